"""Φ fitted to each list's own labels: between its start and the best there is, and near the best."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from lgmml_torch.functional.measures import rank_data
from lgmml_torch.functional.score import kernel as kappa_of
from lgmml_torch.functional.score import score
from lgmml_torch.ragged import RankingData
from research.ideal import ideal_scores
from tests.reference import ideal as reference


def random_lists(K: int, queries: int = 60, seed: int = 0) -> tuple[Tensor, RankingData]:
    """Distances and grades that have nothing to do with each other, so that weights matter."""
    g = torch.Generator().manual_seed(seed)
    sizes = torch.randint(5, 13, (queries,), generator=g)
    dists = 3 * torch.rand(int(sizes.sum()), K, generator=g, dtype=torch.float64)
    labels = torch.randint(0, 4, (len(dists),), generator=g)
    qid = torch.arange(queries).repeat_interleave(sizes)
    data = RankingData.from_arrays(dists, labels, qid=qid, dtype=torch.float64)
    return data.features, data


def ndcg(scores: Tensor, data: RankingData, k: int = 10) -> Tensor:
    return rank_data(scores, data, metrics=[f"ndcg@{k}"])[f"ndcg@{k}"]


def best(dists: Tensor, data: RankingData, kernel: str, k: int = 10) -> Tensor:
    found = []
    for q in range(data.num_queries):
        rows = slice(int(data.offsets[q]), int(data.offsets[q + 1]))
        labels = data.labels[rows].tolist()
        kappa = kappa_of(dists[rows], kernel).numpy()
        found.append(reference.best_ndcg(kappa, labels, k) if max(labels) > 0 else float("nan"))
    return torch.tensor(found, dtype=torch.float64)


def test_the_reference_by_hand() -> None:
    # The middle document can never come first: wherever it is not behind the first it is behind the last.
    kappa = np.array([[0.0, 1.0], [0.6, 0.6], [1.0, 0.0]])
    assert reference.best_ndcg(kappa, [0.0, 1.0, 0.0], 10) == pytest.approx(1 / np.log2(3))
    assert reference.best_ndcg(kappa, [1.0, 0.0, 0.0], 10) == 1.0


@pytest.mark.parametrize(("K", "kernel"), [(2, "paper"), (3, "distance"), (3, "paper")])
def test_near_the_best_never_above_it_never_below_the_start(K: int, kernel: str) -> None:
    dists, data = random_lists(K)
    start = torch.tensor([1.0, 0.5, 0.25], dtype=torch.float64)[:K]
    found = ndcg(ideal_scores(dists, data, start, kernel=kernel), data)
    highest = best(dists, data, kernel)
    counted = ~found.isnan()
    assert torch.equal(counted, ~highest.isnan())
    assert bool((found <= highest + 1e-9)[counted].all())
    assert bool((found >= ndcg(score(dists, start, data.offsets, kernel=kernel), data))[counted].all())
    assert float((found / highest).nanmean()) >= 0.98


def test_single_metrics_and_equal_weights_are_among_what_is_tried() -> None:
    dists, data = random_lists(5, queries=30, seed=2)
    found = ndcg(ideal_scores(dists, data, torch.ones(5).double(), kernel="distance", passes=0), data)
    rows = [*torch.eye(5, dtype=torch.float64), torch.ones(5, dtype=torch.float64)]
    for phi in rows:
        worse = ndcg(score(dists, phi, data.offsets, kernel="distance"), data)
        assert bool((found >= worse - 1e-12)[~found.isnan()].all())


def test_it_is_the_same_again_and_does_not_depend_on_the_unit_of_the_start() -> None:
    dists, data = random_lists(3, seed=4)
    start = torch.tensor([1.0, 2.0, 3.0])
    first = ideal_scores(dists.half(), data, start, kernel="paper", seed=1)
    assert torch.equal(first, ideal_scores(dists.half(), data, start, kernel="paper", seed=1))
    assert first.dtype == torch.float32
    larger = ideal_scores(dists.half(), data, 1024 * start, kernel="paper", seed=1)
    torch.testing.assert_close(ndcg(larger, data), ndcg(first, data), rtol=1e-6, atol=1e-6, equal_nan=True)


def test_each_part_of_the_search_helps() -> None:
    """Passes of WARP improve on starts and single metrics, and a cut at k is what is improved."""
    dists, data = random_lists(6, queries=80, seed=5)
    start = torch.ones(6, dtype=torch.float64)
    without = ndcg(ideal_scores(dists, data, start, kernel="distance", passes=0), data)
    passes = ndcg(ideal_scores(dists, data, start, kernel="distance"), data)
    assert float(passes.nanmean()) > float(without.nanmean()) > 0.92
    first = ndcg(ideal_scores(dists, data, start, kernel="distance", k=1), data, 1)
    assert float(first.nanmean()) > float(ndcg(-dists.sum(1), data, 1).nanmean())


def test_equal_documents_share_a_score_though_their_distances_differ_by_rounding() -> None:
    """Of hundreds of tries one would put the better of two equal documents first by its last bit."""
    g = torch.Generator().manual_seed(0)
    X = torch.rand(6, 2, generator=g).repeat_interleave(2, dim=0)
    labels = torch.arange(12) % 2
    data = RankingData.from_arrays(X, labels, qid=[0] * 12)
    dists = data.features * (1 + 1e-6 * torch.randn(12, 2, generator=g))
    scores = ideal_scores(dists, data, torch.ones(2), kernel="distance")
    for row in range(12):
        same = (data.features == data.features[row]).all(1)
        assert len(scores[same].unique()) == 1


def test_no_weights_at_all_are_no_merit() -> None:
    """Φ = 0 ranks in the caller's order, which may be the right one by chance or by design."""
    data = RankingData.from_arrays(torch.tensor([[3.0], [2.0], [1.0]]), [2, 1, 0], qid=[0, 0, 0])
    scores = ideal_scores(data.features, data, torch.ones(1), kernel="distance")
    worst = float(ndcg(-data.features[:, 0], data))
    assert float(ndcg(scores, data)) == pytest.approx(worst)
    assert worst < 0.99
    assert float(ndcg(torch.zeros(3), data)) == pytest.approx(1)


def test_lists_without_anything_to_order() -> None:
    X = torch.rand(5, 2, generator=torch.Generator().manual_seed(0))
    data = RankingData.from_arrays(X, [0, 0, 0, 1, 1], qid=[0, 0, 0, 1, 1])
    scores = ideal_scores(data.features, data, torch.ones(2), kernel="paper")
    assert scores.shape == (5,)
    assert bool(scores.isfinite().all())
    empty = data.select([])
    assert ideal_scores(empty.features, empty, torch.ones(2), kernel="paper").shape == (0,)
