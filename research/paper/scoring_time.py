"""Time to score a document with GBRT, λ-MART and L-GMML (the paper's fifth table)."""

from __future__ import annotations

import statistics
from typing import Any

from research.compare import NAMES
from research.paper.jobs import all_folds, flat
from research.paper.outcome import Claim, Outcome, Table
from research.plots import bars_picture
from research.protocol import folds_of, present
from research.store import Record, Store

# The paper's scoring time per document, as printed: "ms".
SCORING = {
    "yahoo1": "GBRT 276, λ-MART 302, L-GMML 421",
    "yahoo2": "GBRT 218, λ-MART 286, L-GMML 421",
    "mslr-web10k": "GBRT 73, λ-MART 92, L-GMML 158",
}
SYSTEMS = ("gbrt", "lightgbm", "published", "boosted")


def run(cfg: Any, store: Store) -> Outcome:
    """The models of the ranking experiment, which are fitted here if they are not stored; test documents at once."""
    large, missing = present(cfg.large, cfg.data_dir)
    names = [*cfg.ranking, *large]
    found = {
        name: {s: flat(all_folds(cfg, store, name, s, folds_of(name, cfg.folds))) for s in SYSTEMS} for name in names
    }
    rows = [
        [name, NAMES[s], _size(records), f"{_median(records):.2f}", f"{records[0].info['documents']:,}"]
        for name, systems in found.items()
        for s, records in systems.items()
    ]
    notes = [
        f"microseconds per document: median over folds and seeds, each the median of 3 passes over the test part; "
        f"{cfg.threads} thread(s); raw features in, scores out, preprocessing included; seeds "
        + ", ".join(map(str, cfg.seeds)),
        "the paper's numbers, 73 to 421 “ms” per document, are not credible in that unit; only their order is compared",
        *(f"{name} was not run: its folder is not configured" for name in missing),
    ]
    columns = ["data", "system", "size of the model", "µs per document", "documents scored (first fold)"]
    table = Table("scoring_time", "Scoring time per document", columns, rows, notes)
    picture = bars_picture(
        names,
        {NAMES[s]: [_bar(found[name][s]) for name in names] for s in SYSTEMS},
        y="scoring time per document, µs (log scale)", title="Scoring time", log_y=True,
        note="error bars: smallest to largest over folds and seeds",
    )  # fmt: skip
    return Outcome(cfg.name, "Scoring time per document", [table], {"scoring_time": picture}, _claims(found, missing))


def _times(records: list[Record]) -> list[float]:
    return [1e6 * record.info["scoring seconds per document"] for record in records]


def _median(records: list[Record]) -> float:
    return statistics.median(_times(records))


def _bar(records: list[Record]) -> tuple[float, float, float]:
    times, middle = _times(records), _median(records)
    return middle, middle - min(times), max(times) - middle


def _size(records: list[Record]) -> str:
    trees = [record.info["trees"] for record in records if "trees" in record.info]
    if trees:
        return f"{statistics.median(trees):.0f} trees"
    return f"{statistics.median(record.info['metrics'] for record in records):.0f} metrics"


def _claims(found: dict[str, dict[str, list[Record]]], missing: list[str]) -> list[Claim]:
    claims = []
    for name, systems in found.items():
        times = {s: _median(records) for s, records in systems.items()}
        slower = [times[s] > max(times["gbrt"], times["lightgbm"]) for s in ("published", "boosted")]
        claims.append(
            Claim(
                f"{name}: L-GMML takes longer to score a document than GBRT and λ-MART",
                "1.4 to 2.2 times as long",
                ", ".join(f"{NAMES[s]} {times[s]:.2f} µs" for s in SYSTEMS),
                "holds" if all(slower) else "holds in part" if any(slower) else "does not hold",
                "trees stop early here, after tens of trees instead of 5000; other data than the paper's",
            )
        )
    claims += [
        Claim(f"{name}: scoring time", SCORING[name] + " (“ms”)", "–", "not tested", "its folder is not configured")
        for name in missing
        if name in SCORING
    ]
    return claims
