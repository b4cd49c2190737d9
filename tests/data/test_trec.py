"""TREC runs and qrels: read strictly, written, and measured as trec_eval measures them."""

from __future__ import annotations

import gzip
import io
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from lgmml_torch.app import cli
from lgmml_torch.checks import DataError, DataWarning, LGMMLError
from lgmml_torch.data.trec import Qrels, Run, read_qrels, read_run, write_qrels, write_run
from lgmml_torch.evaluation.trec import evaluate_run
from lgmml_torch.functional.ranking.measures import rank_metrics
from lgmml_torch.functional.ranking.presets import PRESETS
from tests.documented import write_data
from tests.doors import small_data, small_model


def random_files(seed: int) -> tuple[Run, Qrels]:
    """Runs with ties, unjudged and missing documents, negative judgements, queries on one side only."""
    g = np.random.default_rng(seed)
    run: Run = {}
    qrels: Qrels = {}
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


@pytest.mark.parametrize("seed", range(6))
def test_figures_are_those_of_trec_eval(seed: int) -> None:
    ir_measures = pytest.importorskip("ir_measures")
    run, qrels = random_files(seed)
    with pytest.warns(DataWarning, match="1 of 11 queries of 'run' were not judged and are left out, e.g. q5"):
        found = evaluate_run(run, qrels, metrics=list(NAMES))
    measures = {name: ir_measures.parse_measure(other) for name, other in NAMES.items()}
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


@pytest.mark.parametrize("preset", PRESETS)
def test_documents_that_were_not_ranked_change_nothing_but_totals(preset: str) -> None:
    """With irrelevant missing documents every figure is that of the ranked ones alone."""
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
    for content, write, read in ((run, write_run, read_run), (qrels, write_qrels, read_qrels)):
        stream = io.BytesIO()
        write(content, stream)  # type: ignore[operator]
        raw = stream.getvalue()
        (tmp_path / name).write_bytes(gzip.compress(raw) if name.endswith(".gz") else raw.replace(b"\n", b"\r\n"))
        assert read(tmp_path / name) == content
    with pytest.raises(DataError, match="an id must be one word to stand in a TREC file, got 'two words'"):
        write_qrels({"1": {"two words": 1}}, io.BytesIO())


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("1 Q0 b 2 x t", "file:2: the score must be a number, got 'x'"),
        ("1 Q0 b 2 nan t", "file:2: the score must be a number, got 'nan'"),
        ("1 Q0 b 2.5 1 t", "file:2: the rank must be a whole number, got '2.5'"),
        ("1 Q0 b 2 1", "file:2: a line must read `qid Q0 docid rank score tag`, got 5 words"),
        ("1 Q0 a 2 1 t", "file:2: query 1 has document a twice"),
        ("1 Q0 \udcff 2 1 t", "file:2: the line is not UTF-8: invalid start byte"),
    ],
)
def test_a_bad_run_is_refused_with_its_line(tmp_path: Path, line: str, message: str) -> None:
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


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "say what to evaluate: MODEL DATA, or --run FILE --qrels FILE"),
        (["m.safetensors"], "say what to evaluate"),
        (["--run", "x"], "`--run` and `--qrels` go together"),
        (["m", "d", "--qrels", "x"], "`--run` and `--qrels` go together"),
        (["m", "d", "--run", "x", "--qrels", "y"], "`--run` is a ranking already"),
        (["--run", "x", "--run", "y", "--qrels", "z", "--json", "j"], "`--json` takes the figures of one run"),
        (["--run", "x", "--qrels", "nowhere"], "x: no such file"),
    ],
)
def test_words_that_do_not_go_together(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
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
