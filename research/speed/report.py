"""Fill the tables of ``docs/performance.md`` from ``research/results/*.json``.

Run with ``python -m research.speed.report``. Text between a pair of ``<!-- name -->`` and ``<!-- /name -->`` is
replaced by the tables of that name; figures that were not measured yet are said to be missing.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from research.speed.harness import RESULTS
from research.speed.race import race_rows
from research.stats import markdown

PAGE = Path(__file__).parent.parent.parent / "docs" / "performance.md"
SCALES = ("scale-small", "scale-web10k", "scale-web30k", "scale-web30k-float16", "scale-yahoo1")
MISSING = "_Not measured yet._"
PICTURES = "../research/results"
RACE_CAPTION = (
    "_Left: validation NDCG@10 over seconds of training, reading and binning included; LightGBM's trees are spaced by "
    "their mean rate, ours have a point for each pass of Φ, boosted metrics one for the whole fit. Dotted lines are "
    "projections to 5,000 trees, whose NDCG was not measured. Right: seconds to the same NDCG and the paper's measure._"
)
SCORING_CAPTION = (
    "_Blue is ours; other colours are trees. Time alone: these pictures say nothing of how well each ranks._"
)


def load(name: str) -> dict[str, Any] | None:
    """A result, if it is there."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table in Markdown, numbers with few digits."""
    return markdown(columns, [[_short(cell) for cell in row] for row in rows])


def scale() -> str:
    """Stage times and memory of every shape that was run."""
    rows = []
    for name in SCALES:
        found = load(name)
        if found:
            shape, seconds = found["shape"], found["seconds"]
            own = max(part["anonymous"] for part in found["memory_gib"].values())
            size = f"{shape['documents']:,} x {shape['features']}"
            rows.append((
                name.removeprefix("scale-"), size, found["metrics"], *seconds.values(), found["training_seconds"],
                sum(found["cpu_seconds"].values()), found["peak_resident_gib"], own, _machine(found),
            ))  # fmt: skip
    columns = (
        "shape", "documents", "K", "preprocessing and metrics, s", "distances, s", "weights, s", "all, s", "CPU s",
        "peak GiB", "own GiB", "threads, load",
    )  # fmt: skip
    return table(columns, rows) if rows else MISSING


def kernel() -> str:
    """Rate of the distance kernel in the same runs."""
    keys = ("gemm_gflops", "plain_form_gflops", "share_of_gemm")
    found = {name.removeprefix("scale-"): load(name) for name in SCALES}
    rows = [(name, *(one["kernel"][key] for key in keys)) for name, one in found.items() if one]
    return table(("shape", "GEMM, GFLOP/s", "kernel, GFLOP/s of the plain form", "share"), rows) if rows else MISSING


def growth() -> str:
    """Exponents in N, K and D."""
    found = load("scale-curves")
    if not found:
        return MISSING
    stages = list(found["exponents"]["documents"])
    rows = [(size, *(exponents[stage] for stage in stages)) for size, exponents in found["exponents"].items()]
    picture = f"\n\n![seconds over documents, metrics and features]({PICTURES}/scale-curves.png)"
    return table(("exponent in", *stages), rows) + f"\n\nMeasured with {_machine(found)}." + picture


def race() -> str:
    """Training against LightGBM."""
    parts = []
    for name in ("race-small", "race-web10k", "race-web30k"):
        found = load(name)
        if not found:
            continue
        reached = found["lightgbm"]["reached_our_ndcg"]
        equal = f"{found['ours']['seconds_to_best'] / reached['seconds']:.3g}x LightGBM's" if reached else "not reached"
        trees = f"5,000 trees (projected) take {found['projected_over_ours']:.3g}x our training"
        head = (
            f"{name.removeprefix('race-')}: {trees}; "
            f"to the best NDCG of our sampled metrics, our time is {equal}; {_machine(found)}."
        )
        rows = table(("", "seconds", "validation NDCG@10"), race_rows(found))
        parts.append("\n\n".join([head, rows, f"![validation NDCG over seconds]({PICTURES}/{name}.png)", RACE_CAPTION]))
    return "\n\n".join(parts) or MISSING


def scoring() -> str:
    """Scoring against trees."""
    found = load("scoring")
    if not found:
        return MISSING
    parts = []
    for part in ("web", "mq2008", "mslr-sample"):
        if part not in found:
            continue
        one, rows = found[part], []
        for label, value in one["microseconds_per_document"].items():
            rows.append((label, value, one["lightgbm_over"][label]))
        columns = ("ranker", "µs per document", "LightGBM over it")
        head = f"{part}: K = {one['metrics']}, D = {one['features']}; {_machine(found)}."
        picture = f"![microseconds per document, {part}]({PICTURES}/scoring-{part}.png)"
        parts.append("\n\n".join([head, table(columns, rows), picture]))
    return "\n\n".join([*parts, SCORING_CAPTION])


def training() -> str:
    """The training loop against a bare one."""
    rows = []
    for name in ("training", "training-per_query"):
        found = load(name)
        if found:
            rates = found["triplets_per_second"]
            phi = found["settings"]["phi"]
            rows.append((phi, rates["lightning"], rates["bare"], found["share_of_bare"], _machine(found)))
    columns = ("Φ", "Lightning, triplets/s", "bare loop, triplets/s", "share", "threads, load")
    return table(columns, rows) if rows else MISSING


def origins() -> str:
    """Where each stored figure is from."""
    rows = []
    for file in sorted(RESULTS.glob("*.json")):
        found = load(file.stem)
        if isinstance(found, dict) and "machine" in found:
            facts = found["machine"]
            names = ("release", "processor", "cores", "torch_threads", "load_1min", "date")
            rows.append((file.stem, *(str(facts[name]) for name in names)))
    return table(("figures", "release", "processor", "cores", "threads", "load", "date"), rows)


PARTS: dict[str, Callable[[], str]] = {
    "scale": scale, "kernel": kernel, "growth": growth, "race": race, "scoring": scoring, "training": training,
    "origins": origins,
}  # fmt: skip


def fill(text: str) -> str:
    """The page with its tables brought up to date."""
    for name, make in PARTS.items():
        pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        place = pattern.search(text)
        if place:
            text = f"{text[: place.end(1)]}\n{make()}\n\n{text[place.start(2) :]}"
    return text


def _machine(found: dict[str, Any]) -> str:
    facts = found["machine"]
    return f"{facts['torch_threads']} threads, load {facts['load_1min']}"


def _short(cell: object) -> str:
    if not isinstance(cell, float):
        return str(cell)
    return f"{cell:,.0f}" if abs(cell) >= 1000 else f"{cell:.4f}" if 0 < abs(cell) < 1 else f"{cell:.3g}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    PAGE.write_text(fill(PAGE.read_text()))
    print(f"filled {PAGE.name}")


if __name__ == "__main__":
    main()
