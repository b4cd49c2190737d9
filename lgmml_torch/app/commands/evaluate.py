"""``lgmml evaluate``, ``compare`` and ``report``: how well labelled lists are ranked, as tables, JSON or a page."""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import IO, Any

from rich.table import Table

from lgmml_torch.app.commands import Command, common
from lgmml_torch.app.rankers import MODEL, Ranker
from lgmml_torch.checks import DataError, LGMMLError, check_choice, check_positive
from lgmml_torch.data.source import DataSource
from lgmml_torch.data.trec import qrels_lines, read_qrels, read_run
from lgmml_torch.evaluation.evaluate import Evaluation, Paired, evaluate, evaluate_run
from lgmml_torch.evaluation.tables import read_report
from lgmml_torch.files import write_text
from lgmml_torch.functional.presets import find_preset, parse_metric
from lgmml_torch.models.ranker import LGMML
from lgmml_torch.ragged import RankingData

_EVALUATE_EXAMPLES = """
examples:
  lgmml evaluate model.safetensors test.txt
  lgmml evaluate model.safetensors mq2008 --fold 1 --split test --json result.json
  lgmml evaluate best.ckpt test.txt --preset letor4 --metrics ndcg@10,map,precision@5
  lgmml evaluate --run bm25.run --run ours.run --qrels test.qrels        anybody's TREC runs, as trec_eval would
  lgmml evaluate model.safetensors test.txt --write-qrels test.qrels     the labels for other people's tools
"""


def _evaluate_options(parser: ArgumentParser) -> None:
    common.add_model(parser, nargs="?")
    common.add_data(parser, nargs="?")
    add = parser.add_argument_group("TREC files, instead of a model and data").add_argument
    help_ = "a run to measure (qid Q0 docid rank score tag); may be given several times"
    add("--run", action="append", metavar="FILE", help=help_)
    add("--qrels", metavar="FILE", help="the judgements to measure it by (qid 0 docid relevance)")
    add = parser.add_argument
    help_ = "comma-separated, of ndcg dcg map mrr err precision recall, with @k (default: ndcg@1,ndcg@5,ndcg@10,map)"
    add("--metrics", default="ndcg@1,ndcg@5,ndcg@10,map", metavar="NAMES", help=help_)
    help_ = "whose definitions: default, letor4, mslr, lightgbm, ... (default: default; trec_eval for a run)"
    add("--preset", metavar="NAME", help=help_)
    add("--threshold", type=float, metavar="Y", help="label from which a document is relevant")
    add("--max-grade", type=float, metavar="Y", help="highest grade of the data set, for err")
    add("--json", metavar="FILE", help="write all figures, per query too; - prints them instead of the table")
    add("--write-qrels", metavar="FILE", help="also write the labels of DATA as TREC judgements")


def _evaluate(args: Namespace) -> None:
    """Print the table, or the figures as JSON."""
    _check_words(args)
    metrics = list(filter(None, map(str.strip, args.metrics.split(","))))
    rules = {"metrics": metrics, "threshold": args.threshold, "max_grade": args.max_grade}
    if args.run is None:
        rules["preset"] = args.preset or "default"
        found = [_of_model(args, rules)]
    else:
        rules["preset"] = args.preset or "trec_eval"
        runs, found = list(map(read_run, args.run)), list[Evaluation]()
        judged = read_qrels(args.qrels)
        for file, ranking in zip(args.run, runs, strict=True):
            found.append(evaluate_run(ranking, judged, split=Path(file).name, **rules))
    if args.json is not None:
        text = "\n".join(map(Evaluation.to_json, found))
        with common.output(args.json) as stream:
            stream.write(text.encode() + b"\n")
    if args.json != "-":
        common.print_evaluations(found)


def _check_words(args: Namespace) -> None:
    """Require either a model and its data, or runs and judgements."""
    if args.run is None and args.qrels is None:
        if args.data is None:
            raise LGMMLError("say what to evaluate: MODEL DATA, or --run FILE --qrels FILE")
    elif args.run is None or args.qrels is None:
        raise LGMMLError("`--run` and `--qrels` go together: a ranking, and the judgements to measure it by")
    elif args.model is not None or args.write_qrels is not None:
        raise LGMMLError("`--run` is a ranking already: MODEL, DATA and `--write-qrels` do not go with it")
    elif args.json is not None and len(args.run) > 1:
        raise LGMMLError("`--json` takes the figures of one run, got several")


def _of_model(args: Namespace, rules: dict[str, Any]) -> Evaluation:
    """What a model reaches on labelled lists; their labels are written as qrels where that is asked for."""
    model = common.load_model(args)
    with common.open_data(args, model) as lists:
        if not lists.has_labels:
            raise DataError(f"{lists.name}: there are no labels to evaluate against")
        with nullcontext() if args.write_qrels is None else common.output(args.write_qrels) as qrels:
            return evaluate(
                model,
                _written_parts(lists, args.batch_documents, qrels),
                split=lists.name,
                known_queries=args.known_queries,
                policy=args.policy,
                documents_at_once=args.batch_documents,
                **rules,
            )


def _written_parts(lists: DataSource, documents: int, qrels: IO[bytes] | None) -> Iterator[RankingData]:
    """Whole lists, some at a time, whose labels are written on the way."""
    for batch in lists.batches(documents):
        if qrels is not None:
            qrels.write("".join(qrels_lines(batch)).encode())
        yield batch.data


_PICTURES = (".png", ".svg", ".pdf")

_COMPARE_EXAMPLES = """
A and B may each be a model file, a checkpoint, the folder of a run, a LightGBM (text) or XGBoost (JSON, UBJ) model file
or a TREC run (.run, .trec; documents by id, or by row of the data from 1).
examples:
  lgmml compare new.safetensors old.safetensors test.txt
  lgmml compare outputs/mq2008/today lightgbm.txt mq2008 --fold 1 --plot gaps.png
  lgmml compare ours.run theirs.run test.txt --measure map --json gaps.json
"""


def _compare_options(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("model", metavar="A", help="what ranks: see below")
    add("other", metavar="B", help="what to compare it with")
    common.add_data(parser, own_weights=True, batches=False)
    add("--measure", default="ndcg@10", metavar="NAME", help="what to compare by (default: ndcg@10)")
    add("--preset", default="default", metavar="NAME", help="whose definitions: default, letor4, mslr, lightgbm, ...")
    add("--seed", type=int, default=0, metavar="N", help="of the bootstrap over queries (default: 0)")
    add("--top", type=int, default=10, metavar="N", help="queries to show, those that differ most (default: 10)")
    add("--plot", metavar="FILE", help="draw the differences per query: .png, .svg or .pdf")
    add("--json", metavar="FILE", help="write all figures, per query too; - prints them instead of the table")


def _compare(args: Namespace) -> None:
    """Print the comparison, or the figures as JSON; draw it where that is asked for."""
    parse_metric(args.measure)
    find_preset(args.preset)
    check_positive("top", args.top, zero=True)
    if args.plot is not None:
        check_choice("plot", Path(args.plot).suffix, _PICTURES)
    found = _compare_rankers(args)
    if args.plot is not None:
        from lgmml_torch.plots import differences_picture, save_figure  # matplotlib takes its time to import

        gaps = found.gaps[~found.gaps.isnan()].tolist()
        picture = differences_picture(gaps, first=found.first, second=found.second, measure=found.measure)
        save_figure(picture, args.plot)
    if args.json is not None:
        with common.output(args.json) as stream:
            stream.write(json.dumps(found.to_dict(per_query=True), indent=2, ensure_ascii=False).encode() + b"\n")
    if args.json != "-":
        _show(found, args.top)


def _compare_rankers(args: Namespace) -> Paired:
    """Score the lists with both."""
    device = common.use_machine(args)
    first, second = Ranker.open(args.model), Ranker.open(args.other)
    for ranker in (first, second):
        if ranker.model is not None:
            ranker.model.to(device)
    with common.open_data(args, first.model or second.model, reading=_reading_of(first, second)) as lists:
        if not lists.has_labels:
            raise DataError(f"{lists.name}: there are no labels to compare by")
        data = lists.read(labelled=True)
    names = first.name, second.name
    if first.name == second.name:
        names = args.model, args.other
    ours, theirs = first.score(data).cpu(), second.score(data).cpu()
    rules = {"split": lists.name, "measure": args.measure, "preset": args.preset, "seed": args.seed}
    return Paired.of((names[0], ours), (names[1], theirs), data, **rules)


def _reading_of(first: Ranker, second: Ranker) -> dict[str, Any]:
    """What a reader must know: the columns of two models that have names for them, or else the features of both."""
    ours, theirs = first.num_features, second.num_features
    models = list(filter(None, (first.model, second.model)))
    rules = sorted({model.reading["missing"] for model in models})
    if len(rules) > 1:
        raise LGMMLError(f"both must be trained with one rule for missing values, got {' and '.join(rules)}")
    if len(models) == 2 and None not in (models[0].feature_names, models[1].feature_names):
        return _joined(models[0].reading, models[1].reading)
    if None not in (ours, theirs) and ours != theirs:
        named = f"{first.name} has {ours}, {second.name} has {theirs}"
        raise LGMMLError(f"both must rank documents with the same number of features, or by their names: {named}")
    if models:
        return models[0].reading
    return {"num_features": theirs if ours is None else ours, "feature_names": None}


def _joined(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """The columns of both, with the words of both."""
    names = tuple(dict.fromkeys((*one["feature_names"], *other["feature_names"])))
    categories = dict(one["categories"])
    for name, words in other["categories"].items():
        categories[name] = tuple(dict.fromkeys((*categories.get(name, ()), *words)))
    return {**one, "num_features": len(names), "feature_names": names, "categories": categories}


def _show(found: Paired, top: int) -> None:
    """For people: the sentence, the queries that differ most, the definition."""
    parts: list[object] = [f"{found.first} against {found.second} on {found.split}", f"{found.sentence()}."]
    table = Table("query", found.first, found.second, "difference")
    for row in found.rows(top):
        table.add_row(*row)
    if table.rows:
        parts.append(table)
    common.print_tables(*parts, found.definition)


_READERS = ("lgmml_torch.data",)  # a report may come from others: it must not run other code

_REPORT_EXAMPLES = """
Without --data, the lists are those of the run's own settings, as its report.json has them.
examples:
  lgmml report outputs/mq2008/2026-01-31_12-00-00
  lgmml report outputs/run --compare outputs/earlier -o beside.html
  lgmml report outputs/run --data new.txt -o new.html
  lgmml report outputs/run --importance            the cost of shuffling features, and their effects
"""


def _report_options(parser: ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="the folder of a training run")
    common.add_data(parser, "--data", own_weights=True, batches=False)
    add = parser.add_argument
    add("--compare", metavar="FILE", help="a model, run, tree model or TREC run to put beside it")
    add("--importance", action="store_true", help="also shuffle and move features; ranks the lists about 80 times")
    add("-o", "--output", metavar="FILE", help="where to (default: report.html in the run's folder)")


def _report(args: Namespace) -> None:
    """Write the page, and print where it is."""
    from lgmml_torch.app.page import make_page
    from lgmml_torch.app.page_data import PageData

    folder = Path(args.run)
    content, device = _report_of_run(folder), common.use_machine(args)
    model = LGMML.load(folder / MODEL).to(device)
    config = content["config"]
    others = Ranker.of_run(folder, config.get("reference", config.get("compare")))  # its name up to 0.2
    if args.compare:
        others = [Ranker.open(args.compare)]
    split, data = _lists_of_page(args, content, model)
    paired = [other.beside(model, data, split, config) for other in others]
    shown = PageData(content, model, data, split, importance=args.importance)
    file = folder / "report.html"
    if args.output:
        file = Path(args.output)
    write_text(file, make_page(content, shown, paired))
    sys.stdout.write(f"{file}\n")


def _report_of_run(folder: Path) -> dict[str, Any]:
    """The ``report.json`` of a run."""
    file = folder / "report.json"
    if not file.is_file():
        raise DataError(f"{folder} is not the folder of a finished run: it has no report.json")
    content = read_report(file)
    try:
        content["best epoch"], content["config"]["evaluation"]["metrics"]
    except (KeyError, TypeError) as error:
        raise DataError(f"{file} must be the report.json of a training run: {error}") from error
    return content


def _lists_of_page(args: Namespace, content: dict[str, Any], model: LGMML) -> tuple[str, RankingData]:
    """The lists of the page and their name: those of ``--data``, or those the run was tested on."""
    if args.data is not None:
        with common.open_data(args, model) as lists:
            return lists.name, lists.read(labelled=True)
    from omegaconf import OmegaConf

    from lgmml_torch.app.compose import load_splits
    from lgmml_torch.app.report import reported_part

    settings = OmegaConf.create({"data": content["config"].get("data")})
    return reported_part(load_splits(settings, _READERS))


COMMANDS = {
    "evaluate": Command(_evaluate_options, _evaluate, common.DATA_FORMATS + _EVALUATE_EXAMPLES),
    "compare": Command(_compare_options, _compare, common.DATA_FORMATS + _COMPARE_EXAMPLES),
    "report": Command(_report_options, _report, common.DATA_FORMATS + _REPORT_EXAMPLES),
}
