from __future__ import annotations

import math
import pickle

import pytest
import torch
from torch import Tensor

from lgmml_torch import distributed
from lgmml_torch.checks import LGMMLError
from lgmml_torch.evaluation.metric import RankingMetrics
from lgmml_torch.functional.measures import rank_metrics
from lgmml_torch.functional.presets import describe
from lgmml_torch.segments import gather_segments, offsets_from_sizes
from tests.processes import in_processes

NAMES = ("ndcg@10", "ndcg@3", "dcg@5", "map", "mrr", "err", "precision@5", "recall@5")
SIZES = [4, 9, 0, 1, 30, 2, 7, 12, 1, 5, 40]


def lists() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(sum(SIZES), generator=generator)
    labels = torch.randint(0, 4, (sum(SIZES),), generator=generator)
    offsets = offsets_from_sizes(torch.tensor(SIZES))
    labels[offsets[4] : offsets[6]] = 0
    return scores, labels, offsets


def shard(queries: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    scores, labels, offsets = lists()
    rows, part = gather_segments(offsets, torch.tensor(queries, dtype=torch.int64))
    return scores[rows], labels[rows], part


def updated(*shards: list[int], **options: object) -> RankingMetrics:
    metric = RankingMetrics(NAMES, max_grade=3, **options)
    for queries in shards:
        metric.update(*shard(queries))
    return metric


ALL = list(range(len(SIZES)))
# Unequal on purpose: means of means would be wrong.
SPLITS = [[[0], ALL[1:]], [ALL[:5], ALL[5:9], ALL[9:]], [[2], [4, 5], [0, 1, 3, 6, 7, 8, 9, 10]]]


@pytest.mark.parametrize("preset", ["default", "lightgbm"])
def test_equals_the_mean_over_counted_queries(preset: str) -> None:
    found = updated(ALL, preset=preset).compute()
    for name, values in rank_metrics(*lists(), metrics=NAMES, max_grade=3, preset=preset).items():
        torch.testing.assert_close(found[name], values.nanmean())


@pytest.mark.parametrize("split", SPLITS)
def test_batches_add_up(split: list[list[int]]) -> None:
    torch.testing.assert_close(updated(*split).compute(), updated(ALL).compute())


@pytest.mark.parametrize("split", SPLITS)
def test_merged_instances_add_up(split: list[list[int]]) -> None:
    first, *others = (updated(queries) for queries in split)
    for other in others:
        first.merge_state(other)
    torch.testing.assert_close(first.compute(), updated(ALL).compute())
    assert first.summary()["ndcg@10"].counted == updated(ALL).summary()["ndcg@10"].counted


@pytest.mark.parametrize("split", SPLITS)
def test_synchronised_shards_add_up(split: list[list[int]]) -> None:
    shards = [updated(queries) for queries in split]

    def gather(value: Tensor, group: object) -> list[Tensor]:
        (name,) = [n for n in ("total", "counted", "queries") if getattr(local, n) is value]
        return [value if part is local else getattr(part, name) for part in shards]

    local = shards[0]
    local.dist_sync_fn, local.distributed_available_fn = gather, lambda: True
    whole = updated(ALL)
    found = local.summary()  # before compute: both must synchronise on their own
    for name, wanted in whole.summary().items():
        assert (found[name].counted, found[name].skipped) == (wanted.counted, wanted.skipped)
        assert found[name].value == pytest.approx(wanted.value, rel=1e-12)
    torch.testing.assert_close(local.compute(), whole.compute())
    assert int(local.queries) == len(split[0])  # the local sums are restored


def counted_by(rank: int | None = None) -> tuple[Tensor, dict[str, tuple[int, int]]]:
    """What one of two processes says after both have seen their part; or what one says that has seen all."""
    part = ALL if rank is None else (ALL[:3], ALL[3:])[rank]
    metric = updated(part)
    return metric.compute(), {name: (entry.counted, entry.skipped) for name, entry in metric.summary().items()}


def part_of_two() -> tuple[Tensor, dict[str, tuple[int, int]]]:
    return counted_by(distributed.rank())


def test_two_processes_add_up() -> None:
    whole, counts = counted_by()
    for found, counted in in_processes(2, part_of_two):
        torch.testing.assert_close(found, whole)
        assert counted == counts


def test_forward_gives_the_batch_and_keeps_the_whole() -> None:
    metric = RankingMetrics(NAMES, max_grade=3)
    batch = metric(*shard(ALL[:5]))
    torch.testing.assert_close(batch, updated(ALL[:5]).compute())
    metric(*shard(ALL[5:]))
    torch.testing.assert_close(metric.compute(), updated(ALL).compute())


def test_reset_and_pickle() -> None:
    metric = updated(ALL)
    again = pickle.loads(pickle.dumps(metric))
    torch.testing.assert_close(again.compute(), metric.compute())
    metric.reset()
    metric.update(*shard([1]))
    torch.testing.assert_close(metric.compute(), updated([1]).compute())


def test_half_precision_modules_keep_exact_sums() -> None:
    metric = updated(ALL).half()
    assert metric.total.dtype == torch.float64


def test_summary_counts_and_says_what_was_measured() -> None:
    summary = updated(ALL, threshold=2).summary()
    per_query = rank_metrics(*lists(), metrics=["ndcg@10"])["ndcg@10"]
    assert summary["ndcg@10"].skipped == int(per_query.isnan().sum()) >= 3
    assert summary["ndcg@10"].counted + summary["ndcg@10"].skipped == len(SIZES)
    assert (summary["mrr"].counted, summary["mrr"].skipped) == (len(SIZES) - 1, 1)  # one query has no documents
    assert summary["map"].definition == describe("map", threshold=2)


def test_nothing_counted_is_nan() -> None:
    metric = RankingMetrics(["ndcg@10"])
    metric.update(torch.zeros(2), torch.zeros(2), torch.tensor([0, 2]))
    metric.update(torch.zeros(0), torch.zeros(0), torch.tensor([0]))
    assert math.isnan(float(metric.compute()["ndcg@10"]))
    assert (metric.summary()["ndcg@10"].counted, metric.summary()["ndcg@10"].skipped) == (0, 1)


def test_ties_follow_the_order_given() -> None:
    metric = RankingMetrics("mrr")
    metric.update(torch.zeros(3), torch.tensor([0, 0, 1]), torch.tensor([0, 3]), tie_order=torch.tensor([2, 1, 0]))
    assert float(metric.compute()["mrr"]) == 1.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"metrics": []}, r"`metrics` must hold at least one name, got none"),
        ({"metrics": ["nDCG"]}, r"`metrics` must hold names like .*, got 'nDCG'"),
        ({"preset": "none"}, r"`preset` must be one of .*, got 'none'"),
        ({"metrics": ["err@10"]}, r"`max_grade` must be given for err"),
        ({"threshold": -2.0}, r"`threshold` must be positive, got -2.0"),
    ],
)
def test_errors_come_when_the_metric_is_made(options: dict, message: str) -> None:
    with pytest.raises(LGMMLError, match=message):
        RankingMetrics(**options)
