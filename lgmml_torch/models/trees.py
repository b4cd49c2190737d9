"""`TreeBase`: a LightGBM or XGBoost model that ours is added to, carried along in our own model file."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from lgmml_torch.checks import CheckpointError, LGMMLError, check_choice, check_shape, require
from lgmml_torch.functional.features import list_rank_percentiles
from lgmml_torch.models.local_metrics import Kept
from lgmml_torch.ragged import RankingData

_KINDS = {"lightgbm": "LightGBM", "xgboost": "XGBoost"}
_EXTRA = "trees"

# Reads a model and scores some rows. XGBoost's model is written back as JSON.
_TRIAL = """
import importlib, sys
import numpy as np
library, content = importlib.import_module(sys.argv[1]), sys.stdin.buffer.read()
if sys.argv[1] == "lightgbm":
    booster = library.Booster(model_str=content.decode())
    width, predict = booster.num_feature(), booster.predict
else:
    booster = library.Booster()
    booster.load_model(bytearray(content))
    width, predict = booster.num_features(), booster.inplace_predict
rows = np.random.default_rng(0).normal(size=(8, 64, width)) * 10.0 ** np.arange(-3, 5)[:, None, None]
predict(rows.reshape(-1, width).astype(np.float32))
if sys.argv[1] == "xgboost":
    sys.stdout.buffer.write(booster.save_raw("json"))
"""
_TRIAL_SECONDS = 300  # a damaged tree may lead in a circle


def file_kind(content: bytes) -> str | None:
    r"""``lightgbm`` (text), ``xgboost`` (JSON) or ``xgboost-ubj``; None for anything else.

    >>> file_kind(b"tree\nversion=v4\n"), file_kind(b'{"learner": {}}'), file_kind(b"PK")
    ('lightgbm', 'xgboost', None)
    """
    if content.startswith(b"tree\n"):
        return "lightgbm"
    if not content.startswith(b"{") or b"learner" not in content:
        return None
    if content[1:2] in (b'"', b" ", b"\n", b"\r", b"\t"):
        return "xgboost"
    return "xgboost-ubj"


class TreeBase(nn.Module):
    """Boosted trees with a weight: together with ours, a score is ``own_weight``·own + ``weight``·theirs.

    The trees are kept as the bytes of their file and read by their own library at the first prediction. A model with
    trees can be loaded, copied and saved without it. Trees see raw features in the precision of the data.

    Args:
        content: LightGBM's text, or XGBoost's JSON; see `read`.
        kind: ``"lightgbm"`` or ``"xgboost"``.
        weight: of these trees, at least 0.
        own_weight: of the model they are added to, at least 0.
        list_ranks: whether the trees also see each feature's rank percentile within the list, behind the features.
    """

    content: Tensor  # (bytes,) uint8

    def __init__(
        self, content: bytes, *, kind: str, weight: float = 1.0, own_weight: float = 1.0, list_ranks: bool = False
    ) -> None:
        super().__init__()
        check_choice("kind", kind, _KINDS)
        for name, value in (("weight", weight), ("own_weight", own_weight)):
            if not (value >= 0 and math.isfinite(value)):
                raise LGMMLError(f"`{name}` must be at least 0 and finite, got {value}")
        self.kind, self.weight, self.own_weight = kind, float(weight), float(own_weight)
        self.list_ranks = list_ranks
        self.register_buffer("content", torch.from_numpy(np.frombuffer(content, dtype=np.uint8).copy()))
        self._read = Kept()

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Self:
        """Read a model file of LightGBM (text) or XGBoost (JSON, or UBJ, which is kept as JSON).

        The library reads the file in a process of its own first: on some damaged files it would end this one.

        Raises:
            CheckpointError: there is no such file, it is of another kind, or the library cannot read it.
            MissingDependencyError: the library is not installed.
        """
        file = Path(path)
        if not file.is_file():
            raise CheckpointError(f"no model file at {file}")
        content = file.read_bytes()
        if content.startswith(b"tree\r\n"):  # copied from Windows; LightGBM counts the bytes of a tree
            content = content.replace(b"\r\n", b"\n")
        kind = file_kind(content)
        if kind is None:
            raise CheckpointError(f"{file} is neither LightGBM's text nor XGBoost's JSON or UBJ")
        written = _try_out(content, kind.removesuffix("-ubj"), file)
        if kind == "xgboost-ubj":
            kind, content = "xgboost", written
        return cls(content, kind=kind)

    @property
    def title(self) -> str:
        """The name of the library, as it writes it."""
        return _KINDS[self.kind]

    @property
    def needs(self) -> str:
        """What must be installed to evaluate these trees."""
        return f"{self.kind} (pip install 'lgmml-torch[{_EXTRA}]')"

    @property
    def num_features(self) -> int:
        """Raw features a document must have; the library must be installed."""
        return self._trees().num_features // (1 + self.list_ranks)

    def check(self, num_features: int, feature_names: tuple[str, ...] | None = None) -> None:
        """Require trees that can rank documents with these features.

        Raises:
            MissingDependencyError: the library is not installed.
            LGMMLError: the trees have other features, or several scores for a document.
        """
        self._check_features(num_features, feature_names)
        self.predict(torch.zeros(1, num_features, device="cpu"), torch.tensor([0, 1]))

    def _check_features(self, num_features: int, feature_names: tuple[str, ...] | None) -> None:
        trees = self._trees()
        if self.num_features != num_features:
            raise LGMMLError(f"the {self.title} model has {self.num_features} features, the data has {num_features}")
        if trees.names is not None and feature_names is not None:
            for theirs, ours in zip(trees.names, feature_names, strict=True):
                if _plain(theirs) != _plain(ours):
                    raise LGMMLError(
                        f"the {self.title} model must have the features of the data, in their order, got {theirs!r} "
                        f"where the data has {ours!r}"
                    )

    @torch.no_grad()
    def predict(self, features: Tensor, offsets: Tensor) -> Tensor:  # (N, D) raw, (Q+1,) -> (N,)
        """Raw scores of the trees alone, in float64 on the CPU.

        Raises:
            MissingDependencyError: the library is not installed.
            LGMMLError: another number of features, or several scores for a document.
        """
        trees = self._trees()
        check_shape("features", features, (None, self.num_features))
        if not len(features):
            return torch.zeros(0, dtype=torch.float64, device="cpu")
        if features.dtype not in (torch.float32, torch.float64):
            features = features.float()
        if self.list_ranks:
            features = self.with_list_ranks(features, offsets)
        found = np.asarray(trees.predict(features.detach().cpu().contiguous().numpy()), dtype=np.float64)
        if found.shape != (len(features),):
            raise LGMMLError(f"the {self.title} model must give one score for a document, got {found.shape[-1]}")
        return torch.from_numpy(found)

    @staticmethod
    def with_list_ranks(features: Tensor, offsets: Tensor) -> Tensor:  # (N, D), (Q+1,) -> (N, 2·D)
        """The features, and each one's rank percentile within its list."""
        return torch.cat([features, list_rank_percentiles(features, offsets.to(features.device))], dim=1)

    def add_to(self, own: Tensor, data: RankingData) -> Tensor:  # (N,) -> (N,)
        """``own_weight``·own + ``weight``·theirs, in the precision of ``own``; trees of weight 0 are not evaluated."""
        total = self.own_weight * own.double()
        if self.weight > 0:
            self._check_features(data.num_features, data.feature_names)
            total = total + self.weight * self.predict(data.features, data.offsets)
        return total.to(own.dtype)

    def spec(self) -> dict[str, Any]:
        """All that is needed, besides the bytes, to build it again: primitives only."""
        names = ("kind", "weight", "own_weight", "list_ranks")
        return {"size": len(self.content), **{name: getattr(self, name) for name in names}}

    @classmethod
    def from_spec(cls, spec: dict[str, Any]) -> Self:
        """Of the right size, to be filled by ``load_state_dict``."""
        spec = dict(spec)
        return cls(bytes(spec.pop("size")), **spec)

    def _trees(self) -> _LightGBM | _XGBoost:
        return self._read.get(self._open, [self.content])

    def _open(self) -> _LightGBM | _XGBoost:
        content = self.content.cpu().numpy().tobytes()
        if self.kind == "lightgbm":
            return _LightGBM(_library(self.kind), content)
        return _XGBoost(_library(self.kind), content)


class _LightGBM:
    def __init__(self, library: Any, content: bytes) -> None:
        try:
            self.booster = library.Booster(model_str=content.decode())
        except (library.basic.LightGBMError, ValueError) as error:
            raise _unreadable("the LightGBM model", "LightGBM", str(error)) from error
        self.num_features: int = self.booster.num_feature()
        self.names = _given(self.booster.feature_name(), "Column_")

    def predict(self, features: NDArray[Any]) -> Any:
        return self.booster.predict(features, raw_score=True, num_threads=torch.get_num_threads())


class _XGBoost:
    """Trees after the best iteration, where early stopping noted one, are left out, as its own rankers do."""

    def __init__(self, library: Any, content: bytes) -> None:
        self.booster = library.Booster()
        try:
            self.booster.load_model(bytearray(content))
        except (library.core.XGBoostError, ValueError) as error:
            raise _unreadable("the XGBoost model", "XGBoost", str(error)) from error
        self.num_features: int = self.booster.num_features()
        self.names = _given(self.booster.feature_names or [], "f")
        best = self.booster.attr("best_iteration")
        self.rounds = (0, 0)  # all of them
        if best is not None:
            self.rounds = (0, int(best) + 1)

    def predict(self, features: NDArray[Any]) -> Any:
        self.booster.set_param({"nthread": torch.get_num_threads()})
        return self.booster.inplace_predict(
            features, iteration_range=self.rounds, predict_type="margin", validate_features=False
        )


def _try_out(content: bytes, kind: str, file: Path) -> bytes:
    """Let the library read a model and score some rows in a child process; the model as XGBoost writes it."""
    _library(kind)
    if kind == "lightgbm":
        _check_text(content, file)
    command = [sys.executable, "-P", "-c", _TRIAL, kind]
    try:
        trial = subprocess.run(command, input=content, capture_output=True, timeout=_TRIAL_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise CheckpointError(f"{file} cannot be used: {_KINDS[kind]} does not come to an end with it") from None
    if trial.returncode == 0:
        return trial.stdout
    errors = trial.stderr.decode(errors="replace").strip().splitlines()
    named = [line for line in errors if line.startswith(kind)]
    reason = (named or errors or [""])[-1]
    if trial.returncode < 0:
        reason = f"the process ended with signal {-trial.returncode}"
    raise _unreadable(str(file), _KINDS[kind], reason)


def _check_text(content: bytes, file: Path) -> None:
    """Require what LightGBM's reader does not look for: all trees, and categories with the numbers of the data."""
    if b"\nend of trees" not in content:
        raise CheckpointError(f"{file} cannot be used: it is cut short, the end of its trees is missing")
    _, mark, rest = content.rpartition(b"\npandas_categorical:")
    if mark and rest.strip() not in (b"null", b"[]"):
        raise CheckpointError(f"{file} cannot be used: its categories were numbered by pandas; train it on numbers")


def _unreadable(name: str, title: str, reason: str) -> CheckpointError:
    return CheckpointError(f"{name} cannot be used: {title} cannot read it ({' '.join(reason.split())[:200]})")


def _given(names: list[str], prefix: str) -> list[str] | None:
    """The names, unless the library made them up."""
    if names == [f"{prefix}{number}" for number in range(len(names))]:
        return None
    return names


def _plain(name: str) -> str:
    """LightGBM writes blanks as underlines."""
    return "_".join(name.split())


def _library(kind: str) -> Any:
    return require(kind, f"because the model adds to a {_KINDS[kind]} model", _EXTRA)
