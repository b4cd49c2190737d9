"""What trees are asked, how often their file is read, and in which precision; libraries that fail are named."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from lgmml_torch.checks import CheckpointError, LGMMLError
from lgmml_torch.models import tree_base
from lgmml_torch.models.tree_base import TreeBase
from tests.doors import FEATURES, small_data
from tests.models.test_tree_base import lightgbm_booster, xgboost_booster


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("trees")
    found = {"lightgbm": folder / "m.txt", "xgboost": folder / "m.json"}
    lightgbm_booster().save_model(found["lightgbm"])
    xgboost_booster().save_model(found["xgboost"])
    return found


both = pytest.mark.parametrize("library", ["lightgbm", "xgboost"])


def test_both_weights_are_one_unless_said_otherwise() -> None:
    base = TreeBase(b"abc", kind="lightgbm")
    assert base.spec() == {"kind": "lightgbm", "size": 3, "weight": 1.0, "own_weight": 1.0}
    assert base.content.tolist() == [97, 98, 99]


def test_weights_start_at_zero() -> None:
    assert TreeBase(b"", kind="xgboost", weight=0.0, own_weight=0).spec()["own_weight"] == 0.0
    for value in (-1e-9, float("nan"), float("inf")):
        with pytest.raises(LGMMLError, match="`own_weight` must be at least 0 and finite"):
            TreeBase(b"", kind="xgboost", own_weight=value)


def test_a_description_restores_kind_size_and_weights() -> None:
    spec = {"kind": "xgboost", "size": 4, "weight": 0.25, "own_weight": 3.0}
    base = TreeBase.from_spec(spec)
    assert base.spec() == spec
    assert base.content.tolist() == [0] * 4


@both
def test_scores_are_float64_also_of_no_documents(library: str, files: dict[str, Path]) -> None:
    base = TreeBase.read(files[library])
    for rows in (0, 1, 3):
        found = base.predict(torch.zeros(rows, FEATURES))
        assert (found.shape, found.dtype) == ((rows,), torch.float64)
    assert base.num_features == FEATURES


def test_trees_see_the_precision_of_the_data(files: dict[str, Path]) -> None:
    base = TreeBase.read(files["lightgbm"])
    booster = base._trees().booster
    seen: list[Any] = []

    def predict(x: Any, **options: Any) -> Any:
        seen.append(x)
        return booster.predict(x, **options)

    base._trees().booster = SimpleNamespace(predict=predict)
    x = small_data().features
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        base.predict(x.to(dtype))
    assert [array.dtype for array in seen] == [np.float32, np.float64, np.float32, np.float32]
    np.testing.assert_array_equal(seen[1], x.double().numpy())
    np.testing.assert_array_equal(seen[2], x.half().float().numpy())


def test_lightgbm_uses_as_many_threads_as_torch(files: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    base, asked = TreeBase.read(files["lightgbm"]), {}
    base._trees().booster = SimpleNamespace(predict=lambda x, **options: asked.update(options) or np.zeros(len(x)))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    base.predict(torch.zeros(2, FEATURES))
    assert asked == {"raw_score": True, "num_threads": 3}


def test_xgboost_uses_as_many_threads_as_torch(files: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    base, asked = TreeBase.read(files["xgboost"]), {}
    given = SimpleNamespace(set_param=asked.update, inplace_predict=lambda x, **options: np.zeros(len(x)))
    base._trees().booster = given
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    base.predict(torch.zeros(2, FEATURES))
    assert asked == {"nthread": 3}


@both
def test_a_file_is_read_once_and_again_when_its_bytes_change(
    library: str, files: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, x, read = TreeBase.read(files[library]), small_data().features, []
    real = tree_base._library
    monkeypatch.setattr(tree_base, "_library", lambda kind: read.append(kind) or real(kind))
    first = base.predict(x)
    assert torch.equal(base.predict(x), first)
    assert read == [library]
    (lightgbm_booster(rounds=9) if library == "lightgbm" else xgboost_booster(9)).save_model(tmp_path / "m.json")
    other = TreeBase.read(tmp_path / "m.json")
    base.content = other.content.clone()
    assert torch.equal(base.predict(x), other.predict(x))
    assert not torch.equal(base.predict(x), first)


@both
def test_names_that_the_library_made_up_are_no_names(library: str, tmp_path: Path) -> None:
    train = lightgbm_booster if library == "lightgbm" else xgboost_booster
    for names, expected in ((None, None), (["b", "a", "c", "d", "e"], ["b", "a", "c", "d", "e"])):
        train(names=names).save_model(tmp_path / "m.json")
        assert TreeBase.read(tmp_path / "m.json")._trees().names == expected


def refuse(*_: Any, **__: Any) -> None:
    raise ValueError("no\n such   tree\nStack trace:\n  [0] inside")


@pytest.mark.parametrize("title", ["LightGBM", "XGBoost"])
def test_a_library_that_cannot_read_its_file_is_named(
    title: str, files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    base = TreeBase.read(files[title.lower()])
    errors = {"basic": SimpleNamespace(LightGBMError=KeyError), "core": SimpleNamespace(XGBoostError=KeyError)}
    booster = refuse if title == "LightGBM" else lambda: SimpleNamespace(load_model=refuse)
    monkeypatch.setattr(tree_base, "_library", lambda kind: SimpleNamespace(Booster=booster, **errors))
    expected = rf"^the {title} model cannot be used: {title} cannot read it \(no such tree\)$"
    with pytest.raises(CheckpointError, match=expected):
        base.predict(torch.zeros(1, FEATURES))


def test_a_binary_file_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "m.ubj").write_bytes(b"{L\0\0\0\0\0\0\0\7learner")
    booster = lambda: SimpleNamespace(load_model=refuse)  # noqa: E731
    library = SimpleNamespace(Booster=booster, core=SimpleNamespace(XGBoostError=KeyError))
    monkeypatch.setattr(tree_base, "_library", lambda kind: library)
    with pytest.raises(CheckpointError, match=r"m\.ubj cannot be used: XGBoost cannot read it \(no such tree\)$"):
        TreeBase.read(tmp_path / "m.ubj")


@both
def test_a_check_asks_for_features_and_for_one_score(library: str, files: dict[str, Path]) -> None:
    base = TreeBase.read(files[library])
    base.check(FEATURES)
    with pytest.raises(LGMMLError, match="has 5 features, the data has 4"):
        base.check(4)
    trees = base._trees()
    trees.predict = lambda x: np.zeros((len(x), 2))  # type: ignore[method-assign]
    with pytest.raises(LGMMLError, match="must give one score for a document, got 2"):
        base.check(FEATURES)


def test_the_sum_keeps_the_precision_of_our_own_scores(files: dict[str, Path]) -> None:
    base, data = TreeBase.read(files["lightgbm"]), small_data()
    base.weight, base.own_weight = 0.5, 3.0
    for dtype in (torch.float32, torch.float64):
        own = torch.linspace(-1, 1, data.num_documents, dtype=dtype)
        found = base.add_to(own, data)
        assert found.dtype == dtype
        assert torch.equal(found, (3 * own.double() + 0.5 * base.predict(data.features)).to(dtype))
    wide = data.replace(features=torch.cat([data.features, data.features], dim=1))
    with pytest.raises(LGMMLError, match="has 5 features, the data has 10"):
        base.add_to(own, wide)
    base.weight = 0.0
    assert torch.equal(base.add_to(own, wide), 3 * own)  # nobody asks the trees
