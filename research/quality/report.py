"""The page, the figures behind it and the pictures, from what is stored."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lgmml_torch.files import replacing, write_text
from lgmml_torch.functional.significance import Interval
from lgmml_torch.plots import save_figure
from research.compare import ROWS, find_system
from research.plots import Figure, differences_picture, noise_picture
from research.protocol import NOISES
from research.quality.tables import (
    BOOSTED,
    DEFAULT,
    NOISY_BOOSTED,
    NOISY_TREES,
    START,
    TREES,
    Table,
    Verdict,
    collect,
    compare_rows,
    noise_losses,
    read_figures,
    read_table,
    time_ratios,
    verdicts,
)
from research.quality.work import Plan, choice_job, fit_job, growth_job
from research.stats import gain, gains, interval, markdown, over_folds, signed
from research.store import Store, machine_facts, to_json

NOISE_TITLE = "Three times as many features, two thirds of them noise"
NOISE_CAPTION = (
    "_Above: the loss of each system, clean minus noisy, and its 95% interval over queries; below: what boosted L-GMML "
    "loses beyond LightGBM, query by query; where an interval crosses the line, nothing is decided._"
)
GAP_CAPTION = "_Grey intervals hold zero: not decided; red lies below LightGBM with list ranks, green above._"
PROTOCOL = Path(__file__).with_name("protocol.md")
NOTES = Path(__file__).with_name("notes.md")  # how to read the full run's figures
TITLES = {"mq2008": "MQ2008", "ohsumed": "OHSUMED", "lgbm-rank": "LightGBM sample", "mslr-sample": "MSLR sample"}
# Pairs worth reading beside the targets.
PAIRS = (
    (DEFAULT, TREES), (DEFAULT, BOOSTED), (START, TREES), (BOOSTED, START), ("boosted identity", START),
    ("boosted pooled", START), ("boosted no ranks", START), ("boosted bag+warp", BOOSTED),
    ("boosted bag+warp", "lightgbm bag"), (TREES, "lightgbm"), (DEFAULT, "xgboost+ranks"), (DEFAULT, "linear"),
    (DEFAULT, "sampled amortized"),
)  # fmt: skip


def write_report(plan: Plan, store: Store, *, root: Path) -> dict[str, Any]:
    """Write quality.json, the values per query, pictures and docs/quality.md; quick runs keep to files of their own.

    Rows and times that are not stored are kept as an earlier report left them, with the release that was measured.
    """
    name, results = _report_name(plan), root / "research" / "results"
    table = {**read_table(results, name), **collect(store, plan)}
    kept = read_figures(results, name)
    times = {**kept.get("times", {}), **time_ratios(store, plan)}
    grown = store.find(growth_job())
    growth = kept.get("growth") if grown is None else grown.info
    found = verdicts(table, times, growth, plan.sets)
    content = {**_content(plan, store, table, times, found), "growth": growth}
    content["chosen on validation"] = {**kept.get("chosen on validation", {}), **content["chosen on validation"]}
    write_text(results / f"{name}.json", to_json(content))
    arrays: dict[str, Any] = {
        "|".join(part for part in key if part): row.values.float().numpy() for key, row in table.items()
    }
    with replacing(results / f"{name}-per-query.npz") as temporary, temporary.open("wb") as stream:
        np.savez_compressed(stream, **arrays)
    shown = _draw(plan, table, root / "docs" / "images", name)
    write_text(root / "docs" / f"{name}.md", _page(plan, name, table, times, growth, found, shown))
    return content


def draw_again(plan: Plan, *, root: Path) -> None:
    """Both pictures from the stored values of every query; nothing else is written."""
    name = _report_name(plan)
    table = read_table(root / "research" / "results", name)
    _draw(plan, table, root / "docs" / "images", name)


def _report_name(plan: Plan) -> str:
    return "quality-quick" if plan.quick else "quality"


def _draw(plan: Plan, table: Table, images: Path, name: str) -> tuple[bool, bool]:
    """The pictures of differences and of noise, and which of them there are."""
    against = {row: compare_rows(table, row, TREES, plan.sets) for row in ROWS if row not in (TREES, "random")}
    shown = {_plain(ROWS[row]): _intervals(against[row]) for row in against if against[row]}
    if shown:
        reference = _plain(ROWS[TREES])
        picture = differences_picture(shown, reference=reference, sets=[*(_title(s) for s in plan.sets), "mean"])
        save_figure(picture, images / f"{name}-differences.png", dpi=90)
    noise = _noise(table, plan.sets)
    if noise is not None:
        save_figure(noise, images / f"{name}-noise.png", dpi=100)
    return bool(shown), noise is not None


def _content(
    plan: Plan, store: Store, table: Table, times: Mapping[str, Any], found: Sequence[Verdict]
) -> dict[str, Any]:
    rows: dict[str, Any] = {}
    for (row, name, noise), values in table.items():
        rows.setdefault(row, {})[name if noise is None else f"{name}, {noise} noise"] = {
            "ndcg@10": values.mean, "by seed": values.by_seed, "validation by seed": list(values.valid),
            "queries": int((~values.per_query.isnan()).sum()), "cpu seconds of a fit": values.seconds,
            "release": values.release,
        }  # fmt: skip
    pairs = {f"{a} - {b}": _numbers(compare_rows(table, a, b, plan.sets)) for a, b in PAIRS}
    choices = {
        f"{system.choice}, {name}, fold {fold}": record.info
        for system in plan.systems
        for name in plan.sets
        for fold in plan.folds
        if system.choice and (record := store.find(choice_job(plan, system.choice, name, fold))) is not None
    }
    return {
        "machine": machine_facts(), "sets": list(plan.sets), "folds": list(plan.folds), "rows": rows,
        "differences [mean, low, high]": {key: value for key, value in pairs.items() if value}, "times": dict(times),
        "targets": [vars(verdict) for verdict in found], "chosen on validation": choices,
        "warp": warp_story(plan, store),
    }  # fmt: skip


def warp_story(plan: Plan, store: Store) -> dict[str, Any]:
    """How often WARP kept epoch 0, and what it cost."""
    system = find_system("boosted")
    stories = [
        record.info["warp"]
        for seed in range(plan.seeds)
        for name in plan.sets
        for fold in plan.folds
        if (record := store.find(fit_job(store, plan, system, name, fold, None, seed))) is not None
    ]
    if not stories:
        return {}
    kept = [story["epoch kept"] for story in stories]
    return {
        "fits": len(kept), "epoch 0 kept": sum(epoch == 0 for epoch in kept),
        "cpu seconds": statistics.median(story["seconds"] for story in stories),
    }  # fmt: skip


def _counts(table: Table, sets: Sequence[str]) -> str:
    """How many queries the figures of each set are means over."""
    words = []
    for name in sets:
        values = next((row.values for key, row in table.items() if key[1] == name), None)
        if values is not None:
            counted = int((~values[0].isnan()).sum())
            words.append(f"{name} {counted} counted, {values.shape[1] - counted} skipped")
    return f"Queries: {'; '.join(words)}."


def _page(
    plan: Plan,
    name: str,
    table: Table,
    times: Mapping[str, Any],
    growth: Mapping[str, Any] | None,
    found: Sequence[Verdict],
    pictures: tuple[bool, bool],
) -> str:
    shown, noisy = pictures
    sets = list(plan.sets)
    parts = [
        "# How well unseen queries are ranked",
        "After this page you can judge how well unseen queries are ranked on four small sets, beside LightGBM and "
        "XGBoost.",
        f"Written by `python -m research.quality{' --quick' if plan.quick else ''}`; figures in "
        f"`research/results/{name}.json`, values of every query and seed in `{name}-per-query.npz` beside it. "
        "NDCG@10 (gain 2^y − 1, discount 1/log2(i+1), queries without a relevant document skipped, ties in the order "
        "of the file) of test queries; the number after ± is the standard deviation over seeds. "
        + _counts(table, sets),
        _main_table(table, sets),
        "" if plan.quick or not NOTES.is_file() else NOTES.read_text(encoding="utf-8").strip(),
        "## Targets",
        markdown(["target", "found", ""], [[v.target, v.found, v.word] for v in found]),
        "## Paired differences",
        "First minus second, mean and 95% interval over queries.",
        _pairs_table(table, sets),
    ]
    if shown:
        parts += [f"![Differences to LightGBM with list ranks](images/{name}-differences.png)", GAP_CAPTION]
    if noisy:
        picture = f"![Loss with noise, with intervals](images/{name}-noise.png)"
        parts += ["## Noise", _noise_table(table, sets), picture, NOISE_CAPTION]
    if times:
        parts += ["## Times", _times_table(times)]
    if growth:
        parts.append(_growth_table(growth))
    parts.append(PROTOCOL.read_text(encoding="utf-8").strip())
    return "\n\n".join(part for part in parts if part) + "\n"


def _main_table(table: Table, sets: Sequence[str]) -> str:
    rows = []
    for row, label in ROWS.items():
        found = [table.get((row, name, None)) for name in sets]
        if not any(found):
            continue
        cells = [
            f"{r.mean:.4f}" + (f" ± {over_folds(r.by_seed)[1]:.4f}" if len(r.values) > 1 else "") if r else ""
            for r in found
        ]
        whole = [r for r in found if r]
        mean = f"{statistics.fmean(r.mean for r in whole):.4f}" if len(whole) == len(sets) else ""
        seeds = "/".join(str(n) for n in sorted({len(r.values) for r in whole}))
        seconds = f"{statistics.median(r.seconds for r in whole):.1f}"
        releases = "/".join(sorted({r.release for r in whole}))
        rows.append([label, *cells, mean, seeds, seconds, releases])
    return markdown(["system", *(_title(name) for name in sets), "mean", "seeds", "CPU s per fit", "release"], rows)


def _pairs_table(table: Table, sets: Sequence[str]) -> str:
    rows = []
    for first, second in PAIRS:
        found = compare_rows(table, first, second, sets)
        label = f"{_plain(ROWS[first])} − {_plain(ROWS[second])}"
        if found:
            rows.append([label, *_gap_cells(found, sets)])
        if found and (first, second) == (DEFAULT, TREES):
            few = compare_rows(table, first, second, sets, seeds=3)
            rows.append([f"{label}, first three seeds", *_gap_cells(few, sets)])
    return markdown(["", *(_title(name) for name in sets), "mean"], rows)


def _gap_cells(found: Mapping[str, Interval], sets: Sequence[str]) -> list[str]:
    return [signed(found[name]) if name in found else "" for name in [*sets, "mean"]]


def _noise(table: Table, sets: Sequence[str]) -> Figure | None:
    """What noise costs both systems on the sets both were run on, by kind of noise; None when there is no such set."""
    groups: list[str] = []
    losses: dict[str, list[tuple[float, float, float]]] = {"boosted L-GMML": [], _plain(ROWS[TREES]): []}
    extra = []
    for kind in NOISES:
        ours = noise_losses(table, BOOSTED, NOISY_BOOSTED, kind, sets)
        theirs = noise_losses(table, TREES, NOISY_TREES, kind, sets)
        for name in [name for name in sets if name in ours and name in theirs]:
            groups.append(f"{_title(name)}\n{kind} noise")
            for found, values in zip(losses.values(), (ours[name], theirs[name]), strict=True):
                found.append(_triple(interval(values)))
            extra.append(_triple(gain(ours[name], theirs[name]).difference))
    return noise_picture(groups, losses, extra, title=NOISE_TITLE) if groups else None


def _noise_table(table: Table, sets: Sequence[str]) -> str:
    rows = []
    for kind in NOISES:
        ours = noise_losses(table, BOOSTED, NOISY_BOOSTED, kind, sets)
        theirs = noise_losses(table, TREES, NOISY_TREES, kind, sets)
        both = [name for name in sets if name in ours and name in theirs]
        if not both:
            continue
        for label, losses in (("boosted L-GMML", ours), (_plain(ROWS[TREES]), theirs)):
            means = {name: float(losses[name].nanmean()) for name in both}
            found = [f"{means[name]:+.4f}" if name in means else "" for name in sets]
            rows.append([f"{kind}: loss of {label}", *found, f"{statistics.fmean(means.values()):+.4f}"])
        extra = gains({name: (ours[name], theirs[name]) for name in both})
        rows.append([f"{kind}: ours beyond theirs", *_gap_cells(extra, sets)])
    return markdown(["clean minus noisy", *(_title(name) for name in sets), "mean"], rows)


def _times_table(times: Mapping[str, Any]) -> str:
    rows = [
        [_title(name), f"{t['train ratio']:.1f}", f"{t['default train s']:.2f}", f"{t['lightgbm train s']:.2f}",
         f"{t['score ratio']:.2f}", f"{t['default score us']:.1f}", f"{t['lightgbm score us']:.1f}"]
        for name, t in times.items()
    ]  # fmt: skip
    columns = [
        "set", "training, ours/LightGBM", "ours s", "LightGBM s", "scoring, ours/LightGBM", "ours µs per document",
        "LightGBM µs per document",
    ]  # fmt: skip
    return markdown(columns, rows)


def _growth_table(growth: Mapping[str, Any]) -> str:
    rows = [
        [f"{documents:,}", f"{train:.2f}", f"{score:.3f}"]
        for documents, train, score in zip(growth["documents"], growth["train"], growth["score"], strict=True)
    ]
    text = f"The default on generated lists of 50 documents, {growth['rounds']} rounds, CPU seconds of one thread."
    return f"{text}\n\n" + markdown(["documents", "training, s", "scoring all, s"], rows)


def _title(name: str) -> str:
    return TITLES.get(name, name)


def _plain(label: str) -> str:
    return label.replace("*", "")


def _intervals(found: Mapping[str, Interval]) -> dict[str, tuple[float, float, float]]:
    return {_title(name): _triple(gap) for name, gap in found.items()}


def _triple(found: Interval) -> tuple[float, float, float]:
    return found.mean, found.low, found.high


def _numbers(found: Mapping[str, Interval]) -> dict[str, list[float]]:
    return {name: [round(value, 5) for value in (gap.mean, gap.low, gap.high)] for name, gap in found.items()}
