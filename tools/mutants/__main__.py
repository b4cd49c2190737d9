"""``python -m tools.mutants``: change the package in one place at a time, and see whether a test notices.

python -m tools.mutants [--sample 200] [--seed 0] [--package fitting ...] [--jobs 2] [--list] [--matrix]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
import time
from collections import Counter
from pathlib import Path

from tools.mutants.changes import Mutant, mutants_of, sample
from tools.mutants.cover import ONE_THREAD, Tests, make_map
from tools.mutants.run import Outcome, copy_tree, try_all

PACKAGES = ("functional", "fitting", "models", "training", "data")
ROOT = Path(__file__).parents[2]
EQUIVALENT = Path(__file__).with_name("equivalent.json")
# Tests of pages, notebooks and the release: slow, and they notice little else.
NOT_OF_CODE = ("test_docs", "test_notebooks", "test_site", "test_release", "test_budget", "test_layers")
BUDGET = 150.0  # processor seconds of tests for a change that none of them notices


def all_mutants(package: str, root: Path = ROOT) -> list[Mutant]:
    """Every change of a package."""
    files = sorted((root / "lgmml_torch" / package).rglob("*.py"))
    return [mutant for file in files for mutant in mutants_of(file.relative_to(root).as_posix(), file.read_text())]


def accepted(file: Path = EQUIVALENT) -> dict[tuple[str, str, str, str, int], str]:
    """Changes that are not tried, with the reason: of the same result, or accepted as they are."""
    return {
        (entry["path"], entry["scope"], entry["before"], entry["after"], entry.get("number", 0)): entry["reason"]
        for verdict in json.loads(file.read_text()).values()
        for entry in verdict
    }


def choose_sample(packages: list[str], count: int, seed: int) -> tuple[list[Mutant], Counter[str]]:
    """As many of each package, and how many accepted equivalents were met on the way."""
    known, chosen, skipped = accepted(), list[Mutant](), Counter[str]()
    for package in packages:
        rng = random.Random(f"{seed} {package}")
        wanted, kept = -(-count // len(packages)), list[Mutant]()
        for mutant in sample(all_mutants(package), 10**9, rng):
            if len(kept) == wanted:
                break
            if mutant.key in known:
                skipped[package] += 1
            else:
                kept.append(mutant)
        chosen += kept
    return chosen, skipped


def suite(root: Path, packages: list[str]) -> list[str]:
    """Test files that may notice a change: tests and doctests of the packages, and tests of what is above them."""
    own = [f"{top}/{package}" for package in packages for top in ("tests", "lgmml_torch")]
    doors = [file.relative_to(root).as_posix() for file in sorted((root / "tests").glob("test_*.py"))]
    return [*own, *(file for file in doors if Path(file).stem not in NOT_OF_CODE), "tests/evaluation", "tests/app"]


def table(outcomes: list[Outcome], skipped: Counter[str]) -> str:
    """A row for each package."""
    lines = ["| package | tried | caught | survived | equivalent, by name | score |", "|---|---|---|---|---|---|"]
    for package in sorted({outcome.mutant.package for outcome in outcomes}):
        own = [outcome for outcome in outcomes if outcome.mutant.package == package]
        caught = sum(outcome.verdict != "survived" for outcome in own)
        score = f"{caught / len(own):.0%}"
        lines.append(f"| {package} | {len(own)} | {caught} | {len(own) - caught} | {skipped[package]} | {score} |")
    return "\n".join(lines)


def report(folder: Path, outcomes: list[Outcome], skipped: Counter[str], heading: str) -> None:
    """`report.md` to read and `survivors.json` to go on with."""
    alive = [outcome for outcome in outcomes if outcome.verdict == "survived"]
    lines = [heading, "", table(outcomes, skipped), ""]
    for outcome in alive:
        mutant = outcome.mutant
        lines += [f"- `{mutant.path}:{mutant.line}` {mutant.kind}, {outcome.tests} tests, in `{mutant.scope}`"]
        lines += [f"  `{mutant.before}` → `{mutant.after}`"]
    (folder / "report.md").write_text("\n".join(lines) + "\n")
    names = ("path", "scope", "before", "after", "number")
    content = [dict(zip(names, outcome.mutant.key, strict=True)) for outcome in alive]
    (folder / "survivors.json").write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def matrix(folder: Path, outcomes: list[Outcome], tests: Tests) -> str:
    """`matrix.json`: which tests noticed which change; a table of the files of tests."""
    found = [(" ".join(map(str, outcome.mutant.key)), outcome.by.splitlines()) for outcome in outcomes]
    (folder / "matrix.json").write_text(json.dumps(dict(found), indent=1, ensure_ascii=False) + "\n")
    seconds, notices, alone = Counter[str](), Counter[str](), Counter[str]()
    for name, test in tests.items():
        seconds[name.split("::")[0]] += test["cpu"]
    for _, names in found:
        files = {name.split("::")[0] for name in names}
        notices.update(files)
        if len(files) == 1:
            alone.update(files)
    lines = ["| tests | CPU s | changes noticed | by no other file |", "|---|---|---|---|"]
    for file in sorted(seconds, key=lambda file: (-alone[file], -notices[file], seconds[file])):
        lines.append(f"| {file} | {seconds[file]:.1f} | {notices[file]} | {alone[file]} |")
    return "\n".join(lines)


def run(options: argparse.Namespace) -> None:
    start, outcomes = time.monotonic(), list[Outcome]()
    options.output.mkdir(parents=True, exist_ok=True)
    mutants, skipped = choose_sample(options.package, options.sample, options.seed)
    if options.list:
        for mutant in mutants:
            print(f"{mutant.path}:{mutant.line} {mutant.kind}: {mutant.before} -> {mutant.after}")
        return
    random.Random(options.seed).shuffle(mutants)
    with tempfile.TemporaryDirectory() as place:
        trees = [copy_tree(ROOT, Path(place) / f"tree{job}") for job in range(options.jobs)]
        files = suite(trees[0], options.package)
        tests = make_map(trees[0], files, options.output.absolute() / "map.json", options.jobs)
        print(f"{len(tests)} tests, {len(mutants)} changes, {time.monotonic() - start:.0f} s so far", flush=True)

        def tell(outcome: Outcome) -> None:
            outcomes.append(outcome)
            mutant = outcome.mutant
            said = f"{mutant.path}:{mutant.line} {mutant.before!r} -> {mutant.after!r} ({outcome.cpu:.1f} s)"
            count = f"{len(outcomes)}/{len(mutants)}"
            by = ", ".join(outcome.by.splitlines()[:3])
            print(f"{count} {outcome.verdict}: {' '.join(said.split())} {by}", flush=True)
            heading = f"{len(outcomes)} changes, seed {options.seed}, {time.monotonic() - start:.0f} s"
            report(options.output, outcomes, skipped, heading)

        try_all(mutants, trees, tests, options.budget, tell, all_tests=options.matrix)
    print(table(outcomes, skipped))
    if options.matrix:
        (options.output / "matrix.md").write_text(matrix(options.output, outcomes, tests) + "\n")


def main() -> None:
    os.environ.update(ONE_THREAD)  # a fork has none of its parent's threads, and would wait for them
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sample", type=int, default=200, help="changes in all, as many of each package")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--package", nargs="+", choices=PACKAGES, default=list(PACKAGES))
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--budget", type=float, default=BUDGET, help="processor seconds of tests for one change")
    parser.add_argument("--list", action="store_true", help="say what would be tried, and stop")
    parser.add_argument("--matrix", action="store_true", help="run all tests of a change: which tests find what")
    parser.add_argument("--output", type=Path, default=ROOT / "outputs" / "mutants")
    run(parser.parse_args())


if __name__ == "__main__":
    main()
