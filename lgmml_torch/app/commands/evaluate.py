"""``lgmml evaluate``: rank labelled lists, or take somebody's run, and measure the result."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import IO, Any

from lgmml_torch.app.commands.common import DATA_FORMATS, add_data, add_model, load_model, open_data, output
from lgmml_torch.checks import DataError, LGMMLError
from lgmml_torch.data.source import DataSource
from lgmml_torch.data.trec import qrels_lines, read_qrels, read_run
from lgmml_torch.evaluation.evaluate import Evaluation, evaluate, evaluate_run
from lgmml_torch.evaluation.tables import print_evaluations
from lgmml_torch.ragged import RankingData

_EXAMPLES = """
examples:
  lgmml evaluate model.safetensors test.txt
  lgmml evaluate model.safetensors mq2008 --fold 1 --split test --json result.json
  lgmml evaluate best.ckpt test.txt --preset letor4 --metrics ndcg@10,map,precision@5
  lgmml evaluate --run bm25.run --run ours.run --qrels test.qrels        anybody's TREC runs, as trec_eval would
  lgmml evaluate model.safetensors test.txt --write-qrels test.qrels     the labels for other people's tools
"""


def add_options(parser: ArgumentParser) -> None:
    """Arguments and options of the command."""
    parser.epilog = DATA_FORMATS + _EXAMPLES
    parser.set_defaults(execute=run)
    add_model(parser, optional=True)
    add_data(parser, optional=True)
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


def run(args: Namespace) -> None:
    """Print the table, or the figures as JSON."""
    _check_words(args)
    metrics = list(filter(None, map(str.strip, args.metrics.split(","))))
    rules = {"metrics": metrics, "threshold": args.threshold, "max_grade": args.max_grade}
    if args.run is None:
        rules["preset"] = args.preset or "default"
        found = [_of_model(args, rules)]
    else:
        rules["preset"] = args.preset or "trec_eval"
        found = [_of_run(file, args.qrels, rules) for file in args.run]
    if args.json is not None:
        text = "\n".join(map(Evaluation.to_json, found))
        with output(args.json) as stream:
            stream.write(text.encode() + b"\n")
    if args.json != "-":
        print_evaluations(found)


def _check_words(args: Namespace) -> None:
    """Either a model and its data, or runs and judgements.

    Raises:
        LGMMLError: what is missing, or does not go together.
    """
    if args.run is None and args.qrels is None:
        if args.data is None:
            raise LGMMLError("say what to evaluate: MODEL DATA, or --run FILE --qrels FILE")
    elif args.run is None or args.qrels is None:
        raise LGMMLError("`--run` and `--qrels` go together: a ranking, and the judgements to measure it by")
    elif args.model is not None or args.write_qrels is not None:
        raise LGMMLError("`--run` is a ranking already: MODEL, DATA and `--write-qrels` do not go with it")
    elif args.json is not None and len(args.run) > 1:
        raise LGMMLError("`--json` takes the figures of one run, got several")


def _of_run(file: str, qrels: str, rules: dict[str, Any]) -> Evaluation:
    """What a run reaches; called by the name of its file."""
    return evaluate_run(read_run(file), read_qrels(qrels), split=Path(file).name, **rules)


def _of_model(args: Namespace, rules: dict[str, Any]) -> Evaluation:
    """What a model reaches on labelled lists; their labels are written as qrels where that is asked for."""
    model = load_model(args)
    with open_data(args, model) as lists:
        if not lists.has_labels:
            raise DataError(f"{lists.name}: there are no labels to evaluate against")
        with nullcontext() if args.write_qrels is None else output(args.write_qrels) as qrels:
            return evaluate(
                model,
                parts(lists, args.batch_documents, qrels),
                split=lists.name,
                known_queries=args.known_queries,
                policy=args.policy,
                documents_at_once=args.batch_documents,
                **rules,
            )


def parts(lists: DataSource, documents: int, qrels: IO[bytes] | None) -> Iterator[RankingData]:
    """Whole lists, some at a time, whose labels are written on the way."""
    for batch in lists.batches(documents):
        if qrels is not None:
            qrels.write("".join(qrels_lines(batch)).encode())
        yield batch.data
