"""k-NN under learned metrics on scikit-learn's own sets, beside metric-learn's LMNN and ITML: quality and time.

``python -m research.metric_learning`` runs the systems of this environment: this package's where torch is installed,
metric-learn's where that is (0.7 needs scikit-learn below 1.8, so it wants an environment of its own). Each adds its
part to research/results/metric-learning.json. ``python -m research.metric_learning table`` prints the tables of
docs/metric_learning.md.

Every system stands between ``StandardScaler`` and ``KNeighborsClassifier`` with their defaults (k = 5), and keeps its
own. Stratified five-fold cross-validation; the number of the repeat is the seed of the folds, so folds are equal.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import platform
import re
import statistics
import sys
import time
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from sklearn import datasets
from sklearn.model_selection import GridSearchCV, StratifiedKFold, cross_val_predict
from sklearn.neighbors import KNeighborsClassifier
from sklearn.pipeline import Pipeline
from sklearn.preprocessing import StandardScaler

FILE = Path(__file__).parent / "results" / "metric-learning.json"
SETS = ("iris", "wine", "breast_cancer", "digits")
GRID = {"metric__t": [0.1, 0.3, 0.5, 0.7, 0.9], "metric__lam": [0.01, 0.1, 1.0]}
REPEATS = 5
SYSTEMS = ("Euclidean", "GMML", "GMML, t and λ chosen", "LocalGMML", "LMNN", "ITML")
SLOW = ("LMNN", "ITML")  # up to minutes for a fit on digits: one repeat


def pipeline(learner: Any, **options: Any) -> Pipeline:
    """Scaler, metric, k-NN."""
    return Pipeline([("scale", StandardScaler()), ("metric", learner), ("knn", KNeighborsClassifier(**options))])


def systems() -> dict[str, Any]:
    """The pipelines that this environment can run."""
    found: dict[str, Any] = {}
    if importlib.util.find_spec("torch"):
        from lgmml_torch import GMML, LocalGMML

        found["Euclidean"] = pipeline("passthrough")
        found["GMML"] = pipeline(GMML())
        found["GMML, t and λ chosen"] = GridSearchCV(pipeline(GMML()), GRID, cv=3)
        found["LocalGMML"] = pipeline(LocalGMML(random_state=0), metric="precomputed")
    if importlib.util.find_spec("metric_learn"):
        other = importlib.import_module("metric_learn")
        found["LMNN"] = pipeline(other.LMNN(random_state=0))
        found["ITML"] = pipeline(other.ITML_Supervised(random_state=0))
    return found


def run(name: str) -> None:
    """Every system on one set: processor seconds of fitting the metric to all rows, and which rows it gets right."""
    X, y = getattr(datasets, f"load_{name}")(return_X_y=True)
    scaled = StandardScaler().fit_transform(X)
    for system, model in systems().items():
        found: dict[str, Any] = {"seconds": fit_seconds(model, scaled, y), "right": []}
        for repeat in range(1 if system in SLOW else REPEATS):
            folds = StratifiedKFold(5, shuffle=True, random_state=repeat)
            right = cross_val_predict(model, X, y, cv=folds) == y
            found["right"].append("".join(map(str, right.astype(int))))
        save(name, system, found)
        print(name, system, found["seconds"], flush=True)


def fit_seconds(model: Any, X: Any, y: Any) -> float | None:
    """The median of up to five fits, of fewer when they are slow; of a search and of no metric, nothing."""
    metric = getattr(model, "named_steps", {}).get("metric", "passthrough")
    if metric == "passthrough":
        return None
    taken: list[float] = []
    while len(taken) < 5 and sum(taken) < 5:
        start = time.process_time()
        metric.fit(X, y)
        taken.append(time.process_time() - start)
    return statistics.median(taken)


def save(name: str, system: str, found: dict[str, Any]) -> None:
    """Put one outcome into the file, with the versions that made it."""
    kept = json.loads(FILE.read_text()) if FILE.exists() else {"runs": {}, "sets": {}}
    kept["sets"].setdefault(name, {})[system] = found
    packages = {}
    for package in ("lgmml-torch", "scikit-learn", "numpy", "torch", "metric-learn"):
        with suppress(PackageNotFoundError):
            packages[package] = version(package)
    cpu = re.search("model name\\s*: (.*)", Path("/proc/cpuinfo").read_text())
    about = {"date": time.strftime("%Y-%m-%d"), "processor": cpu[1] if cpu else platform.processor()}
    kept["runs"][system] = {**about, "packages": packages}
    FILE.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def table() -> str:
    """Accuracy, its paired gain over Euclidean k-NN, and seconds; a table for each set."""
    import torch

    from research.stats import gain, markdown, seconds, signed

    parts = []
    for name in SETS:
        found = json.loads(FILE.read_text(encoding="utf-8"))["sets"][name]
        values = {}
        for system in filter(found.__contains__, SYSTEMS):
            values[system] = torch.tensor([[int(mark) for mark in one] for one in found[system]["right"]]).double()
        rows = []
        for system, right in values.items():
            row = [system, f"{float(right.mean()):.4f}", None, None, None, len(right)]
            if system != "Euclidean":
                row[2] = signed(gain(right.mean(0), values["Euclidean"][: len(right)].mean(0)).difference)
            if system in SLOW:
                row[3] = signed(gain(values["GMML"][: len(right)].mean(0), right.mean(0)).difference)
            if found[system]["seconds"] is not None:
                row[4] = seconds(found[system]["seconds"])
            rows.append(row)
        columns = ["", "accuracy", "its gain over Euclidean", "GMML's gain over it", "fit, CPU s", "repeats"]
        parts.append(f"**{name}**, {right.shape[1]:,} rows\n\n{markdown(columns, rows)}")
    return "\n\n".join(parts)


def main() -> None:
    """Run, or print the tables."""
    if sys.argv[1:] == ["table"]:
        print(table())
        return
    for name in SETS:
        run(name)


if __name__ == "__main__":
    main()
