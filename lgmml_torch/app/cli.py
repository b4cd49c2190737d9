"""``lgmml train|score|evaluate|explain|merge|info``: what the words on the command line mean."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from lgmml_torch import __version__

COMMANDS = {
    "train": "train a model (the same as train.py: Hydra overrides such as data=mq2008)",
    "score": "score the documents of a file",
    "evaluate": "rank the lists of a labelled file and measure the result",
    "explain": "why one document stands above another",
    "merge": "make one model of several: the sum of their scores, weighted by what ranks labelled lists best",
    "info": "what is in a model file",
}

FORMATS = """
data:
  a LETOR file (label qid:7 1:0.5 2:0 ... #docid = x), plain or gzipped; the label may be left out
  a CSV or TSV file with a header, plain or gzipped; every column but qid, label and docid is a feature
  (--qid-column and so on)
  a Parquet or Arrow (feather) file: a row per document, or a row per query with lists in its columns
  an .npz file with arrays X, qid and, optionally, y and docid
  a file without qid: beside which FILE.query gives the number of documents of each query (LightGBM's way)
  a folder or known data set (mq2008, ohsumed, ...; below LGMML_DATA), with --split and --fold
  - for standard input
Rows of a query need not follow one another; text, Parquet and Arrow files need not fit into memory.
"""

EXAMPLES = {
    "score": """
examples:
  lgmml score model.safetensors test.txt                         one score per row, in the file's order
  lgmml score model.safetensors test.csv.gz -o scores.npy        as a numpy array
  lgmml score last.ckpt test.txt -o test.run --format trec       a TREC run: qid Q0 docid rank score tag
  zcat big.gz | lgmml score model.safetensors - > scores.txt     in a pipe
""",
    "evaluate": """
examples:
  lgmml evaluate model.safetensors test.txt
  lgmml evaluate model.safetensors mq2008 --fold 1 --split test --json result.json
  lgmml evaluate best.ckpt test.txt --preset letor4 --metrics ndcg@10,map,precision@5
""",
    "explain": """
examples:
  lgmml explain model.safetensors test.txt --qid 18219 --document GX004-93-7097963 --over GX010-40-4497720
  lgmml explain model.safetensors test.csv --qid 7 --document 1 --over 4       the 1st and 4th row of query 7
""",
    "merge": """
The lists should be validation queries: none of the models was fitted to them, and nothing is reported of them.
examples:
  lgmml merge boosted.safetensors vali.txt --with trained.safetensors -o both.safetensors
  lgmml merge seed0.safetensors mq2008 --split valid --with seed1.safetensors -o sum.safetensors
""",
    "info": """
examples:
  lgmml info model.safetensors
  lgmml info outputs/run/checkpoints/best.ckpt --json
""",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code is 0, or 2 after an error, which standard error tells in one sentence."""
    words = list(sys.argv[1:] if argv is None else argv)
    with _plain_warnings():
        try:
            if words[:1] == ["train"]:
                return _train(words[1:])
            arguments = build_parser().parse_args(words)
            getattr(importlib.import_module("lgmml_torch.app.commands"), f"run_{arguments.command}")(arguments)
            sys.stdout.flush()
        except BrokenPipeError:  # the reader has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 141
        except KeyboardInterrupt:
            return 130
        except (ValueError, OSError) as error:
            from lgmml_torch.checks import LGMMLError

            if not isinstance(error, (LGMMLError, OSError)):
                raise
            sys.stderr.write(f"lgmml: error: {_sentence(error)}\n")
            return 2
    return 0


def build_parser() -> argparse.ArgumentParser:
    """All commands and options. Nothing heavy is imported: help should come at once."""
    parser = argparse.ArgumentParser(
        prog="lgmml",
        description="Learning to rank with localized geometric-mean metrics.",
        epilog="`lgmml COMMAND --help` says more, with examples.",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, about in COMMANDS.items():
        command = commands.add_parser(
            name,
            help=about,
            description=about[0].upper() + about[1:] + ".",
            epilog=(FORMATS if name != "info" else "") + EXAMPLES.get(name, ""),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if name == "train":
            continue
        command.add_argument("model", metavar="MODEL", help="a model file, or a checkpoint of a training run")
        if name != "info":
            _add_data(command)
    _add_score(commands.choices["score"])
    _add_evaluate(commands.choices["evaluate"])
    _add_explain(commands.choices["explain"])
    add = commands.choices["merge"].add_argument
    add("--with", dest="others", action="append", required=True, metavar="MODEL", help="another model; may be repeated")
    add("-o", "--output", required=True, metavar="FILE", help="the model file to write")
    commands.choices["info"].add_argument("--json", action="store_true", help="print JSON")
    return parser


def _add_data(command: argparse.ArgumentParser) -> None:
    command.add_argument("data", metavar="DATA", help="see below")
    add = command.add_argument_group("data").add_argument
    formats = ("letor", "lightgbm", "csv", "tsv", "npz", "parquet", "arrow")
    add("--input-format", choices=formats, help="by default what the name says, or else letor")
    add("--qid-column", default="qid", metavar="NAME", help="column of a table with the query (default: qid)")
    add("--label-column", default="label", metavar="NAME", help="its column with the relevance (default: label)")
    add("--docid-column", default="docid", metavar="NAME", help="its column with the document's id (default: docid)")
    about = "a column to leave out; may be given several times"
    add("--drop-column", action="append", default=[], metavar="NAME", help=about)
    missing = ("error", "zero", "query-min", "query-mean")
    add("--missing", choices=missing, default="error", help="what NULL, nan and empty cells stand for (default: error)")
    add("--split", default="test", metavar="PART", help="part of a data set: train, valid or test (default: test)")
    add("--fold", type=int, metavar="N", help="fold of a data set that has folds")
    add = command.add_argument_group("model").add_argument
    add(
        "--policy",
        metavar="NAME",
        help="weights of new queries (ones, mean, knn, shared, amortized) instead of its own",
    )
    add("--known-queries", action="store_true", help="use the trained weights of queries with the same id")
    add("--device", default="cpu", metavar="NAME", help="cpu, cuda, cuda:1, ... (default: cpu)")
    add("--threads", type=int, metavar="N", help="cores to use (default: all)")
    add("--batch-documents", type=int, default=32_768, metavar="N", help="documents at a time (default: 32768)")


def _add_score(command: argparse.ArgumentParser) -> None:
    command.add_argument("-o", "--output", default="-", metavar="FILE", help="where to (default: standard output)")
    about = "text: a score per line; npy: a numpy array; trec: a run (by default what the output's name says, or text)"
    command.add_argument("--format", choices=("text", "npy", "trec"), help=about)
    command.add_argument("--tag", default="lgmml", help="last column of a TREC run (default: lgmml)")


def _add_evaluate(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    about = "comma-separated, of ndcg dcg map mrr err precision recall, with @k (default: ndcg@1,ndcg@5,ndcg@10,map)"
    add("--metrics", default="ndcg@1,ndcg@5,ndcg@10,map", metavar="NAMES", help=about)
    add("--preset", default="default", metavar="NAME", help="whose definitions: default, letor4, mslr, lightgbm, ...")
    add("--threshold", type=float, metavar="Y", help="label from which a document is relevant")
    add("--max-grade", type=float, metavar="Y", help="highest grade of the data set, for err")
    add("--json", metavar="FILE", help="write all figures, per query too; - prints them instead of the table")


def _add_explain(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("--qid", required=True, metavar="Q", help="the query")
    add("--document", required=True, metavar="A", help="id of the upper document, or its place in the list, from 1")
    add("--over", required=True, metavar="B", help="the one to compare it with")
    add("--top", type=int, default=10, metavar="N", help="metrics and features to show (default: 10)")
    add("--json", action="store_true", help="print JSON")


def _train(overrides: list[str]) -> int:
    from lgmml_torch.app import train

    before, sys.argv = sys.argv, ["lgmml train", *overrides]
    try:
        train.main()
    finally:
        sys.argv = before
    return 0


def _sentence(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error).partition("\n")[0] or type(error).__name__


@contextmanager
def _plain_warnings() -> Iterator[None]:
    """Warnings as one line on standard error, without the line of source that gave them."""
    before = warnings.formatwarning
    warnings.formatwarning = lambda message, *_, **__: f"lgmml: warning: {message}\n"
    try:
        yield
    finally:
        warnings.formatwarning = before


if __name__ == "__main__":
    sys.exit(main())
