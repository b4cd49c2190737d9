"""What small cases by hand say about functions that large ones only run: ties, blocks, defaults, refusals."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lgmml_torch.checks import LGMMLError, NumericsWarning
from lgmml_torch.functional import features as feature_module
from lgmml_torch.functional import gmml, losses, score, significance, spd, warp
from lgmml_torch.functional.boosting import NewtonRows, list_scatter
from lgmml_torch.functional.distance import DistanceTiles, local_distances
from lgmml_torch.functional.features import interpolate_knots, row_blocks
from lgmml_torch.functional.measures import err, mean_measure, ndcg, rank_metrics
from lgmml_torch.functional.presets import PRESETS
from lgmml_torch.functional.regions import Regions
from lgmml_torch.ragged import RankingData

NAN = float("nan")
TWO = torch.tensor([0, 2])
EYE = torch.eye(2)[None]


def gen(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def t(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


class TestEqualRows:
    """`tie_equal_rows` by hand."""

    def tied(self, scores: list[float], rows: list[float], offsets: list[int]) -> list[float]:
        features = torch.tensor(rows, dtype=torch.float64)[:, None]
        given = torch.tensor(scores, dtype=torch.float64)
        before = given.clone()
        found = score.tie_equal_rows(given, features, torch.tensor(offsets))
        assert torch.equal(given, before)
        out: list[float] = found.tolist()
        return out

    def test_all_copies_get_the_score_of_the_first(self) -> None:
        near = [1.0, 1.0 + 1e-9, 1.0 - 1e-9, 1.0 + 2e-9, 5.0, 7.0]
        assert self.tied(near, [3, 3, 3, 3, 4, 4], [0, 6]) == [1.0, 1.0, 1.0, 1.0, 5.0, 7.0]

    def test_equal_rows_of_other_lists_stay(self) -> None:
        scores = [1.0, 2.0, 2.0 + 1e-9, 2.0 - 1e-9]
        assert self.tied(scores, [3, 3, 3, 3], [0, 2, 4]) == [1.0, 2.0, 2.0 + 1e-9, 2.0 + 1e-9]

    def test_other_rows_of_nearly_equal_scores_stay(self) -> None:
        scores = [1.0, 1.0 + 1e-9, 1.0 + 2e-9]
        assert self.tied(scores, [3, 4, 3], [0, 3]) == [1.0, 1.0 + 1e-9, 1.0]

    def test_what_is_further_apart_than_rounding_stays(self) -> None:
        for sign in (1.0, -1.0):
            apart = [sign * 1000.0, sign * 1000.2]
            assert self.tied(apart, [3, 3], [0, 2]) == apart
            assert self.tied([sign * 1000.0, sign * 1000.09], [3, 3], [0, 2]) == [sign * 1000.0] * 2

    def test_one_document_and_none(self) -> None:
        assert self.tied([1.0], [3], [0, 1]) == [1.0]
        assert self.tied([], [], [0, 0]) == []
        assert self.tied([1.0, 1.0 + 1e-9], [3, 3], [0, 2]) == [1.0, 1.0]


class TestSummaries:
    def test_flat_lists_are_counted_among_those_of_two_documents(self) -> None:
        scores, offsets = t(1, 1, 5, 1, 1.00002, 1, 1.000005, -2, -2.00001), torch.tensor([0, 2, 3, 5, 7, 9])
        with pytest.warns(UserWarning, match="nearly constant within 75% of the lists"):
            assert score.warn_if_degenerate(scores, offsets) == 3 / 4  # not the list of one, not 2e-5 apart

    def test_half_of_the_lists_may_be_flat_without_a_warning(self) -> None:
        assert score.warn_if_degenerate(t(1, 1, 1, 2), torch.tensor([0, 2, 4])) == 0.5


class TestNewton:
    def rows(self, **options: Any) -> NewtonRows:
        return NewtonRows(t(1, -1, 2, -2), t(1, 2, 1, 3), torch.tensor([0, 2, 4]), **options)

    def test_gain_by_hand(self) -> None:
        g, h, kernel = [1, -1, 2, -2], [1, 2, 1, 3], [0.1, 0.9, 0.2, 0.7]
        mean = sum(kernel) / 4
        b = -sum(x * (k - mean) for x, k in zip(g, kernel, strict=True))
        lists = ((0, 1), (2, 3))
        shift = sum(sum(h[i] * kernel[i] for i in rows) ** 2 / sum(h[i] for i in rows) for rows in lists)
        variance = sum(k * k for k in kernel) / 4 - mean**2
        a = sum(x * k * k for x, k in zip(h, kernel, strict=True)) - shift + 0.05 * variance * sum(h)
        found = self.rows().gains(torch.tensor(kernel)[:, None])
        assert found.item() == pytest.approx(b * abs(b) / a, rel=1e-4)
        assert self.rows().weights(torch.tensor(kernel)[:, None]).item() == pytest.approx(b / a, rel=1e-4)
        assert self.rows().gains(1 - torch.tensor(kernel)[:, None]).item() == pytest.approx(-b * abs(b) / a, rel=1e-4)
        assert self.rows().weights(1 - torch.tensor(kernel)[:, None]).item() == 0.0

    def test_what_hardly_varies_gains_nothing(self) -> None:
        column = torch.tensor([[0.49], [0.51], [0.49], [0.51]])  # a deviation of .01, up to rounding
        kernels = torch.cat([0.5 + 0.9 * (column - 0.5), 0.5 + 1.1 * (column - 0.5)], dim=1)
        assert (self.rows().gains(kernels) == -1).tolist() == [True, False]
        assert (self.rows().gains(kernels, min_deviation=0.02) == -1).tolist() == [True, True]


class TestLosses:
    def test_scatter_of_lists_by_hand(self) -> None:
        """Two lists, each scaled to the smaller of its two totals; S over ordered pairs of different documents."""
        x = [0.0, 2.0, 5.0, 1.0, 4.0, 8.0]
        p, n = [1.0, 3.0, 0.0, 2.0, 2.0, 0.0], [0.0, 0.0, 2.0, 0.0, 0.0, 8.0]
        lists = ((0, 1, 2), (3, 4, 5))
        S = D = pairs_s = pairs_d = 0.0
        for rows in lists:
            w = min(sum(p[i] for i in rows), sum(n[i] for i in rows))
            own_p = {i: p[i] * w / sum(p[j] for j in rows) for i in rows}
            own_n = {i: n[i] * w / sum(n[j] for j in rows) for i in rows}
            for i in rows:
                for j in rows:
                    if i != j:
                        S += own_p[i] * own_p[j] / w * (x[i] - x[j]) ** 2
                        pairs_s += own_p[i] * own_p[j] / w
                    D += own_p[i] * own_n[j] / w * (x[i] - x[j]) ** 2
                    pairs_d += own_p[i] * own_n[j] / w
        values, offsets = torch.tensor(x).view(6, 1, 1), torch.tensor([0, 3, 6])
        found = list_scatter(values, torch.tensor(p), torch.tensor(n), offsets)
        assert [part.item() for part in found] == pytest.approx([S / pairs_s, D / pairs_d], rel=1e-5)

    def test_scatter_without_pairs_is_zero(self) -> None:
        values = torch.tensor([0.1, 2.3, 5.7]).view(3, 1, 1)
        S, D = list_scatter(values, t(1, 0, 0), t(0, 1, 1), torch.tensor([0, 3]))  # one positive
        assert S.item() == 0.0
        assert D.item() == pytest.approx((2.2**2 + 5.6**2) / 2, rel=1e-5)
        for positive, negative in ((t(0, 0, 0), t(1, 1, 1)), (t(1, 1, 1), t(0, 0, 0)), (t(1, 0, 0), t(0, 1, 1))):
            offsets = torch.tensor([0, 1, 3])  # no list has both
            assert [part.item() for part in list_scatter(values, positive, negative, offsets)] == [0.0, 0.0]

    def test_a_list_without_gain_counts_nothing(self) -> None:
        scores = torch.tensor([1.0, 2.0, 3.0, 4.0], requires_grad=True)
        offsets = torch.tensor([0, 2, 2, 4])
        found = losses.softmax_loss(scores, torch.tensor([0, 0, 1, 2]), offsets)
        expected = math.log(math.exp(3) + math.exp(4)) - (1 / 4 * 3 + 3 / 4 * 4)
        assert found.tolist() == pytest.approx([0.0, 0.0, expected])
        found.sum().backward()
        assert scores.grad is not None
        share = 1 / (1 + math.e)
        assert scores.grad.tolist() == pytest.approx([0.0, 0.0, share - 1 / 4, 1 - share - 3 / 4], abs=1e-6)
        huge = losses.softmax_loss(t(1e4, -1e4), torch.tensor([1, 0]), TWO)
        assert huge.item() == 0.0

    def test_pairs_in_few_rows_are_the_same_pairs(self, monkeypatch: pytest.MonkeyPatch) -> None:
        scores, labels = torch.randn(20, generator=gen(1)), torch.arange(20) % 4
        offsets = torch.tensor([0, 7, 7, 8, 20])
        plain = losses.lambda_gradients(scores, labels, offsets, truncation=3)
        for chunk in (1, 5, 1 << 16):
            monkeypatch.setattr(losses, "_CHUNK_PAIRS", chunk)
            found = losses.lambda_gradients(scores, labels, offsets, truncation=3)
            torch.testing.assert_close(found, plain)


class TestDraws:
    def test_the_limit_of_draws_is_the_number_of_negatives(self) -> None:
        table = warp.NegativeTable.of(t(0, 0, 1, 2), torch.tensor([0, 4]))
        every = table.sample_list_draws(torch.tensor([0]), max_draws=None, generator=gen())
        assert every.negatives.shape == (2, 3)
        assert (every.num_negatives.tolist(), every.num_draws.tolist()) == ([2, 3], [2, 3])
        some = table.sample_list_draws(torch.tensor([0]), generator=gen())
        assert some.negatives.shape == (2, 10)
        assert some.num_draws.tolist() == [10, 10]
        triplets = table.sample_triplets(3, generator=gen())
        assert triplets.negatives.shape == (3, 10)
        assert triplets.weights.tolist() == [1.0, 1.0, 1.0]

    def test_draws_beyond_the_limit_do_not_count(self) -> None:
        scores = torch.tensor([[0.0, 0.0, 9.0]])
        for limit, draws, violator in ((2, 2, -1), (3, 3, 2), (9, 3, 2)):
            found = warp.warp_loss(t(1), scores, torch.tensor([6]), margin=0.5, num_draws=torch.tensor([limit]))
            assert (found.draws.item(), found.violator.item()) == (draws, violator)
        none = warp.warp_loss(t(1), scores, torch.tensor([0]), margin=0.5)
        assert (none.draws.item(), none.violator.item(), none.rank.item(), none.loss.item()) == (0, -1, 0, 0.0)
        empty = warp.warp_loss(t(1), torch.zeros(1, 0), torch.tensor([3]), margin=0.5)
        assert (empty.draws.item(), empty.violator.item(), empty.loss.item()) == (0, -1, 0.0)

    def test_the_margin_itself_is_no_violation(self) -> None:
        found = warp.warp_loss(t(1, 1), torch.tensor([[0.5], [0.625]]), torch.tensor([4, 4]), margin=0.5)
        assert found.violator.tolist() == [-1, 0]
        assert found.loss.tolist() == pytest.approx([0.0, float(warp.rank_weight_table(4)[4]) * 0.125])


class TestBlocks:
    def test_rows_come_in_blocks_of_so_many_numbers(self) -> None:
        X = torch.arange(30.0).view(10, 3)
        for most, sizes in ((6, [2] * 5), (11, [3, 3, 3, 1]), (1, [1] * 10), (99, [10])):
            blocks = list(row_blocks(X, most))
            assert [len(block) for block in blocks] == sizes
            assert torch.equal(torch.cat(blocks), X)

    def test_scores_in_blocks_are_the_scores(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for sizes in [[3, 3, 3], [1, 5, 3]]:
            values = torch.rand(9, 4, generator=gen(1))
            offsets = torch.tensor([0, *np.cumsum(sizes)])
            owner = torch.arange(3).repeat_interleave(torch.tensor(sizes))
            for phi in (torch.rand(3, 4, generator=gen(2)), torch.rand(1, 4, generator=gen(3)), torch.rand(4)):
                expected = -(values * phi.expand(3, 4)[owner]).sum(1)
                for entries in (1, 7, 12, 1000):
                    monkeypatch.setattr(score, "_CHUNK_ENTRIES", entries)
                    torch.testing.assert_close(score.score(values, phi, offsets), expected)


class TestSignificance:
    def test_figures_are_of_float64_whatever_comes_in(self) -> None:
        a, b = torch.tensor([0.1, 0.3, 0.2]), torch.tensor([0.3, 0.1, 0.2])
        found = significance.compare(a, b, generator=gen(), resamples=10)
        assert (found.mean_a, found.mean_b) == (float(a.double().mean()), float(b.double().mean()))
        assert found.difference.mean == float((a.double() - b.double()).mean())

    def test_ties_are_differences_up_to_the_tolerance(self) -> None:
        a, b = torch.tensor([0.5, 0.25, 0.75, 0.0]).double(), torch.tensor([0.25, 0.5, 0.25, 0.0]).double()
        found = significance.compare(a, b, generator=gen(), resamples=10, tolerance=0.25)
        assert (found.wins, found.ties, found.losses) == (1, 3, 0)
        found = significance.compare(a, b, generator=gen(), resamples=10)
        assert (found.wins, found.ties, found.losses) == (2, 1, 1)


class TestJitter:
    def test_it_grows_tenfold_from_the_rounding_of_float64(self) -> None:
        ones = torch.ones(2, 2, dtype=torch.float64)
        with pytest.warns(NumericsWarning, match=r"added up to 1e-13 to the diagonal of 2 of 3 matrices"):
            L = spd.cholesky_jittered(torch.stack([ones, 100 * ones, 4 * torch.eye(2).double()]))
        assert torch.equal(L[2], 2 * torch.eye(2).double())
        for factor, A in zip(L[:2], (ones, 100 * ones), strict=True):
            torch.testing.assert_close(factor @ factor.T, A, rtol=1e-12, atol=0)

    def test_a_millionth_is_the_most(self) -> None:
        def lacking(share: float) -> Tensor:
            return torch.diag(torch.tensor([1.0, 1.0, -share], dtype=torch.float64))

        with pytest.warns(NumericsWarning, match="added up to 6.67e-07"):
            spd.cholesky_jittered(lacking(6e-7))
        with pytest.raises(LGMMLError, match="smallest eigenvalue -7e-07 in member 0"):
            spd.cholesky_jittered(lacking(7e-7))


NO_GAIN = {
    "default": NAN, "lightgbm": 1.0, "xgboost": 1.0, "xgboost-": 0.0, "xgboost-linear": 1.0, "xgboost-linear-": 0.0,
    "catboost": 1.0, "sklearn": 0.0, "torchmetrics": 0.0, "ranklib": 0.0, "rax": 0.0, "pytorchltr": 0.0,
    "trec_eval": 0.0, "letor4": 0.0, "mslr": 0.0,
}  # fmt: skip
MAX_LABEL = {"lightgbm": 30, "xgboost": 31, "xgboost-": 31, "letor4": 2, "mslr": 4}


def test_lists_without_relevant_documents_and_the_highest_label_of_each_preset() -> None:
    for name in PRESETS:
        found = ndcg(t(2, 1), torch.tensor([0, 0]), TWO, preset=name)
        assert found.item() == pytest.approx(NO_GAIN[name], nan_ok=True)
        most = MAX_LABEL.get(name)
        assert PRESETS[name].max_label == most
        if most is None:
            continue
        assert ndcg(t(2, 1), torch.tensor([most, 0]), TWO, preset=name).item() == pytest.approx(1.0)
        with pytest.raises(LGMMLError, match=f"from 0 to {most} for preset '{name}', got {most + 1}"):
            ndcg(t(2, 1), torch.tensor([most + 1, 0]), TWO, preset=name)


class TestMeasures:
    def test_documents_that_were_not_ranked_stand_in_no_place(self) -> None:
        scores, labels = t(5, 4, 3, 2, 1), torch.tensor([1, 0, 1, 0, 2])
        retrieved = torch.tensor([False, True, True, True, True])
        found = rank_metrics(
            scores, labels, torch.tensor([0, 5]), metrics=["mrr", "precision@2", "recall@4", "dcg"], retrieved=retrieved
        )
        assert found["mrr"].item() == 1 / 2  # behind the second document, not the first
        assert found["precision@2"].item() == 1 / 2
        assert found["recall@4"].item() == pytest.approx(2 / 3)  # the one that was not ranked is relevant, too
        assert found["dcg"].item() == pytest.approx(1 / math.log2(3) + 3 / math.log2(5))
        for wrong, message in ((retrieved.long(), "truth values"), (retrieved[:2], "`retrieved` must have shape")):
            with pytest.raises(LGMMLError, match=message):
                rank_metrics(scores, labels, torch.tensor([0, 5]), retrieved=wrong)

    def test_several_lists_with_documents_that_were_not_ranked(self) -> None:
        scores, labels = t(1, 2, 3, 3, 2, 1, 9), torch.tensor([1, 0, 0, 0, 1, 0, 1])
        retrieved = torch.tensor([True, True, False, False, True, True, False])
        offsets, none = torch.tensor([0, 3, 6, 7]), ["mrr", "precision", "precision@2", "map", "recall"]
        for preset in ("default", "rax", "torchmetrics"):
            found = rank_metrics(scores, labels, offsets, metrics=none, preset=preset, retrieved=retrieved)
            assert found["mrr"].tolist() == [1 / 2, 1.0, 0.0]
            assert [float(found[name][2]) for name in none] == [0.0] * 5  # of the last, nothing was ranked

    @pytest.mark.filterwarnings("ignore:the highest label is")
    def test_gains_up_to_the_largest_exponent(self) -> None:
        assert ndcg(t(2, 1), torch.tensor([960, 0]), TWO).item() == 1.0
        assert ndcg(t(1, 2), torch.tensor([960, 0]), TWO).item() == pytest.approx(1 / math.log2(3))
        with pytest.raises(LGMMLError, match="`labels` must be at most 960"):
            ndcg(t(2, 1), torch.tensor([961, 0]), TWO)
        with pytest.raises(LGMMLError, match="`max_grade` must be from the highest label, 2, to 960, got 961"):
            err(t(2, 1), torch.tensor([2, 0]), TWO, max_grade=961)
        with pytest.raises(LGMMLError, match="`max_grade` must be from the highest label, 2, to 960, got 1"):
            err(t(2, 1), torch.tensor([2, 0]), TWO, max_grade=1)
        assert err(t(2, 1), torch.tensor([2, 0]), TWO, max_grade=2).item() == 3 / 4

    def test_means_can_be_weighted(self) -> None:
        data = RankingData.from_arrays(torch.zeros(6, 1), [1, 0, 1, 0, 0, 0], qid=[0, 0, 1, 1, 2, 2])
        scores = torch.tensor([0.0, 1.0, 1.0, 0.0, 1.0, 0.0])  # rows: by query, then label
        labels = data.labels
        own = [1.0 if scores[2 * q + 1] > scores[2 * q] else 1 / math.log2(3) for q in range(2)]
        assert labels.tolist() == [0, 1, 0, 1, 0, 0]
        assert mean_measure(scores, data) == pytest.approx(sum(own) / 2)
        expected = (3 * own[0] + own[1]) / 4  # the third has nothing relevant, whatever it weighs
        assert mean_measure(scores, data, weights=t(3, 1, 100)) == pytest.approx(expected)


class TestBlocksOfRegions:
    def test_offsets_may_be_short_integers(self) -> None:
        offsets = torch.tensor([0, 2, 2, 5], dtype=torch.int32)
        assert feature_module.list_ids(offsets, 5).tolist() == [0, 0, 2, 2, 2]


class TestListSummary:
    def test_means_and_logs_of_deviations(self) -> None:
        kappa = torch.tensor([[1.0, 0.0], [4.0, 0.5], [7.0, 1.0], [2.0, 3.0]], dtype=torch.float64)
        found = score.list_summary(kappa, torch.tensor([0, 3, 3, 4]))
        floor = math.log(1e-4)
        first = [4.0, 0.5, math.log(6**0.5 + 1e-4), math.log((1 / 6) ** 0.5 + 1e-4)]
        expected = [first, [0.0, 0.0, floor, floor], [2.0, 3.0, floor, floor]]
        torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))


X, ONE = torch.zeros(3, 2), torch.ones(1, 1, 1)
TABLE = warp.NegativeTable.of(t(0, 1), TWO)
WRONG: list[tuple[str, Callable[[], Any]]] = [
    ("`labels` must have shape", lambda: losses.softmax_loss(t(1, 2), t(1), TWO)),
    ("`offsets` must", lambda: losses.softmax_loss(t(1, 2), t(1, 2), torch.tensor([0, 3]))),
    ("`features` must have shape", lambda: score.tie_equal_rows(t(1, 2), torch.zeros(3, 1), TWO)),
    ("`scores` must have shape", lambda: score.warn_if_degenerate(torch.zeros(2, 1), TWO)),
    ("`offsets` must", lambda: score.warn_if_degenerate(t(1, 2), torch.tensor([0, 3]))),
    ("`kappa` must have shape", lambda: score.list_summary(t(1, 2), TWO)),
    ("`offsets` must", lambda: score.list_summary(torch.zeros(2, 1), torch.tensor([0, 3]))),
    ("`values` must have shape", lambda: score.score(t(1, 2), t(1), TWO)),
    ("`offsets` must", lambda: score.score(torch.zeros(2, 1), t(1), torch.tensor([0, 3]))),
    ("`kernel` must be one of", lambda: score.score(torch.zeros(2, 1), t(1), TWO, kernel="flat")),
    ("`phi` must have shape", lambda: score.score(torch.zeros(2, 1), torch.zeros(2, 1), TWO)),
    ("`phi` must have shape", lambda: score.score(torch.zeros(2, 1), t(1, 2), TWO)),
    ("`phi` must have shape", lambda: score.score(torch.zeros(2, 1), torch.zeros(1, 1, 1), TWO)),
    ("`margin` must", lambda: warp.warp_loss(t(1), torch.zeros(1, 1), torch.tensor([1]), margin=0.0)),
    ("`pos_scores` must have", lambda: warp.warp_loss(X, torch.zeros(1, 1), torch.tensor([1]), margin=1.0)),
    ("`neg_scores` must have", lambda: warp.warp_loss(t(1), torch.zeros(2, 1), torch.tensor([1]), margin=1.0)),
    ("`num_negatives` must", lambda: warp.warp_loss(t(1), torch.zeros(1, 1), torch.tensor([1, 2]), margin=1.0)),
    ("`pos_scores` must", lambda: warp.warp_loss(t(NAN), torch.zeros(1, 1), torch.tensor([1]), margin=1.0)),
    ("`neg_scores` must", lambda: warp.warp_loss(t(1), torch.tensor([[NAN]]), torch.tensor([1]), margin=1.0)),
    (
        "`num_draws` must have shape",
        lambda: warp.warp_loss(t(1), torch.zeros(1, 1), torch.tensor([1]), margin=1.0, num_draws=torch.tensor([1, 1])),
    ),
    (
        "`weights` must have shape",
        lambda: warp.warp_loss(t(1), torch.zeros(1, 1), torch.tensor([1]), margin=1.0, weights=t(1, 1)),
    ),
    ("`max_rank` must", lambda: warp.rank_weight_table(-1)),
    ("`features` must have", lambda: local_distances(t(1), torch.zeros(1, 1), ONE, support=torch.tensor([[0]]))),
    ("`support` must have", lambda: local_distances(X, torch.zeros(1, 1), ONE, support=torch.tensor([0]))),
    ("`anchors` must have", lambda: local_distances(X, torch.zeros(1, 2), ONE, support=torch.tensor([[0]]))),
    (
        "`factors` must have",
        lambda: local_distances(X, torch.zeros(1, 1), torch.ones(2, 1, 1), support=torch.tensor([[0]])),
    ),
    (
        "2 features, got -1",
        lambda: local_distances(X, torch.zeros(1, 2), EYE, support=torch.tensor([[-1, 7]])),
    ),
    ("2 features, got 2", lambda: local_distances(X, torch.zeros(1, 2), EYE, support=torch.tensor([[0, 2]]))),
    ("`features` must have", lambda: local_distances(t(1), torch.zeros(1, 1), ONE)),
    ("`anchors` must have", lambda: local_distances(X, torch.zeros(1, 1), ONE)),
    ("`factors` must have", lambda: local_distances(X, torch.zeros(1, 2), ONE)),
    ("`anchors` must", lambda: local_distances(X, torch.full((1, 2), NAN), EYE)),
    ("`factors` must", lambda: local_distances(X, torch.zeros(1, 2), NAN * EYE)),
    ("`method` must be one of", lambda: DistanceTiles(X, torch.zeros(1, 2), EYE, method="fast")),
    ("`norm` must be one of", lambda: local_distances(X, torch.zeros(1, 2), EYE, norm="l2")),
    ("`dists` must have shape", lambda: score.median_scales(t(1))),
    ("`dists` must have at least one row", lambda: score.median_scales(torch.zeros(0, 1))),
    ("`dists` must", lambda: score.median_scales(torch.tensor([[NAN]]))),
    ("`positive` must have", lambda: list_scatter(torch.zeros(2, 1, 1), t(1), t(1, 1), TWO)),
    ("`negative` must have", lambda: list_scatter(torch.zeros(2, 1, 1), t(1, 1), t(1), TWO)),
    ("`hessians` must have", lambda: NewtonRows(t(1, 2), t(1), TWO)),
    ("`hessians` must be positive, got 0", lambda: NewtonRows(t(1, 2), t(1, 0), TWO)),
    ("`ridge` must", lambda: NewtonRows(t(1, 2), t(1, 1), TWO, ridge=0.0)),
    ("power of two wide, got 3", lambda: interpolate_knots(X, torch.zeros(2, 3), torch.zeros(2, 3))),
    ("`levels` must have", lambda: interpolate_knots(X, torch.zeros(2, 2), torch.zeros(2, 4))),
    ("`features` must have", lambda: interpolate_knots(X, torch.zeros(3, 2), torch.zeros(3, 2))),
    ("`features` must have shape", lambda: feature_module.list_rank_percentiles(t(1), TWO)),
    ("`offsets` must", lambda: feature_module.list_rank_percentiles(X, TWO)),
]


def test_what_does_not_fit_is_refused() -> None:
    for message, call in WRONG:
        with pytest.raises(LGMMLError, match=message):
            call()


def test_one_positive_in_every_list_leaves_no_similar_pairs_and_no_rounding() -> None:
    values = 100 * torch.randn(24, 2, 3, generator=gen(5))
    positive = (torch.arange(24) % 4 == 0).float()
    S, D = list_scatter(values, positive, 1 - positive, torch.arange(0, 25, 4))
    assert torch.equal(S, torch.zeros(2, 3, 3))
    assert bool((D.diagonal(dim1=1, dim2=2) > 0).all())


def test_a_pooled_scatter_without_pairs_is_zero() -> None:
    every = torch.tensor([0, 1, 2])
    single = Regions(every[:2], every, torch.tensor([0, 2]), every, torch.tensor([1, 3]), every)
    S, D = gmml.pooled_scatter(t(0, 2, 5, 7)[:, None], single)
    assert (S.item(), D.item()) == (0.0, 4.0)
    nothing = torch.zeros(0, dtype=torch.long), torch.zeros(3, dtype=torch.long)
    pairs = Regions(every[:2], every, torch.tensor([0, 1, 2, 3]), torch.tensor([0, 2, 4]), *nothing)
    S, D = gmml.pooled_scatter(t(0, 2, 5, 7)[:, None], pairs)
    assert (S.item(), D.item()) == (4.0, 0.0)
