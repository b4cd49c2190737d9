"""The mathematical core side by side with its peers: geometric means and evaluation of rankings.

Run with ``python -m benchmarks.core``; the figures are saved to ``benchmarks/results/core.json``.
"""

from __future__ import annotations

import argparse
import importlib

import torch

from benchmarks.harness import save_result

PARTS = ("means", "evaluation")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=PARTS, help="run one part, without saving")
    arguments = parser.parse_args()
    # Threads that wait for each other turn seconds into minutes when another process has a core.
    torch.set_num_threads(1)
    # Imported when run, so that one part can be used without the peers of the other.
    parts = (arguments.only,) if arguments.only else PARTS
    result = {part: importlib.import_module(f"benchmarks.{part}").run() for part in parts}
    if not arguments.only:
        print(f"saved {save_result('core', result).name}")


if __name__ == "__main__":
    main()
