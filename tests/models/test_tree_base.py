"""Trees beside ours: read from files of their libraries, checked before those see them, one score for both."""

from __future__ import annotations

import importlib
import json
import pickle
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from lgmml_torch import checks
from lgmml_torch.checks import CheckpointError, LGMMLError, MissingDependencyError
from lgmml_torch.models.explain import explain
from lgmml_torch.models.export import export_onnx
from lgmml_torch.models.ranker import LGMML
from lgmml_torch.models.tree_base import TreeBase
from lgmml_torch.ragged import RankingData
from tests.doors import FEATURES, small_data, small_model

TINY = {"num_leaves": 5, "min_data_in_leaf": 3, "verbosity": -1, "num_threads": 1}


def lightgbm_booster(
    data: RankingData | None = None, rounds: int = 4, names: list[str] | None = None, **params: Any
) -> Any:
    lightgbm = pytest.importorskip("lightgbm")
    data = small_data(60, seed=9) if data is None else data
    group = data.sizes.numpy() if params.get("objective", "lambdarank") == "lambdarank" else None
    extra = {} if names is None else {"feature_name": names}
    lists = lightgbm.Dataset(data.features.numpy(), data.labels.numpy(), group=group, **extra)
    return lightgbm.train({"objective": "lambdarank", **TINY, **params}, lists, rounds)


def xgboost_booster(rounds: int = 4, names: list[str] | None = None, **params: Any) -> Any:
    xgboost = pytest.importorskip("xgboost")
    data = small_data(60, seed=9)
    matrix = xgboost.DMatrix(data.features.numpy(), data.labels.numpy(), feature_names=names, nthread=1)
    if params.get("objective", "rank:ndcg").startswith("rank"):
        matrix.set_group(data.sizes.numpy())
    return xgboost.train({"objective": "rank:ndcg", "max_depth": 3, "nthread": 1, **params}, matrix, rounds)


@pytest.fixture(scope="module")
def lightgbm_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("trees") / "model.txt"
    lightgbm_booster().save_model(file)
    return file


@pytest.fixture(scope="module")
def xgboost_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("trees") / "model.json"
    xgboost_booster().save_model(file)
    return file


def with_base(file: Path, *, weight: float = 0.75, own_weight: float = 2.0, **options: Any) -> LGMML:
    model = small_model(**options)
    model.base = TreeBase.read(file)
    model.base.weight, model.base.own_weight = weight, own_weight
    return model


class TestReading:
    def test_lightgbm_is_recognised_and_predicts_as_the_library_does(self, lightgbm_file: Path) -> None:
        base, data = TreeBase.read(lightgbm_file), small_data(seed=2)
        booster = importlib.import_module("lightgbm").Booster(model_file=lightgbm_file)
        assert (base.kind, base.title) == ("lightgbm", "LightGBM")
        assert base.content.numpy().tobytes() == lightgbm_file.read_bytes()
        found = base.predict(data.features)
        np.testing.assert_array_equal(found.numpy(), booster.predict(data.features.numpy(), raw_score=True))
        assert found.dtype == torch.float64
        assert base.predict(data.features[:0]).shape == (0,)

    @pytest.mark.parametrize("ending", ["json", "ubj"])
    def test_xgboost_is_recognised_and_predicts_as_the_library_does(self, ending: str, tmp_path: Path) -> None:
        booster, data = xgboost_booster(), small_data(seed=2)
        booster.save_model(tmp_path / f"m.{ending}")
        base = TreeBase.read(tmp_path / f"m.{ending}")
        assert (base.kind, base.title) == ("xgboost", "XGBoost")
        expected = booster.inplace_predict(data.features.numpy(), predict_type="margin")
        np.testing.assert_array_equal(base.predict(data.features).numpy(), expected.astype(np.float64))

    @pytest.mark.parametrize(
        "params",
        [{"objective": "binary"}, {"objective": "regression", "linear_tree": True},
         {"objective": "binary", "boosting": "rf", "bagging_freq": 1, "bagging_fraction": 0.5}],
        ids=["margin", "linear", "forest"],
    )  # fmt: skip
    def test_other_kinds_of_lightgbm_trees(self, params: dict[str, Any], tmp_path: Path) -> None:
        data = small_data(60, seed=9)
        booster = lightgbm_booster(data.replace(labels=(data.labels > 0).float()), **params)
        booster.save_model(tmp_path / "m.txt")
        found = TreeBase.read(tmp_path / "m.txt").predict(data.features)
        np.testing.assert_array_equal(found.numpy(), booster.predict(data.features.numpy(), raw_score=True))

    def test_trees_after_the_best_iteration_are_left_out(self, tmp_path: Path) -> None:
        booster, data = xgboost_booster(6), small_data(seed=2)
        booster.set_attr(best_iteration="1")
        booster.save_model(tmp_path / "m.json")
        expected = booster.inplace_predict(data.features.numpy(), iteration_range=(0, 2), predict_type="margin")
        found = TreeBase.read(tmp_path / "m.json").predict(data.features)
        np.testing.assert_array_equal(found.numpy(), expected.astype(np.float64))

    def test_lines_may_end_as_on_other_systems(self, lightgbm_file: Path, tmp_path: Path) -> None:
        (tmp_path / "m.txt").write_bytes(lightgbm_file.read_bytes().replace(b"\n", b"\r\n"))
        base, data = TreeBase.read(tmp_path / "m.txt"), small_data()
        assert torch.equal(base.predict(data.features), TreeBase.read(lightgbm_file).predict(data.features))

    def test_other_files_are_refused(self, tmp_path: Path) -> None:
        file = tmp_path / "m"
        with pytest.raises(CheckpointError, match=r"^no model file at "):
            TreeBase.read(file)
        small_model().save(tmp_path / "ours.safetensors")
        contents = [b"", b"junk", b"{}", b"trees\n", b"[1]", (tmp_path / "ours.safetensors").read_bytes(), bytes(100)]
        for content in contents:
            file.write_bytes(content)
            with pytest.raises(CheckpointError, match=r"is neither LightGBM's text nor XGBoost's JSON or UBJ$"):
                TreeBase.read(file)

    def test_a_pickle_is_never_opened(self, tmp_path: Path) -> None:
        (tmp_path / "m.pkl").write_bytes(pickle.dumps({"learner": 1}))
        with pytest.raises(CheckpointError, match="is neither"):
            TreeBase.read(tmp_path / "m.pkl")


class TestDamage:
    """LightGBM ends the process on many of these, so a refusal here is what keeps the test running."""

    def test_a_cut_file(self, lightgbm_file: Path, tmp_path: Path) -> None:
        whole, file = lightgbm_file.read_bytes(), tmp_path / "m.txt"
        end = whole.index(b"end of trees")
        for length in [5, 40, 200, *range(300, end, 97), end, end + 3]:
            file.write_bytes(whole[:length])
            with pytest.raises(CheckpointError, match=r"m\.txt cannot be used: "):
                TreeBase.read(file)
        expected = TreeBase.read(lightgbm_file).predict(small_data().features)
        for length in range(end + 13, len(whole), 301):  # only notes about the training are gone
            file.write_bytes(whole[:length])
            assert torch.equal(TreeBase.read(file).predict(small_data().features), expected)

    @pytest.mark.parametrize(
        ("old", "new", "message"),
        [
            (b"left_child=", b"left_child=9", "a branch that leads nowhere"),
            (b"right_child=", b"right_child=-9", "a branch that leads nowhere"),
            (b"split_feature=", b"split_feature=7", "a feature beyond its 5"),
            (b"leaf_value=", b"leaf_value=x", "it is damaged"),
            (b"leaf_value=", b"leaf_value=1 ", "`leaf_value` of a tree is not complete"),
            (b"num_leaves=5", b"num_leaves=6", "is not complete"),
            (b"decision_type=2", b"decision_type=3", "categories that are not there"),
            (b"leaf_count=", b"\nleaf_count=", "lines that say nothing"),
            (b"Tree=1", b"Tree=2", "tree 2 of 4 is cut short"),
            (b"max_feature_idx=4", b"max_feature_idx=5", "`feature_names` is not one for each of 6 features"),
            (b"end of trees", b"end of tree", "the end of its trees is missing"),
            (b"pandas_categorical:null", b"pandas_categorical:[[1]]", "its categories were numbered by pandas"),
        ],
    )
    def test_a_changed_lightgbm_file(
        self, old: bytes, new: bytes, message: str, lightgbm_file: Path, tmp_path: Path
    ) -> None:
        whole = lightgbm_file.read_bytes()
        assert old in whole
        first = whole.index(b"Tree=0\n")
        size = int(whole.partition(b"tree_sizes=")[2].split()[0])
        changed = whole.replace(old, new, 1)
        if first < whole.index(old) < first + size:  # sizes still fit: what is inside must be looked at
            changed = changed.replace(b"tree_sizes=%d " % size, b"tree_sizes=%d " % (size + len(new) - len(old)), 1)
        (tmp_path / "m.txt").write_bytes(changed)
        with pytest.raises(CheckpointError, match=message):
            TreeBase.read(tmp_path / "m.txt")

    @pytest.mark.parametrize(
        ("place", "value", "message"),
        [
            (("left_children", 0), 99, "leads nowhere"),
            (("right_children", 0), 0, "leads back"),
            (("split_indices", 0), 5, "a feature beyond its 5"),
            (("split_conditions",), [], "a tree is not complete"),
            (("split_type", 0), 1, "its categories do not fit"),
            (("tree_param", "num_nodes"), "x", "it is damaged"),
            (("parents",), None, "it is damaged"),
        ],
    )
    def test_a_changed_xgboost_file(
        self, place: tuple[Any, ...], value: Any, message: str, xgboost_file: Path, tmp_path: Path
    ) -> None:
        content = json.loads(xgboost_file.read_bytes())
        part = content["learner"]["gradient_booster"]["model"]["trees"][1]
        for key in place[:-1]:
            part = part[key]
        part[place[-1]] = value
        (tmp_path / "m.json").write_text(json.dumps(content))
        with pytest.raises(CheckpointError, match=f"m.json cannot be used: .*{message}"):
            TreeBase.read(tmp_path / "m.json")

    @pytest.mark.parametrize("ending", ["json", "ubj"])
    def test_a_cut_xgboost_file(self, ending: str, tmp_path: Path) -> None:
        file = tmp_path / f"m.{ending}"
        xgboost_booster().save_model(file)
        whole = file.read_bytes()
        for length in (30, len(whole) // 2, len(whole) - 1):
            file.write_bytes(whole[:length])
            with pytest.raises(CheckpointError, match="cannot be used: ") as caught:
                TreeBase.read(file)
            assert "\n" not in str(caught.value)

    def test_trees_are_what_is_asked_for(self, xgboost_file: Path, tmp_path: Path) -> None:
        (tmp_path / "m.json").write_bytes(xgboost_file.read_bytes().replace(b'"gbtree"', b'"gblinear"'))
        with pytest.raises(CheckpointError, match="it has no trees but is of the kind 'gblinear'"):
            TreeBase.read(tmp_path / "m.json")

    def test_a_damaged_part_of_our_own_file(self, lightgbm_file: Path, tmp_path: Path) -> None:
        model = with_base(lightgbm_file)
        assert model.base is not None
        model.base.content[500:520] = ord("x")
        model.save(tmp_path / "m.safetensors")
        with pytest.raises(CheckpointError, match="the LightGBM model cannot be used"):
            LGMML.load(tmp_path / "m.safetensors").score(small_data())


class TestChecks:
    def test_the_number_of_features(self, lightgbm_file: Path, xgboost_file: Path) -> None:
        for file, title in ((lightgbm_file, "LightGBM"), (xgboost_file, "XGBoost")):
            base = TreeBase.read(file)
            base.check(FEATURES)
            base.check(FEATURES, ("a", "b", "c", "d", "e"))  # the trees' own names are made up
            with pytest.raises(LGMMLError, match=f"^the {title} model has 5 features, the data has 6$"):
                base.check(6)
            with pytest.raises(LGMMLError, match=r"`features` must have shape \(\*, 5\), got \(2, 4\)"):
                base.predict(torch.zeros(2, 4))

    @pytest.mark.parametrize("library", ["lightgbm", "xgboost"])
    def test_names_must_agree_where_both_have_some(self, library: str, tmp_path: Path) -> None:
        names = ["bm25", "page_rank", "clicks", "age", "length"]
        booster = lightgbm_booster(names=names) if library == "lightgbm" else xgboost_booster(names=names)
        booster.save_model(tmp_path / "m.json")
        base = TreeBase.read(tmp_path / "m.json")
        base.check(FEATURES)
        base.check(FEATURES, tuple(names))
        base.check(FEATURES, ("bm25", "page rank", "clicks", "age", "length"))
        with pytest.raises(LGMMLError, match="in their order, got 'clicks' where the data has 'age'"):
            base.check(FEATURES, ("bm25", "page_rank", "age", "clicks", "length"))
        data = small_data()
        model = small_model()
        model.base = base
        with pytest.raises(LGMMLError, match="got 'bm25' where the data has 'a'"):
            model.score(data.replace(feature_names=("a", "b", "c", "d", "e")))

    def test_one_score_for_a_document(self, tmp_path: Path) -> None:
        lightgbm_booster(objective="multiclass", num_class=3).save_model(tmp_path / "m.txt")
        with pytest.raises(LGMMLError, match="the LightGBM model must give one score for a document, got 3"):
            TreeBase.read(tmp_path / "m.txt").check(FEATURES)
        xgboost_booster(objective="multi:softprob", num_class=3).save_model(tmp_path / "m.json")
        with pytest.raises(LGMMLError, match="the XGBoost model must give one score for a document, got 3"):
            TreeBase.read(tmp_path / "m.json").check(FEATURES)

    def test_weights_must_be_weights(self) -> None:
        for value in (-0.1, float("nan"), float("inf")):
            with pytest.raises(LGMMLError, match="`weight` must be at least 0 and finite"):
                TreeBase(b"", kind="lightgbm", weight=value)
        with pytest.raises(LGMMLError, match="`kind` must be one of 'lightgbm', 'xgboost'"):
            TreeBase(b"", kind="catboost")

    def test_a_missing_library_is_named(
        self, lightgbm_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with_base(lightgbm_file).save(tmp_path / "m.safetensors")

        def missing(name: str) -> Any:
            raise ImportError(name)

        monkeypatch.setattr(checks, "importlib", SimpleNamespace(import_module=missing))
        model = LGMML.load(tmp_path / "m.safetensors")
        assert model.base is not None
        assert model.base.needs == "lightgbm (pip install 'lgmml-torch[trees]')"
        with pytest.raises(MissingDependencyError, match=r"`lightgbm` is needed.*pip install 'lgmml-torch\[trees\]'"):
            model.score(small_data())
        model.base.weight = 0.0  # then nobody asks the trees
        assert torch.equal(model.score(small_data()), 2 * model.score(small_data(), alone=True))


class TestTogether:
    @pytest.mark.parametrize("mode", ["shared", "per_query", "amortized"])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_the_score_is_the_weighted_sum(self, mode: str, dtype: torch.dtype, lightgbm_file: Path) -> None:
        model, data = with_base(lightgbm_file, mode=mode, dtype=dtype), small_data(seed=3)
        assert model.base is not None
        expected = 2.0 * small_model(mode=mode, dtype=dtype).score(data).double()
        expected += 0.75 * model.base.predict(data.features)
        assert model.score(data).dtype == dtype
        assert torch.equal(model.score(data), expected.to(dtype))
        assert torch.equal(model.score(data, alone=True), small_model(mode=mode, dtype=dtype).score(data))

    def test_training_does_without_it(self, lightgbm_file: Path) -> None:
        model, data = with_base(lightgbm_file), small_data()
        assert torch.equal(model(data.features, data.offsets), small_model()(data.features, data.offsets))

    @pytest.mark.parametrize("library", ["lightgbm", "xgboost"])
    def test_one_file_holds_both(self, library: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
        model, data = with_base(request.getfixturevalue(f"{library}_file")), small_data(seed=4)
        model.save(tmp_path / "m.safetensors")
        again = LGMML.load(tmp_path / "m.safetensors")
        assert torch.equal(again.score(data), model.score(data))
        assert again.base is not None
        assert (again.base.kind, again.base.weight, again.base.own_weight) == (library, 0.75, 2.0)
        assert json.dumps(again.spec()["base"]) == json.dumps(model.spec()["base"])

    def test_a_model_without_says_nothing_of_it(self, tmp_path: Path) -> None:
        model = small_model()
        assert "base" not in model.spec()
        model.save(tmp_path / "m.safetensors")
        assert LGMML.load(tmp_path / "m.safetensors").base is None

    def test_copies_and_pickles_keep_it(self, lightgbm_file: Path) -> None:
        model, data = with_base(lightgbm_file), small_data()
        expected = model.score(data)  # the library has read the trees by now
        for copy in (deepcopy(model), pickle.loads(pickle.dumps(model)), model.without_idle("shared")):
            assert torch.equal(copy.score(data), expected)
        wide = deepcopy(model).double()
        assert wide.base is not None
        assert wide.base.content.dtype == torch.uint8
        assert torch.allclose(wide.score(data), expected.double(), atol=1e-4)

    def test_new_bytes_are_read_anew(self, lightgbm_file: Path, tmp_path: Path) -> None:
        lightgbm_booster(rounds=9).save_model(tmp_path / "other.txt")
        one, other = (TreeBase.read(file) for file in (lightgbm_file, tmp_path / "other.txt"))
        data, holder = small_data(), TreeBase.from_spec(other.spec())
        assert not torch.equal(one.predict(data.features), other.predict(data.features))
        holder.load_state_dict(other.state_dict())
        assert torch.equal(holder.predict(data.features), other.predict(data.features))

    def test_without_idle_notices_a_new_base(self, lightgbm_file: Path) -> None:
        model = small_model()
        assert model.without_idle("shared").base is None
        model.base = TreeBase.read(lightgbm_file)
        assert model.without_idle("shared").base is model.base

    def test_equal_rows_get_equal_scores(self, lightgbm_file: Path) -> None:
        """Also where the parts cancel, so that rounding of ours is large beside their sum."""
        model = with_base(lightgbm_file)
        assert model.base is not None
        row = small_data(seed=1).features[:1]
        others = torch.randn(20, FEATURES, generator=torch.Generator().manual_seed(0))
        features = torch.cat([row.expand(37, -1), others, row.expand(30, -1)])
        data = RankingData.from_arrays(features, torch.zeros(87), qid=[1] * 87)
        own, theirs = model.score(data, alone=True), model.base.predict(data.features)
        same = (data.features == row).all(dim=1)
        model.base.own_weight, model.base.weight = 1.0, abs(float(own[same][0] / theirs[same][0]))
        assert model.score(data)[same].unique().numel() == 1

    def test_an_explanation_adds_up(self, lightgbm_file: Path) -> None:
        model, data = with_base(lightgbm_file, dtype=torch.float64), small_data(seed=3).to(dtype=torch.float64)
        assert model.base is not None
        query = int(data.sizes.argmax())
        found = explain(model, data, qid=data.qids[query], document=0, over=1)
        part = data.select([query])
        rows = part.order.argsort()[[0, 1]]
        torch.testing.assert_close(found.scores, model.score(part)[rows])
        assert float(found.metrics.sum()) + found.base == pytest.approx(found.difference, rel=1e-9)
        theirs = model.base.predict(part.features[rows])
        assert found.base == pytest.approx(0.75 * float(theirs[0] - theirs[1]))
        assert explain(small_model(), data, qid=data.qids[query], document=0, over=1).base == 0

    def test_what_cannot_have_trees_says_so(self, lightgbm_file: Path, tmp_path: Path) -> None:
        model = with_base(lightgbm_file)
        with pytest.raises(LGMMLError, match="`model` must not add to a LightGBM model to be exported"):
            export_onnx(model, tmp_path / "m.onnx")
        with pytest.raises(LGMMLError, match="`model` must not add to a LightGBM model to be compressed"):
            model.compress(0.1, small_data())

    def test_no_operation_assumes_a_device(self, lightgbm_file: Path) -> None:
        model, data = with_base(lightgbm_file), small_data()
        expected = model.score(data)
        with torch.device("meta"):
            assert torch.equal(model.score(data), expected)
            base = TreeBase.read(lightgbm_file)
            base.check(FEATURES)
        assert model.base is not None
        assert torch.equal(base.predict(data.features), model.base.predict(data.features))
