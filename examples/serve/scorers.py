"""What ranks behind the server: our own model, its ONNX export, or a LightGBM model, all called in the same way."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from lgmml_torch import LGMML

Run = Callable[[NDArray[Any], NDArray[np.int64]], NDArray[Any]]


class Scorer(NamedTuple):
    """A ranker.

    Attributes:
        kind: what it is, in a few words.
        features: how many a document must have.
        names: of the features, where the model knows them.
        run: called with ``(N, D)`` documents of several lists and their ``(Q+1,)`` offsets, gives ``(N,)`` scores.
        dtype: of the documents; object where words and empty cells are taken, too.
    """

    kind: str
    features: int
    names: list[str] | None
    run: Run
    dtype: Any = np.float32


def open_scorer(path: str | Path) -> Scorer:
    """The ranker of a file: ``.safetensors``, ``.onnx`` written with ``--batch``, or LightGBM's ``.txt``."""
    openers = {".safetensors": _own, ".onnx": _onnx, ".txt": _lightgbm}
    file = Path(path)
    if file.suffix not in openers:
        raise SystemExit(f"{file} must end in one of {', '.join(openers)}")
    if not file.is_file():
        raise SystemExit(f"there is no file {file}")
    return openers[file.suffix](file)


def _own(file: Path) -> Scorer:
    import torch

    from lgmml_torch import LGMML, RankingData

    torch.set_num_threads(1)  # requests are what runs side by side
    model = LGMML.load(file)
    dtype = model.dtype
    names = model.feature_names
    if names is not None and (model.encoder is not None or model.reading["missing"] != "error"):
        return _raw(model)

    def run(features: NDArray[Any], offsets: NDArray[np.int64]) -> NDArray[Any]:
        scores = None
        if len(offsets) == 2:  # one list, which needs no grouping
            scores = model.score_list(features)
        if scores is not None:
            return scores
        labels = np.zeros(len(features), np.float32)
        data = RankingData.from_arrays(features, labels, group=np.diff(offsets), dtype=dtype, feature_names=names)
        return model.score_in_caller_order(data)

    return Scorer(
        "LGMML", model.num_features, None if names is None else list(names), run, str(dtype).removeprefix("torch.")
    )


def _raw(model: LGMML) -> Scorer:
    """A model that takes words, or has a rule for missing values: documents are read as the rows of a table."""
    import pyarrow

    from lgmml_torch import RankingData

    names, rules = model.reading["feature_names"], {key: model.reading[key] for key in ("missing", "categories")}

    def run(features: NDArray[Any], offsets: NDArray[np.int64]) -> NDArray[Any]:
        table = pyarrow.table({name: column.tolist() for name, column in zip(names, features.T, strict=True)})
        labels = np.zeros(len(features), np.float32)
        data = RankingData.from_arrays(table, labels, group=np.diff(offsets), dtype=model.dtype, **rules)
        return model.score_in_caller_order(data)

    return Scorer("LGMML", len(names), list(names), run, object)


def _onnx(file: Path) -> Scorer:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    facts = session.get_modelmeta().custom_metadata_map
    if [given.name for given in session.get_inputs()] != ["features", "offsets"]:
        raise SystemExit(f"{file} takes one list in a call; write it with: lgmml export MODEL {file} --batch")
    names = json.loads(facts["feature_names"]) if "feature_names" in facts else None

    def run(features: NDArray[Any], offsets: NDArray[np.int64]) -> NDArray[Any]:
        scores: NDArray[Any] = session.run(["scores"], {"features": features, "offsets": offsets})[0]
        return scores

    double = session.get_inputs()[0].type == "tensor(double)"
    return Scorer("LGMML in onnxruntime", int(facts["num_features"]), names, run, np.float64 if double else np.float32)


def _lightgbm(file: Path) -> Scorer:
    import lightgbm

    booster = lightgbm.Booster(model_file=str(file))
    names = booster.feature_name()
    told = None if all(name.startswith("Column_") for name in names) else names

    def run(features: NDArray[Any], offsets: NDArray[np.int64]) -> NDArray[Any]:
        return np.asarray(booster.predict(features, num_threads=1))

    return Scorer("LightGBM", booster.num_feature(), told, run, np.float64)
