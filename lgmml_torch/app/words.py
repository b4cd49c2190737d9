"""What can be said to each command: words, options, examples. Nothing heavy is imported: help should come at once."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, NamedTuple

from lgmml_torch import __version__

FORMATS = """
data:
  a LETOR file (label qid:7 1:0.5 2:0 ... #docid = x), plain or gzipped; the label may be left out
  a CSV or TSV file with a header, plain or gzipped; every column but qid, label and docid is a feature
  (--qid-column and so on)
  a Parquet or Arrow (feather) file: a row per document, or a row per query with lists in its columns
  an .npz file with arrays X, qid and, optionally, y and docid
  a file without qid: beside which FILE.query gives the number of documents of each query (LightGBM's way)
  a folder or known data set (mq2008, ohsumed, ...; below LGMML_DATA), with --split and --fold
  a folder of shards, as lgmml convert writes them, with --split if it has parts
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
  lgmml score model.safetensors shards --output scores --jobs 4  a file of scores for each shard; to go on after a
                                                                 stop, give the same command again
""",
    "convert": """
FOLDER gets Parquet files of whole lists and manifest.json, which counts them; a data set with parts gets folders
train, valid and test. Files are read list by list; a data set is loaded as it is for training.
examples:
  lgmml convert train.txt.gz shards
  lgmml convert clicks.parquet shards --qid-column query --documents 100000
  lgmml convert mq2008 shards --fold 1                           train, valid and test; --split for one of them
""",
    "evaluate": """
examples:
  lgmml evaluate model.safetensors test.txt
  lgmml evaluate model.safetensors mq2008 --fold 1 --split test --json result.json
  lgmml evaluate best.ckpt test.txt --preset letor4 --metrics ndcg@10,map,precision@5
  lgmml evaluate --run bm25.run --run ours.run --qrels test.qrels        anybody's TREC runs, as trec_eval would
  lgmml evaluate model.safetensors test.txt --write-qrels test.qrels     the labels for other people's tools
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
    "export": """
What is written needs nothing of this package: .onnx runs in onnxruntime, .pt2 in torch. Its scores are compared with
the model's own, on lists of random numbers or on those of --data, and the largest difference is printed.
examples:
  lgmml export model.safetensors model.onnx                      features of one list in, its scores out
  lgmml export model.safetensors lists.onnx --batch              many lists in one call, with their offsets
  lgmml export model.safetensors model.pt2 --data test.txt       a program of torch, compared on your own lists
""",
    "card": """
Figures and settings come from the report.json of the training run, beside the model file if nothing else is said.
examples:
  lgmml card model.safetensors
  lgmml card model.safetensors --name my-ranker --license apache-2.0 -o README.md
""",
    "sweep": """
settings:
  as for `lgmml train`; one with several values is searched, beside those of conf/hparams_search/optuna.yaml:
  interval(a,b), tag(log,interval(a,b)), int(interval(a,b)), range(a,b), choice(x,y)
The study stands in FOLDER/study.db: the same command again goes on, also after a kill, until --trials are done.
examples:
  lgmml sweep data=mq2008 --trials 20 --folder outputs/search
  lgmml sweep experiment=quick 'loss.margin=choice(0.05,0.1)' --space my_space.yaml
  lgmml sweep --table multirun/2026-01-31_12-00-00            means over the runs of python train.py -m data.fold=1,2,3
""",
    "compare": """
A and B may each be a model file, a checkpoint, the folder of a run, a LightGBM (text) or XGBoost (JSON, UBJ) model file
or a TREC run (.run, .trec; documents by id, or by row of the data from 1).
examples:
  lgmml compare new.safetensors old.safetensors test.txt
  lgmml compare outputs/mq2008/today lightgbm.txt mq2008 --fold 1 --plot gaps.png
  lgmml compare ours.run theirs.run test.txt --measure map --json gaps.json
""",
    "report": """
Without --data, the lists are those of the run's own settings, as its report.json has them.
examples:
  lgmml report outputs/mq2008/2026-01-31_12-00-00
  lgmml report outputs/run --compare outputs/earlier -o beside.html
  lgmml report outputs/run --data new.txt -o new.html
""",
    "completion": """
examples:
  eval "$(lgmml completion bash)"                                for this shell; in ~/.bashrc, for every new one
  eval "$(lgmml completion zsh)"                                 the same in ~/.zshrc
""",
    "info": """
examples:
  lgmml info model.safetensors
  lgmml info outputs/run/checkpoints/best.ckpt --json
""",
}


class Command(NamedTuple):
    """One command: ``run`` of its file in `lgmml_torch.app.commands` does what is said here.

    Attributes:
        about: what it does, for the list of commands.
        add: adds its arguments and options.
        more: what stands below its options, before the examples.
    """

    about: str
    add: Callable[[argparse.ArgumentParser], None]
    more: str = ""


def build_parser() -> argparse.ArgumentParser:
    """All commands and options."""
    parser = argparse.ArgumentParser(
        prog="lgmml",
        description="Learning to rank with localized geometric-mean metrics.",
        epilog="`lgmml COMMAND --help` says more, with examples.",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        added = commands.add_parser(
            name,
            help=command.about,
            description=command.about[0].upper() + command.about[1:] + ".",
            epilog=command.more + EXAMPLES.get(name, ""),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add(added)
    return parser


def parsers_of(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """The parser of each command."""
    found = next(action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return dict(found.choices)


def _add_model(command: argparse.ArgumentParser, *, optional: bool = False) -> None:
    about = "a model file, or a checkpoint of a training run"
    command.add_argument("model", metavar="MODEL", help=about, **_places(optional))


def _places(optional: bool) -> dict[str, Any]:
    return {"nargs": "?"} if optional else {}


def _add_source(command: argparse.ArgumentParser, split: str | None) -> Callable[..., argparse.Action]:
    """Which data; answers how to add more options to it. ``split`` is the part that is taken by default."""
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
    about = f"part of a data set: train, valid or test (default: {split or 'all of them'})"
    add("--split", default=split, metavar="PART", help=about)
    add("--fold", type=int, metavar="N", help="fold of a data set that has folds")
    return add


def _add_data(
    command: argparse.ArgumentParser,
    *,
    weighs: bool = False,
    whole: bool = False,
    optional: bool = False,
    name: str = "data",
) -> None:
    """Which data, and how models look at it.

    A command that ``weighs`` models takes each with the weights it has; one that reads the ``whole`` data at once has
    nothing to say about batches; for some the data is ``optional``, or an option by its ``name``.
    """
    command.add_argument(name, metavar="DATA", help="see below", **_places(optional))
    _add_source(command, "test")
    add = command.add_argument_group("model").add_argument
    if weighs:
        command.set_defaults(policy=None, known_queries=False)
    else:
        about = "weights of new queries (ones, mean, knn, shared, amortized) instead of its own"
        add("--policy", metavar="NAME", help=about)
        add("--known-queries", action="store_true", help="use the trained weights of queries with the same id")
    add("--device", default="cpu", metavar="NAME", help="cpu, cuda, cuda:1, ... (default: cpu)")
    add("--threads", type=int, metavar="N", help="cores to use (default: all)")
    if whole:
        command.set_defaults(batch_documents=32_768)
        return
    add("--batch-documents", type=int, default=32_768, metavar="N", help="documents at a time (default: 32768)")


def _score(command: argparse.ArgumentParser) -> None:
    _add_model(command)
    _add_data(command)
    command.add_argument("-o", "--output", default="-", metavar="FILE", help="where to (default: standard output)")
    about = "text: a score per line; npy: a numpy array; trec: a run (by default what the output's name says, or text)"
    command.add_argument("--format", choices=("text", "npy", "trec"), help=about)
    command.add_argument("--tag", default="lgmml", help="last column of a TREC run (default: lgmml)")
    about = "processes, of one thread each, that score a folder of shards (default: 1)"
    command.add_argument("--jobs", type=int, default=1, metavar="N", help=about)


def _convert(command: argparse.ArgumentParser) -> None:
    command.add_argument("data", metavar="DATA", help="see below")
    command.add_argument("folder", metavar="FOLDER", help="where to; shards that are there already are replaced")
    about = "documents in a shard, at most; a longer list has one of its own (default: 50000)"
    command.add_argument("--documents", type=int, default=50_000, metavar="N", help=about)
    add = _add_source(command, None)
    add("--num-features", type=int, metavar="N", help="how many features there are (default: what the data says)")


def _evaluate(command: argparse.ArgumentParser) -> None:
    _add_model(command, optional=True)
    _add_data(command, optional=True)
    add = command.add_argument_group("TREC files, instead of a model and data").add_argument
    about = "a run to measure (qid Q0 docid rank score tag); may be given several times"
    add("--run", action="append", metavar="FILE", help=about)
    add("--qrels", metavar="FILE", help="the judgements to measure it by (qid 0 docid relevance)")
    add = command.add_argument
    about = "comma-separated, of ndcg dcg map mrr err precision recall, with @k (default: ndcg@1,ndcg@5,ndcg@10,map)"
    add("--metrics", default="ndcg@1,ndcg@5,ndcg@10,map", metavar="NAMES", help=about)
    about = "whose definitions: default, letor4, mslr, lightgbm, ... (default: default; trec_eval for a run)"
    add("--preset", metavar="NAME", help=about)
    add("--threshold", type=float, metavar="Y", help="label from which a document is relevant")
    add("--max-grade", type=float, metavar="Y", help="highest grade of the data set, for err")
    add("--json", metavar="FILE", help="write all figures, per query too; - prints them instead of the table")
    add("--write-qrels", metavar="FILE", help="also write the labels of DATA as TREC judgements")


def _explain(command: argparse.ArgumentParser) -> None:
    _add_model(command)
    _add_data(command)
    add = command.add_argument
    add("--qid", required=True, metavar="Q", help="the query")
    add("--document", required=True, metavar="A", help="id of the upper document, or its place in the list, from 1")
    add("--over", required=True, metavar="B", help="the one to compare it with")
    add("--top", type=int, default=10, metavar="N", help="metrics and features to show (default: 10)")
    add("--json", action="store_true", help="print JSON")


def _merge(command: argparse.ArgumentParser) -> None:
    _add_model(command)
    _add_data(command, weighs=True)
    add = command.add_argument
    add("--with", dest="others", action="append", required=True, metavar="MODEL", help="another model; may be repeated")
    add("-o", "--output", required=True, metavar="FILE", help="the model file to write")


def _export(command: argparse.ArgumentParser) -> None:
    _add_model(command)
    add = command.add_argument
    add("output", metavar="FILE", help="what to write: .onnx, or .pt2 for a program of torch.export")
    add("--batch", action="store_true", help="take many lists in one call: a second input holds their offsets")
    _add_data(command, name="--data")


def _card(command: argparse.ArgumentParser) -> None:
    _add_model(command)
    add = command.add_argument
    add("--report", metavar="FILE", help="report.json of the training run (default: the one beside the model)")
    add("--name", help="title of the card (default: the name of the file)")
    add("--license", metavar="NAME", help="of the model, such as apache-2.0")
    add("-o", "--output", default="-", metavar="FILE", help="where to (default: standard output)")


def _compare(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("model", metavar="A", help="what ranks: see below")
    add("other", metavar="B", help="what to compare it with")
    _add_data(command, weighs=True, whole=True)
    add("--measure", default="ndcg@10", metavar="NAME", help="what to compare by (default: ndcg@10)")
    add("--preset", default="default", metavar="NAME", help="whose definitions: default, letor4, mslr, lightgbm, ...")
    add("--seed", type=int, default=0, metavar="N", help="of the bootstrap over queries (default: 0)")
    add("--top", type=int, default=10, metavar="N", help="queries to show, those that differ most (default: 10)")
    add("--plot", metavar="FILE", help="draw the differences per query: .png, .svg or .pdf")
    add("--json", metavar="FILE", help="write all figures, per query too; - prints them instead of the table")


def _report(command: argparse.ArgumentParser) -> None:
    command.add_argument("run", metavar="RUN", help="the folder of a training run")
    _add_data(command, weighs=True, whole=True, name="--data")
    add = command.add_argument
    add("--compare", metavar="FILE", help="a model, run, tree model or TREC run to put beside it")
    add("-o", "--output", metavar="FILE", help="where to (default: report.html in the run's folder)")


def _info(command: argparse.ArgumentParser) -> None:
    _add_model(command)
    command.add_argument("--json", action="store_true", help="print JSON")


def _sweep(command: argparse.ArgumentParser) -> None:
    command.add_argument("overrides", nargs="*", metavar="SETTING", help="key=value, see below")
    add = command.add_argument
    about = "how many to have in all, those of earlier calls included (default: 20)"
    add("--trials", type=int, default=20, metavar="N", help=about)
    about = "for the study, and a folder for each trial (default: outputs/sweep)"
    add("--folder", default="outputs/sweep", metavar="FOLDER", help=about)
    add("--space", metavar="FILE", help="a YAML file with `space: {key: distribution}` instead of the one above")
    add("--table", metavar="FOLDER", help="search nothing: print means over the runs below a folder")


def _train(command: argparse.ArgumentParser) -> None:
    """Hydra reads its words: see `lgmml_torch.app.train`."""


def _completion(command: argparse.ArgumentParser) -> None:
    command.add_argument("shell", choices=("bash", "zsh"), help="whose language to write")


COMMANDS = {
    "train": Command("train a model (the same as train.py: Hydra overrides such as data=mq2008)", _train),
    "score": Command("score the documents of a file", _score, FORMATS),
    "evaluate": Command("rank the lists of a labelled file and measure the result", _evaluate, FORMATS),
    "explain": Command("why one document stands above another", _explain, FORMATS),
    "merge": Command(
        "make one model of several: the sum of their scores, weighted by what ranks labelled lists best",
        _merge,
        FORMATS,
    ),
    "export": Command("write a model for other programs: ONNX, or a program of torch", _export, FORMATS),
    "card": Command("write a model card: data, figures, settings, limits, licence", _card),
    "sweep": Command("search for good settings by validation, in trials that a kill does not undo", _sweep),
    "convert": Command("write data as a folder of shards, for large sets and several processes", _convert, FORMATS),
    "compare": Command("two models or runs on the same lists, query by query", _compare, FORMATS),
    "report": Command("make the page of a training run (again), or one for other data", _report, FORMATS),
    "info": Command("what is in a model file", _info),
    "completion": Command("write a script with which a shell completes commands, options and settings", _completion),
}
