"""NDCG and training time of GBRT, λ-MART and L-GMML on ranking sets (the paper's fourth table)."""

from __future__ import annotations

from typing import Any

from lgmml_torch.functional.presets import describe
from research.compare import NAMES
from research.paper.jobs import all_folds, flat, per_query
from research.paper.outcome import Claim, Outcome, Table
from research.plots import bars_picture
from research.protocol import folds_of, present, split_name
from research.stats import INTERVAL, counts, gain, interval, judged, over_folds, seconds, shown, signed
from research.store import Record, Store

# The paper's NDCG@10 of GBRT, λ-MART and L-GMML.
QUALITY = {
    "yahoo1": "L-GMML .6715, λ-MART .7060, GBRT .6824",
    "yahoo2": "L-GMML .7264, λ-MART .7062, GBRT .6817",
    "mslr-web10k": "L-GMML .5390, λ-MART .4513, GBRT .4342",
    "mslr-web30k": "L-GMML .4976, λ-MART .4090, GBRT .4146",
}
METRICS = ("ndcg@5", "ndcg@10", "ndcg@20")
OURS = ("published", "boosted")
Found = dict[str, dict[str, list[list[Record]]]]


def run(cfg: Any, store: Store) -> Outcome:
    """Every system on every fold of the sets at hand, and of the large ones where their folders are given."""
    large, missing = present(cfg.large, cfg.data_dir)
    names = [*cfg.ranking, *large]
    found: Found = {
        name: {system: all_folds(cfg, store, name, system, folds_of(name, cfg.folds)) for system in cfg.systems}
        for name in names
    }
    splits = "; ".join(f"{name}: {split_name(name)}, {len(folds_of(name, cfg.folds))} fold(s)" for name in names)
    notes = [
        *(describe(metric, "default") for metric in METRICS),
        INTERVAL,
        f"seeds {', '.join(map(str, cfg.seeds))}, averaged per query; {splits}; validation queries choose settings, "
        "rounds and epochs, test queries are only ranked",
        f"seconds of wall clock per fold with all choices, {cfg.threads} thread(s); ± over folds and seeds",
        *(f"{name} was not run: its folder is not configured" for name in missing),
        *cfg.notes,
    ]
    columns = ["data", "system", "NDCG@5", "NDCG@10", "NDCG@20", "training time, s", "test queries"]
    rows = [_row(name, system, records) for name, systems in found.items() for system, records in systems.items()]
    table = Table("large_scale", "GBRT, λ-MART and L-GMML on ranking sets", columns, rows, notes)
    gains = Table("large_scale_gains", "Gains in NDCG@10, paired per test query", ["data", "of", "over", "gain"],
                  _gains(found), [INTERVAL, describe("ndcg@10", "default")])  # fmt: skip
    pictures = {"large_scale": _quality_picture(found, cfg), "large_scale_time": _time_picture(found, cfg)}
    return Outcome(cfg.name, "Ranking given lists", [table, gains], pictures, _claims(found, missing, cfg))


def _row(name: str, system: str, records: list[list[Record]]) -> list[Any]:
    time, spread = over_folds([record.info["seconds"] for record in flat(records)])
    values = [per_query(records, metric) for metric in METRICS]
    quality = [shown(interval(row)) for row in values]
    return [name, NAMES[system], *quality, f"{seconds(time)} ± {seconds(spread)}", counts(values[1])]


def _gains(found: Found) -> list[list[Any]]:
    pairs = [(ours, tree) for ours in OURS for tree in ("lightgbm", "gbrt")] + [("boosted", "published")]
    return [
        [name, NAMES[a], NAMES[b], _signed_gain(systems, a, b)]
        for name, systems in found.items()
        for a, b in pairs
        if a in systems and b in systems
    ]


def _signed_gain(systems: dict[str, list[list[Record]]], a: str, b: str) -> str:
    return signed(gain(per_query(systems[a], "ndcg@10"), per_query(systems[b], "ndcg@10")).difference)


def _quality_picture(found: Found, cfg: Any) -> Any:
    def bar(records: list[list[Record]]) -> tuple[float, float, float]:
        i = interval(per_query(records, "ndcg@10"))
        return i.mean, i.mean - i.low, i.high - i.mean

    bars = {NAMES[s]: [bar(found[name][s]) for name in found] for s in cfg.systems}
    return bars_picture(list(found), bars, y="NDCG@10, test queries", title="Ranking given lists, new queries",
                        note="error bars: 95% bootstrap over queries; paired gains are in the table")  # fmt: skip


def _time_picture(found: Found, cfg: Any) -> Any:
    def bar(records: list[list[Record]]) -> tuple[float, float, float]:
        mean, spread = over_folds([record.info["seconds"] for record in flat(records)])
        return mean, min(spread, 0.9 * mean), spread

    bars = {NAMES[s]: [bar(found[name][s]) for name in found] for s in cfg.systems if s not in ("random", "ridge")}
    return bars_picture(list(found), bars, y="training time per fold, s (log scale)", title="Training time", log_y=True,
                        note="error bars: standard deviation over folds and seeds")  # fmt: skip


def _claims(found: Found, missing: list[str], cfg: Any) -> list[Claim]:
    claims = []
    for name, systems in found.items():
        for ours in OURS:
            difference = gain(per_query(systems[ours], "ndcg@10"), per_query(systems["lightgbm"], "ndcg@10"))
            claims.append(
                Claim(
                    f"{name}: {NAMES[ours]} ranks better than λ-MART (NDCG@10, new queries)",
                    QUALITY.get(name, "better on WEB10K, WEB30K and Yahoo! II, worse on Yahoo! I"),
                    f"{difference.mean_a:.4f} against {difference.mean_b:.4f}: {signed(difference.difference)}",
                    judged(difference.difference),
                    _why(ours, systems[ours], name),
                )
            )
        claims.append(_time_claim(name, systems, cfg))
    claims += [
        Claim(f"{name}: NDCG and training time", QUALITY[name], "–", "not tested", "its folder is not configured")
        for name in missing
    ]
    return claims


def _why(ours: str, records: list[list[Record]], name: str) -> str:
    other = "" if name in QUALITY else "another data set than the paper's; "
    if ours == "boosted":
        return other + "our own way to choose regions, anchors and Φ (docs/method.md)"
    known = [record.info.get("ndcg@10 of training queries with their own Φ") for record in flat(records)]
    own = [value for value in known if value is not None]
    seen = f"; training queries with their own Φ reach {over_folds(own)[0]:.4f}" if own else ""
    return f"{other}the paper learns Φ per training query and gives new queries equal weights{seen}"


def _time_claim(name: str, systems: dict[str, list[list[Record]]], cfg: Any) -> Claim:
    times = {s: over_folds([r.info["seconds"] for r in flat(systems[s])])[0] for s in (*OURS, "lightgbm")}
    faster = times["published"] < times["lightgbm"], times["boosted"] < times["lightgbm"]
    return Claim(
        f"{name}: L-GMML trains faster than λ-MART",
        "19 min against 58 min on WEB10K, 72 against 183 on WEB30K, 28 against 48 and 27 against 43 on Yahoo!",
        f"published {seconds(times['published'])} s, boosted {seconds(times['boosted'])} s, "
        f"λ-MART {seconds(times['lightgbm'])} s",
        "holds" if all(faster) else "holds in part" if any(faster) else "does not hold",
        "λ-MART here is LightGBM with early stopping, not 5000 trees of the paper's implementation; as published with "
        + (", ".join(cfg.systems["published"]["overrides"]) or "the paper's grid for Φ(1) and ζ"),
    )
