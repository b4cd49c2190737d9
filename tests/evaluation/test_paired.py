"""Two rankings query by query, and labels by score, beside naive loops."""

from __future__ import annotations

import json
import math

import pytest
import torch

from lgmml_torch.checks import DataError, LGMMLError
from lgmml_torch.evaluation.evaluate import Paired, evaluate, evaluate_scores, label_by_score
from lgmml_torch.functional.significance import compare
from tests.doors import small_data, small_model


def test_paired_is_the_comparison_of_both() -> None:
    data = small_data(30, seed=4)
    scores = [small_model(seed=seed).score(data) for seed in (1, 2)]
    found = Paired.of(("a", scores[0]), ("b", scores[1]), data, split="test", measure="map", seed=3)
    rows = [evaluate_scores(s, data, metrics=["map"]).per_query["map"] for s in scores]
    assert found.comparison == compare(rows[0], rows[1], generator=torch.Generator().manual_seed(3))
    sizes = [abs(float(found.gaps[query])) for query in found.most_different(30)]
    assert sizes == sorted(sizes, reverse=True)
    assert min(sizes) > 0
    content = json.loads(json.dumps(found.to_dict(per_query=True)))
    assert content["means"] == [found.comparison.mean_a, found.comparison.mean_b]
    assert content["qids"] == list(data.qids)
    assert f"{found.comparison.wins} won" in found.sentence()
    same = Paired.of(("a", scores[0]), ("a", scores[0]), data)
    assert same.most_different() == []
    with pytest.raises(LGMMLError, match="did you mean"):
        Paired.of(("a", scores[0]), ("b", scores[1]), data, measure="ndgc")


def test_labels_by_score_are_what_a_loop_finds() -> None:
    data = small_data(25, seed=6)
    scores = (data.features[:, 0] * 2).round()  # with ties
    found = label_by_score(scores, data, bins=4)
    cells: list[list[list[float]]] = [[[] for _ in range(4)] for _ in range(data.num_queries)]
    for row in range(data.num_documents):
        query = int(data.query_index[row])
        own = scores[data.offsets[query] : data.offsets[query + 1]]
        below, equal = int((own < scores[row]).sum()), int((own == scores[row]).sum())
        place = (below + (equal + 1) / 2 - 0.5) / len(own)
        cells[query][min(int(place * 4 + 1e-9), 3)].append(float(data.labels[row]))
    for part, interval in enumerate(found):
        means = [math.fsum(cell[part]) / len(cell[part]) for cell in cells if cell[part]]
        assert interval is not None
        assert interval.mean == pytest.approx(math.fsum(means) / len(means))
        assert interval.counted == len(means)
    single = data.select((data.sizes == 1).nonzero()[:, 0])
    assert [i is None for i in label_by_score(scores[: single.num_documents], single, bins=3)] == [
        True, False, True,
    ]  # fmt: skip
    with pytest.raises(DataError, match="there are no documents"):
        label_by_score(scores[:0], data.select([]))
    with pytest.raises(LGMMLError, match="`bins` must be positive, got 0"):
        label_by_score(scores, data, bins=0)


def test_means_have_intervals() -> None:
    found = evaluate(small_model(), small_data(), split="test", metrics=["ndcg@5", "ndcg@10"])
    interval = found.interval("ndcg@10")
    assert interval is not None
    assert interval.mean == pytest.approx(found.means["ndcg@10"])
    assert interval.low < interval.mean < interval.high
    assert found.to_dict()["metrics"]["ndcg@10"]["interval"] == [interval.low, interval.high]
    assert f"{interval.mean:.4f} [{interval.low:.4f}, {interval.high:.4f}]" in found.markdown()
    assert found.markdown().count("gain 2^y-1") == 1  # one definition, once
    assert "- ndcg@5, ndcg@10 (default): gain" in found.markdown()
    data = small_data()
    empty = evaluate(small_model(), data.replace(labels=torch.zeros_like(data.labels)), metrics=["map"])
    assert empty.interval("map") is None
    assert empty.to_dict()["metrics"]["map"]["interval"] is None
