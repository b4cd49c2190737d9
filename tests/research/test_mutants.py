"""The changes are what they say, and a run tells the ones that a test notices from the ones that none does."""

from __future__ import annotations

import ast
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from research.mutants import __main__ as command
from research.mutants.changes import mutants_of, sample
from research.mutants.cover import read_record
from research.mutants.run import choose, covering
from research.mutants.swap import exchange, live_functions

SOURCE = '''"""Not a < b."""

from __future__ import annotations

LIMIT: int = 3 - 1


@dataclass(frozen=True)
def f(x: int | None, *, most: float = 0.5, deep: bool = True) -> int | None:
    """Not x + 1."""
    if not x or deep:
        raise ValueError(f"`x` must be {x + 1}, got {max(x, 2)}")
    log.info("%d", x + 1)
    x = abs(x)
    x += 1
    call(x)
    return max(-x, most) if x < LIMIT and deep else g(x, key=2, device="cpu").abs()
'''


def changes(source: str) -> set[tuple[str, str]]:
    return {(mutant.before, mutant.after) for mutant in mutants_of("lgmml_torch/data/x.py", source)}


def test_every_kind_of_change_is_found() -> None:
    found = changes(SOURCE)
    assert found >= {
        ("3 - 1", "(3 + 1)"), ("0.5", "1.0"), ("0.5", "0.25"), ("True", "False"), ("not x", "(x)"), ("-x", "(x)"),
        ("x += 1", "x -= 1"), ("x += 1", "pass"), ("call(x)", "pass"), ("x = abs(x)", "pass"),
        ("max(-x, most)", "min(-x, most)"),
        ("x < LIMIT", "(x <= LIMIT)"), ("x < LIMIT", "(x > LIMIT)"), ("x < LIMIT and deep", "(x < LIMIT or deep)"),
        ("2", "3"), ("2", "4"), ('g(x, key=2, device="cpu")', "g(x, device='cpu')"),
        ('g(x, key=2, device="cpu").abs()', "(g(x, key=2, device='cpu'))"),
    }  # fmt: skip
    assert not any(text in before for before, _ in found for text in ("Not", "int | None", "frozen", "got", "%d"))
    assert not any("device" not in after for before, after in found if before.startswith("g(") and "key" in after)


def test_changed_files_parse_and_differ_in_one_place() -> None:
    for mutant in mutants_of("lgmml_torch/data/x.py", SOURCE):
        changed = mutant.apply(SOURCE)
        assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(SOURCE)), mutant
        assert mutant.text in SOURCE


def test_places_are_found_behind_letters_of_several_bytes() -> None:
    (mutant,) = mutants_of("lgmml_torch/data/x.py", "Φ = {'κ': -y}")
    assert mutant.apply("Φ = {'κ': -y}") == "Φ = {'κ': (y)}"


def test_a_sample_has_a_seed_and_no_place_twice() -> None:
    every = mutants_of("lgmml_torch/data/x.py", SOURCE)
    drawn = [sample(every, 8, random.Random(seed)) for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert len({mutant.span for mutant in drawn[0]}) == 8
    assert len({mutant.span for mutant in sample(every, 999, random.Random(0))}) == len({m.span for m in every})


def test_accepted_equivalents_still_stand_in_the_code_and_have_reasons() -> None:
    known = command.accepted()
    there = {mutant.key for package in command.PACKAGES for mutant in command.all_mutants(package)}
    there |= {(*key[:3], "*") for key in there}
    assert all(len(reason) > 20 for reason in known.values())
    assert not set(known) - there
    assert len(known) == len(json.loads(command.EQUIVALENT.read_text()))
    for package in command.PACKAGES:
        chosen, _ = command.choose_sample([package], 20, 0)
        assert len(chosen) == 20
        assert not {mutant.key for mutant in chosen} & set(known)


def test_named_changes_still_stand_in_the_code() -> None:
    found = command.named_mutants(list(command.PACKAGES))
    assert len({mutant.kind for mutant in found}) == len(found) >= 40
    for mutant in found:
        source = (command.ROOT / mutant.path).read_text()
        assert source.count(mutant.before) == 1, mutant
        ast.parse(mutant.apply(source))
        assert mutant.undo(mutant.apply(source)) == source


CODE = """
def outer(a, b=2):
    def inner(c):
        return c + 1
    return inner(a) * b

class Thing:
    size = 3
    def double(self):
        return 2 * self.size

def made():
    def kept():
        return 1
    return kept

kept = made()
"""


@pytest.mark.parametrize(
    ("before", "after", "done"),
    [
        ("c + 1", "c + 2", {"outer(1)": 6}),
        ("2 * self", "5 * self", {"Thing().double()": 15}),
        ("return 1", "return 7", {"kept()": 7, "made()()": 7}),
        ("b=2", "b=9", None),  # a default is made on import
        ("size = 3", "size = 4", None),
        ("c + 1", "c + 3 * a", {"outer(1)": 8}),  # another closure, within
    ],
)
def test_code_is_exchanged_in_loaded_functions(before: str, after: str, done: dict[str, int] | None) -> None:
    space: dict[str, object] = {}
    exec(compile(CODE, "/nowhere/x.py", "exec"), space)
    plain = {text: eval(text, space) for text in ("outer(1)", "Thing().double()", "kept()")}
    live = live_functions("/nowhere")
    in_place = exchange("/nowhere/x.py", CODE, CODE.replace(before, after), live)
    assert in_place == (done is not None)
    expected = {**plain, **(done or {})}
    assert {text: eval(text, space) for text in expected} == expected


def test_cheap_tests_of_the_package_come_first() -> None:
    tests = {
        "tests/data/test_a.py::dear": {"cpu": 9.0, "lines": {"lgmml_torch/data/x.py": [2]}},
        "tests/data/test_b.py::cheap": {"cpu": 0.1, "lines": {"lgmml_torch/data/x.py": [2, 5]}},
        "tests/models/test_c.py::other": {"cpu": 0.0, "lines": {"lgmml_torch/data/x.py": [2]}},
    }
    source = "def f(a=1):\n    return a\n\ndef g():\n    return 2\n\nC = 3\n"
    by_line = {mutant.line: mutant for mutant in mutants_of("lgmml_torch/data/x.py", source)}
    first, second, third = by_line[1], by_line[5], by_line[7]
    assert covering(first, tests, source) == list(tests)  # a default: the tests of its function
    assert covering(second, tests, source) == ["tests/data/test_b.py::cheap"]
    assert covering(third, tests, source) == list(tests)  # a constant: the tests of its file
    assert list(choose(first, list(tests), tests, 100.0)) == [
        "tests/models/test_c.py::other", "tests/data/test_b.py::cheap", "tests/data/test_a.py::dear",
    ]  # fmt: skip
    assert list(choose(first, list(tests), tests, 1.0)) == ["tests/data/test_b.py::cheap"]


def test_a_record_is_read_test_by_test(tmp_path: Path) -> None:
    file = tmp_path / "record"
    file.write_text(
        "T 1.1 a::b c\nL 1.1 lgmml_torch/x.py 3\nL 1.1 lgmml_torch/x.py 2\nE 1.1 1 0.5\nT 1.2 a::d\nE 1.2 0 9\n"
    )
    assert read_record(file) == {"a::b c": {"cpu": 0.5, "lines": {"lgmml_torch/x.py": [2, 3]}}}


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package of one file, whose one test starts a process, too."""
    tree = tmp_path_factory.mktemp("small") / "tree"
    (tree / "lgmml_torch" / "data").mkdir(parents=True)
    (tree / "tests" / "data").mkdir(parents=True)
    (tree / "lgmml_torch" / "__init__.py").touch()
    (tree / "lgmml_torch" / "data" / "__init__.py").touch()
    (tree / "pyproject.toml").write_text("[tool.pytest.ini_options]\npythonpath = ['.']\n")
    (tree / "lgmml_torch" / "data" / "x.py").write_text(
        "def f(a):\n    while a > 3:\n        a -= 1\n    return a\n\n\ndef g(a):\n    return a + 0\n\n\n"
        "def h(a):\n    return a - 1\n\n\nLIMIT = 7\n\n\ndef k(a=8):\n    return a + LIMIT\n"
    )
    (tree / "tests" / "data" / "test_x.py").write_text(
        "import os, subprocess, sys\nfrom lgmml_torch.data.x import f, g, k\n\n"
        "def test_a():\n    f(3)\n    assert os.environ.get('LGMML_MUTANTS_TEST')  # which only the map has\n\n"
        "def test_f():\n    assert f(9) == 3\n    g(1)\n\n"
        "def test_k():\n    assert k(1) == 8\n    k()\n\n"
        "def test_h():\n    code = 'from lgmml_torch.data.x import h; assert h(2) == 1'\n"
        "    subprocess.run([sys.executable, '-c', code], check=True)\n"
    )
    (tree / "research").symlink_to(command.ROOT / "research")
    return tree


SCRIPT = """
import json, sys
from pathlib import Path
import research.mutants.run as run
from research.mutants.changes import mutants_of
from research.mutants.cover import make_map
tree, path = Path(sys.argv[1]), "lgmml_torch/data/x.py"
tests = make_map(tree, ["tests/data"], tree.parent / "map.json", 1, say=lambda text: None)
run.CPU_EXTRA = 2
few = ("(a >= 3)", "a += 1", "(a - 0)", "(a + 1)", "8", "9")
mutants = [mutant for mutant in mutants_of(path, (tree / path).read_text()) if mutant.after in few]
found = []
tell = lambda outcome: found.append([outcome.mutant.after, outcome.verdict, outcome.by])
run.try_all(mutants, [tree], tests, 10.0, tell)
print(json.dumps([found, tests]))
"""


@pytest.mark.slow
def test_a_run_tells_noticed_changes_from_others(tree: Path) -> None:
    """In a process of its own: it forks, and the forks import a package of the same name."""
    before = (tree / "lgmml_torch" / "data" / "x.py").read_text()
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tree)], cwd=command.ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found, tests = json.loads(done.stdout.splitlines()[-1])
    verdicts = {after: verdict for after, verdict, _ in found}
    assert verdicts["(a >= 3)"] == verdicts["(a + 1)"] == "failed"
    by = {after: test.split("::")[-1] for after, _, test in found}
    assert by["(a >= 3)"] == "test_f"  # not the one that fails without any change, too
    assert by["(a + 1)"] == "test_h"
    # What is made when a file is imported: a constant that counts, and a default that does not.
    assert (verdicts["8"], by["8"], verdicts["9"]) == ("failed", "test_k", "survived")
    assert verdicts["a += 1"] == "slow"  # for ever
    assert verdicts["(a - 0)"] == "survived"
    assert tests["tests/data/test_x.py::test_h"]["lines"] == {"lgmml_torch/data/x.py": [12]}  # in the process it starts
    assert (tree / "lgmml_torch" / "data" / "x.py").read_text() == before
