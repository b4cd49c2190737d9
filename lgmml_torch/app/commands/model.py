"""``lgmml info``, ``card``, ``export``, ``merge`` and ``explain``: what is in a model, and what to make of it."""

from __future__ import annotations

import json
import math
import sys
import zipfile
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from safetensors import safe_open

from lgmml_torch.app.commands import Command, common
from lgmml_torch.checks import DataError, LGMMLError, check_positive
from lgmml_torch.evaluation.tables import model_card, preprocessing_steps, read_report
from lgmml_torch.models.combine import combination_weights, merge_models
from lgmml_torch.models.explain import Explanation, explain
from lgmml_torch.models.export import EXPORTERS, compare_exported
from lgmml_torch.models.importance import structural_importance
from lgmml_torch.models.preprocess.base import feature_label
from lgmml_torch.models.ranker import LGMML
from lgmml_torch.models.storage import FORMAT, load_checkpoint
from lgmml_torch.ragged import RankingData

_LENGTHS = (1, 2, 3, 10, 30, 100, 300, 1000)  # of the lists on which an exported model is compared
_LARGEST = 1e-3  # difference, as a share of the largest score, that rounding may explain

_INFO_EXAMPLES = """
examples:
  lgmml info model.safetensors
  lgmml info outputs/run/checkpoints/best.ckpt --json
"""
_CARD_EXAMPLES = """
Figures and settings come from the report.json of the training run, beside the model file if nothing else is said.
examples:
  lgmml card model.safetensors
  lgmml card model.safetensors --name my-ranker --license apache-2.0 -o README.md
"""
_EXPORT_EXAMPLES = """
What is written needs nothing of this package: .onnx runs in onnxruntime, .pt2 in torch. Its scores are compared with
the model's own, on lists of random numbers or on those of --data, and the largest difference is printed.
examples:
  lgmml export model.safetensors model.onnx                      features of one list in, its scores out
  lgmml export model.safetensors lists.onnx --batch              many lists in one call, with their offsets
  lgmml export model.safetensors model.pt2 --data test.txt       a program of torch, compared on your own lists
"""
_MERGE_EXAMPLES = """
The lists should be validation queries: none of the models was fitted to them, and nothing is reported of them.
examples:
  lgmml merge boosted.safetensors vali.txt --with trained.safetensors -o both.safetensors
  lgmml merge seed0.safetensors mq2008 --split valid --with seed1.safetensors -o sum.safetensors
"""

_EXPLAIN_EXAMPLES = """
examples:
  lgmml explain model.safetensors test.txt --qid 18219 --document GX004-93-7097963 --over GX010-40-4497720
  lgmml explain model.safetensors test.csv --qid 7 --document 1 --over 4       the 1st and 4th row of query 7
"""
_PARTS_NOTE = "Parts add up to the difference; a metric's parts over its features add up to its own."


def _info_options(parser: ArgumentParser) -> None:
    common.add_model(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")


def _info(args: Namespace) -> None:
    """Print one line for each fact."""
    model = LGMML.load(args.model)
    facts = _describe_model(model, Path(args.model))
    if args.json:
        sys.stdout.write(json.dumps(facts, indent=2, ensure_ascii=False) + "\n")
        return
    width = max(map(len, facts))
    for name, value in facts.items():
        if value is not None:
            sys.stdout.write(f"{name:<{width}}  {value}\n")


def _describe_model(model: LGMML, file: Path) -> dict[str, Any]:
    """The facts people ask for, as primitives."""
    kind, version = _file_kind(file)
    phi = model.phi.table.weight.detach()
    quality = model.metrics.quality[~model.metrics.quality.isnan()]
    sources = {source.feature for source in model.preprocess.sources()}
    base = model.base
    mean_quality, weights = None, model.phi.mode
    if len(quality):
        mean_quality = round(float(quality.mean()), 4)
    if model.phi.deviations:
        weights += " with deviations"
    facts: dict[str, Any] = {
        "file": str(file),
        "size": f"{file.stat().st_size / 1024:.1f} KiB",
        "kind": kind,
        "format version": version,
        "local metrics (K)": model.metrics.num_metrics,
        "of which": ", ".join(map(_describe_block, model.metrics.iter_blocks())),
        "norm": model.metrics.norm,
        "kernel": model.kernel,
        "mean anchor NDCG": mean_quality,
        "raw features": model.reading["num_features"],
        "categories": _categories(model),
        "features used": f"{len(sources)} in {model.metrics.num_features} columns",
        "preprocessing": preprocessing_steps(model.preprocess),
        "weights Φ": weights,
        "policy for new queries": model.phi.policy,
        "training queries": len(model.qids),
        "mean Φ": float(f"{float(phi.mean()):.6g}"),
        "share of Φ that is zero": round(float((phi == 0).double().mean()), 4),
        "precision": str(model.dtype).removeprefix("torch."),
    }
    if base is not None:
        facts["adds to"] = f"a {base.title} model of {len(base.content) / 1024:.1f} KiB"
        facts["score"] = f"{base.own_weight:.6g} · own + {base.weight:.6g} · that of the trees"
        facts["needs"] = base.needs
    shares = []
    for feature, share in structural_importance(model).leading(8):
        shares.append(f"{feature_label(model.feature_names, feature)} {share:.1%}")
    facts["features that count most"] = ", ".join(shares)
    return {**facts, **_provenance(model.about or {})}


def _describe_block(block: Any) -> str:
    if block.is_full:
        return f"{block.num_metrics} on all features"
    return f"{block.num_metrics} on {block.anchors.shape[1]} features"


def _categories(model: LGMML) -> str | None:
    """The categories and how each is encoded."""
    if model.encoder is None:
        return None
    texts = []
    for name, known, step in zip(model.encoder.names, model.encoder.categories, model.encoder.steps, strict=True):
        if known is not None:
            encoding = "mean label"
            if step is not None and "codes" in step:
                encoding = "a column each"
            texts.append(f"{name} ({len(known)} words, {encoding})")
    return ", ".join(texts)


def _provenance(about: dict[str, Any]) -> dict[str, Any]:
    """What the file says of where the model comes from, one fact each: ``data``, ``seed`` and so on."""
    facts = {}
    for name, value in about.items():
        if isinstance(value, dict):
            facts[name] = ", ".join(f"{key} {item}" for key, item in value.items())
        elif name != "version":  # of this block
            facts[name] = value
    return facts


def _file_kind(file: Path) -> tuple[str, int]:
    """What the file is, and the version of its format."""
    if zipfile.is_zipfile(file):
        return "checkpoint of a training run", int(load_checkpoint(file)[FORMAT]["version"])
    with safe_open(file, framework="pt") as content:
        return "model", int(content.metadata()["version"])


def _card_options(parser: ArgumentParser) -> None:
    common.add_model(parser)
    add = parser.add_argument
    add("--report", metavar="FILE", help="report.json of the training run (default: the one beside the model)")
    add("--name", help="title of the card (default: the name of the file)")
    add("--license", metavar="NAME", help="of the model, such as apache-2.0")
    add("-o", "--output", default="-", metavar="FILE", help="where to (default: standard output)")


def _card(args: Namespace) -> None:
    """Write the card; figures and settings come from the report of the training run."""
    file = Path(args.model)
    model = LGMML.load(file)
    source, report = Path(args.report or file.parent / "report.json"), None
    if args.report or source.is_file():
        report = read_report(source)
    text = model_card(model, report=report, name=args.name or file.stem, licence=args.license)
    with common.output(args.output) as stream:
        stream.write(text.encode())


def _export_options(parser: ArgumentParser) -> None:
    common.add_model(parser)
    add = parser.add_argument
    add("output", metavar="FILE", help="what to write: .onnx, or .pt2 for a program of torch.export")
    add("--batch", action="store_true", help="take many lists in one call: a second input holds their offsets")
    common.add_data(parser, "--data")


def _export(args: Namespace) -> None:
    """Write the file, score lists with both, and say how far they are apart."""
    file = Path(args.output)
    if file.suffix not in EXPORTERS:
        raise LGMMLError(f"`FILE` must end in {' or '.join(EXPORTERS)}, got {file}")
    if args.known_queries:
        raise LGMMLError("`known-queries` must not be given: an exported file knows lists, and no queries by their id")
    model = common.load_model(args).cpu()
    data = _lists(args, model)
    EXPORTERS[file.suffix](model, file, policy=args.policy, batch=args.batch)
    found = compare_exported(file, model, data, policy=args.policy, batch=args.batch)
    difference = f"largest difference {found.largest:.3g} of scores up to {found.size:.3g}"
    if not found.largest <= _LARGEST * max(found.size, 1.0):
        file.unlink()
        raise LGMMLError(f"{file} was removed, because {found.engine} gives other scores than the model: {difference}")
    given = "features of one list"
    if args.batch:
        given = "features and offsets of lists"
    sys.stdout.write(
        f"{file}: {given} in, scores out; {file.stat().st_size / 1024:.1f} KiB\n"
        f"compared with the model on {found.lists:,} lists, {found.documents:,} documents: "
        f"{difference} ({found.engine})\n"
    )


def _lists(args: Namespace, model: LGMML) -> RankingData:
    """Those to compare on: of the data where it is given, else of random numbers, in all lengths."""
    if args.data is not None:
        with common.open_data(args, model) as source:
            return source.read()
    generator, known = torch.Generator().manual_seed(0), model.reading
    features = torch.randn(sum(_LENGTHS), known["num_features"], generator=generator)
    names = known["feature_names"]
    for name, words in known["categories"].items():
        codes = torch.randint(-1, len(words), (len(features),), generator=generator)
        features[:, names.index(name)] = codes.to(features)
    data = RankingData.from_arrays(features, torch.zeros(len(features)), group=_LENGTHS, feature_names=names)
    if model.encoder is None:
        return data
    return data.replace(categories=model.encoder.categories)


def _merge_options(parser: ArgumentParser) -> None:
    common.add_model(parser)
    common.add_data(parser, own_weights=True)
    add = parser.add_argument
    add("--with", dest="others", action="append", required=True, metavar="MODEL", help="another model; may be repeated")
    add("-o", "--output", required=True, metavar="FILE", help="the model file to write")


def _merge(args: Namespace) -> None:
    """Weigh the models by the labelled lists and write their sum."""
    names = [args.model, *args.others]
    models = [common.load_model(args)]
    for name in args.others:
        models.append(LGMML.load(name).to(models[0].device))
    merge_models(models, [1.0] * len(models))  # what does not go together is told before the lists are read
    with common.open_data(args, models[0]) as lists:
        data = lists.read(labelled=True)
    scores = []
    for model in models:
        scores.append(model.score(data, documents_at_once=args.batch_documents))
    weights = combination_weights(torch.stack(scores), data.labels, data.offsets, tie_order=data.order).tolist()
    merged = merge_models(models, weights)
    try:
        merged.calibrate(data)
    except DataError as error:
        sys.stdout.write(f"no chances of grades: {error}\n")
    merged.save(args.output)
    for name, weight in zip(names, weights, strict=True):
        sys.stdout.write(f"{weight:10.6g}  {name}\n")


def _explain_options(parser: ArgumentParser) -> None:
    common.add_model(parser)
    common.add_data(parser)
    add = parser.add_argument
    add("--qid", required=True, metavar="Q", help="the query")
    add("--document", required=True, metavar="A", help="id of the upper document, or its place in the list, from 1")
    add("--over", required=True, metavar="B", help="the one to compare it with")
    add("--top", type=int, default=10, metavar="N", help="metrics and features to show (default: 10)")
    add("--json", action="store_true", help="print JSON")


def _explain(args: Namespace) -> None:
    """Print the explanation."""
    check_positive("top", args.top)
    model = common.load_model(args)
    with common.open_data(args, model) as lists:
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
    content = _explanation_dict(found, args.top)
    if args.json:
        sys.stdout.write(json.dumps(content, indent=2, ensure_ascii=False) + "\n")
    else:
        _show_explanation(content)


def _document(data: RankingData, name: str) -> str | int:
    """An id when the list has it; otherwise a number is a place, from 1."""
    known = data.doc_ids is not None and name in data.doc_ids
    if known or not name.isdigit():
        return name
    if not 1 <= int(name) <= data.num_documents:
        message = f"query {data.qids[0]!r} has documents 1 to {data.num_documents}, got {name}"
        if data.doc_ids is not None:
            message += ", which is the id of none of them either"
        raise DataError(message)
    return int(name) - 1


def _explanation_dict(found: Explanation, top: int) -> dict[str, Any]:
    """The leading parts, as primitives."""
    metrics = found.leading_metrics(top)
    features, parts = [], []
    for column, part in found.leading_features(top):
        raw, feature, values = None, found.columns[column].feature, found.values[:, column].tolist()
        if feature >= 0:
            raw = found.raw[:, feature].tolist()
        features.append({"feature": found.called(column), "part": part, "values": values, "raw": raw})
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


def _metric_cells(row: dict[str, Any]) -> list[str]:
    near, far = row["distances"]
    quality, mostly = "", []
    if row["anchor_ndcg"] is not None:
        quality = f"{row['anchor_ndcg']:.3f}"
    for item in row["features"]:
        mostly.append(f"{item['feature']} {item['part']:+.3g} (anchor at {item['anchor']:.3g})")
    part, weight = f"{row['part']:+.6g}", f"{row['weight']:.4g}"
    return [str(row["metric"]), part, weight, f"{near:.4g}", f"{far:.4g}", quality, "; ".join(mostly)]


def _show_explanation(content: dict[str, Any]) -> None:
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
    common.print_tables(title, _PARTS_NOTE, metrics, features)


COMMANDS = {
    "info": Command(_info_options, _info, _INFO_EXAMPLES),
    "card": Command(_card_options, _card, _CARD_EXAMPLES),
    "export": Command(_export_options, _export, common.DATA_FORMATS + _EXPORT_EXAMPLES),
    "merge": Command(_merge_options, _merge, common.DATA_FORMATS + _MERGE_EXAMPLES),
    "explain": Command(_explain_options, _explain, common.DATA_FORMATS + _EXPLAIN_EXAMPLES),
}
