"""TREC runs and qrels: read strictly, written, and measured as trec_eval measures them."""

from __future__ import annotations

import gzip
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lgmml_torch.app import cli
from lgmml_torch.checks import DataError, DataWarning, LGMMLError
from lgmml_torch.data.source import Batch
from lgmml_torch.data.trec import (
    as_arrays,
    qrels_lines,
    read_qrels,
    read_run,
    run_lines,
    word,
)
from lgmml_torch.evaluation.evaluate import evaluate_run
from lgmml_torch.functional.measures import rank_metrics
from lgmml_torch.functional.presets import PRESETS
from lgmml_torch.ragged import RankingData
from tests.documented import write_data
from tests.doors import small_data, small_model


def random_files(seed: int) -> tuple[dict[str, dict[str, float]], dict[str, dict[str, int]]]:
    """Runs with ties, unjudged and missing documents, negative judgements, queries on one side only."""
    g = np.random.default_rng(seed)
    run: dict[str, dict[str, float]] = {}
    qrels: dict[str, dict[str, int]] = {}
    for query in range(12):
        documents = [f"d{number}" for number in g.permutation(30)]
        ranked, judged = g.integers(1, 25), g.integers(1, 25)
        if query != 3:
            scores = g.choice([0.0, 0.5, -1.0, 2.0, 1e-9, 3e38], ranked) if query % 2 else g.normal(size=ranked)
            run[f"q{query}"] = dict(zip(documents[:ranked], map(float, scores), strict=True))
        if query != 5:
            grades = g.integers(-1, 4, judged) if query != 7 else np.zeros(judged, int)
            qrels[f"q{query}"] = dict(zip(g.permutation(documents)[:judged].tolist(), map(int, grades), strict=True))
    return run, qrels


NAMES = {
    "ndcg": "nDCG", "ndcg@1": "nDCG@1", "ndcg@5": "nDCG@5", "ndcg@20": "nDCG@20", "map": "AP", "map@5": "AP@5",
    "mrr": "RR", "precision@1": "P@1", "precision@10": "P@10", "recall@5": "R@5", "recall@100": "R@100",
}  # fmt: skip


def their_measure(ir_measures: Any, text: str) -> Any:
    """A measure by its name; ir_measures' own parser does not work on Python 3.14."""
    name, _, cutoff = text.partition("@")
    measure = getattr(ir_measures, name)
    return measure @ int(cutoff) if cutoff else measure


def test_figures_are_those_of_trec_eval() -> None:
    for seed in range(6):
        ir_measures = pytest.importorskip("ir_measures")
        run, qrels = random_files(seed)
        with pytest.warns(DataWarning, match="1 of 11 queries of 'run' were not judged and are left out, e.g. q5"):
            found = evaluate_run(run, qrels, metrics=list(NAMES))
        measures = {name: their_measure(ir_measures, other) for name, other in NAMES.items()}
        theirs = {(str(m.measure), m.query_id): m.value for m in ir_measures.iter_calc(measures.values(), qrels, run)}
        for name, measure in measures.items():
            values = [theirs.get((str(measure), qid), 0.0) for qid in found.qids]
            assert found.per_query[name].tolist() == pytest.approx(values, abs=1e-12), name
        assert found.means["ndcg@5"] == pytest.approx(
            ir_measures.calc_aggregate([measures["ndcg@5"]], qrels, run)[measures["ndcg@5"]], abs=1e-12
        )
        assert found.counted["map"] == len(qrels)


def test_scores_that_single_precision_cannot_tell_apart_are_ties() -> None:
    ir_measures = pytest.importorskip("ir_measures")
    run, qrels = {"1": {"a": 1.0 + 1e-12, "b": 1.0}}, {"1": {"a": 1, "b": 0}}
    found = evaluate_run(run, qrels, metrics=["mrr"])
    (theirs,) = ir_measures.iter_calc([ir_measures.RR], qrels, run)
    assert found.means["mrr"] == theirs.value == 0.5
    assert "ties: falling document id" in found.definitions["mrr"]


def test_documents_that_were_not_ranked_change_nothing_but_totals() -> None:
    """With irrelevant missing documents every figure is that of the ranked ones alone."""
    for preset in PRESETS:
        g = torch.Generator().manual_seed(3)
        sizes = torch.tensor([4, 7, 1])
        offsets = torch.tensor([0, 4, 11, 12])
        scores, labels = torch.randint(0, 3, (12,), generator=g).float(), torch.randint(0, 3, (12,), generator=g)
        more = torch.cat([torch.tensor([True] * int(n) + [False] * 3) for n in sizes])
        wide_scores, wide_labels = torch.full((len(more),), 9.0), torch.zeros(len(more), dtype=torch.long)
        wide_scores[more], wide_labels[more] = scores, labels
        names = ["ndcg@3", "ndcg@10", "map", "mrr", "precision@5", "recall@2", "err"]
        plain = rank_metrics(scores, labels, offsets, metrics=names, preset=preset, max_grade=4)
        wide = torch.tensor([0, 7, 17, 21])
        found = rank_metrics(wide_scores, wide_labels, wide, metrics=names, preset=preset, max_grade=4, retrieved=more)
        for name in names:
            torch.testing.assert_close(found[name], plain[name], equal_nan=True, rtol=0, atol=1e-12, msg=name)


def test_retrieved_is_checked() -> None:
    scores, offsets = torch.zeros(2), torch.tensor([0, 2])
    with pytest.raises(LGMMLError, match=r"`retrieved` must have shape \(2,\), got \(1,\)"):
        rank_metrics(scores, scores, offsets, retrieved=torch.ones(1, dtype=torch.bool))
    with pytest.raises(LGMMLError, match=r"`retrieved` must hold truth values, got torch\.int64"):
        rank_metrics(scores, scores, offsets, retrieved=torch.ones(2, dtype=torch.long))


@pytest.mark.parametrize("name", ["x", "x.gz"])
def test_files_come_back_as_they_were(tmp_path: Path, name: str) -> None:
    run, qrels = random_files(9)
    for content, read in ((run, read_run), (qrels, read_qrels)):
        lines = []
        for qid, own in content.items():
            for doc_id, value in own.items():
                lines.append(f"{qid} Q0 {doc_id} 1 {value!r} t\n" if content is run else f"{qid} 0 {doc_id} {value}\n")
        raw = "".join(lines).encode()
        (tmp_path / name).write_bytes(gzip.compress(raw) if name.endswith(".gz") else raw.replace(b"\n", b"\r\n"))
        assert read(tmp_path / name) == content


def test_a_bad_run_is_refused_with_its_line(tmp_path: Path) -> None:
    for line, message in [
        ("1 Q0 b 2 x t", "file:2: the score must be a number, got 'x'"),
        ("1 Q0 b 2 nan t", "file:2: the score must be a number, got 'nan'"),
        ("1 Q0 b 2.5 1 t", "file:2: the rank must be a whole number, got '2.5'"),
        ("1 Q0 b 2 1", "file:2: a line must read `qid Q0 docid rank score tag`, got 5 words"),
        ("1 Q0 a 2 1 t", "file:2: query 1 has document a twice"),
        ("1 Q0 \udcff 2 1 t", "file:2: the line is not UTF-8: invalid start byte"),
    ]:
        (tmp_path / "file").write_bytes(f"1 Q0 a 1 3 t\n{line}\n".encode(errors="surrogateescape"))
        with pytest.raises(DataError) as error:
            read_run(tmp_path / "file")
        assert str(error.value).endswith(message)


def test_bad_qrels_are_refused_with_their_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("1 0 a 1\n\n1 0 b high\n")
    with pytest.raises(DataError, match="file:3: the relevance must be a whole number, got 'high'"):
        read_qrels(tmp_path / "file")
    (tmp_path / "file").write_text("\n")
    with pytest.raises(DataError, match="file:1: the file holds no documents"):
        read_qrels(tmp_path / "file")
    with pytest.raises(DataError, match="no query of 'run' was judged; it has 7"):
        evaluate_run({"7": {"a": 1.0}}, {"8": {"a": 1}})


def test_a_model_and_its_run_get_the_same_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Scores, run and qrels of one data set: by trec_eval's rules both ways agree, as nothing ties."""
    small_model().save(tmp_path / "m.safetensors")
    write_data(small_data(seed=7), tmp_path / "test.txt")
    model, data, run, qrels = (str(tmp_path / n) for n in ("m.safetensors", "test.txt", "x.run", "x.qrels"))
    assert cli.main(["score", model, data, "-o", run]) == 0
    rules = ["--metrics", "ndcg@5,map,precision@3"]
    capsys.readouterr()
    assert cli.main(["evaluate", model, data, "--write-qrels", qrels, "--preset", "trec_eval", *rules]) == 0
    ours = capsys.readouterr().out
    assert cli.main(["evaluate", "--run", run, "--qrels", qrels, *rules]) == 0
    theirs = capsys.readouterr().out
    figures = [[cell.strip() for cell in text.splitlines()[3].split("│")[3:]] for text in (ours, theirs)]
    assert figures[0] == figures[1]
    assert "x.run" in theirs
    assert not any(math.isnan(float(cell)) for cell in figures[0][:3])


def test_words_that_do_not_go_together(capsys: pytest.CaptureFixture[str]) -> None:
    for words, message in [
        ([], "say what to evaluate: MODEL DATA, or --run FILE --qrels FILE"),
        (["m.safetensors"], "say what to evaluate"),
        (["--run", "x"], "`--run` and `--qrels` go together"),
        (["m", "d", "--qrels", "x"], "`--run` and `--qrels` go together"),
        (["m", "d", "--run", "x", "--qrels", "y"], "`--run` is a ranking already"),
        (["--run", "x", "--run", "y", "--qrels", "z", "--json", "j"], "`--json` takes the figures of one run"),
        (["--run", "x", "--qrels", "nowhere"], "x: no such file"),
    ]:
        assert cli.main(["evaluate", *words]) == 2
        assert message in capsys.readouterr().err


def test_fractions_are_no_judgements(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small_model().save(tmp_path / "m.safetensors")
    data = small_data(seed=7)
    write_data(data.replace(labels=data.labels + 0.5), tmp_path / "test.txt")
    words = ["evaluate", str(tmp_path / "m.safetensors"), str(tmp_path / "test.txt"), "--write-qrels"]
    assert cli.main([*words, str(tmp_path / "q")]) == 2
    assert "labels must be whole numbers to be written as qrels" in capsys.readouterr().err
    assert not (tmp_path / "q").exists()


def batch_of(rows: list[tuple[Any, float, str]], numbers: list[int] | None = None) -> Batch:
    """Rows of query, label and id."""
    ids = [name for _, _, name in rows]
    data = RankingData.from_arrays(
        torch.zeros(len(rows), 1),
        [label for _, label, _ in rows],
        qid=[query for query, _, _ in rows],
        doc_ids=ids if any(ids) else None,
    )
    return Batch(data, np.array(numbers if numbers is not None else range(len(rows))))


def test_lines_of_a_run_by_hand() -> None:
    batch = batch_of([("b", 0, "x"), ("a", 1, "y y"), ("b", 2, ""), ("b", 0, "z"), ("a", 1, "w")], [4, 5, 6, 8, 9])
    scores = np.array([1.0, 2.5, 3.0, 1.0, 7.0])
    assert list(run_lines(batch, scores, "my tag")) == [
        "a Q0 w 1 7.0 my%20tag\n",
        "a Q0 y%20y 2 2.5 my%20tag\n",
        "b Q0 7 1 3.0 my%20tag\n",
        "b Q0 x 2 1.0 my%20tag\n",
        "b Q0 z 3 1.0 my%20tag\n",
    ]


def test_equal_scores_stand_in_the_order_of_the_rows() -> None:
    count = 60
    batch = batch_of([(row % 2, 0, f"d{row:02d}") for row in range(count)])
    names = [line.split()[2] for line in run_lines(batch, np.zeros(count), "t")]
    assert names == [f"d{row:02d}" for row in [*range(0, count, 2), *range(1, count, 2)]]
    ranks = [int(line.split()[3]) for line in run_lines(batch, np.zeros(count), "t")]
    assert ranks == [*range(1, 31), *range(1, 31)]


def test_lines_of_qrels_by_hand() -> None:
    batch = batch_of([("b", 0, ""), ("a b", 3, ""), ("b", -1, "")], [10, 20, 30])
    assert list(qrels_lines(batch)) == ["b 0 11 0\n", "a%20b 0 21 3\n", "b 0 31 -1\n"]
    with pytest.raises(DataError, match=r"labels must be whole numbers to be written as qrels, got 0.5 in b"):
        list(qrels_lines(batch_of([("a", 1, ""), ("b", 0.5, "")])))


def test_names_of_documents() -> None:
    batch = batch_of([(1, 0, "one two"), (1, 0, ""), (2, 0, " ")], [3, 6, 7])
    assert [line.split()[2] for line in qrels_lines(batch)] == ["one%20two", "7", "%20"]
    others = batch_of([(1, 0, ""), (2, 0, "")], [0, 5])
    assert [line.split()[2] for line in qrels_lines(others)] == ["1", "6"]
    assert [word(value) for value in ("", "  ", " a b ", 3)] == ["%00", "%20%20", "%20a%20b%20", "3"]


def test_queries_that_differ_by_blanks_stay_apart() -> None:
    queries = ["red shoes", "red_shoes", "red  shoes", "red%20shoes", "red\tshoes", "", "%", "_", "100%", "%%20", "% "]
    batch = batch_of([(query, 0, "d") for query in queries])
    lines = list(run_lines(batch, np.zeros(len(queries)), "t"))
    assert {len(line.split()) for line in lines} == {6}
    assert len({line.split()[0] for line in lines}) == len(queries)
    judged = list(qrels_lines(batch))
    assert {line.split()[0] for line in judged} == {line.split()[0] for line in lines}


def test_arrays_of_a_run_by_hand() -> None:
    run = {"q": {"a": 1.0, "b": 1e300, "x": -2.0}, "never judged": {"a": 1.0}}
    qrels = {"q": {"a": 2, "c": -1, "x": -3, "d": 1}, "r": {"z": 4}}
    scores, labels, ranked, sizes = as_arrays(run, qrels)
    inf = math.inf
    assert scores.tolist() == [-2.0, -inf, -inf, inf, 1.0, -inf]  # x d c b a, then z
    assert labels.tolist() == [0, 1, 0, 0, 2, 4]
    assert ranked.tolist() == [True, False, False, True, True, False]
    assert sizes == [5, 1]
    assert (scores.dtype, labels.dtype, ranked.dtype) == (np.float32, np.float32, np.bool_)
    assert as_arrays({}, {"q": {"a": 1}})[0].tolist() == [-inf]
    assert as_arrays({"q": {"a": 2**53 + 1}}, {"q": {"a": 1}})[0].tolist() == [2.0**53]


def test_lines_of_files_by_hand(tmp_path: Path) -> None:
    file = tmp_path / "x"
    file.write_text("\n1 Q0 a 5 0.5 t\n\n2 Q0 a 0 inf t\n1 Q0 b 1 -1e3 t\n")
    assert read_run(file) == {"1": {"a": 0.5, "b": -1000.0}, "2": {"a": math.inf}}
    file.write_text("1 0 a 1\n2 0 a 0\n1 0 b -2\n")
    assert read_qrels(file) == {"1": {"a": 1, "b": -2}, "2": {"a": 0}}
    with pytest.raises(DataError, match=r"x:1: a line must read `qid Q0 docid rank score tag`, got 4 words"):
        read_run(file)
