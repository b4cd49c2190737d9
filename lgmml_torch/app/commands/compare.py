"""``lgmml compare``: two models or runs on the same lists, query by query."""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from lgmml_torch.app.commands.common import DATA_FORMATS, add_data, open_data, output, use_machine
from lgmml_torch.app.rankers import Ranker, open_ranker
from lgmml_torch.checks import DataError, LGMMLError, check_choice, check_positive
from lgmml_torch.evaluation.evaluate import Paired, compare_rankings
from lgmml_torch.functional.ranking.presets import find_preset, parse_metric

PICTURES = (".png", ".svg", ".pdf")

_EXAMPLES = """
A and B may each be a model file, a checkpoint, the folder of a run, a LightGBM (text) or XGBoost (JSON, UBJ) model file
or a TREC run (.run, .trec; documents by id, or by row of the data from 1).
examples:
  lgmml compare new.safetensors old.safetensors test.txt
  lgmml compare outputs/mq2008/today lightgbm.txt mq2008 --fold 1 --plot gaps.png
  lgmml compare ours.run theirs.run test.txt --measure map --json gaps.json
"""


def add_options(parser: ArgumentParser) -> None:
    """Arguments and options of the command."""
    parser.epilog = DATA_FORMATS + _EXAMPLES
    parser.set_defaults(execute=run)
    add = parser.add_argument
    add("model", metavar="A", help="what ranks: see below")
    add("other", metavar="B", help="what to compare it with")
    add_data(parser, own_weights=True, batches=False)
    add("--measure", default="ndcg@10", metavar="NAME", help="what to compare by (default: ndcg@10)")
    add("--preset", default="default", metavar="NAME", help="whose definitions: default, letor4, mslr, lightgbm, ...")
    add("--seed", type=int, default=0, metavar="N", help="of the bootstrap over queries (default: 0)")
    add("--top", type=int, default=10, metavar="N", help="queries to show, those that differ most (default: 10)")
    add("--plot", metavar="FILE", help="draw the differences per query: .png, .svg or .pdf")
    add("--json", metavar="FILE", help="write all figures, per query too; - prints them instead of the table")


def run(args: Namespace) -> None:
    """Print the comparison, or the figures as JSON; draw it where that is asked for."""
    parse_metric(args.measure)
    find_preset(args.preset)
    check_positive("top", args.top, zero=True)
    if args.plot is not None:
        check_choice("plot", Path(args.plot).suffix, PICTURES)
    found = _compare(args)
    if args.plot is not None:
        draw(found, args.plot)
    if args.json is not None:
        with output(args.json) as stream:
            stream.write(json.dumps(found.to_dict(per_query=True), indent=2, ensure_ascii=False).encode() + b"\n")
    if args.json != "-":
        show(found, args.top)


def _compare(args: Namespace) -> Paired:
    """Score the lists with both."""
    device = use_machine(args)
    first, second = open_ranker(args.model), open_ranker(args.other)
    for ranker in (first, second):
        if ranker.model is not None:
            ranker.model.to(device)
    with open_data(args, first.model or second.model, reading=_reading(first, second)) as lists:
        if not lists.has_labels:
            raise DataError(f"{lists.name}: there are no labels to compare by")
        data = lists.read(labelled=True)
    names = first.name, second.name
    if first.name == second.name:
        names = args.model, args.other
    ours, theirs = first.score(data).cpu(), second.score(data).cpu()
    rules = {"split": lists.name, "measure": args.measure, "preset": args.preset, "seed": args.seed}
    return compare_rankings((names[0], ours), (names[1], theirs), data, **rules)


def _reading(first: Ranker, second: Ranker) -> dict[str, Any]:
    """What a reader must know: the columns of two models that have names for them, or else the features of both.

    Raises:
        LGMMLError: different numbers of features without names; different rules for missing values.
    """
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


def draw(found: Paired, path: str) -> None:
    """The differences per query, as a picture."""
    from lgmml_torch.plots import differences_picture, save_figure  # matplotlib takes its time to import

    gaps = found.gaps[~found.gaps.isnan()].tolist()
    save_figure(differences_picture(gaps, first=found.first, second=found.second, measure=found.measure), path)


def show(found: Paired, top: int) -> None:
    """For people: the sentence, the queries that differ most, the definition."""
    width = None
    if not sys.stdout.isatty():
        width = 160
    console = Console(file=sys.stdout, width=width, highlight=False, markup=False)
    console.print(f"{found.first} against {found.second} on {found.split}", soft_wrap=True)
    console.print(f"{found.sentence()}.", soft_wrap=True)
    queries = found.most_different(top)
    if queries:
        table = Table("query", found.first, found.second, "difference")
        for query in queries:
            a, b = found.values[:, query].tolist()
            table.add_row(str(found.qids[query]), f"{a:.4f}", f"{b:.4f}", f"{a - b:+.4f}")
        console.print(table)
    console.print(found.definition, soft_wrap=True)
