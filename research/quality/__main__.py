"""How well unseen queries are ranked: L-GMML beside linear models and boosted trees, on four sets.

Run with ``python -m research.quality``; data sets are looked for below ``LGMML_DATA``. Every fit is stored when it is
done, so a run that was stopped goes on; several processes may share the work with ``--only``. ``--stage choices``
selects settings on validation queries and scores no test query; ``--stage report`` only writes the page from what is
stored.
``research/quality/protocol.md`` says what is selected where.
"""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from research.quality.data import NUM_FOLDS, SETS, load_fold
from research.quality.store import FOLDER, Cells
from research.quality.systems import CHOICES, MAIN_SEEDS, SYSTEMS, System, find_system, score_all
from research.quality.time import time_fold, time_growth

log = logging.getLogger(__name__)

QUICK = ("random", "linear", "boosted", "lightgbm+ranks", "paper", "boosted bag", "lightgbm bag")
TIMED_FOLDS = 3


@dataclass(frozen=True)
class Plan:
    """What is run."""

    sets: tuple[str, ...] = SETS
    folds: tuple[int, ...] = tuple(range(NUM_FOLDS))
    seeds: int = MAIN_SEEDS  # at most; a system may have fewer
    systems: tuple[System, ...] = SYSTEMS
    quick: bool = False
    split: str = "test"

    def cells(self) -> Iterator[tuple[System, str, int, str | None, int]]:
        """Every fit, all of one seed before any of the next: what is cut short is seeds, not systems."""
        for seed in range(self.seeds):
            for system in self.systems:
                for noise in system.noises or (None,):
                    for name in self.sets:
                        for fold in self.folds if seed < system.seeds else ():
                            yield system, name, fold, noise, seed


def choose(cells: Cells, choice: str, name: str, fold: int, quick: bool) -> dict[str, Any]:
    """What validation chooses, done once."""

    def make() -> dict[str, Any]:
        chosen, value = CHOICES[choice](load_fold(name, fold), quick)
        log.info("%s, %s, fold %d: %s, %.4f on validation", choice, name, fold, chosen, value)
        return {"chosen": chosen, "valid": value}

    return cells.get(make, "choice", choice, name, fold)


def run_cell(
    cells: Cells, plan: Plan, system: System, name: str, fold: int, noise: str | None, seed: int
) -> dict[str, Any]:
    """One fit and what it makes of the held-out queries, done once."""

    def make() -> dict[str, Any]:
        chosen = choose(cells, system.choice, name, fold, plan.quick)["chosen"] if system.choice else {}
        data = load_fold(name, fold, noise)
        start = time.process_time()
        scores, info = system.fit(data, seed, chosen)
        seconds = time.process_time() - start
        held = data.test if plan.split == "test" else data.valid
        found = score_all(scores, held)
        means = {row: float(torch.tensor(values).nanmean()) for row, values in score_all(scores, data.valid).items()}
        log.info("%s, %s, fold %d, %s, seed %d: %.1f s", system.name, name, fold, noise or "clean", seed, seconds)
        return {"values": found, "valid": means, "fit seconds": seconds, "info": info}

    return cells.get(make, plan.split, system.name, name, fold, noise, seed)


def time_cell(cells: Cells, plan: Plan, name: str, fold: int) -> dict[str, Any]:
    """Training and scoring times of one fold, done once."""

    def make() -> dict[str, Any]:
        chosen = choose(cells, "lightgbm+ranks", name, fold, plan.quick)["chosen"]
        return time_fold(load_fold(name, fold), chosen, rounds=1 if plan.quick else 2)

    return cells.get(make, "time", name, fold)


def make_plan(args: argparse.Namespace) -> Plan:
    """The plan a command line asks for."""
    names = args.only or (QUICK if args.quick else [system.name for system in SYSTEMS])
    return Plan(
        sets=tuple(args.sets or SETS),
        folds=(0,) if args.quick else tuple(args.folds or range(NUM_FOLDS)),
        seeds=1 if args.quick else args.seeds,
        systems=tuple(find_system(name) for name in names if name != "times"),
        quick=args.quick,
        split=args.split,
    )


def run(plan: Plan, cells: Cells, *, stage: str = "all", times: bool = True) -> None:
    """Do all that is not done yet."""
    for choice in dict.fromkeys(system.choice for system in plan.systems if system.choice):
        for name in plan.sets:
            for fold in plan.folds if stage != "report" else ():
                choose(cells, choice, name, fold, plan.quick)
    if stage != "all":
        return
    for system, name, fold, noise, seed in plan.cells():
        run_cell(cells, plan, system, name, fold, noise, seed)
    for name in plan.sets if times else ():
        for fold in plan.folds[:TIMED_FOLDS]:
            time_cell(cells, plan, name, fold)
    if times and not plan.quick:
        cells.get(time_growth, "time", "growth")


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = [*(system.name for system in SYSTEMS), "times"]
    parser.add_argument("--quick", action="store_true", help="one fold, one seed, small grids; its own result files")
    parser.add_argument("--only", nargs="+", choices=known, metavar="SYSTEM", help=f"of: {', '.join(known)}")
    parser.add_argument("--sets", nargs="+", metavar="SET", help=f"of: {', '.join(SETS)}")
    parser.add_argument("--folds", nargs="+", type=int, help="from 0")
    parser.add_argument("--seeds", type=int, default=MAIN_SEEDS, help="at most; most systems have three (default: 10)")
    parser.add_argument("--stage", choices=("choices", "all", "report"), default="all")
    parser.add_argument("--split", choices=("test", "valid"), default="test", help="valid: score no test query")
    parser.add_argument("--cells", type=Path, help="where finished fits are kept (default: outputs/quality)")
    parser.add_argument("--out", type=Path, help="root for research/results and docs (default: the repository)")
    args = parser.parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    log.setLevel(logging.INFO)
    torch.set_num_threads(1)
    plan = make_plan(args)
    cells = Cells(args.cells or (FOLDER.with_name("quality-quick") if args.quick else FOLDER))
    run(plan, cells, stage=args.stage, times=args.only is None or "times" in args.only)
    complete = plan.quick or (plan.sets == SETS and plan.folds == tuple(range(NUM_FOLDS)))
    if not complete and args.out is None:
        log.info("a part of the sets or folds writes no page; give it a place with --out")
    elif args.stage != "choices" and args.split == "test" and (args.only is None or args.stage == "report"):
        from research.quality.report import write_report

        write_report(plan, cells, root=args.out or FOLDER.parent.parent)


if __name__ == "__main__":
    main()
