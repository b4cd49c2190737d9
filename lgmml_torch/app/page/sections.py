"""The sections of a run's page, from what its ``report.json`` says and from what was seen in its lists."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from lgmml_torch.app.page.charts import (
    Bar,
    Point,
    bar_chart,
    figure,
    histogram,
    line_chart,
    point_chart,
    sorted_chart,
)
from lgmml_torch.app.page.look import Document, Look, Query
from lgmml_torch.app.page.markup import Child, Markup, table, tag
from lgmml_torch.evaluation.paired import Paired
from lgmml_torch.evaluation.tables import OWN_LABELS, OWN_LABELS_NOTE, merge_definitions

Report = Mapping[str, Any]
NONE = "–"


def section(title: str, *children: Child) -> tuple[str, str, Markup]:
    """Its anchor, its title and its content."""
    anchor = title.lower().replace(" ", "-")
    return anchor, title, tag("section", tag("h2", title, id=anchor), *children)


def sentence(text: object) -> str:
    """With a capital at its beginning and a full stop at its end."""
    words = str(text).strip()
    return words and words[0].upper() + words[1:] + ("" if words.endswith(".") else ".")


def header(report: Report, look: Look, title: str) -> Markup:
    """The name of the run, and the few figures that people look for first."""
    trained = report.get("data", {}).get("train", {})
    seconds = report.get("seconds", {})
    value, span = headline(report, look)
    tiles = [
        (value, f"{look.measure}, {look.split} {span}"),
        (f"{trained['queries']:,}" if trained else NONE, "training queries"),
        (f"{trained['documents']:,}" if trained else NONE, "training documents"),
        (f"{report['model']['metrics']:,}" if "model" in report else NONE, "local metrics"),
        (f"{sum(seconds.values()):.1f} s" if seconds else NONE, "from data to report"),
    ]
    boxes = [tag("div", tag("b", value), tag("span", name), class_="tile") for value, name in tiles]
    return tag(
        "header",
        tag("h1", title),
        tag("p", sentence(report["config"].get("chosen") or "")),
        tag("div", boxes, class_="tiles"),
    )


def headline(report: Report, look: Look) -> tuple[str, str]:
    """The measure on the part that was looked at, and its interval: of all its queries where the report has them."""
    for item in report["evaluations"]:
        entry = item["metrics"].get(look.measure, {})
        if str(item["split"]).startswith(f"{look.split}: ") and entry.get("interval"):
            return f"{entry['mean']:.4f}", "[{:.3f}, {:.3f}]".format(*entry["interval"])
    return (f"{look.mean.mean:.4f}", f"[{look.mean.low:.3f}, {look.mean.high:.3f}]") if look.mean else (NONE, NONE)


def data_section(report: Report) -> tuple[str, str, Markup]:
    """What was trained on what."""
    parts: Mapping[str, Mapping[str, Any]] = report.get("data", {})
    rows = [
        [
            name, f"{fact['queries']:,}", f"{fact['documents']:,}", f"{fact['features']:,}",
            "–".join(str(size) for size in fact["documents per query (min, median, max)"]),
            ", ".join(f"{float(label):g}: {count:,}" for label, count in list(fact["labels"].items())[:8])
            + (", …" if len(fact["labels"]) > 8 else ""),
            f"{fact['queries without a relevant document']:,}" if fact["labels"] else NONE,
        ]
        for name, fact in parts.items()
    ]  # fmt: skip
    head = [
        "part",
        "queries",
        "documents",
        "features",
        "list length (min–median–max)",
        "documents by label",
        "without relevant",
    ]
    facts = {key: value for key, value in report.get("model", {}).items() if value is not None}
    words = [tag("tr", tag("td", key), tag("td", str(value))) for key, value in facts.items()]
    return section(
        "Data and model",
        tag("div", table(head, rows, numbers=(1, 2, 3, 4, 6)), class_="facts")
        if rows
        else tag("p", "The report does not say.", class_="note"),
        tag("div", tag("table", tag("tbody", words)), class_="scroll") if words else None,
    )


def results_section(report: Report) -> tuple[str, str, Markup]:
    """The main table, with intervals, and what the figures mean."""
    found: Sequence[Mapping[str, Any]] = report["evaluations"]
    names = list(dict.fromkeys(name for item in found for name in item["metrics"]))
    rows = [
        [
            item["split"], item["policy"], *(_mean(item["metrics"].get(name)) for name in names),
            _agreed(item, "counted"), _agreed(item, "skipped"),
        ]
        for item in found
    ]  # fmt: skip
    definitions = [entry["definition"] for item in found for entry in item["metrics"].values()]
    numbers = range(2, len(names) + 4)
    own = any(str(item["split"]).endswith(OWN_LABELS) for item in found)
    return section(
        "Results",
        table(["data", "weights", *names, "queries", "skipped"], rows, numbers=numbers),
        tag("p", "In brackets: 95% bootstrap interval of the mean over queries.", class_="note"),
        tag("p", OWN_LABELS_NOTE.replace("*", "").strip(), class_="note") if own else None,
        [tag("p", text, class_="note") for text in merge_definitions(definitions)],
    )


def _mean(entry: Mapping[str, Any] | None) -> Child:
    if entry is None or entry["mean"] is None:
        return NONE
    span = entry.get("interval")
    return [f"{entry['mean']:.4f}", tag("span", f"[{span[0]:.4f}, {span[1]:.4f}]", class_="span") if span else None]


def _agreed(item: Mapping[str, Any], key: str) -> str:
    counts = {name: entry[key] for name, entry in item["metrics"].items()}
    same = set(counts.values())
    return f"{same.pop():,}" if len(same) == 1 else ", ".join(f"{count} ({name})" for name, count in counts.items())


TRAINING = (("training", "train_ndcg"),)


def validation_section(report: Report) -> tuple[str, str, Markup]:
    """Boosting rounds and epochs, with the kept ones marked."""
    bank, curve = report.get("bank", {}), report.get("validation curve", {})
    charts = []
    rounds, own = bank.get("rounds") or [], bank.get("measure")
    called = "NDCG@10" if own is None else str(own)
    lines = {
        name: [Point(x, y) for x, y in zip(rounds, bank.get(key) or [], strict=False)]
        for name, key in (("validation", "valid_measure" if own else "valid_ndcg"), *(() if own else TRAINING))
    }
    lines = {name: line for name, line in lines.items() if line}
    if isinstance(bank.get("best_round"), int) and lines:
        kept = bank["best_round"]
        chart = line_chart(
            lines, x="boosting round", y=called, title=f"{called} by boosting round", kept=(kept, f"kept: {kept}")
        )
        note = "Kept where the mean of the last few validation values is highest: single ones are noise."
        charts.append(figure("Local metrics, round by round", chart, note if "validation" in lines else ""))
    points = [Point(int(epoch), value) for epoch, value in curve.items() if value is not None and value == value]
    if points:
        kept, called = report["best epoch"], str(report["config"].get("measure", "ndcg@10")).replace("ndcg", "NDCG")
        chart = line_chart(
            {"validation": points},
            x="epoch",
            y=f"validation {called}",
            title=f"{called} by epoch",
            kept=(kept, f"kept: {kept}"),
        )
        note = "Epoch 0 is the start, before any training of the weights."
        charts.append(figure("Training, epoch by epoch", chart, note))
    else:
        charts.append(tag("p", f"No validation queries: the last epoch ({report['best epoch']}) was kept."))
    if biases := bank.get("position_bias"):
        line = [Point(int(place), bias) for place, bias in biases.items()]
        chart = line_chart({"bias": line}, x="position", y="added to the score", title="Bias by position")
        note = "What being shown there added to a score while training; scores of new lists do without it."
        charts.append(figure("Positions", chart, note))
    return section("Validation", tag("div", charts, class_="charts"))


def queries_section(look: Look) -> tuple[str, str, Markup]:
    """The measure per query and labels by score, then the best and the worst lists side by side."""
    sides = [
        tag("div", tag("h3", title), [_card(query, look.top, look.measure) for query in found])
        for title, found in (("Ranked best", look.best), ("Ranked worst", look.worst))
        if found
    ]
    told = (
        "Of each list the first documents, then relevant ones further down. Scores have no unit. “Set apart by”: what "
        "features add to the score over the document in the middle of the ranking; exact parts of the difference."
    )
    return section(
        "Queries",
        tag("p", sampled(look), class_="note"),
        tag("div", _distribution(look), _calibration(look), class_="charts"),
        tag("p", told, class_="note") if sides else None,
        tag("div", sides, class_="sides"),
    )


def _distribution(look: Look) -> Markup:
    title = f"{look.measure} per query"
    if look.mean is None:
        return figure(title, tag("p", f"No query of {look.split} counts: none has a relevant document."))
    chart = histogram(
        look.values, low=0.0, high=max(1.0, *look.values), bins=20, x=look.measure, y="queries", title=title,
        marks={"mean": look.mean.mean},
    )  # fmt: skip
    ordered = sorted(look.values)
    low, middle, high = (ordered[round(share * (len(ordered) - 1))] for share in (0.1, 0.5, 0.9))
    counts = f"{look.mean.counted:,} queries count, {look.mean.skipped:,} are skipped."
    spread = f"Median {middle:.3f}; a tenth are at most {low:.3f}, a tenth at least {high:.3f}."
    return figure(title, chart, f"{counts} {spread}")


def sampled(look: Look) -> str:
    """Which lists were looked at."""
    if look.looked == look.queries:
        return f"All {look.queries:,} queries of {look.split}, {look.documents:,} documents."
    drawn = f"{look.looked:,} of the {look.queries:,} queries of {look.split}, drawn with seed {look.seed}"
    return f"{drawn}; {look.documents:,} documents."


def _card(query: Query, top: float, measure: str) -> Markup:
    scores = [row.score for row in query.rows]
    gap = max(scores) - min(scores)
    digits = min(max(2 - math.floor(math.log10(gap)), 0), 8) if gap > 0 else 3
    rows = [[row.rank, row.name, _grade(row.label, top), f"{row.score:.{digits}f}", _parts(row)] for row in query.rows]
    head = ["rank", "document", "label", "score", "set apart by"]
    more = query.size - len(query.rows)
    return tag(
        "article",
        tag("h4", f"Query {query.qid} · {measure} {query.value:.3f} · {query.size:,} documents"),
        table(head, rows, numbers=(0, 3)),
        tag("p", f"{more:,} more that are not shown." if more else "The whole list.", class_="note"),
        tag("p", query.why, class_="note") if query.why else None,
        class_="query",
    )


def _grade(label: float, top: float) -> Markup:
    return tag("span", f"{label:g}", class_="grade", style=f"--grade:{max(label, 0) / top if top > 0 else 0:.2f}")


def _parts(row: Document) -> list[Markup]:
    return [
        tag("span", f"{name} ", tag("span", f"{part:+.2g}", class_="up" if part > 0 else "down"), class_="part")
        for name, part in row.parts
    ]


def importance_section(look: Look) -> tuple[str, str, Markup]:
    """What features and metrics matter, and which values of a feature are good."""
    if look.pairs is None:
        return section("What matters", tag("p", "No list has two documents, so that nothing can be told apart."))
    shares = [Bar(look.names[feature], share) for feature, share in look.pairs.leading(15)]
    trees = [Bar("trees it adds to", look.pairs.base)] if look.pairs.base else []
    metrics = [Bar(f"metric {number + 1}", share, note=words) for number, share, words in look.metrics]
    about = "How much of the difference between two documents of a list each raw feature accounts for, on average."
    looks = [[number + 1, f"{share:.1%}", words] for number, share, words in look.metrics]
    effects = _effects(look)
    note = (
        "One document of a list is given other values of one feature, from its lowest to its highest; all else stays. "
        "The change of its score, in deviations of the scores within a list, with 95% intervals over "
        f"{look.moved_queries:,} queries."
    )
    return section(
        "What matters",
        tag(
            "div",
            _shares("Features in score differences", [*shares, *trees], about),
            None if look.shuffled is None else _shuffled(look),
            _shares("Local metrics in score differences", metrics),
            class_="charts",
        ),
        tag(
            "details",
            tag("summary", "What the leading metrics look at"),
            table(["metric", "share", "mostly"], looks, numbers=(0, 1)),
        ),
        [tag("h3", "Which values are good"), tag("p", note, class_="note")] if effects else None,
        tag("div", effects, class_="charts small"),
    )


def _shares(title: str, bars: Sequence[Bar], note: str = "") -> Markup:
    chart = bar_chart(bars, x="share of the score differences", title=title, form="{:.0%}".format)
    return figure(title, chart, note)


def _shuffled(look: Look) -> Markup:
    found = look.shuffled
    assert found is not None
    bars = [
        Bar(look.names[feature], interval.mean, interval.low, interval.high)
        for feature, interval in zip(found.features, found.intervals, strict=True)
    ]
    bars.sort(key=lambda bar: -bar.value)
    note = (
        f"Drop in {found.measure} when the values of a feature are shuffled within each list: mean of "
        f"{found.n_repeats} shuffles (seed {found.seed}) over {found.intervals[0].counted:,} queries, with 95% "
        "intervals, paired per query. Grey: the interval holds 0."
    )
    chart = bar_chart(
        bars,
        x=f"drop in {found.measure}",
        title="Cost of shuffling a feature",
        style=_sure,
    )
    return figure("Cost of shuffling a feature", chart, note)


def _sure(bar: Bar) -> str:
    return "c0" if (bar.low or 0) <= 0 <= (bar.high or 0) else "c1" if bar.value > 0 else "c2"


def _effects(look: Look) -> list[Markup]:
    """A chart for each feature, all on one scale."""
    lines = {
        look.names[effect.feature]: [
            Point(value, *(part / (effect.spread or 1.0) for part in (interval.mean, interval.low, interval.high)))
            for value, interval in zip(effect.values, effect.intervals, strict=True)
        ]
        for effect in look.effects
    }
    ends = [part for line in lines.values() for point in line for part in point[1:] if part is not None]
    return [
        figure(
            name,
            line_chart({name: line}, x="value", y="change of score", title=f"Effect of {name}", also=(0.0, *ends)),
        )
        for name, line in lines.items()
    ]


def _calibration(look: Look) -> Markup:
    points = [
        Point(place, found.mean, found.low, found.high) for place, found in enumerate(look.calibration.labels) if found
    ]
    count = len(look.calibration.labels)
    labels = [f"{100 * (place + 1) // count}%" for place in range(count)]
    chart = point_chart(
        points,
        x="place of the score within its list (100%: the top)",
        y="mean label",
        title="Mean label by score",
        labels=labels,
    )
    note = "Each list is cut into ten parts by the rank of its scores; 95% intervals over queries. Good rankings rise."
    return figure("Mean label by score", chart, note)


def comparison_section(paired: Paired) -> tuple[str, str, Markup]:
    """Beside another model, query by query."""
    gaps = [gap for gap in paired.gaps.tolist() if gap == gap]
    chart = sorted_chart(
        gaps, x="queries, by difference", y=f"difference in {paired.measure}", title="Differences per query"
    )
    rows = [
        [
            str(paired.qids[query]),
            *(f"{float(value):.4f}" for value in paired.values[:, query]),
            f"{float(paired.gaps[query]):+.4f}",
        ]
        for query in paired.most_different(8)
    ]
    return section(
        "Comparison",
        tag("p", sentence(f"{paired.first} against {paired.second} on {paired.split}: {paired.sentence()}")),
        tag(
            "div",
            figure("Differences per query", chart, f"Blue: {paired.first} is better; orange: {paired.second} is."),
            figure(
                "Queries that differ most",
                table(["query", paired.first, paired.second, "difference"], rows, numbers=(1, 2, 3)),
            ),
            class_="charts",
        ),
        tag("p", paired.definition, class_="note"),
    )


def settings_section(report: Report) -> tuple[str, str, Markup]:
    """How long it took, with which versions and settings; everything that is needed to do it again."""
    seconds, versions = report.get("seconds", {}), report.get("versions", {})
    times = [[name, f"{value:.1f} s"] for name, value in seconds.items()]
    rest = [[name, version] for name, version in versions.items()]
    return section(
        "Settings and versions",
        tag(
            "div",
            figure("Time", table(["stage", "seconds"], times, numbers=(1,))) if times else None,
            figure("Versions", table(["package", "version"], rest)) if rest else None,
            class_="charts",
        ),
        tag("p", f"Written {report['written']}.", class_="note") if "written" in report else None,
        tag(
            "details",
            tag("summary", "All settings"),
            tag("div", tag("pre", tag("code", _settings(report["config"]))), class_="scroll"),
        ),
    )


def _settings(config: Mapping[str, Any]) -> str:
    return json.dumps(config, indent=2, ensure_ascii=False, default=str)
