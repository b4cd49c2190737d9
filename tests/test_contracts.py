"""The promises every part of the package relies on; docs/architecture.md names them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from lgmml_torch.checks import DataError, LGMMLError
from lgmml_torch.data.catalog import load_file, open_dataset, open_table
from lgmml_torch.data.source import Source, open_source
from lgmml_torch.data.write import save_letor, save_table
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


def in_file_order(data: RankingData) -> tuple[bytes, list[float], list[object]]:
    queries = [data.qids[query] for query in data.in_caller_order(data.query_index).tolist()]
    return data.in_caller_order(data.features).numpy().tobytes(), data.in_caller_order(data.labels).tolist(), queries


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(DataError) as caught:
        call()
    return str(caught.value)


def refusals(file: Path) -> set[str]:
    """What the loader, a whole read and reading list by list say about a file that none of them should take."""

    def read(source: Source, *, whole: bool) -> None:
        with source:
            source.read() if whole else list(source.batches(1))

    whole, lists = (refusal(lambda way=way: read(open_source(file), whole=way)) for way in (True, False))  # type: ignore[misc]
    return {refusal(lambda: load_file(file, cache=False)), whole, lists}


class TestOneWayIn:
    """One source reads every format, for training and for scoring, with the same checks, errors and column rules."""

    DENSE = "1 qid:1 1:1 2:2 #docid = a\n0 qid:2 1:3 2:4 #docid = b\n2 qid:1 1:5 2:6 #docid = c\n"

    def test_a_last_line_without_its_comment_is_cut_for_everybody(self, tmp_path: Path) -> None:
        """The reader for training used to refuse it, the one for scoring to take it."""
        file = tmp_path / "data.txt"
        file.write_text(self.DENSE + "1 qid:2 1:7 2:8")
        message = f"{file}:4: the last line is cut: it ends without a comment, which all others have"
        assert refusals(file) == {message}
        file.write_text(self.DENSE + "1 qid:2 1:7")
        assert refusals(file) == {f"{file}:4: the last line is cut: it has 1 features, all others 2"}
        file.write_text(self.DENSE + "1 qid:2 1:7 2:8\n")
        assert load_file(file, cache=False).num_documents == 4

    @pytest.mark.parametrize(
        ("name", "content"),
        [
            ("a.txt", "1 qid:1 1:1\n1 qid:1 1:x\n"),
            ("a.txt", "1 qid:1 1:1\n1 qid:1 1:NULL\n"),
            ("a.txt", ""),
            ("a.csv", "qid,label,x\n1,1,1\n1,1,y\n"),
            ("a.csv", "qid,label,x\n1,1,1\n1,1,\n"),
            ("a.csv", "query,label,x\n1,1,1\n"),
            ("a.tsv", "qid\tlabel\tx\tx\n1\t1\t1\t1\n"),
        ],
    )
    def test_bad_files_are_refused_with_the_same_words(self, tmp_path: Path, name: str, content: str) -> None:
        (tmp_path / name).write_text(content)
        (message,) = refusals(tmp_path / name)
        assert message.startswith(f"{tmp_path / name}:")
        assert "\n" not in message

    @pytest.mark.parametrize("ending", ["txt", "txt.gz", "csv", "tsv.gz", "npz", "parquet", "arrow", "feather"])
    def test_what_can_be_scored_can_be_trained_on(self, tmp_path: Path, ending: str) -> None:
        data = small_data(queries=30, seed=5)
        if ending.startswith("txt"):
            save_letor(data, tmp_path / f"data.{ending}")
        elif ending == "npz":
            qid = [data.qids[query] for query in data.in_caller_order(data.query_index).tolist()]
            X, y = data.in_caller_order(data.features), data.in_caller_order(data.labels)
            np.savez(tmp_path / "data.npz", X=X, y=y, qid=qid)
        else:
            save_table(data, tmp_path / f"data.{ending}")
        parts = open_table(tmp_path / f"data.{ending}", cache=False)
        assert [len(part) for part in parts.values()] == [18, 6, 6]
        model = small_model(preprocess=list_rank_features(), data=parts["train"])
        with open_source(tmp_path / f"data.{ending}", num_features=model.num_features) as source:
            whole = source.read()
            streamed = np.empty(source.num_rows, np.float32)
            for batch in source.batches(20):
                streamed[batch.rows] = model.score_in_caller_order(batch.data)
        assert in_file_order(whole) == in_file_order(data)
        np.testing.assert_allclose(streamed, model.score_in_caller_order(data), rtol=1e-5, atol=1e-6)

    def test_gaps_are_filled_alike(self, tmp_path: Path) -> None:
        """Whole or in batches of one list, from text, a table or arrays: a stand-in comes from its own list."""
        X = np.array([[1, np.nan], [4, 2], [np.nan, 6], [8, np.nan]], np.float32)
        np.savez(tmp_path / "a.npz", X=X, y=np.zeros(4), qid=[1, 1, 2, 2])
        text = X.astype(str).tolist()
        (tmp_path / "a.csv").write_text(
            "qid,label,u,v\n" + "".join(f"{1 + i // 2},0,{u},{v}\n" for i, (u, v) in enumerate(text))
        )
        (tmp_path / "a.txt").write_text("".join(f"0 qid:{1 + i // 2} 1:{u} 2:{v}\n" for i, (u, v) in enumerate(text)))
        want = RankingData.from_arrays(X, np.zeros(4), qid=[1, 1, 2, 2], missing="query-mean")
        assert in_file_order(want)[0] == np.array([[1, 2], [4, 2], [8, 6], [8, 6]], np.float32).tobytes()
        for name in ("a.npz", "a.csv", "a.txt"):
            with open_source(tmp_path / name, missing="query-mean") as source:
                lists = RankingData.merge([batch.data for batch in source.batches(1)])
                assert in_file_order(source.read()) == in_file_order(lists) == in_file_order(want)
            assert in_file_order(load_file(tmp_path / name, missing="query-mean", cache=False)) == in_file_order(want)

    def test_training_without_labels_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "a.txt").write_text("qid:1 1:2\n")
        (tmp_path / "a.csv").write_text("qid,x\n1,2\n")
        np.savez(tmp_path / "a.npz", X=[[2.0]], qid=[1])
        for name in ("a.txt", "a.csv", "a.npz"):
            with open_source(tmp_path / name) as source:
                assert source.read().features.tolist() == [[2]]  # to be scored it is as good as any
            with pytest.raises(DataError, match=r"label.*and training needs"):
                load_file(tmp_path / name, cache=False)
