"""The page of a run: one HTML file without scripts, fonts or pictures from elsewhere, for light and dark screens."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lgmml_torch.app.charts import Bar, Chart, Child, Markup, Point, figure, table, tag
from lgmml_torch.app.page_data import PageData, Query
from lgmml_torch.evaluation.evaluate import Paired
from lgmml_torch.evaluation.tables import results_table
from lgmml_torch.models.importance import PermutationImportance

_STYLE = Path(__file__).with_name("page.css")
# Whatever a name in the data might try, a browser loads and runs nothing.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_CARDS_NOTE = (
    "Of each list the first documents, then relevant ones further down. Scores have no unit. “Set apart by”: what "
    "features add to the score over the document in the middle of the ranking; exact parts of the difference."
)
_Report = Mapping[str, Any]
_NONE = "–"


def make_page(report: _Report, data: PageData, paired: Sequence[Paired] = ()) -> str:
    """The whole page, from what ``report.json`` holds and the data of the lists."""
    title = str(report["config"].get("name") or "run")
    sections = [_data_section(report), _results_section(report)]
    for each in paired:
        sections.append(_comparison_section(each))
    sections += [_validation_section(report), _queries_section(data), _importance_section(data)]
    sections.append(_settings_section(report))
    links, contents = list[Markup](), list[Markup]()
    for anchor, name, content in sections:
        links.append(tag("a", name, href=f"#{anchor}"))
        contents.append(content)
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        tag("meta", name_="viewport", content="width=device-width, initial-scale=1"),
        tag("title", f"{title}: a run of lgmml"),
        tag("style", Markup(_STYLE.read_text(encoding="utf-8"))),
    )
    body = tag("body", _header(report, data, title), tag("nav", links), tag("main", contents))
    return "<!doctype html>\n" + tag("html", head, body, lang="en") + "\n"


def _section(title: str, *children: Child) -> tuple[str, str, Markup]:
    """Its anchor, its title and its content."""
    anchor = title.lower().replace(" ", "-")
    return anchor, title, tag("section", tag("h2", title, id=anchor), *children)


def _sentence(text: object) -> str:
    """The text with a capital at its beginning and a full stop at its end."""
    stripped = str(text).strip().removesuffix(".")
    if not stripped:
        return ""
    return f"{stripped[0].upper()}{stripped[1:]}."


def _header(report: _Report, data: PageData, title: str) -> Markup:
    """The name of the run, and the few figures that people look for first."""
    trained = report.get("data", {}).get("train")
    seconds = report.get("seconds")
    value, span = _headline(report, data)
    tiles = [(value, f"{data.measure}, {data.split} {span}")]
    if trained:
        tiles.append((f"{trained['queries']:,}", "training queries"))
        tiles.append((f"{trained['documents']:,}", "training documents"))
    if "model" in report:
        tiles.append((f"{report['model']['metrics']:,}", "local metrics"))
    if seconds:
        tiles.append((f"{sum(seconds.values()):.1f} s", "from data to report"))
    boxes = []
    for value, name in tiles:
        boxes.append(tag("div", tag("b", value), tag("span", name), class_="tile"))
    chosen = tag("p", _sentence(report["config"].get("chosen") or ""))
    return tag("header", tag("h1", title), chosen, tag("div", boxes, class_="tiles"))


def _headline(report: _Report, data: PageData) -> tuple[str, str]:
    """The measure and its interval: of all queries of the part where the report has them, else of the sample."""
    for item in report["evaluations"]:
        entry = item["metrics"].get(data.measure, {})
        if str(item["split"]).startswith(f"{data.split}: ") and entry.get("interval"):
            return f"{entry['mean']:.4f}", "[{:.3f}, {:.3f}]".format(*entry["interval"])
    if data.mean is None:
        return _NONE, _NONE
    return f"{data.mean.mean:.4f}", f"[{data.mean.low:.3f}, {data.mean.high:.3f}]"


def _data_section(report: _Report) -> tuple[str, str, Markup]:
    """What was trained on what."""
    rows = []
    for name, facts in report.get("data", {}).items():
        rows.append(_data_row(name, facts))
    head = ["part", "queries", "documents", "features", "list length (min–median–max)", "documents by label",
            "without relevant"]  # fmt: skip
    parts = tag("p", "The report does not say.", class_="note")
    if rows:
        parts = tag("div", table(head, rows, numbers=(1, 2, 3, 4, 6)), class_="facts")
    lines = []
    for key, value in report.get("model", {}).items():
        if value is not None:
            lines.append(tag("tr", tag("td", key), tag("td", str(value))))
    model = None
    if lines:
        model = tag("div", tag("table", tag("tbody", lines)), class_="scroll")
    return _section("Data and model", parts, model)


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


def _results_section(report: _Report) -> tuple[str, str, Markup]:
    """The main table, with intervals, and what the figures mean."""
    header, found, definitions = results_table(report["evaluations"])
    rows: list[list[Child]] = []
    for data, weights, *figures in found:
        rows.append([data, weights, *map(_figure, figures)])
    notes = ["In brackets: 95% bootstrap interval of the mean over queries.", *definitions]
    return _section(
        "Results",
        table(header, rows, numbers=range(2, len(header))),
        [tag("p", text, class_="note") for text in notes],
    )


def _figure(text: str) -> Child:
    """The mean, and its interval where there is one in smaller letters."""
    mean, bracket, interval = text.partition("[")
    if not bracket:
        return text
    return [mean.rstrip(), tag("span", f"[{interval}", class_="span")]


def _validation_section(report: _Report) -> tuple[str, str, Markup]:
    """Boosting rounds and epochs, with the kept ones marked."""
    charts = [_rounds_chart(report.get("bank", {})), _epochs_chart(report)]
    biases = report.get("bank", {}).get("position_bias")
    if biases:
        line = []
        for place, bias in biases.items():
            line.append(Point(int(place), bias))
        note = "What being shown there added to a score while training; scores of new lists do without it."
        charts.append(
            Chart.lines({"bias": line}, x="position", y="added to the score", title="Bias by position", note=note)
        )
    return _section("Validation", tag("div", charts, class_="charts"))


def _rounds_chart(bank: Mapping[str, Any]) -> Markup | None:
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
        return None
    note, title = "", f"Local metrics: {measure} by boosting round"
    if "validation" in lines:
        note = "Kept where the mean of the last few validation values is highest: single ones are noise."
    return Chart.lines(lines, x="boosting round", y=measure, title=title, note=note, kept=kept)


def _epochs_chart(report: _Report) -> Markup:
    curve, kept = report.get("validation curve", {}), report["best epoch"]
    points = []
    for epoch, value in curve.items():
        if value is not None and not math.isnan(value):
            points.append(Point(int(epoch), value))
    if not points:
        return tag("p", f"No validation queries: the last epoch ({kept}) was kept.")
    measure = str(report["config"].get("measure", "ndcg@10")).replace("ndcg", "NDCG")
    title, note = f"Training: {measure} by epoch", "Epoch 0 is the start, before any training of the weights."
    lines = {"validation": points}
    return Chart.lines(lines, x="epoch", y=f"validation {measure}", title=title, note=note, kept=kept)


def _queries_section(data: PageData) -> tuple[str, str, Markup]:
    """The measure per query and labels by score, then the best and the worst lists side by side."""
    sides = []
    for title, queries in (("Ranked best", data.best), ("Ranked worst", data.worst)):
        if queries:
            cards = [_card(query, data.top, data.measure) for query in queries]
            sides.append(tag("div", tag("h3", title), cards))
    note = None
    if sides:
        note = tag("p", _CARDS_NOTE, class_="note")
    return _section(
        "Queries",
        tag("p", data.sample, class_="note"),
        tag("div", _distribution(data), _calibration(data), _reliability(data), class_="charts"),
        note,
        tag("div", sides, class_="sides"),
    )


def _distribution(data: PageData) -> Markup:
    title = f"{data.measure} per query"
    if data.mean is None:
        return figure(title, tag("p", f"No query of {data.split} counts: none has a relevant document."))
    ordered = sorted(data.values)
    last = len(ordered) - 1
    low, middle, high = ordered[round(0.1 * last)], ordered[round(0.5 * last)], ordered[round(0.9 * last)]
    counts = f"{data.mean.counted:,} queries count, {data.mean.skipped:,} are skipped."
    spread = f"Median {middle:.3f}; a tenth are at most {low:.3f}, a tenth at least {high:.3f}."
    return Chart.histogram(
        data.values, high=max(1.0, ordered[-1]), mean=data.mean.mean, x=data.measure, y="queries", title=title,
        note=f"{counts} {spread}",
    )  # fmt: skip


def _card(query: Query, top: float, measure: str) -> Markup:
    scores = [row.score for row in query.rows]
    gap, digits = max(scores) - min(scores), 3
    if gap > 0:
        digits = min(max(2 - math.floor(math.log10(gap)), 0), 8)
    rows: list[list[Child]] = []
    for row in query.rows:
        share = max(row.label, 0) / max(top, 1e-9)
        grade = tag("span", f"{row.label:g}", class_="grade", style=f"--grade:{share:.2f}")
        rows.append([row.rank, row.name, grade, f"{row.score:.{digits}f}", _parts(row.parts)])
    more, rest = query.size - len(query.rows), "The whole list."
    if more:
        rest = f"{more:,} more that are not shown."
    content = [
        tag("h4", f"Query {query.qid} · {measure} {query.value:.3f} · {query.size:,} documents"),
        table(["rank", "document", "label", "score", "set apart by"], rows, numbers=(0, 3)),
        tag("p", rest, class_="note"),
    ]
    if query.why:
        content.append(tag("p", query.why, class_="note"))
    return tag("article", content, class_="query")


def _parts(leading: Iterable[tuple[str, float]]) -> list[Child]:
    parts = list[Child]()
    for name, part in leading:
        direction = "down"
        if part > 0:
            direction = "up"
        parts.append(tag("span", f"{name} ", tag("span", f"{part:+.2g}", class_=direction), class_="part"))
        parts.append(" ")  # a line may break here
    return parts


def _importance_section(data: PageData) -> tuple[str, str, Markup]:
    """The shares of features and metrics in score differences and, where they were made, costs and effects."""
    if data.pairs is None:
        return _section("What matters", tag("p", "No list has two documents: there are no score differences."))
    features, metrics, rows = list[Bar](), list[Bar](), list[list[Child]]()
    for feature, share in data.pairs.leading(15):
        features.append(Bar(data.names[feature], share))
    if data.pairs.base:
        features.append(Bar("trees it adds to", data.pairs.base))
    for number, share, columns in data.metrics:
        metrics.append(Bar(f"metric {number + 1}", share, note=columns))
        rows.append([number + 1, f"{share:.1%}", columns])
    about = "How much of the difference between two documents of a list each raw feature accounts for, on average."
    charts: list[Child] = [_shares("Features in score differences", features, about)]
    below: list[Child] = [tag("p", "lgmml report RUN --importance adds the cost of shuffling features.", class_="note")]
    if data.effects:
        charts.append(_shuffled(data.names, data.shuffled))
        below = _effects(data)
    charts.append(_shares("Local metrics in score differences", metrics))
    leading = table(["metric", "share", "mostly"], rows, numbers=(0, 1))
    details = tag("details", tag("summary", "What the leading metrics look at"), leading)
    return _section("What matters", tag("div", charts, class_="charts"), details, below)


def _shares(title: str, bars: Sequence[Bar], note: str = "") -> Markup:
    return Chart.bars(bars, x="share of the score differences", title=title, note=note, form="{:.0%}".format)


def _shuffled(names: Sequence[str], shuffled: PermutationImportance | None) -> Markup | None:
    if shuffled is None:
        return None
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


def _effects(data: PageData) -> list[Child]:
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
    note = (
        "One document of a list is given other values of one feature, from its lowest to its highest; all else stays. "
        "The change of its score, in deviations of the scores within a list, with 95% intervals over "
        f"{data.effect_queries:,} queries."
    )
    charts = []
    for name, line in lines.items():
        charts.append(Chart.lines({name: line}, x="value", y="change of score", title=f"Effect of {name}", also=ends))
    return [
        tag("h3", "Which values are good"),
        tag("p", note, class_="note"),
        tag("div", charts, class_="charts small"),
    ]


def _calibration(data: PageData) -> Markup:
    title, points = "Mean label by score", list[Point]()
    for place, mean in enumerate(data.calibration, 1):
        if mean:
            points.append(Point(100 * place // len(data.calibration), mean.mean, mean.low, mean.high))
    if not points:
        return figure(title, tag("p", "No list has a label for each of its parts."))
    x = "place of the score within its list, % (100: the top)"
    note = "Each list is cut into ten parts by the rank of its scores; 95% intervals over queries. Good rankings rise."
    lines = {"mean label": points}
    return Chart.lines(lines, x=x, y="mean label", title=title, note=note, also=[0.0])


def _reliability(data: PageData) -> Markup | None:
    found, title = data.reliability, "Chance to be relevant, and how often it came true"
    if found is None:
        return None
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


def _comparison_section(paired: Paired) -> tuple[str, str, Markup]:
    """Beside another model, query by query."""
    gaps = paired.gaps[~paired.gaps.isnan()].sort(descending=True).values.tolist()
    line = list(map(Point, range(1, len(gaps) + 1), gaps))
    title, y = "Differences per query", f"difference in {paired.measure}"
    differing = table(["query", paired.first, paired.second, "difference"], paired.rows(8), numbers=(1, 2, 3))
    note = f"Above 0, {paired.first} is better; below, {paired.second} is."
    chart = Chart.lines({"query": line}, x="queries, by difference", y=y, title=title, note=note, also=[0.0])
    charts = [chart, figure("Queries that differ most", differing)]
    return _section(
        f"Against {paired.second}",
        tag("p", _sentence(f"{paired.first} against {paired.second} on {paired.split}: {paired.sentence()}")),
        tag("div", charts, class_="charts"),
        tag("p", paired.definition, class_="note"),
    )


def _settings_section(report: _Report) -> tuple[str, str, Markup]:
    """How long it took, with which versions and settings; everything that is needed to do it again."""
    tables = []
    if report.get("seconds"):
        rows = []
        for name, value in report["seconds"].items():
            rows.append([name, f"{value:.1f} s"])
        tables.append(figure("Time", table(["stage", "seconds"], rows, numbers=(1,))))
    if report.get("versions"):
        tables.append(figure("Versions", table(["package", "version"], list(report["versions"].items()))))
    written = None
    if "written" in report:
        written = tag("p", f"Written {report['written']}.", class_="note")
    settings = json.dumps(report["config"], indent=2, ensure_ascii=False, default=str)
    return _section(
        "Settings and versions",
        tag("div", tables, class_="charts"),
        written,
        tag("details", tag("summary", "All settings"), tag("div", tag("pre", tag("code", settings)), class_="scroll")),
    )
