"""The promises every part of the package relies on; docs/architecture.md names them."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lgmml_torch.checks import LGMMLError
from lgmml_torch.data.catalog import open_dataset
from lgmml_torch.evaluation.evaluate import evaluate
from lgmml_torch.functional.ranking.measures import mean_ndcg, ndcg
from lgmml_torch.functional.score import tie_equal_rows
from lgmml_torch.models.preprocess.compose import list_rank_features
from lgmml_torch.ragged import RankingData
from lgmml_torch.segments import offsets_from_sizes
from tests.doors import small_data, small_model

ROOT = Path(__file__).parent.parent


class TestOrder:
    """Scores, labels and offsets of a data set are in the order of its rows; only doors give the caller's order."""

    def test_scores_go_with_labels_and_offsets(self) -> None:
        model, data = small_model(), small_data(queries=40, seed=2, shuffled=True)
        measured = evaluate(model, data, metrics=["ndcg@10"]).means["ndcg@10"]
        assert float(ndcg(model.score(data), data.labels, data.offsets, k=10)) == pytest.approx(measured, abs=1e-6)
        for query in range(data.num_queries):  # row by row: what a list scores alone, it scores among others
            part, rows = data.select([query]), slice(int(data.offsets[query]), int(data.offsets[query + 1]))
            torch.testing.assert_close(model.score(part), model.score(data)[rows], rtol=1e-5, atol=1e-6)

    @pytest.mark.realdata
    def test_on_real_data_too(self, data_dir: Path) -> None:
        """The row order of MQ2008 is not that of its file: mixing the two cost .16 of NDCG@10 without a word."""
        parts = open_dataset("mq2008", data_dir, fold=1)
        train, test = parts["train"], parts["test"]
        model = small_model(preprocess=list_rank_features(), data=train)
        scores = model.score(test)
        assert float(ndcg(scores, test.labels, test.offsets, k=10)) == pytest.approx(
            evaluate(model, test, metrics=["ndcg@10"]).means["ndcg@10"], abs=2e-3  # ties alone may differ
        )  # fmt: skip

    def test_the_caller_gets_its_own_order_back(self) -> None:
        model, data = small_model(), small_data(seed=3, shuffled=True)
        X, qid = data.in_caller_order(data.features), data.in_caller_order(data.query_index)
        again = RankingData.from_arrays(X, np.zeros(len(X)), qid=qid)
        found = model.score_in_caller_order(again)
        np.testing.assert_allclose(found, data.in_caller_order(model.score(data)).numpy(), rtol=1e-5, atol=1e-6)

    def test_the_two_orders_cannot_be_mixed_by_accident(self) -> None:
        model, data = small_model(), small_data(seed=3, shuffled=True)
        given = model.score_in_caller_order(data)
        assert not isinstance(given, torch.Tensor)
        for measure in (lambda: ndcg(given, data.labels, data.offsets), lambda: mean_ndcg(given, data)):  # type: ignore[arg-type]
            with pytest.raises(LGMMLError, match="`scores` must be a tensor in the order of the rows, got ndarray"):
                measure()


class TestTies:
    """Equal documents of a list get equal scores, whatever their place, and whichever way the processor rounds."""

    SCRIPT = """
import sys
import torch
from lgmml_torch.ragged import RankingData
from tests.doors import FEATURES, small_model

threads = int(sys.argv[1])
torch.set_num_threads(threads)
g = torch.Generator().manual_seed(threads)
models = [small_model(mode=mode, kernel=kernel) for mode, kernel in (("shared", "paper"), ("amortized", "rbf"))]
worst = 0
for size in [*range(2, 70), 127, 129, 1000, 2049, 5001]:
    before = int(torch.randint(0, 40, (1,), generator=g))  # rows of another list shift the tied ones
    one, other = torch.randn(2, FEATURES, generator=g).split(1)
    rows = torch.cat([torch.randn(before, FEATURES, generator=g), one.expand(size, -1), other.expand(size // 2, -1)])
    qid = [0] * before + [1] * (size + size // 2)
    mixed = before + torch.randperm(len(rows) - before, generator=g)
    rows = torch.cat([rows[:before], rows[mixed]])
    data = RankingData.from_arrays(rows, torch.randint(0, 3, (len(rows),), generator=g), qid=qid)
    for model in models:
        scores = model.score(data)[data.query_index == data.num_queries - 1]
        worst = max(worst, scores.unique().numel() - (2 if size > 1 else 1))
print(worst)
"""

    @pytest.mark.parametrize("threads", [1, 2])
    @pytest.mark.parametrize("capability", ["default", "avx2", ""])
    def test_ties_are_real_ties(self, threads: int, capability: str) -> None:
        surroundings = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        if capability:
            surroundings["ATEN_CPU_CAPABILITY"] = capability
        done = subprocess.run(
            [sys.executable, "-c", self.SCRIPT, str(threads)],
            env=surroundings,
            capture_output=True,
            text=True,
            cwd=ROOT,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.split() == ["0"]

    @given(st.data())
    @settings(max_examples=60, deadline=None)
    def test_agrees_with_a_loop(self, draw: st.DataObject) -> None:
        sizes = draw.draw(st.lists(st.integers(0, 6), min_size=1, max_size=4))
        n = sum(sizes)
        features = torch.tensor(draw.draw(st.lists(st.sampled_from([0.0, -0.0, 1.0]), min_size=n, max_size=n))).view(
            n, 1
        )
        noise = draw.draw(st.lists(st.integers(0, 3), min_size=n, max_size=n))
        scores = -1 - features[:, 0] - torch.tensor(noise, dtype=torch.float32) * 1e-6
        offsets = offsets_from_sizes(torch.tensor(sizes))
        expected = scores.clone()
        for start, stop in itertools.pairwise(offsets.tolist()):
            for row in range(start, stop):
                twin = next(other for other in range(start, stop) if features[other] == features[row])
                expected[row] = scores[twin]
        assert torch.equal(tie_equal_rows(scores, features, offsets), expected)

    def test_rows_that_differ_are_left_alone(self) -> None:
        scores, offsets = torch.tensor([0.5, 0.5000001, 0.5]), torch.tensor([0, 3])
        features = torch.tensor([[1.0, 2.0], [1.0, 3.0], [1.0, 4.0]])
        assert torch.equal(tie_equal_rows(scores, features, offsets), scores)
