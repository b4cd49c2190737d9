"""``lgmml explain``: why one document stands above another."""

from __future__ import annotations

import json
import math
import sys
from argparse import ArgumentParser, Namespace
from typing import Any

from rich.table import Table

from lgmml_torch.app.commands.common import DATA_FORMATS, add_data, add_model, load_model, open_data, print_tables
from lgmml_torch.checks import DataError, check_positive
from lgmml_torch.models.explain import Explanation, explain
from lgmml_torch.ragged import RankingData

_NOTE = "Parts add up to the difference; a metric's parts over its features add up to its own."

_EXAMPLES = """
examples:
  lgmml explain model.safetensors test.txt --qid 18219 --document GX004-93-7097963 --over GX010-40-4497720
  lgmml explain model.safetensors test.csv --qid 7 --document 1 --over 4       the 1st and 4th row of query 7
"""


def add_explain_options(parser: ArgumentParser) -> None:
    """Arguments and options of the command."""
    parser.epilog = DATA_FORMATS + _EXAMPLES
    parser.set_defaults(execute=_explain)
    add_model(parser)
    add_data(parser)
    add = parser.add_argument
    add("--qid", required=True, metavar="Q", help="the query")
    add("--document", required=True, metavar="A", help="id of the upper document, or its place in the list, from 1")
    add("--over", required=True, metavar="B", help="the one to compare it with")
    add("--top", type=int, default=10, metavar="N", help="metrics and features to show (default: 10)")
    add("--json", action="store_true", help="print JSON")


def _explain(args: Namespace) -> None:
    """Print the explanation."""
    check_positive("top", args.top)
    model = load_model(args)
    with open_data(args, model) as lists:
        data = lists.only(args.qid)
    found = explain(
        model,
        data,
        qid=data.qids[0],
        document=_document(data, args.document),
        over=_document(data, args.over),
        policy=args.policy,
        known_queries=args.known_queries,
    )
    content = _as_dict(found, args.top)
    if args.json:
        sys.stdout.write(json.dumps(content, indent=2, ensure_ascii=False) + "\n")
    else:
        _show(content)


def _document(data: RankingData, name: str) -> str | int:
    """An id when the list has it; otherwise a number is a place, from 1.

    Raises:
        DataError: a place that the list does not have, told as it was given.
    """
    known = data.doc_ids is not None and name in data.doc_ids
    if known or not name.isdigit():
        return name
    if not 1 <= int(name) <= data.num_documents:
        message = f"query {data.qids[0]!r} has documents 1 to {data.num_documents}, got {name}"
        if data.doc_ids is not None:
            message += ", which is the id of none of them either"
        raise DataError(message)
    return int(name) - 1


def _as_dict(found: Explanation, top: int) -> dict[str, Any]:
    """The leading parts, as primitives."""
    metrics = found.leading_metrics(top)
    features, parts = [], []
    for column, part in found.leading_features(top):
        features.append(_feature(found, column, part))
        parts.append(part)
    return {
        "qid": found.qid,
        "document": found.document,
        "over": found.over,
        "scores": found.scores.tolist(),
        "difference": found.difference,
        "metrics": [_metric(found, metric) for metric in metrics],
        "other_metrics": float(found.metrics.sum() - found.metrics[metrics].sum()),
        "features": features,
        "other_features": found.difference - found.base - math.fsum(parts),
        "base": found.base,
    }


def _metric(found: Explanation, metric: int) -> dict[str, Any]:
    quality, features = None, []
    if not found.quality[metric].isnan():
        quality = float(found.quality[metric])
    for column, part in found.leading_features(3, metric=metric):
        anchor = float(found.anchors[metric, column])
        features.append({"feature": found.called(column), "part": part, "anchor": anchor})
    return {
        "metric": metric + 1,
        "part": float(found.metrics[metric]),
        "weight": float(found.phi[metric]),
        "distances": found.distances[:, metric].tolist(),
        "anchor_ndcg": quality,
        "features": features,
    }


def _feature(found: Explanation, column: int, part: float) -> dict[str, Any]:
    raw, feature = None, found.columns[column].feature
    if feature >= 0:
        raw = found.raw[:, feature].tolist()
    return {"feature": found.called(column), "part": part, "values": found.values[:, column].tolist(), "raw": raw}


def _metric_cells(row: dict[str, Any]) -> list[str]:
    near, far = row["distances"]
    quality, mostly = "", []
    if row["anchor_ndcg"] is not None:
        quality = f"{row['anchor_ndcg']:.3f}"
    for item in row["features"]:
        mostly.append(f"{item['feature']} {item['part']:+.3g} (anchor at {item['anchor']:.3g})")
    part, weight = f"{row['part']:+.6g}", f"{row['weight']:.4g}"
    return [str(row["metric"]), part, weight, f"{near:.4g}", f"{far:.4g}", quality, "; ".join(mostly)]


def _show(content: dict[str, Any]) -> None:
    """The same for people."""
    a, b = content["document"], content["over"]
    first, second = content["scores"]
    relation = "level with"
    if content["difference"] > 0:
        relation = "above"
    elif content["difference"]:
        relation = "below"
    title = f"Query {content['qid']}: {a} (score {first:.6g}) is {relation} {b} (score {second:.6g}); "
    title += f"difference {content['difference']:+.6g}."
    metrics = Table("metric", "part", "weight Φ", "distance of the first", "of the second", "anchor NDCG", "mostly by")
    for row in content["metrics"]:
        metrics.add_row(*_metric_cells(row))
    features = Table("feature", "part", "value in the first", "in the second", "as the metrics see it")
    for row in content["features"]:
        raw = ["", ""]
        if row["raw"] is not None:
            raw = list(map("{:.6g}".format, row["raw"]))
        seen = " against ".join(map("{:.3g}".format, row["values"]))
        features.add_row(row["feature"], f"{row['part']:+.6g}", *raw, seen)
    for table, rest in ((metrics, content["other_metrics"]), (features, content["other_features"])):
        table.add_row("all others", f"{rest:+.6g}")
        if content["base"]:
            table.add_row("trees it adds to", f"{content['base']:+.6g}")
    print_tables(title, _NOTE, metrics, features)
