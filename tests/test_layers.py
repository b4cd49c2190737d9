"""Lower layers never import higher ones, and heavy packages appear only where they belong."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "lgmml_torch"

# The first pattern that a module's dotted name starts with decides its layer.
LAYERS = [
    ("checks", 0), ("segments", 0), ("arrays", 0), ("files", 0), ("ragged", 1), ("functional", 2),
    ("data.datamodule", 4), ("data", 3), ("models", 3), ("metrics", 3), ("plots", 3), ("plots_experiments", 3),
    ("plots_benchmarks", 3), ("plots_quality", 3),
    ("fitting", 4), ("baselines", 4), ("training", 4),
    ("estimator", 5), ("estimator_fit", 5), ("estimator_tools", 5), ("run_config", 5), ("run_report", 5), ("run", 5),
    ("experiments", 6),
    ("report_tables", 5), ("reports", 5), ("streaming", 4), ("commands", 6), ("cli", 6),
]  # fmt: skip
ONLY_IN = {
    "matplotlib": ("plots", "plots_experiments", "plots_benchmarks", "plots_quality"),
    "pytorch_lightning": ("training", "data.datamodule", "estimator_fit", "run", "run_report", "experiments", "cli"),
    "hydra": ("run", "run_config", "cli", "experiments"),
    "omegaconf": ("run", "run_config", "cli", "experiments"),
    "lightgbm": ("baselines",),
    "xgboost": ("baselines",),
}


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


def layer(name: str) -> int:
    for prefix, level in LAYERS:
        if name == prefix or name.startswith(prefix + "."):
            return level
    raise AssertionError(f"module {name!r} has no layer: add it to LAYERS")


def imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(node.module or "")
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


MODULES = [path for path in sorted(PACKAGE.rglob("*.py")) if module_name(path) not in ("__init__", "__main__")]


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_imports_point_downwards(path: Path) -> None:
    name = module_name(path)
    for target in imports(path):
        if not target.startswith("lgmml_torch."):
            continue
        inner = target.removeprefix("lgmml_torch.")
        if not ((PACKAGE / inner.replace(".", "/")).is_dir() or (PACKAGE / (inner.replace(".", "/") + ".py")).exists()):
            continue  # a name inside a module, which is listed itself
        assert layer(inner) <= layer(name), f"{name} imports {inner} from a higher layer"


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_heavy_packages_stay_in_their_place(path: Path) -> None:
    name = module_name(path)
    for target in imports(path):
        homes = ONLY_IN.get(target.split(".")[0])
        if homes is not None:
            assert any(name == home or name.startswith(home + ".") for home in homes), f"{name} imports {target}"
