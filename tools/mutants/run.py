"""Each change in a copy of the tree, against tests that run its line.

A tree has a process that has collected all tests. It is forked for each change; the copy exchanges the code of the
changed functions (`swap`) and runs the tests at once. Changes outside of functions, such as defaults and constants, are
tried in a fork of a process that has only the slow imports of others behind it.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path

import psutil
import pytest

from tools.mutants.changes import Mutant
from tools.mutants.cover import ONE_THREAD, Tests
from tools.mutants.swap import Live, exchange, live_functions

# Paid once, before the forks.
SLOW_IMPORTS = (
    "torch", "pytorch_lightning", "pandas", "scipy.stats", "sklearn.pipeline", "hydra.utils", "hypothesis.strategies",
    "pyarrow.parquet", "torchmetrics", "lightgbm",
)  # fmt: skip
CPU_FACTOR, CPU_EXTRA = 4.0, 10  # a change that takes so many times the seconds of its tests, and some, runs for ever
CPU_IMPORTS = 20  # seconds more where everything is imported anew
QUICK = 0.3  # seconds of a test that is tried before all the others
IDLE_SECONDS = 60.0  # without any processor time: it waits for something that never comes
SURVIVED, FAILED, NOT_IN_PLACE = 0, 1, 77  # codes of the forked processes
OPTIONS = (
    "-x", "-q", "-s", "--assert=plain", "-p", "no:cacheprovider", "-p", "no:xdist", "-o", "timeout=0",
    "--hypothesis-seed=0",
)  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """What became of a change: ``survived``, or why it was noticed.

    Attributes:
        mutant: the change.
        verdict: ``survived``, ``failed`` (a test), ``slow`` (out of processor time) or ``hung``.
        tests: how many were chosen; none of them when no test runs the line.
        cpu: seconds spent.
        by: the tests that failed, one in a line: the first, or all where all were run.
    """

    mutant: Mutant
    verdict: str
    tests: int
    cpu: float
    by: str = ""


def copy_tree(root: Path, place: Path) -> Path:
    """What git knows or could know of the tree, as it is now."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(command, cwd=root, capture_output=True, check=True).stdout.decode().split("\0")
    for name in filter(None, names):
        if (root / name).is_file():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, place / name)
    return place


def covering(mutant: Mutant, tests: Tests, source: str) -> dict[str, bool]:
    """Tests of the files that run the line, and whether a test runs it itself.

    Where it is no line of a function's body, those that run the function, or the file. All tests of a file: what they
    share is made once, and the map gives it to the test that came first.
    """
    for lines in _places(ast.parse(source), mutant.line):
        direct = {name for name, test in tests.items() if not lines.isdisjoint(test["lines"].get(mutant.path, ()))}
        files = {name.split("::")[0] for name in direct}
        if files:
            return {name: name in direct for name in tests if name.split("::")[0] in files}
    return {}


def _places(tree: ast.Module, line: int) -> Iterator[set[int]]:
    """The statement, the function around it, the file."""
    within = [node for node in ast.walk(tree) if isinstance(node, ast.stmt) and node.lineno <= line <= _last(node)]
    simple = [node for node in within if not hasattr(node, "body")]
    if simple:
        yield set(range(simple[0].lineno, _last(simple[0]) + 1))
    elif within:
        yield {line}
    for node in reversed(within):
        if isinstance(node, ast.FunctionDef):
            yield set(range(node.body[0].lineno, _last(node) + 1))
    yield set(range(1, 100_000))


def _last(node: ast.stmt) -> int:
    return node.end_lineno or node.lineno


def choose(mutant: Mutant, names: dict[str, bool], tests: Tests, budget: float) -> dict[str, int]:
    """The tests to run, by their place in the order: those that run the line first, cheap ones first."""
    own = (f"tests/{mutant.package}/", f"lgmml_torch/{mutant.package}/")
    ranked = sorted(names, key=lambda name: (not name.startswith(own), not names[name], tests[name]["cpu"], name))
    kept, spent = list[str](), 0.0
    for name in ranked:
        spent += tests[name]["cpu"] + 0.01
        if kept and spent > budget:
            break
        kept.append(name)
    cost: dict[str, float] = {}
    for name in kept:
        file = name.split("::")[0]
        cost[file] = cost.get(file, 0.0) + tests[name]["cpu"]
    # Whole files in turn, because tests of one file may share what is dear to make.
    kept.sort(key=lambda name: (tests[name]["cpu"] > QUICK, cost[name.split("::")[0]], name.split("::")[0]))
    return {name: place for place, name in enumerate(kept)}


@dataclass(frozen=True)
class Job:
    """What a tree's process is asked: the tests to run, in their order, and the processor seconds each may take."""

    mutant: Mutant | None  # None: nothing is changed
    order: tuple[str, ...]
    limits: dict[str, float]
    all_tests: bool = False  # run them all, instead of up to the first that fails

    @property
    def limit(self) -> int:
        """Of all of them, and of the imports they may need."""
        return int(CPU_IMPORTS + sum(self.limits[name] for name in self.order))


@dataclass(frozen=True)
class Answer:
    """How a fork ended: its code, or -1 where it was killed; what failed; seconds; whether it only waited."""

    code: int
    by: str
    cpu: float
    hung: bool = False


class Watcher:
    """The plugin that leaves chosen tests only, in their order, and notes which of them fails."""

    def __init__(self, tree: Path, order: tuple[str, ...] = ()) -> None:
        self.failed, self.order = tree / ".failed", {name: place for place, name in enumerate(order)}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Drop the others."""
        items[:] = [item for item in items if item.nodeid in self.order]
        items.sort(key=lambda item: self.order[item.nodeid])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Write the name down: the process may not come to tell it."""
        if not report.failed:
            return
        named = self.failed.read_text().splitlines() if self.failed.exists() else []
        if report.nodeid not in named:
            self.failed.write_text("\n".join([*named, report.nodeid]))


class Resident(Watcher):
    """The plugin that has collected all tests, and then runs some of them in a fork whenever it is asked."""

    def __init__(self, tree: Path, link: Connection) -> None:
        super().__init__(tree)
        self.tree, self.link = tree, link

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Keep them all."""
        self.items = {item.nodeid: item for item in items}

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Until told to stop."""
        live = live_functions(str(self.tree / "lgmml_torch"))
        self.link.send(len(self.items))
        while (job := self.link.recv()) is not None:
            self.link.send(fork_and_wait(partial(self.attempt, session, job, live), self.tree, job.limit))
        return True

    def attempt(self, session: pytest.Session, job: Job, live: Live) -> int:
        """In the fork."""
        if job.mutant is not None:
            file = self.tree / job.mutant.path
            after = file.read_text()
            if not exchange(str(file), job.mutant.undo(after), after, live):
                return NOT_IN_PLACE
        return self.run_items(session, job)

    def run_items(self, session: pytest.Session, job: Job) -> int:
        """In the fork: up to the first that fails."""
        items = [self.items[name] for name in job.order if name in self.items]
        most = resource.getrlimit(resource.RLIMIT_CPU)[1]
        for item, following in zip(items, [*items[1:], None], strict=True):
            until = int(time.process_time() + job.limits[item.nodeid]) + 1
            resource.setrlimit(resource.RLIMIT_CPU, (min(until, most), most))
            session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if session.testsfailed and not job.all_tests:
                return FAILED
        return FAILED if session.testsfailed else SURVIVED


def import_and_run(tree: Path, job: Job) -> int:
    """In a fork that has imported nothing of the package yet."""
    files = list(dict.fromkeys(name.split("::")[0] for name in job.order))
    options = OPTIONS[job.all_tests :]  # the first stops at a failure
    code = int(pytest.main([*options, *files], plugins=[Watcher(tree, job.order)]))
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.INTERRUPTED):
        raise RuntimeError(f"pytest ended with {code}")
    return FAILED if code else SURVIVED  # interrupted: the changed package cannot be imported


def fork_and_wait(work: Callable[[], int], tree: Path, limit: int) -> Answer:
    """Do something in a fork: with a log and temporary folder of its own, within a limit, and nothing is left of it."""
    (tree / ".failed").unlink(missing_ok=True)
    pid = os.fork()
    if not pid:
        _in_fork(work, tree, limit)
    cpu, moved, hung = 0.0, time.monotonic(), False
    while not (ended := os.wait4(pid, os.WNOHANG))[0]:
        time.sleep(0.02)
        used = _family_seconds(pid)
        if used is not None and used != cpu:
            cpu, moved = used, time.monotonic()
        elif time.monotonic() - moved > IDLE_SECONDS:  # slowness of the machine alone never looks like that
            hung = True
            os.killpg(pid, signal.SIGKILL)
            moved = time.monotonic()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)  # what its tests have left behind
    _, status, usage = ended
    code = -1 if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
    failed = tree / ".failed"
    by = failed.read_text() if failed.exists() else ""
    return Answer(code, by, usage.ru_utime + usage.ru_stime, hung)


def _family_seconds(pid: int) -> float | None:
    try:
        process = psutil.Process(pid)
        return sum(sum(one.cpu_times()[:2]) for one in (process, *process.children(recursive=True)))
    except psutil.Error:
        return None


def _in_fork(work: Callable[[], int], tree: Path, limit: int) -> None:
    """Run it and end the process with its code; what it raises is a failure, too."""
    code = FAILED
    try:
        os.setsid()
        out = os.open(tree.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(out, 1)
        os.dup2(out, 2)
        resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 5))
        temporary = tree / ".tmp"
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        os.environ.update(PYTHONDONTWRITEBYTECODE="1", TMPDIR=str(temporary))
        tempfile.tempdir = None
        sys.dont_write_bytecode = True
        code = work()
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        os._exit(code)


def attend(tree: Path, files: list[str], link: Connection) -> None:
    """The process of a tree: puts each change into the file, has it tried, and takes it out again."""
    os.chdir(tree)
    os.environ.update(ONE_THREAD, PYTHONPATH=str(tree))
    sys.path.insert(0, str(tree))
    here, there = Pipe()
    if not os.fork():
        with tree.with_suffix(".collected").open("w") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
            pytest.main([*OPTIONS, *files], plugins=[Resident(tree, there)])
        os._exit(0)
    there.close()
    try:
        link.send(here.recv())
    except EOFError:
        said = tree.with_suffix(".collected").read_text()[-2000:]
        link.send(RuntimeError(f"the tests cannot be collected:\n{said}"))
        return
    sound: dict[str, bool] = {}
    while (job := link.recv()) is not None:
        with changed_file(tree / job.mutant.path, job.mutant):
            answer = ask(job, here, tree)
        while answer.code == FAILED and answer.by:
            failed = answer.by.splitlines()
            for name in failed:
                if name not in sound:
                    sound[name] = ask(replace(job, mutant=None, order=(name,)), here, tree).code == SURVIVED
            telling = [name for name in failed if sound[name]]
            if telling:
                answer = replace(answer, by="\n".join(telling))
                break
            # A test that fails without the change as well says nothing: without it.
            job = replace(job, order=tuple(name for name in job.order if sound.get(name, True)))
            with changed_file(tree / job.mutant.path, job.mutant):
                answer = ask(job, here, tree)
        link.send(answer)
    here.send(None)


@contextlib.contextmanager
def changed_file(file: Path, mutant: Mutant) -> Iterator[None]:
    """The file with the change, for the processes that tests start; its time tells it from what was compiled."""
    source, before = file.read_text(), file.stat()
    file.write_text(mutant.apply(source))
    later = before.st_mtime_ns + 10**15
    os.utime(file, ns=(later, later))
    try:
        yield
    finally:
        file.write_text(source)
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def ask(job: Job, resident: Connection, tree: Path) -> Answer:
    """In place where that is possible, else with everything imported anew."""
    resident.send(job)
    answer: Answer = resident.recv()
    if answer.code == NOT_IN_PLACE:
        answer = fork_and_wait(partial(import_and_run, tree, job), tree, job.limit)
    return answer


def try_all(
    mutants: list[Mutant],
    trees: list[Path],
    tests: Tests,
    budget: float,
    tell: Callable[[Outcome], None],
    *,
    all_tests: bool = False,
) -> None:
    """Every change once, as many at a time as there are trees; ``all_tests`` also runs those after the first failure.

    Raises:
        RuntimeError: the tests cannot be collected.
    """
    for name in SLOW_IMPORTS:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    files = sorted({name.split("::")[0] for name in tests})
    links = {}
    for tree in trees:
        here, there = Pipe()
        if not os.fork():
            try:
                attend(tree, files, there)
            finally:
                os._exit(0)
        links[here] = tree
    waiting, busy = list(reversed(mutants)), dict[Connection, Job | None](dict.fromkeys(links))
    while busy:
        for link in wait(list(busy)):
            assert isinstance(link, Connection)
            said, job = link.recv(), busy.pop(link)
            if isinstance(said, RuntimeError):
                raise said
            if job is not None:
                tell(_outcome(job, said))
            following = _next_job(waiting, links[link], tests, budget, tell)
            if following is not None:
                following = replace(following, all_tests=all_tests)
            link.send(following)
            if following is not None:
                busy[link] = following


def _next_job(
    waiting: list[Mutant], tree: Path, tests: Tests, budget: float, tell: Callable[[Outcome], None]
) -> Job | None:
    """The next change whose line a test runs; of the others it is told that they survive."""
    while waiting:
        mutant = waiting.pop()
        order = choose(mutant, covering(mutant, tests, (tree / mutant.path).read_text()), tests, budget)
        if order:
            return Job(mutant, tuple(order), {name: CPU_EXTRA + CPU_FACTOR * tests[name]["cpu"] for name in order})
        tell(Outcome(mutant, "survived", 0, 0.0))
    return None


def _outcome(job: Job, answer: Answer) -> Outcome:
    verdict = {SURVIVED: "survived", FAILED: "failed"}.get(answer.code, "hung" if answer.hung else "slow")
    assert job.mutant is not None
    return Outcome(job.mutant, verdict, len(job.order), answer.cpu, answer.by)
