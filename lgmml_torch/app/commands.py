"""The commands of ``lgmml``: each ``run_…`` takes the parsed arguments."""

from __future__ import annotations

import json
import math
import sys
import zipfile
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from safetensors import safe_open

from lgmml_torch.checks import DataError, LGMMLError, check_choice, check_positive
from lgmml_torch.data.catalog import CATALOG, open_dataset
from lgmml_torch.data.source import Batch, Columns, Source, open_source
from lgmml_torch.evaluation.evaluate import evaluate
from lgmml_torch.evaluation.tables import print_evaluations
from lgmml_torch.files import replacing
from lgmml_torch.models.explain import Explanation, explain
from lgmml_torch.models.phi import POLICIES
from lgmml_torch.models.preprocess.base import Preprocess
from lgmml_torch.models.ranker import LGMML
from lgmml_torch.models.storage import FORMAT, load_checkpoint
from lgmml_torch.ragged import RankingData


def load_model(args: Namespace) -> LGMML:
    """The model, on the device asked for; options that do not suit it are refused before any data is read."""
    if args.threads is not None:
        check_positive("threads", args.threads)
        torch.set_num_threads(args.threads)
    check_positive("batch-documents", args.batch_documents)
    device = find_device(args.device)
    model = LGMML.load(args.model)
    if args.policy is not None:
        check_choice("policy", args.policy, POLICIES[model.phi.mode])
    if args.known_queries:
        model.known_rows(())
    return model.to(device)


def find_device(name: str) -> torch.device:
    """The device of that name, if this machine has it."""
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise LGMMLError(f"`device` {name!r} cannot be used here: {str(error).splitlines()[0]}") from error
    return device


def open_data(args: Namespace, model: LGMML) -> Source:
    """The lists to rank, from a file, a folder or a data set known by name."""
    name, width, dtype = args.data, model.num_features, model.metrics.scales.dtype
    names = model.feature_names
    columns = Columns(args.qid_column, args.label_column, args.docid_column, tuple(args.drop_column))
    if name in CATALOG or (name != "-" and Path(name).is_dir()):
        options = {"num_features": width, "missing": args.missing, "dtype": dtype, "columns": columns,
                   "feature_names": names}  # fmt: skip
        parts = open_dataset(name, fold=args.fold, **options)
        check_choice("split", args.split, parts)
        source = open_source(parts[args.split], num_features=width)
        source.name = f"{name}, {args.split}"
        return source
    return open_source(
        name,
        kind=args.input_format,
        num_features=width,
        feature_names=names,
        columns=columns,
        dtype=dtype,
        missing=args.missing,
    )


@contextmanager
def output(path: str) -> Iterator[IO[bytes]]:
    """Where to write: standard output, or a file that appears only when all of it is there."""
    if path == "-":
        yield sys.stdout.buffer
    elif Path(path).exists() and not Path(path).is_file():  # a device or a pipe cannot be exchanged for a file
        with Path(path).open("wb") as stream:
            yield stream
    else:
        with replacing(path) as temporary, temporary.open("wb") as stream:
            yield stream


FORMATS = {".npy": "npy", ".run": "trec", ".trec": "trec"}

Scored = tuple[Batch, NDArray[Any]]


def run_score(args: Namespace) -> None:
    """Read, score, write; whole lists at a time."""
    model = load_model(args)
    form = args.format or FORMATS.get(Path(args.output).suffix, "text")
    with open_data(args, model) as lists, output(args.output) as stream:
        scored = score_batches(model, lists, args)
        if form == "trec":
            write_trec(stream, scored, args.tag)
        elif form == "text" and lists.in_order:
            for _, scores in scored:
                write_text(stream, scores)
        else:
            scores = in_file_order(scored, lists.num_rows)
            if form == "text":
                write_text(stream, scores)
            else:
                np.save(stream, scores, allow_pickle=False)


def score_batches(model: LGMML, lists: Source, args: Namespace) -> Iterator[Scored]:
    """Each batch with its scores, in the order of its rows in the file."""
    for batch in lists.batches(args.batch_documents):
        scores = model.score_in_caller_order(
            batch.data,
            known_queries=args.known_queries,
            policy=args.policy,
            documents_at_once=args.batch_documents,
        )
        yield batch, scores


def in_file_order(scored: Iterator[Scored], rows: int) -> NDArray[Any]:
    """All scores; only these have to fit into memory."""
    out: NDArray[Any] | None = None
    for batch, scores in scored:
        if out is None:
            out = np.empty(rows, scores.dtype)
        out[batch.rows] = scores
    assert out is not None  # a file without documents was refused
    return out


def write_text(stream: IO[bytes], scores: NDArray[Any]) -> None:
    """One score per line, with as few digits as give back the same number."""
    stream.write("".join(f"{score!s}\n" for score in scores).encode())


def write_trec(stream: IO[bytes], scored: Iterator[Scored], tag: str) -> None:
    """``qid Q0 docid rank score tag``, best first; a document without an id goes by its row in the file, from 1."""
    for batch, scores in scored:
        data = batch.data
        order = data.order.argsort()  # canonical rows in the file's order
        ids = data.doc_ids
        names = [
            (ids[row] if ids is not None else "") or str(batch.rows[i] + 1) for i, row in enumerate(order.tolist())
        ]
        queries = data.in_caller_order(data.query_index)
        best = torch.from_numpy(scores).argsort(descending=True, stable=True)
        best = best[queries[best].argsort(stable=True)]
        lines, rank, previous = [], 0, -1
        for place, query in zip(best.tolist(), queries[best].tolist(), strict=True):
            rank = rank + 1 if query == previous else 1
            previous = query
            lines.append(f"{word(data.qids[query])} Q0 {word(names[place])} {rank} {scores[place]!s} {word(tag)}\n")
        stream.write("".join(lines).encode())


def word(value: object) -> str:
    """One word: a TREC line is cut at blanks."""
    return "_".join(str(value).split()) or "_"


def run_evaluate(args: Namespace) -> None:
    """Print the table, or the figures as JSON."""
    model = load_model(args)
    with open_data(args, model) as lists:
        if not lists.has_labels:
            raise DataError(f"{lists.name}: there are no labels to evaluate against")
        found = evaluate(
            model,
            (batch.data for batch in lists.batches(args.batch_documents)),
            split=lists.name,
            metrics=[name.strip() for name in args.metrics.split(",") if name.strip()],
            preset=args.preset,
            known_queries=args.known_queries,
            policy=args.policy,
            threshold=args.threshold,
            max_grade=args.max_grade,
            documents_at_once=args.batch_documents,
        )
    if args.json == "-":
        sys.stdout.write(found.to_json() + "\n")
        return
    if args.json is not None:
        with output(args.json) as stream:
            stream.write(found.to_json().encode() + b"\n")
    print_evaluations([found])


NOTE = "Parts add up to the difference; a metric's parts over its features add up to its own."


def run_explain(args: Namespace) -> None:
    """Print the explanation."""
    check_positive("top", args.top)
    model = load_model(args)
    with open_data(args, model) as lists:
        data = lists.only(args.qid)
    found = explain(
        model,
        data,
        qid=data.qids[0],
        document=document(data, args.document),
        over=document(data, args.over),
        policy=args.policy,
        known_queries=args.known_queries,
    )
    content = as_dict(found, args.top)
    if args.json:
        sys.stdout.write(json.dumps(content, indent=2, ensure_ascii=False) + "\n")
    else:
        show(content)


def document(data: RankingData, name: str) -> str | int:
    """An id when the list has it; otherwise a number is a place, from 1."""
    known = data.doc_ids is not None and name in data.doc_ids
    return name if known or not name.isdigit() else int(name) - 1


def as_dict(found: Explanation, top: int) -> dict[str, Any]:
    """The leading parts, as primitives."""
    metrics = found.leading_metrics(top)
    features = found.leading_features(top)
    return {
        "qid": found.qid,
        "document": found.document,
        "over": found.over,
        "scores": found.scores.tolist(),
        "difference": found.difference,
        "metrics": [
            {
                "metric": r + 1,
                "part": float(found.metrics[r]),
                "weight": float(found.phi[r]),
                "distances": found.distances[:, r].tolist(),
                "anchor_ndcg": None if found.quality[r].isnan() else float(found.quality[r]),
                "features": [
                    {"feature": str(found.columns[j]), "part": part, "anchor": float(found.anchors[r, j])}
                    for j, part in found.leading_features(3, metric=r)
                ],
            }
            for r in metrics
        ],
        "other_metrics": float(found.metrics.sum() - found.metrics[metrics].sum()),
        "features": [
            {
                "feature": str(found.columns[j]),
                "part": part,
                "values": found.values[:, j].tolist(),
                "raw": found.raw[:, found.columns[j].feature].tolist() if found.columns[j].feature >= 0 else None,
            }
            for j, part in features
        ],
        "other_features": found.difference - found.base - math.fsum(part for _, part in features),
        "base": found.base,
    }


def show(content: dict[str, Any]) -> None:
    """The same for people."""
    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else 160, highlight=False, markup=False)
    a, b = content["document"], content["over"]
    first, second = content["scores"]
    relation = "above" if content["difference"] > 0 else "below" if content["difference"] < 0 else "level with"
    console.print(f"Query {content['qid']}: {a} (score {first:.6g}) is {relation} {b} (score {second:.6g}); ", end="")
    console.print(f"difference {content['difference']:+.6g}.", NOTE, sep="\n")
    table = Table("metric", "part", "weight Φ", "distance of the first", "of the second", "anchor NDCG", "mostly by")
    for row in content["metrics"]:
        near, far = row["distances"]
        mostly = "; ".join(f"{i['feature']} {i['part']:+.3g} (anchor at {i['anchor']:.3g})" for i in row["features"])
        quality = "" if row["anchor_ndcg"] is None else f"{row['anchor_ndcg']:.3f}"
        part, weight = f"{row['part']:+.6g}", f"{row['weight']:.4g}"
        table.add_row(str(row["metric"]), part, weight, f"{near:.4g}", f"{far:.4g}", quality, mostly)
    table.add_row("all others", f"{content['other_metrics']:+.6g}")
    if content["base"]:
        table.add_row("trees it adds to", f"{content['base']:+.6g}")
    console.print(table)
    table = Table("feature", "part", "value in the first", "in the second", "as the metrics see it")
    for row in content["features"]:
        raw = ["", ""] if row["raw"] is None else [f"{value:.6g}" for value in row["raw"]]
        seen = " against ".join(f"{value:.3g}" for value in row["values"])
        table.add_row(row["feature"], f"{row['part']:+.6g}", *raw, seen)
    table.add_row("all others", f"{content['other_features']:+.6g}")
    if content["base"]:
        table.add_row("trees it adds to", f"{content['base']:+.6g}")
    console.print(table)


def run_merge(args: Namespace) -> None:
    """Weigh the models by the labelled lists and write their sum."""
    from lgmml_torch.functional.combine import combination_weights  # other commands need neither
    from lgmml_torch.models.merge import merge_models

    names = [args.model, *args.others]
    models = [load_model(args), *(LGMML.load(name) for name in args.others)]
    merge_models(models, [1.0] * len(models))  # what does not go together is told before the lists are read
    with open_data(args, models[0]) as lists:
        data = lists.read(labelled=True)
    scores = torch.stack([model.score(data) for model in models])
    weights = combination_weights(scores, data.labels, data.offsets, tie_order=data.order).tolist()
    merge_models(models, weights).save(args.output)
    for name, weight in zip(names, weights, strict=True):
        sys.stdout.write(f"{weight:10.6g}  {name}\n")


def run_info(args: Namespace) -> None:
    """Print one line for each fact."""
    model = LGMML.load(args.model)
    facts = describe_model(model, Path(args.model))
    if args.json:
        sys.stdout.write(json.dumps(facts, indent=2, ensure_ascii=False) + "\n")
        return
    width = max(len(name) for name in facts)
    sys.stdout.write("".join(f"{name:<{width}}  {value}\n" for name, value in facts.items() if value is not None))


def describe_model(model: LGMML, file: Path) -> dict[str, Any]:
    """The facts people ask for, as primitives."""
    kind, version = file_kind(file)
    phi = model.phi.table.weight.detach()
    quality = model.metrics.quality[~model.metrics.quality.isnan()]
    sources = Counter(source.feature for source in model.preprocess.sources())
    base = model.base
    blocks = [
        f"{block.num_metrics} on {'all' if block.is_full else block.anchors.shape[1]} features"
        for block in model.metrics.iter_blocks()
    ]
    return {
        "file": str(file),
        "size": f"{file.stat().st_size / 1024:.1f} KiB",
        "kind": kind,
        "format version": version,
        "local metrics (K)": model.metrics.num_metrics,
        "of which": ", ".join(blocks),
        "norm": model.metrics.norm,
        "kernel": model.kernel,
        "mean anchor NDCG": round(float(quality.mean()), 4) if len(quality) else None,
        "raw features": model.num_features,
        "features used": f"{len(sources)} in {model.metrics.num_features} columns",
        "preprocessing": steps(model.preprocess),
        "weights Φ": model.phi.mode + (" with deviations" if model.phi.deviations else ""),
        "policy for new queries": model.phi.policy,
        "training queries": len(model.qids),
        "mean Φ": float(f"{float(phi.mean()):.6g}"),
        "share of Φ that is zero": round(float((phi == 0).double().mean()), 4),
        "precision": str(model.metrics.scales.dtype).removeprefix("torch."),
        "adds to": None if base is None else f"a {base.title} model of {len(base.content) / 1024:.1f} KiB",
        "score": None if base is None else f"{base.own_weight:.6g} · own + {base.weight:.6g} · that of the trees",
        "needs": None if base is None else base.needs,
    }


def file_kind(file: Path) -> tuple[str, int]:
    """What the file is, and the version of its format."""
    if zipfile.is_zipfile(file):
        return "checkpoint of a training run", int(load_checkpoint(file)[FORMAT]["version"])
    with safe_open(file, framework="pt") as content:
        return "model", int(content.metadata()["version"])


def steps(preprocess: Preprocess | dict[str, Any]) -> str:
    """The steps in one line: ``remove_constant → (quantile + list_rank) → standardize``."""
    spec = preprocess.spec() if isinstance(preprocess, Preprocess) else preprocess
    inner = [steps(step) for step in spec["args"].get("steps", [])]
    if spec["name"] == "chain":
        return " → ".join(inner) or "none"
    return f"({' + '.join(inner)})" if spec["name"] == "concat" else str(spec["name"])
