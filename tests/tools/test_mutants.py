"""Mutants are what they say, and a run separates those that a test catches from those that survive."""

from __future__ import annotations

import ast
import json
import random
import subprocess
import sys
from pathlib import Path

from tools.mutants import __main__ as command
from tools.mutants.changes import mutants_of, sample
from tools.mutants.swap import exchange, live_functions

PATH = "lgmml_torch/data/x.py"
SOURCE = '''"""Not a < b."""
LIMIT: int = 3 - 1
def f(x: int | None, *, most: float = 0.5, deep: bool = True) -> int | None:
    """Not x + 1."""
    if not x or deep:
        raise ValueError(f"`x` must be {x + 1}, got {max(x, 2)}")
    log.info("%d", x + 1)
    x = abs(x)
    x += 1
    call(x)  # Φ
    return max(-x, most) if x < LIMIT and deep else g(x, key=2, device="cpu").abs()
'''
EXPECTED = {
    ("3 - 1", "(3 + 1)"), ("0.5", "0"), ("0.5", "(-0.5)"), ("True", "False"), ("not x", "(x)"), ("-x", "(x)"),
    ("x += 1", "x -= 1"), ("x += 1", "pass"), ("call(x)", "pass"), ("x = abs(x)", "pass"),
    ("max(-x, most)", "min(-x, most)"), ("x < LIMIT", "(x <= LIMIT)"),
    ("x < LIMIT", "(x > LIMIT)"), ("x < LIMIT and deep", "(x < LIMIT or deep)"), ("2", "0"),
    ('g(x, key=2, device="cpu")', "g(x, device='cpu')"),
    ('g(x, key=2, device="cpu").abs()', "(g(x, key=2, device='cpu'))"),
}  # fmt: skip


def test_changes_of_a_file() -> None:
    every = mutants_of(PATH, SOURCE)
    found = {(mutant.before, mutant.after) for mutant in every}
    assert found >= EXPECTED
    assert not any(text in before for before, _ in found for text in ("Not", "int | None", "got", "%d"))
    for mutant in every:
        changed = mutant.apply(SOURCE)
        assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(SOURCE)), mutant
        assert mutant.undo(changed) == SOURCE
    spaced = mutants_of(PATH, SOURCE.replace("x += 1", "x  +=  1  # a comment"))
    assert [mutant.key for mutant in spaced] == [mutant.key for mutant in every]
    drawn = [sample(every, 8, random.Random(seed)) for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert len({mutant.span for mutant in drawn[0]}) == 8


def test_the_last_axis_has_two_names() -> None:
    for source in ("x.sum(dim=1)", "x.sum(dim=-1)"):
        assert not {"1", "(1)", "(-1)"} & {mutant.after for mutant in mutants_of(PATH, source)}


def test_accepted_mutants_exist_and_are_not_drawn() -> None:
    known = command.accepted()
    assert set(json.loads(command.EQUIVALENT.read_text())) == {"same result", "accepted"}
    assert all(len(reason) > 20 for reason in known.values())
    files = {entry[0] for entry in known}
    there = {mutant.key for file in files for mutant in mutants_of(file, (command.ROOT / file).read_text())}
    assert not set(known) - there
    chosen, _ = command.choose_sample(["functional"], 100, 0)
    assert len(chosen) == 100
    assert not {mutant.key for mutant in chosen} & set(known)


CODE = "def outer(a, b=2):\n    def inner(c):\n        return c + 1\n    return inner(a) * b\n"


def test_code_is_exchanged_in_loaded_functions() -> None:
    for before, after, result in (("c + 1", "c + 3 * a", 8), ("* b", "- b", 0), ("b=2", "b=9", None)):
        space: dict[str, int] = {}
        exec(compile(CODE, "/nowhere/x.py", "exec"), space)
        live = live_functions("/nowhere")
        assert exchange("/nowhere/x.py", CODE, CODE.replace(before, after), live) == (result is not None)
        assert eval("outer(1)", space) == (4 if result is None else result)  # a default is made on import


SCRIPT = """
import json, sys
from pathlib import Path
from tools.mutants.changes import mutants_of
from tools.mutants.cover import make_map
from tools.mutants.run import try_all
tree, path = Path(sys.argv[1]), "lgmml_torch/data/x.py"
tests = make_map(tree, ["tests/data"], tree.parent / "map.json", 1, say=lambda text: None)
found = {}
def tell(outcome): found[outcome.mutant.before + outcome.mutant.after] = [outcome.verdict, outcome.by[-6:]]
mutants = [mutant for mutant in mutants_of(path, (tree / path).read_text()) if mutant.kind != "sign"]
try_all(mutants, [tree], tests, 10.0, tell)
print(json.dumps(found))
"""


def test_a_run_separates_caught_from_survived(tmp_path: Path) -> None:
    """In a process of its own: it forks, and the forks import a package of the same name."""
    tree = tmp_path / "tree"
    for folder, name, text in (
        ("lgmml_torch/data", "x.py", "LIMIT = 7\ndef f(a=8):\n    return a + LIMIT\ndef g(a):\n    return a - 0\n"),
        (
            "tests/data",
            "test_x.py",
            "import os\nimport resource\nfrom lgmml_torch.data.x import f, g\n"
            "def test_a():\n    f()\n    assert os.environ.get('LGMML_MUTANTS_TEST')  # fails without a change\n"
            "def test_f():\n    most = resource.getrlimit(resource.RLIMIT_FSIZE)\n"
            "    resource.setrlimit(resource.RLIMIT_FSIZE, (0, most[1]))  # a full disk\n"
            "    try:\n        found = f(1)\n        g(1)\n"
            "    finally:\n        resource.setrlimit(resource.RLIMIT_FSIZE, most)\n    assert found == 8\n",
        ),
    ):
        (tree / folder).mkdir(parents=True)
        (tree / folder / name).write_text(text)
        (tree / folder / "__init__.py").touch()
    (tree / "pyproject.toml").write_text("[tool.pytest.ini_options]\npythonpath = ['.']\n")
    (tree / "lgmml_torch" / "__init__.py").touch()
    (tree / "tools").symlink_to(command.ROOT / "tools")
    line = [sys.executable, "-c", SCRIPT, str(tree)]
    done = subprocess.run(line, cwd=command.ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["a + LIMIT(a - LIMIT)"] == found["70"] == ["failed", "test_f"]
    assert found["80"][0] == found["a - 0(a + 0)"][0] == "survived"
