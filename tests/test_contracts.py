"""The promises every part of the package relies on; docs/architecture.md names them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from lgmml_torch.checks import LGMMLError
from lgmml_torch.data.catalog import open_dataset
from lgmml_torch.evaluation.evaluate import evaluate
from lgmml_torch.functional.ranking.measures import mean_ndcg, ndcg
from lgmml_torch.models.preprocess.compose import list_rank_features
from lgmml_torch.ragged import RankingData
from tests.doors import small_data, small_model


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
