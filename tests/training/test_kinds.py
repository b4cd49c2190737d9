"""Where the size of the data leaves open which metrics rank better, validation queries decide, alike at both doors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lgmml_torch.app.compose import settle
from lgmml_torch.app.config import load_config
from lgmml_torch.estimator import LGMMLRanker
from lgmml_torch.ragged import RankingData
from lgmml_torch.training.defaults import Defaults, Sizes, choose_defaults
from lgmml_torch.training.resume import Start
from lgmml_torch.training.stages import choose_kind
from tests.training import tiny


def lists(queries: int, seed: int, *, mixed: bool) -> RankingData:
    """25 documents a list. What is relevant lies along a mixture of all features, or depends on one alone."""
    g = torch.Generator().manual_seed(seed)
    features = torch.randn(25 * queries, 12, generator=g)
    value = -(features[:, 0] - 0.5).abs()
    if mixed:
        value = features @ (torch.arange(12) % 2 * 2.0 - 1)
    labels = (value > value.quantile(0.8)).float()
    return RankingData.from_arrays(features, labels, qid=torch.arange(25 * queries) // 25)


def splits_of(*, mixed: bool, judges: int = 40) -> dict[str, RankingData]:
    return {"train": lists(100, 0, mixed=mixed), "valid": lists(judges, 1, mixed=mixed)}


def chosen(splits: dict[str, RankingData], asked: dict[str, Any], **further: Any) -> Defaults:
    return choose_kind(splits, asked, 0, **{"measure": "ndcg@10", **further})


@pytest.mark.parametrize(("mixed", "kind", "measure"), [(True, "trained", "ndcg@10"), (False, "boosted", "map")])
def test_both_doors_take_the_kind_that_ranks_validation_queries_better(mixed: bool, kind: str, measure: str) -> None:
    """Each time the same, so a run that resumes goes on with the metrics that it began with."""
    splits, asked = splits_of(mixed=mixed), [f"measure={measure}"]
    found = chosen(splits, {}, measure=measure)
    assert found.bank == kind
    assert f"validation queries after short fits, {measure}: boosted 0.9" in found.reason
    named = choose_defaults(Sizes.of(splits["train"]), {"bank": kind})
    assert found.trainer == named.trainer
    cfg = settle(load_config(asked), asked, splits)
    assert cfg.chosen == found.reason
    assert cfg.local_metrics["_target_"].endswith(f"{kind.title()}Builder")


@pytest.mark.slow
def test_a_kind_that_was_chosen_gives_the_model_of_the_kind_that_is_named() -> None:
    data, judged = splits_of(mixed=True).values()
    scores, options = [], {"n_jobs": 1, "random_state": 3}
    for bank in ("auto", "trained"):
        ranker = LGMMLRanker(bank=bank, **options)
        ranker.fit(
            data.features,
            data.labels,
            group=data.sizes,
            eval_set=[(judged.features, judged.labels)],
            eval_group=[judged.sizes],
        )
        assert Start.of(ranker.model_).kind == "trained"
        scores.append(ranker.predict(judged.features, group=judged.sizes))
    np.testing.assert_array_equal(*scores)


def test_size_alone_decides_without_enough_validation_queries_or_time() -> None:
    few = splits_of(mixed=True, judges=19)
    for splits, asked in ((few, {}), ({"train": few["train"]}, {}), (splits_of(mixed=True), {"budget": "fast"})):
        found = chosen(splits, asked)
        assert found == choose_defaults(Sizes.of(splits["train"]), asked)
        assert found.bank == "boosted"


def test_positions_leave_the_choice_to_the_size() -> None:
    splits = splits_of(mixed=True)
    train = splits["train"]
    splits["train"] = train.replace(positions=torch.arange(train.num_documents) % 4)
    assert chosen(splits, {}) == choose_defaults(Sizes.of(train))


def test_a_model_to_go_on_from_has_decided() -> None:
    assert chosen(splits_of(mixed=True), {}, start="boosted").bank == "boosted"


def test_a_run_that_is_resumed_keeps_its_kind(tmp_path: Path) -> None:
    """Whatever validation says now: several processes do not ask it, and another processor may round otherwise."""
    splits = splits_of(mixed=False)
    tiny.train(tmp_path, mode="trained", epochs=1)
    asked = [f"resume={tmp_path / 'last.ckpt'}"]
    cfg = settle(load_config(asked), asked, splits)
    assert cfg.local_metrics["_target_"].endswith("TrainedBuilder")
    assert "trained metrics (as the model to go on from)" in cfg.chosen


@pytest.mark.parametrize(
    ("sizes", "asked", "left_open"),
    [
        ((100, 10_000, 46), {}, True),
        ((100, 10_000, 46), {"budget": "thorough", "measure": "map", "batch_size": 8}, True),
        ((100, 10_000, 46), {"budget": "1s"}, False),
        # Settings that the short fits do not have.
        ((100, 10_000, 46), {"epochs": 0}, False),
        ((100, 10_000, 46), {"preprocess.ramps": "2"}, False),
        ((100, 10_000, 46), {"phi": "amortized"}, False),
        ((100, 10_000, 46), {"learning_rate": 0.1}, False),
        ((100, 10_000, 46), {"search.margin": "[0.1,1]"}, False),
        ((150, 60_000, 46), {}, True),  # few long lists
        ((100, 1_999, 46), {}, False),
        ((150, 100_000, 46), {}, False),
        ((400, 20_000, 46), {}, False),  # trained
        ((100, 10_000, 46), {"bank": "boosted"}, False),
        ((100, 10_000, 46), {"rounds": 50}, False),  # a setting of boosted metrics
    ],
)
def test_what_leaves_the_kind_open(sizes: tuple[int, int, int], asked: dict[str, Any], left_open: bool) -> None:
    assert Sizes(*sizes).leave_kind_open(asked) is left_open
