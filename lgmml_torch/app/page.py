"""The page of a run: one HTML file without scripts, fonts or pictures from elsewhere, for light and dark screens.

What stands where is told by the template ``page.html``, which escapes every text; charts and figures are made here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from itertools import starmap
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup

from lgmml_torch.app.charts import Bar, Chart, Point, figure
from lgmml_torch.app.page_data import PageData
from lgmml_torch.evaluation.evaluate import Paired
from lgmml_torch.evaluation.tables import results_table
from lgmml_torch.models.importance import PermutationImportance

_Report = Mapping[str, Any]
_NONE, _SENTENCE = "–", Markup("<p>{}</p>")


def make_page(report: _Report, data: PageData, paired: Sequence[Paired] = ()) -> str:
    """The whole page, from what ``report.json`` holds and the data of the lists."""
    templates = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    templates.filters |= {"anchor": _anchor, "count": "{:,}".format, "sentence": _sentence}
    return templates.get_template("page.html").render(
        report=report,
        data=data,
        name=str(report["config"].get("name") or "run"),
        tiles=_tiles(report, data),
        parts_of_data=list(starmap(_data_row, report.get("data", {}).items())),
        results=results_table(report["evaluations"]),
        comparisons=paired,
        gaps_chart=_gaps_chart,
        validation=_validation_charts(report),
        rankings=[_distribution(data), _calibration(data), _reliability(data)],
        shares=_share_charts(data),
        effects=_effect_charts(data),
        settings=json.dumps(report["config"], indent=2, ensure_ascii=False, default=str),
    )


def _anchor(title: str) -> str:
    return title.lower().replace(" ", "-")


def _sentence(text: object) -> str:
    """The text with a capital at its beginning and a full stop at its end."""
    stripped = str(text).strip().removesuffix(".")
    if not stripped:
        return ""
    return f"{stripped[0].upper()}{stripped[1:]}."


def _tiles(report: _Report, data: PageData) -> list[tuple[str, str]]:
    """The few figures that people look for first, and what they are."""
    value, span = _headline(report, data)
    tiles = [(value, f"{data.measure}, {data.split} {span}")]
    trained, seconds = report.get("data", {}).get("train"), report.get("seconds")
    if trained:
        tiles.append((f"{trained['queries']:,}", "training queries"))
        tiles.append((f"{trained['documents']:,}", "training documents"))
    if "model" in report:
        tiles.append((f"{report['model']['metrics']:,}", "local metrics"))
    if seconds:
        tiles.append((f"{sum(seconds.values()):.1f} s", "from data to report"))
    return tiles


def _headline(report: _Report, data: PageData) -> tuple[str, str]:
    """The measure and its interval: of all queries of the part where the report has them, else of the sample."""
    for item in report["evaluations"]:
        entry = item["metrics"].get(data.measure, {})
        if str(item["split"]).startswith(f"{data.split}: ") and entry.get("interval"):
            return f"{entry['mean']:.4f}", "[{:.3f}, {:.3f}]".format(*entry["interval"])
    if data.mean is None:
        return _NONE, _NONE
    return f"{data.mean.mean:.4f}", f"[{data.mean.low:.3f}, {data.mean.high:.3f}]"


def _data_row(name: str, facts: Mapping[str, Any]) -> list[str]:
    counts = [f"{facts[key]:,}" for key in ("queries", "documents", "features")]
    sizes = "–".join(map(str, facts["documents per query (min, median, max)"]))
    labels = []
    for label, count in facts["labels"].items():
        labels.append(f"{float(label):g}: {count:,}")
    if len(labels) > 8:
        labels[8:] = ["…"]
    without = _NONE
    if facts["labels"]:
        without = f"{facts['queries without a relevant document']:,}"
    return [name, *counts, sizes, ", ".join(labels), without]


def _validation_charts(report: _Report) -> list[Markup]:
    """Boosting rounds and epochs, with the kept ones marked."""
    bank = report.get("bank", {})
    charts = [*_rounds_chart(bank), _epochs_chart(report)]
    if bank.get("position_bias"):
        line = list(map(Point, map(int, bank["position_bias"]), bank["position_bias"].values()))
        note = "What being shown there added to a score while training; scores of new lists do without it."
        charts.append(
            Chart.lines({"bias": line}, x="position", y="added to the score", title="Bias by position", note=note)
        )
    return charts


def _rounds_chart(bank: Mapping[str, Any]) -> list[Markup]:
    measure, keys = "NDCG@10", {"validation": "valid_ndcg", "training": "train_ndcg"}
    if bank.get("measure") is not None:
        measure, keys = str(bank["measure"]), {"validation": "valid_measure"}
    lines = {}
    for name, key in keys.items():
        points = list(map(Point, bank.get("rounds") or [], bank.get(key) or []))
        if points:
            lines[name] = points
    kept = bank.get("best_round")
    if not isinstance(kept, int) or not lines:
        return []
    note, title = "", f"Local metrics: {measure} by boosting round"
    if "validation" in lines:
        note = "Kept where the mean of the last few validation values is highest: single ones are noise."
    return [Chart.lines(lines, x="boosting round", y=measure, title=title, note=note, kept=kept)]


def _epochs_chart(report: _Report) -> Markup:
    curve, kept = report.get("validation curve", {}), report["best epoch"]
    points = []
    for epoch, value in curve.items():
        if value is not None and not math.isnan(value):
            points.append(Point(int(epoch), value))
    if not points:
        return _SENTENCE.format(f"No validation queries: the last epoch ({kept}) was kept.")
    measure = str(report["config"].get("measure", "ndcg@10")).replace("ndcg", "NDCG")
    title, note = f"Training: {measure} by epoch", "Epoch 0 is the start, before any training of the weights."
    lines = {"validation": points}
    return Chart.lines(lines, x="epoch", y=f"validation {measure}", title=title, note=note, kept=kept)


def _distribution(data: PageData) -> Markup:
    title = f"{data.measure} per query"
    if data.mean is None:
        return figure(title, _SENTENCE.format(f"No query of {data.split} counts: none has a relevant document."))
    ordered = sorted(data.values)
    last = len(ordered) - 1
    low, middle, high = ordered[round(0.1 * last)], ordered[round(0.5 * last)], ordered[round(0.9 * last)]
    counts = f"{data.mean.counted:,} queries count, {data.mean.skipped:,} are skipped."
    spread = f"Median {middle:.3f}; a tenth are at most {low:.3f}, a tenth at least {high:.3f}."
    return Chart.histogram(
        data.values, high=max(1.0, ordered[-1]), mean=data.mean.mean, x=data.measure, y="queries", title=title,
        note=f"{counts} {spread}",
    )  # fmt: skip


def _calibration(data: PageData) -> Markup:
    title, points = "Mean label by score", list[Point]()
    for place, mean in enumerate(data.calibration, 1):
        if mean:
            points.append(Point(100 * place // len(data.calibration), mean.mean, mean.low, mean.high))
    if not points:
        return figure(title, _SENTENCE.format("No list has a label for each of its parts."))
    x = "place of the score within its list, % (100: the top)"
    note = "Each list is cut into ten parts by the rank of its scores; 95% intervals over queries. Good rankings rise."
    lines = {"mean label": points}
    return Chart.lines(lines, x=x, y="mean label", title=title, note=note, also=[0.0])


def _reliability(data: PageData) -> Markup:
    found, title = data.reliability, "Chance to be relevant, and how often it came true"
    if found is None:
        return Markup("")
    top = math.ceil(100 * max(*found.chances, *found.shares)) / 100  # a round number to read at the axis
    lines = {"documents": list(map(Point, found.chances, found.shares)), "exact": [Point(0, 0), Point(top, top)]}
    x, y = "chance of a label of at least 1", "share of documents with one"
    note = (
        f"A dot is a group of about {max(found.documents):,} documents; on the line, their chances are exact. "
        f"Expected calibration error {found.error:.4f}, Brier score {found.brier:.4f}. {data.sample}"
    )
    if data.split == "valid":
        note += " The chances were fitted to these very queries."
    return Chart.lines(lines, x=x, y=y, title=title, note=note)


def _share_charts(data: PageData) -> list[Markup]:
    """The shares of features and metrics in score differences and, where it was made, the cost of shuffling."""
    if data.pairs is None:
        return []
    features = [Bar(data.names[feature], share) for feature, share in data.pairs.leading(15)]
    if data.pairs.base:
        features.append(Bar("trees it adds to", data.pairs.base))
    metrics = [Bar(f"metric {number + 1}", share, note=columns) for number, share, columns in data.metrics]
    about = "How much of the difference between two documents of a list each raw feature accounts for, on average."
    charts = [_shares("Features in score differences", features, about)]
    if data.shuffled is not None:
        charts.append(_shuffled(data.names, data.shuffled))
    return [*charts, _shares("Local metrics in score differences", metrics)]


def _shares(title: str, bars: Sequence[Bar], note: str = "") -> Markup:
    return Chart.bars(bars, x="share of the score differences", title=title, note=note, form="{:.0%}".format)


def _shuffled(names: Sequence[str], shuffled: PermutationImportance) -> Markup:
    bars = []
    for feature, interval in zip(shuffled.features, shuffled.intervals, strict=True):
        bars.append(Bar(names[feature], interval.mean, interval.low, interval.high))
    bars.sort(key=lambda bar: -bar.value)
    note = (
        f"Drop in {shuffled.measure} when the values of a feature are shuffled within each list: mean of "
        f"{shuffled.n_repeats} shuffles (seed {shuffled.seed}) over {shuffled.intervals[0].counted:,} queries, with "
        "95% intervals, paired per query. Grey: the interval holds 0."
    )
    return Chart.bars(bars, x=f"drop in {shuffled.measure}", title="Cost of shuffling a feature", note=note)


def _effect_charts(data: PageData) -> list[Markup]:
    """A chart for each feature, all on one scale."""
    lines = {}
    ends = [0.0]
    for effect in data.effects:
        spread = effect.spread or 1.0
        line = []
        for value, interval in zip(effect.values, effect.intervals, strict=True):
            line.append(Point(value, interval.mean / spread, interval.low / spread, interval.high / spread))
            ends += [interval.low / spread, interval.high / spread]
        lines[data.names[effect.feature]] = line
    charts = []
    for name, line in lines.items():
        charts.append(Chart.lines({name: line}, x="value", y="change of score", title=f"Effect of {name}", also=ends))
    return charts


def _gaps_chart(paired: Paired) -> Markup:
    """The differences to another model, query by query."""
    gaps = paired.gaps[~paired.gaps.isnan()].sort(descending=True).values.tolist()
    line = list(map(Point, range(1, len(gaps) + 1), gaps))
    title, y = "Differences per query", f"difference in {paired.measure}"
    note = f"Above 0, {paired.first} is better; below, {paired.second} is."
    return Chart.lines({"query": line}, x="queries, by difference", y=y, title=title, note=note, also=[0.0])
