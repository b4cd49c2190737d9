"""Which raw features stay: calibrated on noise, and the same whatever the order, the blocks and the processes."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from lgmml_torch.checks import LGMMLError
from lgmml_torch.functional.selection import FeatureChoice, FeatureSums, choose_features
from lgmml_torch.ragged import RankingData
from lgmml_torch.training.preprocessed import select_features
from tests.processes import in_processes, own_part
from tests.reference import selection as reference


def drawn(queries: int = 120, features: int = 40, documents: int = 25, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Features and the offsets of lists of one length."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(queries * documents, features, generator=g)
    return x, torch.arange(0, len(x) + 1, documents)


def labelled(strength: Tensor, seed: int = 0) -> Tensor:
    """Labels 0, 1 and 2 that follow a score and chance."""
    g = torch.Generator().manual_seed(seed + 1000)
    noisy = strength + torch.randn(len(strength), generator=g)
    return (noisy > 1.0).float() + (noisy > 2.0).float()


def chosen(x: Tensor, labels: Tensor, offsets: Tensor, *, paired: bool | None = None) -> FeatureChoice:
    sums = FeatureSums(x.shape[1], len(offsets) - 1, paired=paired)
    sums.add(x, labels, offsets)
    return choose_features(sums)


def noisy_lists(seed: int = 0) -> RankingData:
    """The first two of thirty features mean something by themselves, the next two in combination."""
    x, offsets = drawn(100, 30, 20, seed)
    labels = labelled(x[:, 0] - x[:, 1] + 1.5 * (x[:, 2] * x[:, 3]).sign(), seed)
    return RankingData.from_arrays(x, labels, group=offsets.diff())


def test_statistics_follow_their_definition() -> None:
    g = torch.Generator().manual_seed(3)
    sizes = torch.tensor([7, 1, 12, 4, 0, 9])
    offsets = torch.cat([torch.zeros(1, dtype=torch.long), sizes.cumsum(0)])
    x = torch.randint(0, 5, (33, 4), generator=g).float()
    x[:, 3] = 2.0
    labels = torch.randint(0, 3, (33,), generator=g).float()
    labels[20:24] = 1.0  # a list whose labels are all equal
    columns, y, bounds = x.mT.tolist(), labels.tolist(), offsets.tolist()
    expected = [reference.statistic(columns, y, bounds, j) for j in range(4)]
    expected += [reference.statistic(columns, y, bounds, j, j) for j in range(4)]
    pairs = [reference.statistic(columns, y, bounds, j, k) for j, k in itertools.combinations(range(4), 2)]
    for paired, wanted in ((True, expected + pairs), (False, expected)):
        sums = FeatureSums(4, 6, paired=paired)
        sums.add(x, labels, offsets)
        torch.testing.assert_close(
            sums.statistics()[0], torch.tensor(wanted, dtype=torch.float64), rtol=1e-4, atol=1e-5
        )
        assert sums.lists == 3
        assert sums.varies.tolist() == [True, True, True, False]


def test_statistics_of_noise_are_about_standard_normal() -> None:
    x, offsets = drawn(200, 60)
    sums = FeatureSums(60, 200)
    sums.add(x, labelled(torch.zeros(len(x))), offsets)
    for values in (sums.statistics()[0], sums.statistics()[1:].flatten()):
        assert float(values.mean().abs()) < 0.1
        assert 0.9 < float(values.std()) < 1.1


def test_noise_rarely_stays_and_real_features_do() -> None:
    """Over ten draws with five real features of fifty."""
    noise = 0
    for seed in range(10):
        x, offsets = drawn(120, 50, seed=seed)
        found = chosen(x, labelled(0.7 * x[:, :5].sum(1), seed), offsets)
        assert set(range(5)) <= set(found.kept.tolist())
        assert found.null_share > 0.7
        noise += len(found.kept) - 5
    assert noise <= 30  # of 450: chance alone would keep half a feature of each of three kinds


def test_sparse_noise_rarely_stays() -> None:
    """Features that are nearly always 0 are skewed, and yet T of chance is not large."""
    noise = 0
    for seed in range(5):
        x, offsets = drawn(300, 60, seed=seed)
        x[:, 5:] = (x[:, 5:] > 2.3).float()
        found = chosen(x, labelled(0.7 * x[:, :5].sum(1), seed), offsets)
        assert set(range(5)) <= set(found.kept.tolist())
        noise += len(found.kept) - 5
    assert noise <= 25  # of 275


def test_features_that_matter_in_combination_only_stay_where_pairs_are_seen() -> None:
    x, offsets = drawn(200, 40)
    labels = labelled(2 * (x[:, 7] * x[:, 20]).sign())
    found = chosen(x, labels, offsets).kept.tolist()
    assert {7, 20} <= set(found)
    assert len(found) < 20
    # One by one they look like noise.
    assert not {7, 20} <= set(chosen(torch.cat([x, labels[:, None]], 1), labels, offsets, paired=False).kept.tolist())


def test_features_that_matter_by_their_size_stay() -> None:
    x, offsets = drawn(200, 40)
    assert 9 in chosen(x, labelled(2 * (x[:, 9].abs() - 1)), offsets, paired=False).kept


def test_all_features_stay_where_most_of_them_mean_something() -> None:
    x, offsets = drawn(150, 10)
    found = chosen(x, labelled(x[:, :8].sum(1)), offsets)
    assert found.kept.tolist() == list(range(10))
    assert found.set_aside == []
    assert found.reason.startswith("All features stay: about ")
    assert "All features stay: 20 queries" in chosen(x[:500], labelled(x[:500, 0]), offsets[:21]).reason
    assert found.null_share == pytest.approx(0.6, abs=0.25)  # two of the ten, and the squares of all


def test_what_ranks_cannot_judge_stays() -> None:
    x, offsets = drawn(100, 30)
    x[:, 11] = torch.arange(100.0).repeat_interleave(25)  # the same for all documents of a query
    x[:, 12] = 3.0
    found = chosen(x, labelled(x[:, 0] - x[:, 1]), offsets)
    assert {0, 1, 11, 12} <= set(found.kept.tolist())
    assert len(found.kept) < 12


@pytest.mark.parametrize(
    ("queries", "features", "labels"),
    [(1, 5, "score"), (20, 5, "score"), (80, 5, "equal"), (80, 1, "score"), (80, 1, "chance"), (80, 30, "chance")],
)
def test_all_features_stay_where_nothing_can_be_said(queries: int, features: int, labels: str) -> None:
    x, offsets = drawn(queries, features)
    y = {"score": labelled(2 * x[:, 0]), "equal": torch.ones(len(x)), "chance": labelled(torch.zeros(len(x)))}[labels]
    kept = chosen(x, y, offsets).kept.tolist()
    assert kept == list(range(features)) or (labels == "chance" and 0 < len(kept) < 10)


def test_raw_scale_does_not_matter() -> None:
    data = noisy_lists()
    expected = select_features(data).kept
    assert len(expected) < 15
    assert select_features(data.replace(features=data.features.exp() * 1e-3 - 5)).kept.equal(expected)
    assert select_features(data.replace(features=data.features.double())).kept.equal(expected)


def test_order_of_rows_and_queries_does_not_matter() -> None:
    data = noisy_lists()
    expected = select_features(data)
    rows = torch.randperm(data.num_documents, generator=torch.Generator().manual_seed(5))
    qid = torch.repeat_interleave(torch.arange(data.num_queries), data.sizes)
    shuffled = RankingData.from_arrays(data.features[rows], data.labels[rows], qid=qid[rows])
    found = select_features(shuffled)
    assert found.kept.equal(expected.kept)
    assert found.null_share == expected.null_share


def test_lists_may_come_in_parts_in_any_order() -> None:
    data = noisy_lists()
    whole = FeatureSums(30, data.num_queries)
    whole.add(data.features, data.labels, data.offsets)
    parts = FeatureSums(30, data.num_queries)
    for numbers in torch.randperm(data.num_queries, generator=torch.Generator().manual_seed(1)).split(17):
        some = data.select(numbers)
        parts.add(some.features, some.labels, some.offsets, numbers)
    torch.testing.assert_close(parts.parts, whole.parts, rtol=1e-5, atol=1e-3)
    assert choose_features(parts).kept.equal(choose_features(whole).kept)
    with pytest.raises(LGMMLError, match="`numbers` must have shape"):
        parts.add(data.features, data.labels, data.offsets, torch.arange(3))


def shared_choice(owner: list[int] | None) -> dict[str, Tensor]:
    return {"kept": select_features(own_part(noisy_lists(), owner)).kept}


def test_processes_choose_what_one_chooses() -> None:
    expected = select_features(noisy_lists())
    assert set(range(4)) <= set(expected.kept.tolist())
    assert len(expected.set_aside) > 15
    for count, owner in ((1, None), (2, None), (3, [0] * 90 + [2] * 10)):
        for found in in_processes(count, shared_choice, owner):
            assert found["kept"].equal(expected.kept)


def test_weights_of_documents_count() -> None:
    """Relevance that weighs nothing is no relevance."""
    data = noisy_lists()
    weighed = data.replace(document_weights=torch.zeros(data.num_documents))
    assert select_features(weighed).lists == 0
    assert len(select_features(weighed).kept) == 30
