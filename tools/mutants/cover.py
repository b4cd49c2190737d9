"""Which tests run which lines: a pytest plugin that writes them down, and the map made of what it wrote.

The package is imported with a probe before each statement of its functions. A probe looks a line up in a table, and
only the first look of a test writes it down, at once: so threads, loader workers and processes that a test starts are
seen too, and what a killed process did before. Code of others runs as fast as ever.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import pytest

ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}  # two jobs of two threads would fight over two cores
LINES = "LGMML_MUTANTS_LINES"  # the file lines are written to
TEST = "LGMML_MUTANTS_TEST"  # the test they belong to
TABLE = "__lgmml_lines__"  # of a module: what its probes look into
# Put where a new process of a test finds it; pytest's own processes import the plugin by themselves.
FOLLOW = f"import os\nif os.environ.get({TEST!r}):\n    from tools.mutants.cover import follow\n    follow()\n"


class Seen(dict[int, None]):
    """The lines of a file that the current test has run; the first look writes a line down."""

    def __init__(self, tracer: Tracer, path: str) -> None:
        self.tracer, self.path = tracer, path

    def __missing__(self, line: int) -> None:
        self[line] = None
        if self.tracer.test:
            self.tracer.write(f"L {self.tracer.test} {self.path} {line}")


class Tracer(MetaPathFinder):
    """Finds the package's modules, and writes down each line of them once for each test."""

    def __init__(self, file: str) -> None:
        self.out = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self.tables: list[Seen] = []
        self.begin(os.environ.get(TEST, ""))

    def begin(self, test: str) -> None:
        """From here on it is another test."""
        self.test = test
        for table in self.tables:
            table.clear()

    def write(self, line: str) -> None:
        """A line of the record, at once."""
        os.write(self.out, f"{line}\n".encode())

    def start(self) -> None:
        """Be asked first for modules to come."""
        sys.meta_path.insert(0, self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Only modules of the package are of interest."""
        if fullname.split(".")[0] != "lgmml_torch":
            return None
        spec = PathFinder.find_spec(fullname, path)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = ProbingLoader(fullname, spec.loader.path, self)
        return spec


class ProbingLoader(SourceFileLoader):
    """Imports a file with its probes."""

    def __init__(self, name: str, path: str, tracer: Tracer) -> None:
        super().__init__(name, path)
        self.tracer = tracer

    def get_code(self, fullname: str) -> CodeType:
        """From the source: what is compiled already has no probes."""
        tree = ast.fix_missing_locations(Probes().visit(ast.parse(self.get_data(self.path))))
        code: CodeType = compile(tree, self.path, "exec", dont_inherit=True)
        return code

    def exec_module(self, module: ModuleType) -> None:
        """Give the module its table first."""
        path = Path(self.path).relative_to(Path(self.path).parents[self.name.count(".") + self.is_package(self.name)])
        table = Seen(self.tracer, path.as_posix())
        self.tracer.tables.append(table)
        module.__dict__[TABLE] = table
        super().exec_module(module)


class Probes(ast.NodeTransformer):
    """Puts a look at the table before each statement within functions."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        """The whole function; functions within are among its statements."""
        self._within(node)
        return node

    def _within(self, node: ast.AST) -> None:
        for field in ("body", "orelse", "finalbody"):
            block = getattr(node, field, None)
            if isinstance(block, list):
                for statement in block:
                    self._within(statement)
                setattr(node, field, [each for statement in block for each in (*_probe(statement), statement)])
        for other in (*getattr(node, "handlers", ()), *getattr(node, "cases", ())):
            self._within(other)


def _probe(statement: ast.stmt) -> tuple[ast.stmt, ...]:
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
        return ()  # a docstring must stay the first
    look = ast.Subscript(ast.Name(TABLE, ast.Load()), ast.Constant(statement.lineno), ast.Load())
    return (ast.copy_location(ast.Expr(look), statement),)


class Plugin:
    """Tells the tracer where tests begin, and notes what they cost."""

    def __init__(self, tracer: Tracer) -> None:
        self.tracer, self.count, self.passed = tracer, 0, True

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        """One test with its fixtures."""
        self.count, self.passed = self.count + 1, True
        key = f"{os.getpid()}.{self.count}"
        os.environ[TEST] = key
        self.tracer.write(f"T {key} {item.nodeid}")
        self.tracer.begin(key)
        start = cpu_seconds()
        done = yield
        self.tracer.write(f"E {key} {int(self.passed)} {cpu_seconds() - start:.3f}")
        self.tracer.begin("")
        return done

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Skipped tests and failing ones say nothing about a change."""
        self.passed = self.passed and report.passed


def pytest_configure(config: pytest.Config) -> None:
    """Trace when asked to (`-p tools.mutants.cover`)."""
    if LINES in os.environ:
        tracer = Tracer(os.environ[LINES])
        config.pluginmanager.register(Plugin(tracer))
        tracer.start()


def follow() -> None:
    """Trace a process that a test has started."""
    Tracer(os.environ[LINES]).start()


def cpu_seconds() -> float:
    """Of this process and the ones it has waited for."""
    times = os.times()
    return time.process_time() + times.children_user + times.children_system


Tests = dict[str, dict[str, Any]]
"""By test: ``cpu`` seconds, and ``lines`` by file."""


def read_record(file: Path) -> Tests:
    """What the tracer wrote, tests that passed only."""
    names: dict[str, str] = {}
    ended: dict[str, float] = {}
    lines: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for entry in file.read_text().splitlines():
        what, key, rest = entry.split(" ", 2)
        if what == "T":
            names[key] = rest
        elif what == "E" and rest.startswith("1 "):
            ended[key] = float(rest[2:])
        elif what == "L":
            path, line = rest.rsplit(" ", 1)
            lines[key][path].append(int(line))
    return {
        names[key]: {"cpu": cpu, "lines": {path: sorted(set(found)) for path, found in lines[key].items()}}
        for key, cpu in ended.items()
    }


def digest(files: list[Path]) -> str:
    """Of their content."""
    sha = hashlib.sha256()
    for file in sorted(files):
        sha.update(file.name.encode() + file.read_bytes())
    return sha.hexdigest()


def make_map(tree: Path, tests: list[str], store: Path, jobs: int, say: Any = print) -> Tests:
    """Which tests run which lines; test files that have not changed since the last time are not run again."""
    helpers = [file for file in (tree / "tests").rglob("*.py") if not file.name.startswith("test_")]
    package = digest([*(tree / "lgmml_torch").rglob("*.py"), *helpers])
    files = sorted({file for name in tests for file in _test_files(tree, name)})
    known = json.loads(store.read_text()) if store.exists() else {}
    current = {file: digest([tree / file]) + package for file in files}
    todo = [file for file in files if known.get(file, {}).get("digest") != current[file]]
    if todo:
        say(f"running {len(todo)} test files to see which lines they run")
        found = _traced(tree, todo, store.with_suffix(".lines"), jobs)
        for file in todo:
            own = {name: test for name, test in found.items() if name.split("::")[0] == file}
            known[file] = {"digest": current[file], "tests": own}
        store.write_text(json.dumps(known))
    return {name: test for file in files for name, test in known[file]["tests"].items()}


def _test_files(tree: Path, name: str) -> list[str]:
    path = tree / name
    found = [path] if path.is_file() else path.rglob("test_*.py" if name.startswith("tests") else "*.py")
    return [file.relative_to(tree).as_posix() for file in found]


def _traced(tree: Path, files: list[str], record: Path, jobs: int) -> Tests:
    record.unlink(missing_ok=True)
    hook = tree / ".follow"
    hook.mkdir(exist_ok=True)
    (hook / "sitecustomize.py").write_text(FOLLOW)
    pipe = hook / "lines"  # which tests that limit the size of files do not limit
    pipe.unlink(missing_ok=True)
    os.mkfifo(pipe)
    environment = {**os.environ, **ONE_THREAD, LINES: str(pipe), "PYTHONPATH": f"{hook}{os.pathsep}{tree}"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tools.mutants.cover", "-p", "no:cacheprovider"]
    spread = ["-n", str(jobs), "--dist", "loadgroup"] if jobs > 1 else []
    with record.open("w") as lines, record.with_suffix(".log").open("w") as log:
        reader = subprocess.Popen(["cat", str(pipe)], stdout=lines)
        subprocess.run(
            [*command, *spread, "-o", "timeout=0", "--hypothesis-seed=0", *files],
            cwd=tree, env=environment, stdout=log, stderr=subprocess.STDOUT, check=False,
        )  # fmt: skip
        with contextlib.suppress(subprocess.TimeoutExpired):
            reader.wait(60)  # longer only if a process that a test has left holds the pipe
        reader.kill()
    return read_record(record)
