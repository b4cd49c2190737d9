"""Trees beside ours: read from files of their libraries, checked before those see them, one score for both."""

from __future__ import annotations

import json
import pickle
from copy import deepcopy
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from lgmml_torch import checks
from lgmml_torch.app.rankers import fit_lightgbm
from lgmml_torch.checks import CheckpointError, LGMMLError, MissingDependencyError
from lgmml_torch.functional.measures import Measure
from lgmml_torch.models.explain import explain
from lgmml_torch.models.export import export_onnx
from lgmml_torch.models.preprocess.steps import ListRank
from lgmml_torch.models.ranker import LGMML
from lgmml_torch.models.trees import TreeBase, file_kind
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


@cache
def _read_once(file: Path) -> TreeBase:
    return TreeBase.read(file)


def base_of(file: Path) -> TreeBase:
    """The trees of a file that does not change: reading starts a process, which takes seconds."""
    return deepcopy(_read_once(file))


def with_base(file: Path, *, weight: float = 0.75, own_weight: float = 2.0, **options: Any) -> LGMML:
    model = small_model(**options)
    model.base = base_of(file)
    model.base.weight, model.base.own_weight = weight, own_weight
    return model


def test_predictions_are_those_of_the_library(lightgbm_file: Path, tmp_path: Path) -> None:
    data = small_data(60, seed=9)
    binary = data.replace(labels=(data.labels > 0).float())
    boosters = [lightgbm_booster(), lightgbm_booster(binary, objective="regression", linear_tree=True)]
    for booster in boosters:
        booster.save_model(tmp_path / "m.txt")
        base = TreeBase.read(tmp_path / "m.txt")
        assert (base.kind, base.title, base.num_features) == ("lightgbm", "LightGBM", FEATURES)
        assert base.content.numpy().tobytes() == (tmp_path / "m.txt").read_bytes()
        found = base.predict(data.features, data.offsets)
        np.testing.assert_array_equal(found.numpy(), booster.predict(data.features.numpy(), raw_score=True))
    rows = data.features.half()  # features in other precisions are widened, and no documents are no scores
    wide = boosters[1].predict(rows.float().numpy(), raw_score=True)
    np.testing.assert_array_equal(base.predict(rows, data.offsets).numpy(), wide)
    assert base.predict(data.features.double(), data.offsets).dtype == torch.float64
    assert base.predict(data.features[:0], data.offsets[:1]).shape == (0,)
    (tmp_path / "m.txt").write_bytes(lightgbm_file.read_bytes().replace(b"\n", b"\r\n"))
    expected = base_of(lightgbm_file).predict(data.features, data.offsets)
    assert torch.equal(TreeBase.read(tmp_path / "m.txt").predict(data.features, data.offsets), expected)


@pytest.mark.parametrize("ending", ["json", "ubj"])
def test_predictions_of_xgboost_stop_at_the_best_iteration(ending: str, tmp_path: Path) -> None:
    booster, data = xgboost_booster(6), small_data(seed=2)
    for rounds in ((0, 0), (0, 2)):
        if rounds[1]:
            booster.set_attr(best_iteration=str(rounds[1] - 1))
        booster.save_model(tmp_path / f"m.{ending}")
        base = TreeBase.read(tmp_path / f"m.{ending}")
        assert (base.kind, base.title, base.num_features) == ("xgboost", "XGBoost", FEATURES)
        expected = booster.inplace_predict(data.features.numpy(), iteration_range=rounds, predict_type="margin")
        np.testing.assert_array_equal(base.predict(data.features, data.offsets).numpy(), expected.astype(np.float64))


def test_other_files_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "m"
    with pytest.raises(CheckpointError, match=r"^no model file at "):
        TreeBase.read(file)
    small_model().save(tmp_path / "ours.safetensors")
    ours = (tmp_path / "ours.safetensors").read_bytes()
    for content in (b"", b"junk", b"{}", b"trees\n", b"[1]", ours, bytes(100), pickle.dumps({"learner": 1})):
        file.write_bytes(content)
        assert file_kind(content) is None
        with pytest.raises(CheckpointError, match=r"is neither LightGBM's text nor XGBoost's JSON or UBJ$"):
            TreeBase.read(file)
    kinds = [file_kind(start + b'"learner"') for start in (b"{ ", b"{\n", b"{\r", b"{\t", b"{L")]
    assert kinds == ["xgboost"] * 4 + ["xgboost-ubj"]


def test_a_file_the_library_cannot_read_is_refused(lightgbm_file: Path, xgboost_file: Path, tmp_path: Path) -> None:
    text, whole = lightgbm_file.read_bytes(), xgboost_file.read_bytes()
    cases = [
        (text[: text.index(b"end of trees")], "it is cut short, the end of its trees is missing"),
        (text.replace(b"num_leaves=5", b"num_leaves=x"), "LightGBM cannot read it"),
        (text.replace(b"tree_sizes=", b"tree_sizes=9"), "LightGBM cannot read it"),
        (
            text.replace(b"pandas_categorical:null", b"pandas_categorical:[[1]]"),
            "its categories were numbered by pandas",
        ),
        (whole[: len(whole) // 2], r"XGBoost cannot read it \(xgboost\.\w+\.XGBoostError: "),
        (whole.replace(b'"num_nodes":"', b'"num_nodes":"x'), "XGBoost cannot read it"),
    ]
    for content, message in cases:
        assert content not in (text, whole)
        (tmp_path / "m.txt").write_bytes(content)
        with pytest.raises(CheckpointError, match=f"m.txt cannot be used: {message}") as caught:
            TreeBase.read(tmp_path / "m.txt")
        assert "\n" not in str(caught.value)


def test_damage_inside_our_own_file_is_named(lightgbm_file: Path, xgboost_file: Path) -> None:
    for file, title in ((lightgbm_file, "LightGBM"), (xgboost_file, "XGBoost")):
        model = with_base(file)
        assert model.base is not None
        model.base.content[:50] = ord("x")
        with pytest.raises(CheckpointError, match=f"^the {title} model cannot be used: {title} cannot read it"):
            model.score(small_data())


class TestChecks:
    def test_the_number_of_features(self, lightgbm_file: Path, xgboost_file: Path) -> None:
        for file, title in ((lightgbm_file, "LightGBM"), (xgboost_file, "XGBoost")):
            base = base_of(file)
            base.check(FEATURES)
            base.check(FEATURES, ("a", "b", "c", "d", "e"))  # the trees' own names are made up
            with pytest.raises(LGMMLError, match=f"^the {title} model has 5 features, the data has 6$"):
                base.check(6)
            with pytest.raises(LGMMLError, match=r"`features` must have shape \(\*, 5\), got \(2, 4\)"):
                base.predict(torch.zeros(2, 4), torch.tensor([0, 2]))

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
            for name in ("weight", "own_weight"):
                with pytest.raises(LGMMLError, match=f"`{name}` must be at least 0 and finite"):
                    TreeBase(b"", kind="lightgbm", **{name: value})
        assert TreeBase(b"abc", kind="lightgbm", weight=0).spec() == {
            "kind": "lightgbm", "size": 3, "weight": 0.0, "own_weight": 1.0, "list_ranks": False
        }  # fmt: skip
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
    @pytest.mark.parametrize(("mode", "dtype"), [("shared", torch.float32), ("per_query", torch.float64)])
    def test_the_score_is_the_weighted_sum(self, mode: str, dtype: torch.dtype, lightgbm_file: Path) -> None:
        model, data = with_base(lightgbm_file, mode=mode, dtype=dtype), small_data(seed=3)
        assert model.base is not None
        expected = 2.0 * small_model(mode=mode, dtype=dtype).score(data).double()
        expected += 0.75 * model.base.predict(data.features, data.offsets)
        assert model.score(data).dtype == dtype
        assert torch.equal(model.score(data), expected.to(dtype))
        assert torch.equal(model.score(data, alone=True), small_model(mode=mode, dtype=dtype).score(data))

    @pytest.mark.parametrize("library", ["lightgbm", "xgboost"])
    def test_one_file_holds_both(self, library: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
        model, data = with_base(request.getfixturevalue(f"{library}_file")), small_data(seed=4)
        model.save(tmp_path / "m.safetensors")
        again = LGMML.load(tmp_path / "m.safetensors")
        assert torch.equal(again.score(data), model.score(data))
        assert again.base is not None
        assert (again.base.kind, again.base.weight, again.base.own_weight) == (library, 0.75, 2.0)
        assert json.dumps(again.spec()["base"]) == json.dumps(model.spec()["base"])

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
        one, other = base_of(lightgbm_file), TreeBase.read(tmp_path / "other.txt")
        data, holder = small_data(), TreeBase.from_spec(other.spec())
        lists = (data.features, data.offsets)
        assert not torch.equal(one.predict(*lists), other.predict(*lists))
        holder.load_state_dict(other.state_dict())
        assert torch.equal(holder.predict(*lists), other.predict(*lists))

    def test_without_idle_notices_a_new_base(self, lightgbm_file: Path) -> None:
        model = small_model()
        assert model.without_idle("shared").base is None
        model.base = base_of(lightgbm_file)
        assert model.without_idle("shared").base is model.base

    def test_equal_rows_get_equal_scores(self, lightgbm_file: Path) -> None:
        """Also where the parts cancel, so that rounding of ours is large beside their sum."""
        model = with_base(lightgbm_file)
        assert model.base is not None
        row = small_data(seed=1).features[:1]
        others = torch.randn(20, FEATURES, generator=torch.Generator().manual_seed(0))
        features = torch.cat([row.expand(37, -1), others, row.expand(30, -1)])
        data = RankingData.from_arrays(features, torch.zeros(87), qid=[1] * 87)
        own, theirs = model.score(data, alone=True), model.base.predict(data.features, data.offsets)
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
        theirs = model.base.predict(part.features, part.offsets)[rows]
        assert found.base == pytest.approx(0.75 * float(theirs[0] - theirs[1]))
        assert explain(small_model(), data, qid=data.qids[query], document=0, over=1).base == 0

    def test_trees_may_see_ranks_within_the_list(self, tmp_path: Path) -> None:
        """A score then depends on the rest of the list; one file holds all of it."""
        lightgbm = pytest.importorskip("lightgbm")
        data = small_data(60, seed=9)
        trees = fit_lightgbm({"train": data, "valid": small_data(20, seed=4)}, Measure.of("ndcg@5"), list_ranks=True)
        trees.check(FEATURES)
        both = np.column_stack([data.features, ListRank().fit_transform(data.features, data.offsets)])
        booster = lightgbm.Booster(model_str=trees.content.numpy().tobytes().decode())
        np.testing.assert_array_equal(trees.predict(data.features, data.offsets).numpy(), booster.predict(both))
        model = small_model()
        model.base = trees
        model.save(tmp_path / "m.safetensors")
        again = LGMML.load(tmp_path / "m.safetensors")
        assert torch.equal(again.score(data), model.score(data))
        query = int(data.sizes.argmax())
        alone = data.select([query])
        rows = slice(int(data.offsets[query]), int(data.offsets[query + 1]))
        torch.testing.assert_close(model.score(alone), model.score(data)[rows], rtol=1e-5, atol=1e-6)
        with pytest.raises(LGMMLError, match="the LightGBM model has 5 features, the data has 10"):
            trees.check(2 * FEATURES)

    def test_what_cannot_have_trees_says_so(self, lightgbm_file: Path, tmp_path: Path) -> None:
        model = with_base(lightgbm_file)
        with pytest.raises(LGMMLError, match="`model` must not add to a LightGBM model to be exported"):
            export_onnx(model, tmp_path / "m.onnx")
