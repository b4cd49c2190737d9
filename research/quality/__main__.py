"""How well unseen queries are ranked: L-GMML beside linear models and boosted trees, on four sets.

Run with ``python -m research.quality``; data sets are looked for below ``LGMML_DATA``. Every fit is stored when it is
done, so a run that was stopped goes on; several processes may share the work with ``--only``. ``--stage choices``
selects settings on validation queries and scores no test query; ``--stage report`` only writes the page from what is
stored, ``--stage pictures`` only draws the pictures again from the values of every query in research/results.
``research/quality/protocol.md`` says what is selected where.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from pathlib import Path

import torch

from research.compare import MAIN_SEEDS, SYSTEMS, find_system
from research.protocol import NUM_FOLDS
from research.quality.report import draw_again, write_report
from research.quality.work import SETS, TIMED_FOLDS, Plan, choice_job, fit_job, growth_job, time_job
from research.store import Store

log = logging.getLogger("research.quality")

ROOT = Path(__file__).parent.parent.parent
QUICK = ("random", "linear", "default", "boosted", "lightgbm+ranks", "published", "boosted bag", "lightgbm bag")


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


def run(plan: Plan, store: Store, *, stage: str = "all", times: bool = True) -> None:
    """Do all that is not done yet."""
    for choice in dict.fromkeys(system.choice for system in plan.systems if system.choice):
        for name in plan.sets:
            for fold in plan.folds if stage != "report" else ():
                store.get(choice_job(plan, choice, name, fold))
    if stage != "all":
        return
    for fit in plan.fits():
        store.get(fit_job(store, plan, *fit))
    for name in plan.sets if times else ():
        for fold in plan.folds[:TIMED_FOLDS]:
            store.get(time_job(store, plan, name, fold))
    if times and not plan.quick:
        store.get(growth_job())


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = [*(system.name for system in SYSTEMS), "times"]
    parser.add_argument("--quick", action="store_true", help="one fold, one seed, small grids; results of its own")
    parser.add_argument("--only", nargs="+", choices=known, metavar="SYSTEM", help=f"of: {', '.join(known)}")
    parser.add_argument("--sets", nargs="+", metavar="SET", help=f"of: {', '.join(SETS)}")
    parser.add_argument("--folds", nargs="+", type=int, help="from 0")
    parser.add_argument("--seeds", type=int, default=MAIN_SEEDS, help="at most; most systems have three (default: 10)")
    parser.add_argument("--stage", choices=("choices", "all", "report", "pictures"), default="all")
    parser.add_argument("--split", choices=("test", "valid"), default="test", help="valid: score no test query")
    parser.add_argument("--store", type=Path, help="where finished fits are kept (default: outputs/quality)")
    parser.add_argument("--out", type=Path, help="root for research/results and docs (default: the repository)")
    args = parser.parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    log.setLevel(logging.INFO)
    torch.set_num_threads(1)
    plan = make_plan(args)
    if args.stage == "pictures":
        draw_again(plan, root=args.out or ROOT)
        return
    store = Store(args.store or ROOT / "outputs" / "quality")
    run(plan, store, stage=args.stage, times=args.only is None or "times" in args.only)
    complete = plan.quick or (plan.sets == SETS and plan.folds == tuple(range(NUM_FOLDS)))
    if not complete and args.out is None:
        log.info("a part of the sets or folds writes no page; give it a place with --out")
    elif args.stage != "choices" and args.split == "test" and (args.only is None or args.stage == "report"):
        write_report(plan, store, root=args.out or ROOT)


if __name__ == "__main__":
    main()
