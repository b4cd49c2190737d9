"""What builders refuse before they see data, and the bank they hand back."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from lgmml_torch.checks import ConfigError, LGMMLError
from lgmml_torch.fitting.bank import Bank, BankBuilder, as_builder, merge_banks
from lgmml_torch.fitting.boosted import BoostedBuilder, fit_boosted
from lgmml_torch.fitting.round import BoostConfig
from lgmml_torch.fitting.sampled import SampledBuilder, fit_sampled
from lgmml_torch.fitting.trained import TrainedBuilder, start_trained
from lgmml_torch.models.local_metrics import LocalMetrics, MetricBlock
from tests.fitting.test_boosted import make

BOOSTED: list[tuple[dict[str, Any], str]] = [
    ({"metric": "gmlm"}, "`metric` must be one of .* did you mean 'gmml'"),
    ({"kernel": "cosine"}, "`kernel` must be one of"),
    ({"method": "svd"}, "`method` must be one of"),
    ({"t": 1.5}, r"`t` must lie in \[0, 1\], got 1.5"),
    ({"subsample": 1.1}, r"`subsample` must lie in \[0, 1\]"),
    ({"shrinkage": 1.1}, r"`shrinkage` must lie in \[0, 1\]"),
    ({"rounds": -1}, "`rounds` must be at least 0, got -1"),
    ({"sizes": ()}, r"`sizes` must hold positive numbers, got \[\]"),
    ({"sizes": (1, 0)}, r"`sizes` must hold positive numbers, got \[1, 0\]"),
    ({"sizes": (1.5,)}, r"`sizes\[0\]` must be a whole number, got 1.5"),
    ({"steps": (1.0, "a")}, r"`steps\[1\]` must be a number"),
    ({"bandwidths": ()}, r"`bandwidths` must hold positive numbers, got \[\]"),
    ({"bandwidths": (1.0, 0.0)}, r"`bandwidths` must hold positive numbers, got \[1.0, 0.0\]"),
    ({"candidates": 2}, "`candidates` must be at least one for each of the 3 sizes, got 2"),
]
SAMPLED: list[tuple[dict[str, Any], str]] = [
    ({"prior": "globl"}, "`prior` must be one of 'identity', 'global', got 'globl'"),
    ({"prior": None}, "`prior` must be one of 'identity', 'global', got 'None'"),
    ({"method": "svd"}, "`method` must be one of 'cholesky', 'eigh', got 'svd'"),
    ({"reduction": "max"}, "`reduction` must be one of 'mean', 'sum', got 'max'"),
    ({"candidates": "all"}, "`candidates` must be one of 'positives', 'top', got 'all'"),
    ({"norm": "l2"}, "`norm` must be one of 'mahalanobis', 'trace', got 'l2'"),
    ({"kernel": "cosine"}, "`kernel` must be one of 'paper', 'distance', 'rbf', got 'cosine'"),
    ({"num_metrics": 1.5}, "`num_metrics` must be a whole number"),
    ({"pool": 0}, "`pool` must be positive, got 0"),
    ({"t": 1.5}, r"`t` must lie in \[0, 1\], got 1.5"),
    ({"lam": -1.0}, "`lam` must be .*at least 0, got -1"),
    ({"relative": "yes"}, "`relative` must be"),
    ({"alphas": ["a"]}, r"`alphas\[0\]` must be a number"),
    ({"bandwidth": []}, r"`bandwidth` must be a positive number or some of them, got \[\]"),
    ({"bandwidth": 0}, r"`bandwidth` must be a positive number or some of them, got \[0\]"),
    ({"bandwidth": [1.0, 0.0]}, r"`bandwidth` must be a positive number or some of them, got \[1.0, 0.0\]"),
    ({"bandwidth": "wide"}, r"`bandwidth\[0\]` must be a number, got 'wide'"),
]
TRAINED: list[tuple[dict[str, Any], str]] = [
    ({"kernel": "cosine"}, "`kernel` must be one of"),
    ({"start": "zero"}, "`start` must be one of 'random', 'strength', got 'zero'"),
    ({"num_metrics": 0}, "`num_metrics` must be positive, got 0"),
    ({"rank": 0}, "`rank` must be positive, got 0"),
]


@pytest.mark.parametrize(
    ("builder", "door", "table"),
    [
        (BoostedBuilder, fit_boosted, BOOSTED),
        (SampledBuilder, fit_sampled, SAMPLED),
        (TrainedBuilder, start_trained, TRAINED),
    ],
)
def test_settings_are_refused_when_a_builder_is_made(
    builder: type[BankBuilder], door: Any, table: list[tuple[dict[str, Any], str]]
) -> None:
    for settings, message in table:
        with pytest.raises(LGMMLError, match=message):
            builder(**settings)
        with pytest.raises(LGMMLError, match=message):
            door(make(0, queries=2), **settings)
    with pytest.raises(ConfigError, match=f"`kernl` is no setting of {builder.kind} metrics; did you mean 'kernel'"):
        builder.of(kernl="rbf")


ABLE: list[tuple[BankBuilder, set[str]]] = [
    (BoostedBuilder(), {"grows", "takes_measure", "takes_positions", "takes_shared_lists", "resumes"}),
    (SampledBuilder(), set()),
    (TrainedBuilder(), {"trains_metrics", "takes_shared_lists"}),
    (as_builder(fit_sampled), set()),
]


def test_builders_say_what_they_can_do_and_refuse_the_rest() -> None:
    for builder, able in ABLE:
        names = ("trains_metrics", "grows", "takes_measure", "takes_positions", "takes_shared_lists", "resumes")
        assert {name for name in names if getattr(builder, name)} == able
        for argument, name in (("start", "grows"), ("measure", "takes_measure"), ("resume", "resumes")):
            builder.check_call(**{argument: None})
            if name not in able:
                with pytest.raises(
                    ConfigError, match=f"`{argument}` does not apply to {builder.kind or 'these'} metrics"
                ):
                    builder.check_call(**{argument: "ndcg"})
        if "takes_measure" in able:
            builder.check_call(measure="ndcg")


def test_counts_and_sizes_of_steps_are_bounded() -> None:
    counts = ["batch", "candidates", "anchors", "cap", "truncation", "evaluate_every", "k", "smooth", "patience"]
    for name in counts:
        for value, message in ((0, "must be positive, got 0"), (2.5, "must be a whole number")):
            with pytest.raises(LGMMLError, match=f"`{name}` {message}"):
                BoostConfig(**{name: value})
        BoostConfig(**{"sizes": (1,), name: 1})
    unit = ["shrinkage", "subsample"]
    bounded = ["ridge", "sigma", "hessian_floor", "feature_floor", "min_deviation", "position_ridge"]
    for name in unit + bounded:
        with pytest.raises(LGMMLError, match=f"`{name}` must be positive, got 0"):
            BoostConfig(**{name: 0.0})
    BoostConfig(lam=0.0)
    with pytest.raises(LGMMLError, match=r"`lam` must be at least 0, got -0\.1"):
        BoostConfig(lam=-0.1)
    for name in (*bounded, "lam"):
        BoostConfig(**{name: 1e30})
        with pytest.raises(LGMMLError, match=rf"`{name}` must be at most 1e\+30, got 1.1e\+30"):
            BoostConfig(**{name: 1.1e30})


def test_what_just_fits_is_taken_and_lists_are_as_good_as_tuples() -> None:
    """A configuration file gives lists."""
    config = BoostConfig(sizes=[1, 2], candidates=2, steps=[-1.0, 0.0], bandwidths=[0.5], t=0.0, shrinkage=1.0)  # type: ignore[arg-type]
    assert (config.sizes, config.steps, config.bandwidths) == ((1, 2), (-1.0, 0.0), (0.5,))
    BoostConfig(t=1.0, subsample=1.0, rounds=0, steps=())
    for settings in ({"lam": 0.0, "t": 0.0}, {"relative": False, "t": 1.0}, {"bandwidth": 2}, {"prior": torch.eye(2)}):
        SampledBuilder(**settings)  # type: ignore[arg-type]
    assert SampledBuilder(alphas=[-1.0, 2], bandwidth=[0.1]) == SampledBuilder(alphas=(-1.0, 2), bandwidth=(0.1,))
    TrainedBuilder(rank=1, num_metrics=1)


def test_a_call_may_ask_only_for_what_a_builder_can() -> None:
    data = make(0, queries=8, size=8)
    bank = fit_boosted(data, rounds=1, candidates=3)
    state: Any = object()
    asked: list[tuple[BankBuilder, dict[str, Any]]] = [
        (SampledBuilder(), {"start": bank}),
        (SampledBuilder(), {"measure": "mrr"}),
        (TrainedBuilder(), {"resume": state}),
    ]
    for builder, further in asked:
        with pytest.raises(ConfigError, match=f"`{next(iter(further))}` does not apply to {builder.kind} metrics"):
            builder(data, **further)
        builder.check_call(**dict.fromkeys(further))
    with pytest.raises(LGMMLError, match="ndgc"):
        BoostedBuilder().check_call(measure="ndgc@10")
    with pytest.raises(NotImplementedError):
        SampledBuilder().load_state({})


def test_a_function_is_a_builder_too() -> None:
    def plain(data: Any, valid: Any = None, *, seed: int, on_round: Any, size: int = 1) -> Any:
        return data, valid, seed, on_round, size

    builder: Any = as_builder(partial(partial(plain, size=2), size=3))
    assert builder("data", "valid", seed=4, on_round=print) == ("data", "valid", 4, print, 3)
    assert as_builder(builder) is builder
    assert as_builder(plain) == as_builder(plain)
    assert not builder.trains_metrics
    with pytest.raises(ConfigError, match="`measure` does not apply to these metrics"):
        builder("data", measure="mrr")
    with pytest.raises(ConfigError, match=r"plain does not take these settings: .*unexpected keyword argument"):
        as_builder(partial(plain, sise=2))


def one_metric(
    size: float = 1.0, *, features: int = 2, norm: str = "trace", kernel: str = "rbf", **fields: Any
) -> Bank:
    block = MetricBlock(
        torch.full((1, features), size),
        size * torch.eye(features)[None],
        scales=torch.tensor([size]),
        quality=torch.tensor([size]),
    )
    return Bank(LocalMetrics([block], num_features=features, norm=norm), kernel, torch.tensor([size]), **fields)


class TestBanks:
    def test_without_weights_all_metrics_count_alike(self) -> None:
        block = MetricBlock(torch.tensor([[0.0], [1.0]]), torch.ones(2, 1, 1))
        bank = Bank(LocalMetrics([block], num_features=1), "distance")
        x = torch.tensor([[3.0], [0.0]])
        assert bank.score(x).tolist() == [-5.0, -1.0]
        assert replace(bank, phi=torch.tensor([1.0, 2.0])).score(x).tolist() == [-7.0, -2.0]
        assert not bank.trained
        with pytest.raises(LGMMLError, match=r"`phi` must have shape \(2,\)"):
            Bank(bank.metrics, "distance", torch.ones(3))
        with pytest.raises(LGMMLError, match="`kernel` must be one of"):
            Bank(bank.metrics, "cosine")

    def test_a_fingerprint_is_of_metrics_and_weights(self) -> None:
        one = one_metric()
        others = [one_metric(2.0), replace(one, phi=None), replace(one, phi=torch.tensor([3.0]))]
        assert len({bank.digest for bank in (one, *others)}) == 4
        assert one.digest == one_metric(kernel="paper").digest

    def test_a_merged_bank_scores_as_the_weighted_sum(self) -> None:
        """Blocks of one shape become one; full metrics and subspaces, of one or two features, stay apart."""
        full = MetricBlock(torch.zeros(1, 3), torch.eye(3)[None])
        narrow = MetricBlock(torch.ones(2, 1), torch.ones(2, 1, 1), support=torch.tensor([[0], [1]]))
        wide = MetricBlock(torch.ones(1, 2), torch.ones(1, 2, 1), support=torch.tensor([[0, 2]]))
        first = Bank(LocalMetrics([full], num_features=3), "paper", torch.tensor([1.0]))
        second = Bank(LocalMetrics([narrow, full, wide], num_features=3), "paper", torch.tensor([2.0, 3.0, 4.0, 5.0]))
        merged = merge_banks([first, second], [1.0, 0.5])
        assert merged.phi is not None
        assert merged.phi.tolist() == [1.0, 2.0, 1.0, 1.5, 2.5]
        assert [block.num_metrics for block in merged.metrics.iter_blocks()] == [2, 2, 1]
        x = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
        torch.testing.assert_close(merged.score(x), first.score(x) + 0.5 * second.score(x))

    def test_it_keeps_what_its_blocks_have_and_adds_biases_up(self) -> None:
        biases = torch.tensor([1.0, 2.0]), torch.tensor([10.0, 30.0])
        banks = [one_metric(position_bias=biases[0]), one_metric(2.0, position_bias=biases[1])]
        merged = merge_banks(banks, [0.5, 2.0])
        assert (merged.kernel, merged.metrics.norm) == ("rbf", "trace")
        assert merged.metrics.scales.tolist() == merged.metrics.quality.tolist() == [1.0, 2.0]
        assert merged.position_bias is not None
        assert merged.position_bias.tolist() == [20.5, 61.0]
        assert merge_banks([banks[0], one_metric(2.0)], [1.0, 1.0]).position_bias is None

    def test_banks_that_do_not_fit_together_are_refused(self) -> None:
        for other in (one_metric(norm="mahalanobis"), one_metric(kernel="paper"), one_metric(features=3)):
            with pytest.raises(LGMMLError, match="`banks` must agree on features, norm and kernel"):
                merge_banks([one_metric(), other], [1.0, 1.0])
        with pytest.raises(LGMMLError, match="`banks` must have weights Φ"):
            merge_banks([replace(one_metric(), phi=None)], [1.0])
        for banks, weights in (([one_metric()], []), ([one_metric()], [1.0, 1.0]), ([], [])):
            sentence = rf"one for each of at least one bank, got {len(weights)} for {len(banks)}"
            with pytest.raises(LGMMLError, match=sentence):
                merge_banks(banks, weights)


def test_the_seed_is_zero_unless_one_is_given() -> None:
    data = make(seed=1)
    for builder in (SampledBuilder(num_metrics=3), TrainedBuilder(num_metrics=3, rank=2)):
        anchors = [bank.metrics.blocks[0].anchors for bank in (builder(data), builder(data, seed=0))]
        assert torch.equal(*anchors)
