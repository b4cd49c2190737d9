"""Features set aside: by both doors, in the model file, exported, and told; scores take all raw features."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from lgmml_torch.app.config import load_config
from lgmml_torch.app.train import train
from lgmml_torch.checks import LGMMLError
from lgmml_torch.data.write import save_table
from lgmml_torch.estimator import LGMMLRanker
from lgmml_torch.fitting.boosted import BoostedBuilder
from lgmml_torch.models.export import compare_exported, export_onnx
from lgmml_torch.models.phi import Phi
from lgmml_torch.models.preprocess.compose import list_rank_features
from lgmml_torch.models.preprocess.steps import KeepColumns
from lgmml_torch.models.ranker import LGMML
from lgmml_torch.ragged import RankingData
from lgmml_torch.training.preprocessed import select_features
from lgmml_torch.training.recipe import Recipe
from lgmml_torch.training.stages import prepare

REAL, ALL = 4, 16
QUICK = {"rounds": 4, "epochs": 1, "random_state": 0, "validation_fraction": 0.0}


def lists(noise: int = ALL - REAL, queries: int = 60, seed: int = 0) -> RankingData:
    """Four features that say what is relevant, and some that mean nothing."""
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(queries * 15, REAL + noise)).astype(np.float32)
    score = X[:, :REAL].sum(1) + rng.normal(size=len(X))
    labels = (score > 1).astype(int) + (score > 3)
    names = [f"real {n}" for n in range(REAL)] + [f"noise {n}" for n in range(noise)]
    return RankingData.from_arrays(X, labels, qid=np.arange(queries).repeat(15), feature_names=names)


def fitted(data: RankingData, **params: object) -> LGMMLRanker:
    return LGMMLRanker(**{**QUICK, **params}).fit(data.features, data.labels, group=data.sizes)


@pytest.fixture(scope="module")
def model() -> LGMML:
    """Boosted metrics of the features that stay."""
    return fitted(lists()).model_


def seen_features(model: LGMML) -> set[int]:
    return {source.feature for source in model.preprocess.sources()}


def test_metrics_see_what_stays(model: LGMML) -> None:
    kept = set(select_features(lists()).kept.tolist())
    assert set(range(REAL)) <= kept < set(range(ALL))
    assert seen_features(model) == kept
    assert model.preprocess.num_features_in == ALL


def test_scores_take_raw_features_and_do_not_see_what_is_set_aside(model: LGMML) -> None:
    data, kept = lists(seed=1), sorted(seen_features(model))
    other = torch.randn(data.features.shape, generator=torch.Generator().manual_seed(0))
    other[:, kept] = data.features[:, kept]
    assert model.score(data.replace(features=other)).equal(model.score(data))
    with pytest.raises(LGMMLError, match="16"):
        model.score(data.replace(features=data.features[:, kept], feature_names=None))


def test_metrics_are_those_of_the_features_that_stay() -> None:
    """As if the others had never been there."""
    data = lists()
    less = data.replace(features=data.features[:, select_features(data).kept], feature_names=None)
    recipe = Recipe(list_rank_features, BoostedBuilder(rounds=4))
    chosen = prepare({"train": data}, recipe).model(Phi)
    alone = prepare({"train": less}, replace(recipe, features="all")).model(Phi)
    assert alone.score(less).equal(chosen.score(data))


def test_files_keep_the_choice(model: LGMML, tmp_path: Path) -> None:
    data = lists(seed=1)
    model.save(tmp_path / "model.safetensors")
    again = LGMML.load(tmp_path / "model.safetensors")
    assert again.score(data).equal(model.score(data))
    assert seen_features(again) == seen_features(model)


def test_exported_models_keep_the_choice(model: LGMML, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    path = export_onnx(model, tmp_path / "model.onnx")
    parity = compare_exported(path, model, lists(seed=1))
    assert parity.largest <= 1e-5 * parity.size
    assert parity.size == float(model.score(lists(seed=1)).abs().max())


def test_trained_metrics_see_what_stays() -> None:
    data = lists()
    params = {"bank": "trained", "num_metrics": 5, "rounds": None}
    assert seen_features(fitted(data, **params).model_) == set(select_features(data).kept.tolist())


def test_all_features_are_kept_where_that_is_asked_for_or_the_metrics_are_sampled() -> None:
    for params in ({"features": "all"}, {"bank": "sampled", "num_metrics": 5, "rounds": None}):
        assert len(seen_features(fitted(lists(), **params).model_)) == ALL


def test_clean_data_costs_nothing() -> None:
    """The same model, bit for bit, and no step more."""
    data = lists(noise=1)
    chosen, whole = fitted(data).model_, fitted(data, features="all").model_
    assert chosen.preprocess.spec() == whole.preprocess.spec() == list_rank_features().spec()
    assert chosen.score(data).equal(whole.score(data))


def test_a_model_to_go_on_from_keeps_its_features(model: LGMML) -> None:
    data = lists(seed=2)
    ranker = LGMMLRanker(**{**QUICK, "rounds": 2})
    grown = ranker.fit(data.features, data.labels, group=data.sizes, init_model=model).model_
    assert seen_features(grown) == seen_features(model)


def test_a_run_tells_what_was_set_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_table(lists(queries=80), tmp_path / "lists.csv")
    words = [
        "data=table", f"data.path={tmp_path / 'lists.csv'}", "local_metrics.rounds=3", "trainer.max_epochs=1",
        "loader.num_workers=0", "trainer.enable_progress_bar=false", "callbacks=quiet", "logger=none",
        "trainer.accelerator=cpu", f"paths.output_dir={tmp_path / 'run'}", f"paths.cache_dir={tmp_path / 'cache'}",
        "name=noisy",
    ]  # fmt: skip
    with caplog.at_level(logging.INFO):
        result = train(load_config(words), words)
    assert result is not None
    gone = sorted(set(range(ALL)) - seen_features(result.model))
    sentence = f"Features set aside: {len(gone)} of {ALL}, because over"
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    for text in (caplog.text, (tmp_path / "run" / "report.md").read_text(), report["config"]["chosen"]):
        assert sentence in text
    assert f"noise {gone[0] - REAL}, noise {gone[1] - REAL}" in report["config"]["chosen"]


def test_features_without_names_have_their_numbers() -> None:
    """From 1, as in LETOR files."""
    data = lists(queries=80).replace(feature_names=None)
    prepared = prepare(
        {"train": data}, Recipe(list_rank_features, BoostedBuilder.of(rounds=2), partial(Phi, mode="shared"))
    )
    gone = sorted(set(range(ALL)) - seen_features(prepared.model(Phi)))
    assert prepared.set_aside.endswith(f": {', '.join(str(column + 1) for column in gone)}")


def test_columns_must_be_there() -> None:
    with pytest.raises(LGMMLError, match="`columns` must lie below the 2 features, got 2"):
        KeepColumns([2]).fit(torch.zeros(3, 2), torch.tensor([0, 3]))
    with pytest.raises(LGMMLError, match="`features` must be one of 'auto', 'all'"):
        fitted(lists(), features="some")
