"""One root: `train.py` and `LGMMLRanker` make equal recipes of equal settings, or refuse in the same sentence."""

from __future__ import annotations

import functools
from dataclasses import fields, is_dataclass
from typing import Any

import pytest
import torch

from lgmml_torch.app.compose import recipe_of as recipe_of_config
from lgmml_torch.app.compose import settle
from lgmml_torch.app.config import load_config
from lgmml_torch.checks import LGMMLError
from lgmml_torch.estimator import LGMMLRanker, _asked_params
from lgmml_torch.functional.losses import spearman_loss
from lgmml_torch.models.preprocess.base import Preprocess
from lgmml_torch.models.preprocess.steps import Norm2
from lgmml_torch.ragged import RankingData
from lgmml_torch.training.defaults import Sizes, choose_defaults, make_recipe

SIZES = {"small": (30, 20), "large": (250, 82)}  # queries, documents of each

# A parameter of the estimator, and what one types for it.
TABLE: list[tuple[dict[str, Any], list[str]]] = [
    ({}, []),
    ({"bank": "boosted"}, ["local_metrics=boosted"]),
    ({"bank": "trained"}, ["local_metrics=trained"]),
    ({"bank": "trained"}, ["experiment=trained"]),
    ({"bank": "sampled"}, ["local_metrics=sampled"]),
    ({"budget": "fast"}, ["budget=fast"]),
    ({"budget": "60s"}, ["budget=60s"]),
    ({"bank": "boosted", "budget": "fast"}, ["local_metrics=boosted", "budget=fast"]),
    ({"bank": "sampled", "budget": "fast"}, ["local_metrics=sampled", "budget=fast"]),
    ({"rounds": 50}, ["local_metrics.rounds=50"]),
    ({"bank": "trained", "rounds": 50}, ["experiment=trained", "local_metrics.rounds=50"]),
    ({"num_metrics": 60}, ["local_metrics.num_metrics=60"]),
    ({"bank": "boosted", "num_metrics": 60}, ["local_metrics=boosted", "local_metrics.num_metrics=60"]),
    ({"bank": "trained", "num_metrics": 60}, ["local_metrics=trained", "local_metrics.num_metrics=60"]),
    ({"bank": "sampled", "num_metrics": 60}, ["local_metrics=sampled", "local_metrics.num_metrics=60"]),
    ({"bank_options": {"lam": 0.5}}, ["local_metrics.lam=0.5"]),
    ({"bank": "boosted", "bank_options": {"lam": 0.5}}, ["local_metrics=boosted", "local_metrics.lam=0.5"]),
    ({"bank": "trained", "bank_options": {"rank": 3}}, ["local_metrics=trained", "local_metrics.rank=3"]),
    ({"preprocess": Norm2()}, ["preprocess=norm2"]),
    ({"features": "all"}, ["features=all"]),
    ({"bank": "sampled", "features": "all"}, ["local_metrics=sampled", "features=all"]),
    ({"max_one_hot": 5}, ["categories.max_one_hot=5"]),
    ({"kernel": "rbf"}, ["local_metrics.kernel=rbf"]),
    ({"phi": "per_query"}, ["phi=per_query"]),
    ({"phi": "amortized"}, ["phi=amortized"]),
    ({"phi": "deviations"}, ["phi=deviations"]),
    ({"policy": "ones"}, ["phi.policy=ones"]),
    ({"epochs": 3}, ["trainer.max_epochs=3"]),
    ({"learning_rate": 0.01}, ["optimizer.lr=0.01"]),
    ({"margin": 0.7}, ["loss.margin=0.7"]),
    ({"bank": "trained", "margin": 0.7}, ["local_metrics=trained", "loss.margin=0.7"]),
    ({"loss": "spearman"}, ["loss=spearman"]),
    ({"bank": "trained", "loss": spearman_loss},
     ["local_metrics=trained", "loss=lgmml_torch.functional.losses.spearman_loss"]),
    ({"bank": "sampled", "loss": "label_differences"}, ["local_metrics=sampled", "loss=label_differences"]),
    ({"bank": "trained", "loss": "warp", "margin": 0.7, "max_draws": 3},
     ["local_metrics=trained", "loss=warp", "loss.margin=0.7", "loader.max_draws=3"]),
    ({"measure": "map"}, ["measure=map"]),
    ({"batch_size": 7}, ["loader.batch_size=7"]),
    ({"max_draws": 3}, ["loader.max_draws=3"]),
    ({"random_state": 4}, ["seed=4"]),
]  # fmt: skip
# Parameters that say where and how, not what: the configuration has them elsewhere, or needs none.
ELSEWHERE = {"categories", "missing", "validation_fraction", "precision", "n_jobs", "device", "verbose"}


def lists(size: str) -> RankingData:
    queries, documents = SIZES[size]
    g = torch.Generator().manual_seed(0)
    count = queries * documents
    labels = torch.randint(0, 3, (count,), generator=g)
    return RankingData.from_arrays(torch.randn(count, 4, generator=g), labels, qid=torch.arange(count) % queries)


def plain(value: Any) -> Any:
    """Builders, settings and partial calls as dictionaries, which compare by what they hold."""
    if isinstance(value, functools.partial):
        return plain(value.func), {name: plain(each) for name, each in value.keywords.items()}
    if isinstance(value, Preprocess):
        return value.spec()
    if is_dataclass(value) and not isinstance(value, type):
        return type(value).__name__, {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    return [plain(each) for each in value] if isinstance(value, tuple) else value


def described(recipe: Any, trainer: dict[str, Any]) -> dict[str, Any]:
    """What is fitted: parts made once where they are made by a function."""
    phi = recipe.make_phi(3, 2)
    optimizer = recipe.phi.optimizer([torch.nn.Parameter(torch.zeros(1))])
    rates = {name: optimizer.defaults[name] for name in ("lr", "weight_decay")}
    loader = {"max_draws": 10, **recipe.phi.loader}
    return {
        "preprocess": recipe.preprocess().spec(),
        "bank": plain(recipe.builder),
        "phi": (phi.mode, phi.policy, phi.deviations, phi.hidden, phi.neighbours, phi.sparse),
        "optimizer": (type(optimizer).__name__, rates),
        "loader": (loader["batch_size"], loader["max_draws"]),
        "rest": [
            plain(part) for part in (recipe.phi.loss, recipe.phi.step_size, recipe.phi.dropout, recipe.categories)
        ],
        "features": (recipe.features, recipe.chooses_features),
        "choices": (recipe.seed, getattr(recipe.measure, "name", recipe.measure), recipe.phi.keep, trainer),
    }


def by_estimator(params: dict[str, Any], data: RankingData) -> dict[str, Any]:
    given = LGMMLRanker(**params).get_params(deep=False)
    chosen = choose_defaults(Sizes.of(data), _asked_params(given))
    trainer = {"gradient_clip_val": None, **chosen.trainer}
    if given["epochs"] is not None:
        trainer["max_epochs"] = given["epochs"]
    return described(make_recipe(given, chosen, given["random_state"] or 0), trainer)


def by_configuration(overrides: list[str], data: RankingData) -> dict[str, Any]:
    cfg = settle(load_config(overrides), overrides, {"train": data})
    names = ("max_epochs", "check_val_every_n_epoch", "gradient_clip_val")
    trainer = {name: cfg.trainer.get(name) for name in names}
    return described(recipe_of_config(cfg), trainer)


def outcome(make: Any, asked: Any, data: RankingData) -> Any:
    try:
        return make(asked, data)
    except LGMMLError as error:
        return str(error)


@pytest.mark.parametrize("size", SIZES)
def test_both_doors_fit_the_same_or_refuse_alike(size: str) -> None:
    data = lists(size)
    for params, overrides in TABLE:
        expected = outcome(by_estimator, params, data)
        assert outcome(by_configuration, overrides, data) == expected, (params, overrides)


def test_every_parameter_of_the_estimator_is_in_the_table() -> None:
    named = {name for params, _ in TABLE for name in params}
    assert named | ELSEWHERE == set(LGMMLRanker().get_params())


@pytest.mark.parametrize(
    ("params", "sentence"),
    [
        ({"margin": 0.7}, r"`margin` \(loss.margin\) has no effect with the loss softmax of trained metrics"),
        (
            {"rounds": 50},
            r"`rounds` \(local_metrics.rounds\) has no effect on trained metrics \(chosen for 20,500 docum",
        ),
        ({"max_draws": 3}, r"`max_draws` \(loader.max_draws\) has no effect with the loss softmax"),
        ({"num_metrics": 5}, r"`num_metrics` \(local_metrics.num_metrics\) belongs to one kind of metrics, so name it"),
        ({"bank_options": {"lam": 0.5}}, r"`bank_options` \(local_metrics.\*\) belongs to one kind of metrics"),
    ],
)
def test_a_setting_without_effect_is_refused(params: dict[str, Any], sentence: str) -> None:
    data = lists("large")
    with pytest.raises(LGMMLError, match=sentence):
        LGMMLRanker(validation_fraction=0, **params).fit(data.features, data.labels, group=data.sizes)


def test_no_setting_changes_the_kind_of_metrics() -> None:
    data = lists("large")
    for overrides in (["optimizer.lr=0.002"], ["phi=per_query"], ["preprocess=norm2"], ["local_metrics.kernel=rbf"]):
        settled = settle(load_config(overrides), overrides, {"train": data})
        assert settled.local_metrics["_target_"].endswith("TrainedBuilder")
