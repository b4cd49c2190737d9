"""`TreeBase`: a LightGBM or XGBoost model that ours is added to, carried along in our own model file."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from lgmml_torch.checks import CheckpointError, LGMMLError, check_choice, check_shape, require
from lgmml_torch.models.local_metrics import tensor_state
from lgmml_torch.models.tree_files import check_content, file_kind, trees_of
from lgmml_torch.ragged import RankingData

KINDS = {"lightgbm": "LightGBM", "xgboost": "XGBoost"}
EXTRA = "trees"


class TreeBase(nn.Module):
    """Boosted trees with a weight: together with ours, a score is ``own_weight``·own + ``weight``·theirs.

    The trees are kept as the bytes of their file and read by their own library when they are first asked; a model that
    has them can be loaded, copied and saved without it. Trees see raw features, with whatever stands in for missing
    values, in the precision of the data.

    Args:
        content: LightGBM's text, or XGBoost's JSON; see `read`.
        kind: ``"lightgbm"`` or ``"xgboost"``.
        weight: of these trees, at least 0.
        own_weight: of the model they are added to, at least 0.
    """

    content: Tensor  # (bytes,) uint8

    def __init__(self, content: bytes, *, kind: str, weight: float = 1.0, own_weight: float = 1.0) -> None:
        super().__init__()
        check_choice("kind", kind, KINDS)
        for name, value in (("weight", weight), ("own_weight", own_weight)):
            if not (value >= 0 and math.isfinite(value)):
                raise LGMMLError(f"`{name}` must be at least 0 and finite, got {value}")
        self.kind, self.weight, self.own_weight = kind, float(weight), float(own_weight)
        self.register_buffer("content", torch.from_numpy(np.frombuffer(content, dtype=np.uint8).copy()))
        self._kept: tuple[Any, _Trees, Tensor] | None = None

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Self:
        """Take up a model file of LightGBM (text) or XGBoost (JSON, or UBJ, which is kept as JSON).

        Raises:
            CheckpointError: there is no such file, it is of another kind, or it is damaged.
            MissingDependencyError: a UBJ file, and XGBoost is not installed.
        """
        file = Path(path)
        if not file.is_file():
            raise CheckpointError(f"no model file at {file}")
        content = file.read_bytes()
        if content.startswith(b"tree\r\n"):  # a copy that went through another system; sizes of trees count bytes
            content = content.replace(b"\r\n", b"\n")
        kind = file_kind(content)
        if kind is None:
            raise CheckpointError(f"{file} is neither LightGBM's text nor XGBoost's JSON or UBJ")
        if kind == "xgboost-ubj":
            kind, content = "xgboost", _as_json(content, str(file))
        check_content(content, kind, str(file))
        return cls(content, kind=kind)

    @property
    def title(self) -> str:
        """The name of the library, as it writes it."""
        return KINDS[self.kind]

    @property
    def needs(self) -> str:
        """What must be installed for these trees to be asked."""
        return f"{self.kind} (pip install 'lgmml-torch[{EXTRA}]')"

    @property
    def num_features(self) -> int:
        """Features a document must have.

        Raises:
            MissingDependencyError: the library is not installed.
        """
        return self._trees().num_features

    def check(self, num_features: int, feature_names: tuple[str, ...] | None = None) -> None:
        """Require trees that can rank documents with these features.

        Raises:
            MissingDependencyError: the library is not installed.
            LGMMLError: the trees have other features, or several scores for a document.
        """
        self._check_features(num_features, feature_names)
        self.predict(torch.zeros(1, num_features, device="cpu"))

    def _check_features(self, num_features: int, feature_names: tuple[str, ...] | None) -> None:
        trees = self._trees()
        if trees.num_features != num_features:
            raise LGMMLError(f"the {self.title} model has {trees.num_features} features, the data has {num_features}")
        if trees.names is not None and feature_names is not None:
            pairs = zip(trees.names, feature_names, strict=True)
            wrong = next(((a, b) for a, b in pairs if _plain(a) != _plain(b)), None)
            if wrong is not None:
                raise LGMMLError(
                    f"the {self.title} model must have the features of the data, in their order, got {wrong[0]!r} "
                    f"where the data has {wrong[1]!r}"
                )

    @torch.no_grad()
    def predict(
        self,
        features: Tensor,  # (N, D) raw
    ) -> Tensor:  # (N,)
        """Raw scores of the trees alone, in float64 on the CPU.

        Raises:
            MissingDependencyError: the library is not installed.
            LGMMLError: another number of features, or several scores for a document.
        """
        trees = self._trees()
        check_shape("features", features, (None, trees.num_features))
        if not len(features):
            return torch.zeros(0, dtype=torch.float64, device="cpu")
        wide = features if features.dtype in (torch.float32, torch.float64) else features.float()
        found = np.asarray(trees.predict(wide.detach().cpu().contiguous().numpy()), dtype=np.float64)
        if found.shape != (len(features),):
            raise LGMMLError(f"the {self.title} model must give one score for a document, got {found.shape[-1]}")
        return torch.from_numpy(found)

    def add_to(
        self,
        own: Tensor,  # (N,)
        data: RankingData,
    ) -> Tensor:  # (N,)
        """``own_weight``·own + ``weight``·theirs, in the precision of ``own``; trees without weight are not asked."""
        total = self.own_weight * own.double()
        if self.weight > 0:
            self._check_features(data.num_features, data.feature_names)
            total = total + self.weight * self.predict(data.features)
        return total.to(own.dtype)

    def spec(self) -> dict[str, Any]:
        """All that is needed, besides the bytes, to build it again: primitives only."""
        return {"kind": self.kind, "size": len(self.content), "weight": self.weight, "own_weight": self.own_weight}

    @classmethod
    def from_spec(cls, spec: dict[str, Any]) -> Self:
        """Of the right size, to be filled by ``load_state_dict``."""
        return cls(bytes(spec["size"]), kind=spec["kind"], weight=spec["weight"], own_weight=spec["own_weight"])

    def _trees(self) -> _Trees:
        state = tensor_state([self.content])
        if self._kept is None or self._kept[0] != state:
            library = _library(self.kind)
            content = self.content.cpu().numpy().tobytes()
            check_content(content, self.kind, f"the {self.title} model")
            trees = (_LightGBM if self.kind == "lightgbm" else _XGBoost)(library, content)
            self._kept = (state, trees, self.content)
        return self._kept[1]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_kept": None}


class _Trees(Protocol):
    """What either library reads out of a file."""

    num_features: int
    names: list[str] | None

    def predict(self, features: NDArray[Any]) -> Any: ...


class _LightGBM:
    def __init__(self, library: Any, content: bytes) -> None:
        try:
            self.booster = library.Booster(model_str=trees_of(content).decode())
        except (library.basic.LightGBMError, ValueError) as error:
            raise _unreadable("LightGBM", error) from error
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
            raise _unreadable("XGBoost", error) from error
        self.num_features: int = self.booster.num_features()
        self.names = _given(self.booster.feature_names or [], "f")
        best = self.booster.attr("best_iteration")
        self.rounds = (0, 0) if best is None else (0, int(best) + 1)

    def predict(self, features: NDArray[Any]) -> Any:
        self.booster.set_param({"nthread": torch.get_num_threads()})
        return self.booster.inplace_predict(
            features, iteration_range=self.rounds, predict_type="margin", validate_features=False
        )


def _as_json(content: bytes, name: str) -> bytes:
    """Only JSON can be looked through before the library reads it, which every later reading then does."""
    library = _library("xgboost")
    booster = library.Booster()
    try:
        booster.load_model(bytearray(content))
        return bytes(booster.save_raw("json"))
    except (library.core.XGBoostError, ValueError) as error:
        raise _unreadable("XGBoost", error, name) from error


def _unreadable(title: str, error: Exception, name: str | None = None) -> CheckpointError:
    first = " ".join(str(error).split("Stack trace")[0].split())
    return CheckpointError(f"{name or f'the {title} model'} cannot be used: {title} cannot read it ({first[:200]})")


def _given(names: list[str], prefix: str) -> list[str] | None:
    """The names, unless the library made them up."""
    return None if names == [f"{prefix}{number}" for number in range(len(names))] else names


def _plain(name: str) -> str:
    """LightGBM writes blanks as underlines."""
    return "_".join(name.split())


def _library(kind: str) -> Any:
    return require(kind, f"because the model adds to a {KINDS[kind]} model", EXTRA)
