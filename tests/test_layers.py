"""Lower layers never import higher ones, imports make no circle, and heavy packages keep to their place."""

from __future__ import annotations

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "lgmml_torch"

# A line may import the lines above it and its own folder. A folder is one layer; files beside the folders are named.
LAYERS = (
    ("checks",),
    ("files", "progress", "segments"),
    ("inputs",),
    ("categories",),
    ("distributed",),
    ("ragged",),
    ("functional",),
    ("data", "models", "evaluation/metric", "metric_learning"),
    ("plots", "fitting"),
    ("training", "evaluation"),
    ("estimator_inputs",),
    ("estimator",),
    ("interop",),
    ("app",),
)
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
HEAVY = {  # where a package may be imported
    "pytorch_lightning": ("training", "estimator", "app"),
    "hydra": ("app",),
    "omegaconf": ("app",),
    "matplotlib": ("plots",),
    "lightgbm": (),
    "xgboost": (),
    "sklearn": ("estimator", "metric_learning", "data"),
    "research": (),
    "tools": (),
}
MODULES = {
    "/".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix("/__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
    if path != PACKAGE / "__init__.py"
}


def rank_of(name: str) -> int:
    return RANK.get(name, RANK.get(name.split("/")[0], -1))


def imported(path: Path, *, at_load: bool = False) -> set[str]:
    """Dotted names, without imports for types only; ``at_load`` leaves out imports inside functions, too."""
    found: set[str] = set()
    todo: list[ast.AST] = [ast.parse(path.read_text())]
    while todo:
        node = todo.pop()
        if ast.unparse(getattr(node, "test", [])) == "TYPE_CHECKING":
            continue
        if at_load and isinstance(node, ast.FunctionDef):
            continue
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.update([node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)])
        todo.extend(ast.iter_child_nodes(node))
    return found


def inner(targets: set[str]) -> set[str]:
    """Those of them that are modules of the package."""
    return {target.removeprefix("lgmml_torch.").replace(".", "/") for target in targets} & set(MODULES)


def test_imports_point_downwards_and_heavy_packages_stay_in_their_place() -> None:
    for name, path in MODULES.items():
        room, targets = name.split("/")[0], imported(path)
        assert rank_of(name) >= 0, f"{name} is in no layer"
        for target in inner(targets):
            assert target.split("/")[0] == room or rank_of(target) < rank_of(name), f"{name} imports {target}"
        for target in targets:
            homes = HEAVY.get(target.split(".")[0])
            assert homes is None or room in homes, f"{name} imports {target}"


def test_there_is_no_import_cycle() -> None:
    graph = {name: inner(imported(path, at_load=True)) for name, path in MODULES.items()}
    list(TopologicalSorter(graph).static_order())


def test_files_and_functions_stay_readable() -> None:
    for name, path in MODULES.items():
        text = path.read_text()
        assert text.count("\n") <= 460, f"{name} has {text.count(chr(10))} lines"
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                body = node.body[ast.get_docstring(node) is not None :]
                lines = (node.end_lineno or 0) - body[0].lineno + 1 if body else 0
                assert lines <= 40, f"{name}: {node.name} has {lines} lines"


def test_scoring_imports_neither_training_nor_pictures() -> None:
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
