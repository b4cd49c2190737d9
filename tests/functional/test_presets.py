"""Each preset against its source: the library itself where it is installed, its rules read literally otherwise."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import lightgbm
import numpy as np
import pytest
import torch
import xgboost
from sklearn.metrics import average_precision_score, dcg_score, ndcg_score
from torch import Tensor
from torchmetrics.functional import retrieval as torchmetrics_functional
from torchmetrics.retrieval import RetrievalNormalizedDCG

from lgmml_torch.functional.measures import average_precision, dcg, ndcg, precision, rank_metrics
from lgmml_torch.functional.presets import PRESETS
from lgmml_torch.segments import offsets_from_sizes
from tests.reference import ranking as reference

SIZES = [5, 3, 1, 12, 4, 30, 2, 1, 17, 9]
SEEDS = range(4)


def lists(seed: int, *, grades: int = 5, ties: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """Lists with ties, one-document lists and lists without a relevant document."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(SIZES)
    scores = torch.randn(total, generator=generator)
    scores = scores.mul(2).round() if ties else scores
    labels = torch.randint(0, grades, (total,), generator=generator)
    labels[torch.rand(total, generator=generator) < 0.4] = 0
    offsets = offsets_from_sizes(torch.tensor(SIZES))
    labels[offsets[1] : offsets[3]] = 0
    return scores, labels, offsets


def pairs(scores: Tensor, labels: Tensor, offsets: Tensor) -> list[tuple[list[float], list[float]]]:
    bounds = itertools.pairwise(offsets.tolist())
    return [(scores[a:b].tolist(), labels[a:b].tolist()) for a, b in bounds]


def lightgbm_values(scores: Tensor, labels: Tensor, offsets: Tensor, metric: str, at: list[int]) -> list[float]:
    """LightGBM's own evaluation of given scores: a model without trees on top of initial scores."""
    data = lightgbm.Dataset(
        np.zeros((len(scores), 1)),
        label=labels.numpy(),
        group=offsets.diff().numpy(),
        init_score=scores.double().numpy(),
        params={"verbosity": -1},
    )
    params = {"objective": "lambdarank", "metric": metric, "eval_at": at, "verbosity": -1, "num_threads": 1}
    booster = lightgbm.Booster(params, data)
    return [float(result[2]) for result in booster.eval_train()]


def xgboost_values(
    scores: Tensor, labels: Tensor, offsets: Tensor, metrics: list[str], **params: Any
) -> dict[str, float]:
    """XGBoost's own evaluation of given scores: a model without trees on top of base margins."""
    data = xgboost.DMatrix(np.zeros((len(scores), 1)), label=labels.numpy())
    data.set_group(offsets.diff().numpy())
    data.set_base_margin(scores.numpy())
    common = {"base_score": 0.0, "eval_metric": metrics, "disable_default_eval_metric": 1, "nthread": 1}
    line = xgboost.Booster({"objective": "rank:ndcg", **common, **params}, [data]).eval(data)
    fields = [field.removeprefix("eval-").rpartition(":") for field in line.split("\t")[1:]]
    return {name: float(value) for name, _, value in fields}


def test_lightgbm() -> None:
    for seed in SEEDS:
        data = lists(seed)
        cutoffs = [1, 2, 3, 5, 10, 20]
        for metric, ours in (("ndcg", ndcg), ("map", average_precision)):
            expected = lightgbm_values(*data, metric, cutoffs)
            assert ours(*data, k=cutoffs, preset="lightgbm").tolist() == pytest.approx(expected, rel=1e-12)


def test_xgboost_ndcg() -> None:
    for seed in SEEDS:
        for linear in [False, True]:
            data = lists(seed)
            cutoffs = [1, 2, 3, 5, 10, 20]
            name = "xgboost-linear" if linear else "xgboost"
            for suffix in ("", "-"):
                names = [f"ndcg@{k}{suffix}" for k in cutoffs] + [f"ndcg{suffix}"]
                expected = xgboost_values(*data, names, ndcg_exp_gain=not linear)
                ours = ndcg(*data, k=[*cutoffs, None], preset=name + suffix)
                assert ours.tolist() == pytest.approx([expected[name] for name in names], rel=1e-6)


def test_xgboost_map_and_precision() -> None:
    for seed in SEEDS:
        data = lists(seed, grades=2)
        cutoffs = [1, 2, 3, 5, 10, 20]
        ours = average_precision(*data, k=[*cutoffs, None], preset="xgboost").tolist()
        names = [f"map@{k}" for k in cutoffs] + ["map"]
        expected = xgboost_values(*data, names, objective="rank:map")
        assert ours == pytest.approx([expected[name] for name in names], rel=1e-6)
        zero = average_precision(*data, k=3, preset="xgboost-")
        assert float(zero) == pytest.approx(xgboost_values(*data, ["map@3-"], objective="rank:map")["map@3-"], rel=1e-6)
        names = [f"pre@{k}" for k in cutoffs]
        expected = xgboost_values(*data, names, objective="rank:map")
        ours = precision(*data, k=cutoffs, preset="xgboost").tolist()
        assert ours == pytest.approx([expected[name] for name in names], rel=1e-6)


def test_xgboost_linear_takes_fractions() -> None:
    scores, labels, offsets = lists(0)
    labels = labels * 0.7
    expected = xgboost_values(scores, labels, offsets, ["ndcg@5"], ndcg_exp_gain=False)["ndcg@5"]
    assert float(ndcg(scores, labels, offsets, k=5, preset="xgboost-linear")) == pytest.approx(expected, rel=1e-6)


def test_sklearn() -> None:
    for seed in SEEDS:
        for fraction in [1.0, 0.37]:
            scores, labels, offsets = lists(seed)
            labels = labels * fraction
            for k in (1, 3, 10, 100, None):
                gain = dcg(scores, labels, offsets, k=k, preset="sklearn", reduction="none")
                share = ndcg(scores, labels, offsets, k=k, preset="sklearn", reduction="none")
                for q, (s, y) in enumerate(pairs(scores, labels, offsets)):
                    if len(s) > 1:  # scikit-learn refuses lists of one document
                        assert float(share[q]) == pytest.approx(ndcg_score([y], [s], k=k), rel=1e-9, abs=1e-12)
                        assert float(gain[q]) == pytest.approx(dcg_score([y], [s], k=k), rel=1e-9)
                    else:
                        assert float(share[q]) == (1.0 if y[0] else 0.0)


def test_sklearn_average_precision_without_ties() -> None:
    scores, labels, offsets = lists(0, grades=2, ties=False)
    found = average_precision(scores, labels, offsets, preset="sklearn", reduction="none")
    for q, (s, y) in enumerate(pairs(scores, labels, offsets)):
        if any(y):  # scikit-learn warns about the others, and returns 0 too
            assert float(found[q]) == pytest.approx(average_precision_score(y, s))
        else:
            assert float(found[q]) == 0.0


def test_torchmetrics_ndcg() -> None:
    for seed in SEEDS:
        for k in [1, 3, 10, None]:
            scores, labels, offsets = lists(seed)
            found = ndcg(scores, labels, offsets, k=k, preset="torchmetrics", reduction="none")
            for q, (s, y) in enumerate(pairs(scores, labels, offsets)):
                expected = torchmetrics_functional.retrieval_normalized_dcg(torch.tensor(s), torch.tensor(y), top_k=k)
                assert float(found[q]) == pytest.approx(float(expected), rel=1e-5, abs=1e-6)
            metric = RetrievalNormalizedDCG(top_k=k)  # its class counts lists without a relevant document as 0
            metric.update(scores, labels, indexes=torch.repeat_interleave(offsets.diff()))
            assert float(found.mean()) == pytest.approx(float(metric.compute()), rel=1e-5)


def test_torchmetrics_binary_metrics_at_positive_scores() -> None:
    """Positive scores, since it masks the others, and no ties, since it breaks them in no stated order.

    The scores of a model are at most 0; the preset gives them the figures of the same scores shifted above 0.
    """
    for k in [1, 3, 10, None]:
        scores, labels, offsets = lists(1, grades=2, ties=False)
        scores = scores - scores.min() + 1
        functions = {
            "map": torchmetrics_functional.retrieval_average_precision,
            "mrr": torchmetrics_functional.retrieval_reciprocal_rank,
            "precision": torchmetrics_functional.retrieval_precision,
            "recall": torchmetrics_functional.retrieval_recall,
        }
        for kind, function in functions.items():
            name = kind if k is None else f"{kind}@{k}"
            negative = scores - scores.max() - 1
            found = rank_metrics(negative, labels, offsets, metrics=[name], preset="torchmetrics")[name]
            for q, (s, y) in enumerate(pairs(scores, labels, offsets)):
                expected = float(function(torch.tensor(s), torch.tensor(y, dtype=torch.long), top_k=k))
                assert float(found[q]) == pytest.approx(expected, rel=1e-5), (name, q)


def test_averaged_ties_are_the_mean_over_all_orders() -> None:
    for seed in SEEDS:
        for preset in ["sklearn", "torchmetrics"]:
            generator = torch.Generator().manual_seed(seed)
            scores = torch.randint(-1, 2, (7,), generator=generator).double()
            labels = torch.rand(7, generator=generator, dtype=torch.float64) * 3
            for k in (1, 2, 4, None):
                found = ndcg(scores, labels, torch.tensor([0, 7]), k=k, preset=preset)
                expected = reference.mean_over_ties(
                    scores.tolist(), labels.tolist(), lambda best, k=k: reference.ndcg(best, k, reference.linear, 0)
                )
                assert float(found) == pytest.approx(expected, rel=1e-12)


def test_catboost_rules() -> None:
    """Linear gain, the lowest label of a tie first, 1 for a list without a relevant document."""
    for seed in SEEDS:
        data = lists(seed)
        for k in (1, 3, 10, None):
            found = ndcg(*data, k=k, preset="catboost", reduction="none").tolist()
            expected = [
                reference.ndcg(reference.worst_ties_first(s, y), k, reference.linear, 1.0) for s, y in pairs(*data)
            ]
            assert found == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("preset", "gain", "nothing"),
    [
        ("ranklib", reference.exponential, 0.0),
        ("rax", reference.exponential, 0.0),
        ("pytorchltr", reference.exponential, 0.0),
        ("trec_eval", reference.linear, 0.0),
        ("xgboost-linear", reference.linear, 1.0),
        ("xgboost-linear-", reference.linear, 0.0),
    ],
)
def test_rules_without_a_library_at_hand(preset: str, gain: Any, nothing: float) -> None:
    """Equal scores in the caller's order; a value for a list without a relevant document."""
    for seed in SEEDS:
        data = lists(seed)
        best = [reference.best_first(s, y) for s, y in pairs(*data)]
        for k in (1, 3, 10, None):
            found = ndcg(*data, k=k, preset=preset, reduction="none").tolist()
            assert found == pytest.approx([reference.ndcg(b, k, gain, nothing) for b in best], rel=1e-12)
        found = average_precision(*data, preset=preset, reduction="none").tolist()
        expected = [reference.average_precision(b, None, no_relevant=nothing) for b in best]
        assert found == pytest.approx(expected, rel=1e-12)


LETOR = {
    "letor4": ({0: 0, 1: 1, 2: 3}, {0: 0, 1: 1, 2: 1}),
    "mslr": ({0: 0, 1: 1, 2: 3, 3: 7, 4: 15}, {0: 0, 1: 0, 2: 1, 3: 1, 4: 1}),
}


def test_letor_and_mslr_scripts() -> None:
    for seed in SEEDS:
        for preset in LETOR:
            gain, counts = LETOR[preset]
            data = lists(seed, grades=len(gain))
            best = [reference.best_first(s, y) for s, y in pairs(*data)]
            found = rank_metrics(
                *data,
                metrics=["map", *(f"{m}@{k}" for m in ("ndcg", "precision") for k in range(1, 11))],
                preset=preset,
            )
            assert found["map"].tolist() == pytest.approx([reference.letor_map(b, counts) for b in best], rel=1e-12)
            for k in range(1, 11):
                expected = [reference.letor_ndcg(b, k, gain) for b in best]
                assert found[f"ndcg@{k}"].tolist() == pytest.approx(expected, rel=1e-12)
                expected = [reference.letor_precision(b, k, counts) for b in best]
                assert found[f"precision@{k}"].tolist() == pytest.approx(expected, rel=1e-12)


def test_letor_presets_know_the_highest_grade_for_err() -> None:
    scores, labels, offsets = lists(0, grades=3)
    for preset, grade in (("letor4", 2), ("mslr", 4)):
        found = rank_metrics(scores, labels, offsets, metrics=["err"], preset=preset)["err"]
        expected = [reference.err(reference.best_first(s, y), None, grade) for s, y in pairs(scores, labels, offsets)]
        assert found.tolist() == pytest.approx(expected, rel=1e-12)


def test_what_a_list_without_relevant_documents_counts() -> None:
    nothing = torch.tensor([1.0, 2.0]), torch.tensor([0, 0]), torch.tensor([0, 2])
    rules = {"lightgbm": 1, "xgboost": 1, "xgboost-": 0, "catboost": 1, "sklearn": 0, "torchmetrics": 0, "ranklib": 0}
    for preset, value in {**rules, "rax": 0, "pytorchltr": 0, "letor4": 0, "mslr": 0}.items():
        assert float(ndcg(*nothing, k=2, preset=preset)) == value
    assert math.isnan(float(ndcg(*nothing, k=2)))
    assert set(PRESETS) >= set(rules) | {"default"}


def test_a_list_shorter_than_k() -> None:
    short = torch.tensor([2.0, 1.0]), torch.tensor([1, 0]), torch.tensor([0, 2])
    assert float(ndcg(*short, k=10)) == 1.0
    assert float(ndcg(*short, k=10, preset="letor4")) == 0.0
    assert float(precision(*short, k=10)) == 0.1
    assert float(precision(*short, k=10, preset="letor4")) == 0.1
    assert float(precision(*short, k=10, preset="rax")) == 0.5


@pytest.mark.realdata
def test_the_same_random_orders_of_mq2008_under_two_definitions(data_dir: Path) -> None:
    """The definition matters more than the model: a random order scores four times as much by one as by the other."""
    texts = [(data_dir / f"mq2008/Fold{fold}/test.txt").read_text() for fold in range(1, 6)]
    lines = [line.split(maxsplit=2)[:2] for text in texts for line in text.splitlines()]
    groups = [[int(label) for label, _ in group] for _, group in itertools.groupby(lines, key=lambda line: line[1])]
    labels = torch.tensor([label for group in groups for label in group])
    offsets = offsets_from_sizes(torch.tensor([len(group) for group in groups]))
    generator = torch.Generator().manual_seed(0)
    draws = [torch.rand(len(labels), generator=generator) for _ in range(30)]
    means = {
        p: np.mean([float(ndcg(d, labels, offsets, k=10, preset=p)) for d in draws]) for p in ("default", "letor4")
    }
    assert means["default"] == pytest.approx(0.469, abs=0.005)
    assert means["letor4"] == pytest.approx(0.117, abs=0.003)
    skipped = ndcg(draws[0], labels, offsets, k=10, reduction="none").isnan().sum()
    assert (len(groups), int(skipped)) == (784, 220)
