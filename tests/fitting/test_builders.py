"""What builders promise about themselves: defaults, attributes, settings they refuse, and banks put together."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

import pytest
import torch

from lgmml_torch.checks import ConfigError, LGMMLError
from lgmml_torch.fitting import bagged, bank, sampled, trained
from lgmml_torch.fitting.bagged import fit_bagged, query_share, score_spread
from lgmml_torch.fitting.bank import Bank, check_builder, checked_by, describe_builder, merge_banks
from lgmml_torch.fitting.boosted import IDLE_ROUNDS, BoostState, fit_boosted, make_config
from lgmml_torch.fitting.learners import LARGEST, BoostConfig
from lgmml_torch.fitting.sampled import fit_sampled, global_metric
from lgmml_torch.fitting.trained import start_trained
from lgmml_torch.functional.positions import position_curve
from lgmml_torch.models.local_metrics import LocalMetrics, MetricBlock
from tests.fitting.test_boosted import make
from tests.fitting.test_sampled import lists as doubles


def defaults(function: Callable[..., Any]) -> dict[str, Any]:
    found = inspect.signature(function).parameters.values()
    return {each.name: each.default for each in found if each.kind is each.KEYWORD_ONLY}


def test_boosting_has_the_recipe_of_the_method() -> None:
    assert asdict(BoostConfig()) == {
        "rounds": 200, "batch": 4, "shrinkage": 0.1, "candidates": 24, "sizes": (1, 2, 3), "anchors": 6,
        "steps": (2.0, 8.0), "bandwidths": (0.3, 1.0, 3.0), "kernel": "paper", "metric": "gmml", "lam": 0.1, "t": 0.5,
        "method": "cholesky", "ridge": 0.05, "min_deviation": 0.01, "subsample": 0.7, "cap": 2500, "phi_cap": 0,
        "draw": "uniform", "truncation": 30, "sigma": 1.0, "hessian_floor": 0.05, "feature_floor": 0.05,
        "position_ridge": 0.01, "prior_power": 0.0, "evaluate_every": 5, "k": 10, "smooth": 3, "patience": 40,
    }  # fmt: skip
    assert IDLE_ROUNDS == 5
    assert make_config() == BoostConfig()
    assert defaults(fit_boosted) == {"seed": 0, "on_round": None, "resume": None, "start": None, "measure": None}
    assert defaults(fit_bagged) == {"seed": 0, "on_round": None, "members": 5, "share": 1.0}
    for builder in (fit_boosted, fit_bagged):  # what is refused by name is refused in a call
        with pytest.raises(LGMMLError, match="`batch` must be positive, got 0"):
            builder(make(0, queries=2), batch=0)


def test_the_paper_and_trained_metrics_have_theirs() -> None:
    assert defaults(fit_sampled) == {
        "num_metrics": 500, "pool": 1, "t": 0.5, "lam": 0.1, "relative": True, "prior": "identity",
        "reduction": "mean", "method": "cholesky", "candidates": "positives", "alphas": (), "norm": "mahalanobis",
        "kernel": "paper", "bandwidth": (0.3, 0.5, 0.7, 1.0, 1.5, 2.0, 3.0), "seed": 0, "on_round": None,
    }  # fmt: skip
    assert defaults(global_metric) == {"t": 0.5, "method": "cholesky"}
    assert defaults(start_trained) == {
        "num_metrics": 128, "rank": 8, "start": "strength", "pool": 16, "lam": 0.1, "kernel": "paper", "seed": 0,
        "on_round": None,
    }  # fmt: skip
    assert (sampled.GLOBAL_LAM, sampled.MEDIAN_DOCUMENTS) == (0.01, 65_536)
    assert defaults(bank.BankBuilder.__call__) == {"seed": 0, "on_round": None}
    for builder in (fit_sampled, start_trained):
        check_builder(builder)
        with pytest.raises(LGMMLError, match="`num_metrics` must be positive, got 0"):
            builder(doubles(0), num_metrics=0)
    torch.testing.assert_close(global_metric(doubles(1)), global_metric(doubles(1), t=0.5, method="cholesky"))


def test_members_of_neighbouring_seeds_share_none() -> None:
    bagged.check_settings(members=bagged.SEED_STEP)  # so many have seeds of their own
    assert bagged.SEED_STEP == 1000


@pytest.mark.parametrize(
    ("asked", "builders"),
    [
        (bank.trains_metrics, {start_trained}),
        (bank.takes_spread, {fit_boosted, start_trained}),
        (bank.grows, {fit_boosted}),
        (bank.takes_measure, {fit_boosted, fit_bagged}),
        (bank.takes_positions, {fit_boosted, fit_bagged}),
    ],
)
def test_builders_say_what_they_can(asked: Callable[..., bool], builders: set[Any]) -> None:
    for builder in (fit_boosted, fit_bagged, fit_sampled, start_trained):
        check_builder(builder)
        assert asked(builder) is (builder in builders)
        assert asked(partial(partial(builder, seed=1), seed=2)) is (builder in builders)
    assert asked(lambda data: None) is False


def test_states_are_read_by_whoever_writes_them() -> None:
    assert bank.resumable_by(fit_boosted) == BoostState.load
    assert bank.resumable_by(partial(fit_boosted, rounds=3)) == BoostState.load
    assert bank.resumable_by(fit_sampled) is None


def test_a_builder_in_words() -> None:
    one = describe_builder(partial(partial(fit_sampled, pool=2), t=0.3))
    assert one == "fit_sampled [('pool', 2), ('t', 0.3)]"
    assert describe_builder(partial(fit_sampled, t=0.3, pool=2)) == one
    assert describe_builder(partial(partial(fit_sampled, pool=2), pool=3)) == "fit_sampled [('pool', 3)]"
    assert describe_builder(fit_boosted) == "fit_boosted []"


def test_a_check_is_asked_with_the_settings() -> None:
    asked: list[dict[str, Any]] = []

    @checked_by(lambda **settings: asked.append(settings))
    def builder(data: Any, valid: Any = None, *, size: int = 1) -> Any:
        """One with a check."""

    check_builder(partial(builder, size=3))
    check_builder(builder)
    assert asked == [{"size": 3}, {}]
    with pytest.raises(ConfigError, match=r"builder does not take these settings: .*'colour'"):
        check_builder(partial(builder, colour=3))
    assert len(asked) == 2


def one_metric(size: float = 1.0, *, features: int = 2, **fields: Any) -> Bank:
    block = MetricBlock(torch.full((1, features), size), size * torch.eye(features)[None])
    return Bank(LocalMetrics([block], num_features=features), phi=torch.tensor([size]), **fields)


def test_a_bank_by_default() -> None:
    plain = Bank(one_metric().metrics)
    assert (plain.kernel, plain.phi, plain.history, plain.trained, plain.position_bias) == (
        "paper",
        None,
        {},
        False,
        None,
    )
    assert plain.history is not Bank(plain.metrics).history


def test_a_fingerprint_is_of_metrics_and_weights() -> None:
    digests = {
        one_metric().digest,
        one_metric(2.0).digest,
        Bank(one_metric().metrics).digest,
        Bank(one_metric().metrics, phi=torch.tensor([3.0])).digest,
    }
    assert len(digests) == 4
    assert one_metric().digest == one_metric().digest == Bank(one_metric().metrics, "rbf", torch.ones(1)).digest


def test_blocks_of_another_shape_stay_apart() -> None:
    """Of one rank, but one metric looks at one feature and the other at two."""
    narrow = MetricBlock(torch.zeros(1, 1), torch.ones(1, 1, 1), support=torch.tensor([[2]]))
    wide = MetricBlock(torch.ones(1, 2), torch.ones(1, 2, 1), support=torch.tensor([[0, 1]]))
    banks = [Bank(LocalMetrics([block], num_features=3), phi=torch.ones(1)) for block in (narrow, wide, narrow)]
    merged = merge_banks(banks, [1.0, 2.0, 3.0])
    assert [block.num_metrics for block in merged.metrics.iter_blocks()] == [2, 1]
    assert merged.phi is not None
    assert merged.phi.tolist() == [1.0, 3.0, 2.0]
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    expected = sum(weight * one.score(x) for one, weight in zip(banks, (1, 2, 3), strict=True))
    torch.testing.assert_close(merged.score(x), expected)


def test_biases_of_positions_are_added_up_where_all_have_them() -> None:
    first, second = torch.tensor([1.0, 2.0]), torch.tensor([10.0, 30.0])
    banks = [one_metric(position_bias=first), one_metric(2.0, position_bias=second)]
    merged = merge_banks(banks, [0.5, 2.0])
    assert merged.position_bias is not None
    assert merged.position_bias.tolist() == [20.5, 61.0]
    assert merge_banks([banks[0], one_metric(2.0)], [1.0, 1.0]).position_bias is None
    assert merge_banks([one_metric()], [1.0]).position_bias is None
    alone = merge_banks([banks[1]], [3.0]).position_bias
    assert alone is not None
    assert alone.tolist() == [30.0, 90.0]
    for weights in ([], [1.0], [1.0, 1.0, 1.0]):
        with pytest.raises(LGMMLError, match=rf"one for each of at least one bank, got {len(weights)} for 2"):
            merge_banks(banks, weights)
    with pytest.raises(LGMMLError, match=r"`weights` must be one for each of at least one bank, got 0 for 0"):
        merge_banks([], [])


def test_a_bag_of_lists_that_were_shown_somewhere() -> None:
    data = make(0, queries=12, size=8)
    shown = torch.arange(data.num_documents) % 4 + 1
    data = data.replace(positions=shown)
    settings: dict[str, Any] = {"rounds": 3, "candidates": 6, "evaluate_every": 1}
    bag = fit_bagged(data, members=2, **settings)
    members = [fit_boosted(data, seed=seed, **settings) for seed in (0, 1000)]
    spreads = [score_spread(member.score(data.features), data.offsets) for member in members]
    assert bag.position_bias is not None
    expected = sum(m.position_bias / (2 * s) for m, s in zip(members, spreads, strict=True))  # type: ignore[operator]
    torch.testing.assert_close(bag.position_bias, expected)
    assert bag.history["position_bias"] == position_curve(bag.position_bias, data)
    assert list(bag.history["position_bias"]) == [1, 2, 3, 4]
    assert "position_bias" not in fit_bagged(data.replace(positions=None), members=1, **settings).history


def test_small_spreads_are_spreads_too() -> None:
    assert score_spread(torch.tensor([0.0, 1e-4]), torch.tensor([0, 2])) == pytest.approx(5e-5)
    assert score_spread(torch.tensor([0.0, 0.5, 9.0]), torch.tensor([0, 2, 3])) == pytest.approx((0.125 / 3) ** 0.5)


def test_a_share_of_queries_is_drawn_by_its_seed() -> None:
    data = make(0, queries=10, size=3)
    drawn = torch.randperm(10, generator=torch.Generator().manual_seed(4))[:3].sort().values
    assert query_share(data, 0.3, 4).qids == tuple(data.qids[query] for query in drawn.tolist())
    assert query_share(data, 0.01, 4).num_queries == 1
    assert query_share(data, 0.15, 4).num_queries == 2


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_bags_check_what_they_are_given(share: float) -> None:
    bagged.check_settings()
    bagged.check_settings(members=1, share=share, rounds=3)
    for options, message in (
        ({"members": 2.5}, "`members` must be a whole number"),
        ({"members": 0}, "`members` must be"),
        ({"share": 0.0}, "`share` must be positive, got 0"),
        ({"share": -0.5}, r"`share` must lie in \[0, 1\]"),
        ({"rounds": 0}, "`rounds` must be positive, got 0"),
    ):
        for check in (bagged.check_settings, partial(fit_bagged, make(0, queries=2))):
            with pytest.raises(LGMMLError, match=message):
                check(**{"share": share, **options})


WHOLE = ("rounds", "batch", "candidates", "anchors", "cap", "truncation", "evaluate_every", "k", "smooth", "patience")
POSITIVE = (
    "shrinkage",
    "ridge",
    "subsample",
    "sigma",
    "hessian_floor",
    "feature_floor",
    "min_deviation",
    "position_ridge",
)


@pytest.mark.parametrize("name", WHOLE)
def test_counts_are_whole_and_positive(name: str) -> None:
    for value, message in ((0, "must be positive, got 0"), (2.5, "must be a whole number"), ("3", "must be")):
        with pytest.raises(LGMMLError, match=f"`{name}` {message}"):
            BoostConfig(**{name: value})
    assert getattr(BoostConfig(**{"sizes": (1,), name: 1}), name) == 1


@pytest.mark.parametrize("name", [*POSITIVE, "lam", "prior_power"])
def test_sizes_of_steps_are_bounded(name: str) -> None:
    with pytest.raises(LGMMLError, match=f"`{name}` must"):
        BoostConfig(**{name: -0.1})
    if name in POSITIVE:
        with pytest.raises(LGMMLError, match=f"`{name}` must be positive, got 0"):
            BoostConfig(**{name: 0.0})
    else:
        assert getattr(BoostConfig(**{name: 0.0}), name) == 0
    with pytest.raises(LGMMLError, match=f"`{name}` must"):
        BoostConfig(**{name: 1.1e30})
    if name not in ("shrinkage", "subsample"):
        assert getattr(BoostConfig(**{name: 1e30}), name) == LARGEST == 1e30
        with pytest.raises(LGMMLError, match=rf"`{name}` must be at most 1e\+30, got 1.1e\+30"):
            BoostConfig(**{name: 1.1e30})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kernel": "cosine"}, "`kernel` must be one of"),
        ({"metric": "l2"}, "`metric` must be one of"),
        ({"method": "svd"}, "`method` must be one of"),
        ({"draw": "all"}, "`draw` must be one of"),
        ({"t": -0.1}, r"`t` must lie in \[0, 1\]"),
        ({"subsample": 1.1}, r"`subsample` must lie in \[0, 1\]"),
        ({"shrinkage": 1.1}, r"`shrinkage` must lie in \[0, 1\]"),
        ({"phi_cap": -1}, "`phi_cap` must be at least 0, got -1"),
        ({"phi_cap": 1.5}, "`phi_cap` must be a whole number"),
        ({"sizes": (1, 0)}, r"`sizes` must hold positive numbers, got \[1, 0\]"),
        ({"sizes": (1.5,)}, r"`sizes\[0\]` must be a whole number, got 1.5"),
        ({"sizes": ("a",)}, r"`sizes\[0\]` must be a number"),
        ({"steps": (1.0, "a")}, r"`steps\[1\]` must be a number"),
        ({"bandwidths": (1.0, -1.0)}, r"`bandwidths` must hold positive numbers, got \[1.0, -1.0\]"),
        ({"bandwidths": ()}, r"`bandwidths` must hold positive numbers, got \[\]"),
        ({"candidates": 1, "sizes": (1, 2)}, "`candidates` must be at least one for each of the 2 sizes, got 1"),
    ],
)
def test_boosting_refuses(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(LGMMLError, match=message):
        BoostConfig(**settings)


def test_boosting_takes_what_just_fits() -> None:
    config = BoostConfig(sizes=[1, 2], candidates=2, steps=[], bandwidths=[0.5], phi_cap=0, t=0.0, shrinkage=1.0)
    assert (config.sizes, config.steps, config.bandwidths) == ((1, 2), (), (0.5,))
    assert BoostConfig(t=1.0, subsample=1.0, phi_cap=7).phi_cap == 7
    assert BoostConfig(steps=(-1.0, 0.0)).steps == (-1.0, 0.0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"relative": "yes"}, "`relative` must be"),
        ({"alphas": ["a"]}, r"`alphas\[0\]` must be a number"),
        ({"bandwidth": "wide"}, r"`bandwidth\[0\]` must be a number, got 'wide'"),
        ({"bandwidth": [1.0, "a"]}, r"`bandwidth\[1\]` must be a number"),
        ({"bandwidth": 0}, r"`bandwidth` must be a positive number or some of them, got \[0.0\]"),
        ({"bandwidth": [1.0, -0.5]}, r"`bandwidth` must be a positive number or some of them, got \[1.0, -0.5\]"),
        ({"num_metrics": 1.5}, "`num_metrics` must be a whole number"),
        ({"t": -0.1}, r"`t` must lie in \[0, 1\]"),
        ({"lam": -0.1}, "`lam` must be at least 0"),
    ],
)
def test_the_paper_refuses(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(LGMMLError, match=message):
        check_builder(partial(fit_sampled, **settings))


def test_the_paper_takes_what_just_fits() -> None:
    lawful: list[dict[str, Any]] = [{}, {"lam": 0.0}, {"t": 0.0}, {"t": 1.0}, {"relative": False}]
    lawful += [{"bandwidth": 0.5}, {"bandwidth": 2}, {"bandwidth": [0.1, 0.2]}, {"alphas": [-1.0, 2]}]
    for settings in (*lawful, {"prior": torch.eye(2)}):
        check_builder(partial(fit_sampled, **settings))


def test_an_unlawful_bandwidth_or_prior_ends_the_fit_at_once() -> None:
    for settings, message in (
        ({"bandwidth": 0.0}, "`bandwidth`"),
        ({"prior": "x"}, "`prior`"),
        ({"num_metrics": 0}, "`num_m"),
    ):
        with pytest.raises(LGMMLError, match=message):
            fit_sampled(doubles(0), **settings)  # type: ignore[arg-type]


def test_the_method_is_that_of_the_global_metric_too(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []
    real = sampled.gmml
    monkeypatch.setattr(
        sampled, "gmml", lambda S, D, t, **more: asked.append({"t": t, **more}) or real(S, D, t, **more)
    )
    for method in ("cholesky", "eigh"):
        fit_sampled(doubles(0), num_metrics=2, prior="global", method=method, t=0.3, bandwidth=1.0)
        assert asked.pop() == {"t": 0.3, "lam": 0.01, "method": method}
    assert not asked


def test_documents_for_the_medians_are_drawn_by_the_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever else has drawn random numbers before."""
    monkeypatch.setattr(sampled, "MEDIAN_DOCUMENTS", 5)
    scales = []
    for before in range(3):
        torch.manual_seed(before)
        scales.append(fit_sampled(doubles(0), num_metrics=2, bandwidth=1.0).metrics.scales)
    assert torch.equal(scales[0], scales[1])
    assert torch.equal(scales[0], scales[2])


def test_only_fewer_metrics_are_told(caplog: pytest.LogCaptureFixture) -> None:
    data = doubles(3)
    with caplog.at_level("INFO"):
        fit_sampled(data, num_metrics=7, bandwidth=1.0)
        assert "instead of" not in caplog.text
        fit_sampled(data, num_metrics=8, bandwidth=1.0)
    assert "7 local metrics instead of 8" in caplog.text


def test_one_bandwidth_of_a_list_is_not_judged() -> None:
    found = fit_sampled(doubles(3), num_metrics=3, bandwidth=[2.0]).history
    assert (found["bandwidth"], found["ndcg@10 by bandwidth"]) == (2.0, {})
    judged = fit_sampled(doubles(3), num_metrics=3, bandwidth=[2.0, 0.5]).history
    assert list(judged["ndcg@10 by bandwidth"]) == ["2.0", "0.5"]
    assert judged["bandwidth"] in (2.0, 0.5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kernel": "cosine"}, "`kernel` must be one of"),
        ({"start": "zero"}, "`start` must be one of"),
        ({"num_metrics": 0}, "`num_metrics` must be positive, got 0"),
        ({"rank": 0}, "`rank` must be positive, got 0"),
        ({"pool": 0}, "`pool` must be positive, got 0"),
        ({"lam": 1.5}, r"`lam` must lie in \[0, 1\], got 1.5"),
    ],
)
def test_trained_metrics_refuse(settings: dict[str, Any], message: str) -> None:
    check_builder(start_trained)
    with pytest.raises(LGMMLError, match=message):
        check_builder(partial(start_trained, **settings))
    with pytest.raises(LGMMLError, match=message):
        start_trained(doubles(0), **settings)


def test_what_a_start_tells_of_itself() -> None:
    data = doubles(0)
    start = start_trained(data, num_metrics=3, rank=99, start="random", kernel="rbf")
    assert start.history == {"start": "random", "rank": 3}
    assert (start.kernel, start.trained) == ("rbf", True)
    assert start.metrics.num_features == 3
    assert start.phi is not None
    assert start.phi.tolist() == pytest.approx([4 / 3**0.5] * 3)
    assert start.phi.dtype == torch.float64


def test_scales_of_a_start_come_from_some_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    data = doubles(0)
    monkeypatch.setattr(trained, "SCALE_DOCUMENTS", 5)
    found = start_trained(data, num_metrics=2, rank=2, start="random", seed=6)
    (block,) = found.metrics.iter_blocks()
    g = torch.Generator().manual_seed(6)
    lowest = torch.cat(
        [
            data.labels[a:b].min().expand(b - a)
            for a, b in zip(data.offsets[:-1].tolist(), data.offsets[1:].tolist(), strict=True)
        ]
    )
    relevant = (data.labels > lowest).nonzero()[:, 0]
    chosen = relevant[torch.randint(len(relevant), (2,), generator=g)]
    assert torch.equal(block.anchors, data.features[chosen])
    drawn = torch.randn(2, 3, 2, generator=g).double() / 6**0.5
    torch.testing.assert_close(block.factors, drawn)
    some = torch.randperm(data.num_documents, generator=g)[:5]
    dists = torch.stack(
        [((data.features[some] - a) @ W).norm(dim=1) for a, W in zip(block.anchors, drawn, strict=True)]
    )
    torch.testing.assert_close(block.scales, dists.mean(1))


def test_few_directions_may_be_asked_of_diagonal_scatters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many lists only some are looked at: those that the draw gives."""
    data = doubles(1)
    monkeypatch.setattr(trained, "SCATTER_QUERIES", 4)
    found = start_trained(data, num_metrics=3, rank=2, start="diagonal", seed=2)
    g = torch.Generator().manual_seed(2)
    torch.randint(1, (3,), generator=g)
    queries = torch.randperm(data.num_queries, generator=g)[:4].sort().values
    monkeypatch.setattr(trained, "SCATTER_QUERIES", 10**9)
    state = torch.Generator()
    state.set_state(g.get_state())
    part = data.select(queries)
    monkeypatch.setattr(torch, "randperm", lambda n, generator: torch.arange(n))
    expected = trained._diagonal(part, (3, 3, 2), 1, 0.1, state)
    torch.testing.assert_close(found.metrics.iter_blocks()[0].factors, expected.double())


def test_the_strength_of_a_feature_does_not_depend_on_its_unit() -> None:
    data = doubles(2)
    units = torch.tensor([1.0, 1000.0, 0.01], dtype=torch.float64)
    found = [
        start_trained(part, num_metrics=3, rank=2, start="strength", seed=1).metrics.iter_blocks()[0].factors
        for part in (data, data.replace(features=data.features * units))
    ]
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-8)
    sizes = found[0].square().mean((0, 2))
    assert float(sizes.max() / sizes.min()) > 1.5  # features do differ in what they say


def test_directions_by_ratio_of_one_region() -> None:
    """The generalised eigenvectors by another route, largest ratio first, of length 1 in the similar scatter."""
    data = doubles(5)
    found = start_trained(data, num_metrics=2, rank=3, start="ratio", pool=2, lam=0.3, seed=1).metrics.iter_blocks()[0]
    from lgmml_torch.functional.gmml import scatter_matrices
    from lgmml_torch.functional.regions import sample_regions

    g = torch.Generator().manual_seed(1)
    lowest = torch.stack([data.labels[data.query_index == q].min() for q in range(data.num_queries)])[data.query_index]
    torch.randint(int((data.labels > lowest).sum()), (2,), generator=g)
    regions = sample_regions(data.labels, data.offsets, 2, pool=2, generator=g)
    S, D = scatter_matrices(
        data.features, regions.positives, regions.positive_offsets, regions.negatives, regions.negative_offsets
    )
    for k in range(2):
        level = 0.3 * float((S[k] + D[k]).trace()) / 3 / 2
        similar = S[k] + level * torch.eye(3).double()
        W = found.factors[k]
        torch.testing.assert_close(W.mT @ similar @ W, torch.eye(3).double(), rtol=1e-6, atol=1e-8)
        ratios = (W.mT @ D[k] @ W).diagonal()
        values = torch.linalg.eigvals(torch.linalg.solve(similar, D[k])).real.sort(descending=True).values
        torch.testing.assert_close(ratios, values, rtol=1e-6, atol=1e-8)
