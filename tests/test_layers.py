"""Lower layers never import higher ones, imports make no circle, and heavy packages keep to their place."""

from __future__ import annotations

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "lgmml_torch"

# What stands on one line may import what stands above it, and its own folder. A folder is one layer; files beside the
# folders are named.
LAYERS = (
    ("checks",),
    ("files", "progress", "segments"),
    ("canonical", "inputs", "rules"),
    ("categories",),
    ("ragged", "distributed"),
    ("functional",),
    ("data", "models", "evaluation/metric"),
    ("plots", "fitting", "baselines"),
    ("training", "evaluation"),
    ("parameters", "estimator_inputs"),
    ("estimator",),
    ("interop",),
    ("app",),
)
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
HEAVY = {  # from which layer on, and where else, a package may be imported
    "pytorch_lightning": ("training", "estimator", "app"),
    "hydra": ("app",),
    "omegaconf": ("app",),
    "matplotlib": ("plots",),
    "lightgbm": ("baselines",),
    "xgboost": ("baselines",),
    "sklearn": ("baselines", "estimator", "data"),
}
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def name_of(path: Path) -> str:
    return "/".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix("/__init__")


def rank_of(name: str) -> int:
    """A file that is named stands on its own line, any other on that of its folder."""
    return RANK[name] if name in RANK else RANK[name.split("/")[0]]


def imported(path: Path, *, at_load: bool = False) -> set[str]:
    """Dotted names; ``at_load`` leaves out what is imported inside functions or for types only."""
    found: set[str] = set()
    todo: list[ast.AST] = [ast.parse(path.read_text())]
    while todo:
        node = todo.pop()
        lazy = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) or (
            isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        )
        if at_load and lazy:
            continue
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(node.module or "")
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
        todo.extend(ast.iter_child_nodes(node))
    return found


def inner(targets: set[str]) -> set[str]:
    """Those of them that are modules of the package."""
    names = {
        target.removeprefix("lgmml_torch.").replace(".", "/") for target in targets if target[:12] == "lgmml_torch."
    }
    return {name for name in names if (PACKAGE / f"{name}.py").is_file()}


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_point_downwards(path: Path) -> None:
    name = name_of(path)
    for target in inner(imported(path)):
        same_room = target.split("/")[0] == name.split("/")[0] or {name, target} == {"ragged", "distributed"}
        assert same_room or rank_of(target) < rank_of(name), f"{name} imports {target}"


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_heavy_packages_stay_in_their_place(path: Path) -> None:
    name = name_of(path)
    for target in imported(path):
        homes = HEAVY.get(target.split(".")[0])
        assert homes is None or name.split("/")[0] in homes, f"{name} imports {target}"


def test_there_is_no_import_cycle() -> None:
    graph = {name_of(path): inner(imported(path, at_load=True)) for path in MODULES}
    list(TopologicalSorter(graph).static_order())


def test_nothing_of_the_laboratory_is_shipped() -> None:
    assert not any("research" in target.split(".") for path in MODULES for target in imported(path))


def test_files_and_functions_stay_readable() -> None:
    for path in MODULES:
        text = path.read_text()
        assert text.count("\n") <= 460, f"{name_of(path)} has {text.count(chr(10))} lines"
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                body = node.body[1:] if ast.get_docstring(node) else node.body
                lines = (node.end_lineno or 0) - (body[0].lineno if body else node.lineno) + 1
                assert lines <= 40, f"{name_of(path)}: {node.name} has {lines} lines"


def test_scoring_imports_neither_training_nor_pictures(tmp_path: Path) -> None:
    script = """
import sys
import lgmml_torch.app.commands.score, lgmml_torch.models.ranker
heavy = ("pytorch_lightning", "matplotlib", "hydra", "sklearn", "torchmetrics", "scipy.stats")
heavy += ("pandas", "pyarrow", "polars", "scipy.sparse")
ours = ("lgmml_torch.fitting", "lgmml_torch.training", "lgmml_torch.functional.boosting", "lgmml_torch.plots")
print([name for name in (*heavy, *ours) if name in sys.modules])
print(len([name for name in sys.modules if name.startswith("lgmml_torch")]))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT)
    found, count = done.stdout.splitlines()
    assert found == "[]"
    assert int(count) <= 40
