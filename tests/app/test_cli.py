from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from lgmml_torch.app import cli
from lgmml_torch.checks import LGMMLError
from lgmml_torch.data.letor import load_letor
from lgmml_torch.data.write import save_letor, save_table
from lgmml_torch.evaluation.evaluate import evaluate
from lgmml_torch.models.explain import explain
from lgmml_torch.models.ranker import LGMML
from lgmml_torch.models.storage import VERSION
from tests.data.test_source import write
from tests.doors import save_lightgbm, small_data, small_model


@pytest.fixture
def model_file(tmp_path: Path) -> Path:
    small_model(mode="per_query").save(tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def lgmml(*words: object) -> None:
    assert cli.main([str(word) for word in words]) == 0


def refused(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    capsys.readouterr()
    assert cli.main([str(word) for word in words]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("lgmml: error: ")
    assert captured.err.count("\n") == 1
    return captured.err.removeprefix("lgmml: error: ").rstrip("\n")


@pytest.mark.parametrize(("kind", "shuffled"), [("txt.gz", True), ("csv", False), ("npz", True)])
def test_scores_stand_in_the_order_of_the_rows(tmp_path: Path, model_file: Path, kind: str, shuffled: bool) -> None:
    data = small_data(seed=7, shuffled=shuffled)
    expected = LGMML.load(model_file).score_in_caller_order(data)
    file = write(data, tmp_path, kind)
    for options in ([], ["--batch-documents", 3], ["--threads", 1, "--device", "cpu"]):
        lgmml("score", model_file, file, "-o", tmp_path / "scores.txt", *options)
        np.testing.assert_allclose(np.loadtxt(tmp_path / "scores.txt"), expected, rtol=1e-5, atol=1e-6)
    lgmml("score", model_file, file, "-o", tmp_path / "scores.npy")
    found = np.load(tmp_path / "scores.npy")
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_tables_with_other_columns(
    tmp_path: Path, model_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pd = pytest.importorskip("pandas")
    data = small_data(seed=7, shuffled=True)
    frame = pd.read_csv(write(data, tmp_path, "csv")).rename(columns={"qid": "query", "docid": "id"})
    frame["title"] = "text"
    frame.to_parquet(tmp_path / "data.parquet")
    names = ["--qid-column", "query", "--docid-column", "id"]
    words = ["score", model_file, tmp_path / "data.parquet", *names, "-o", tmp_path / "scores.npy"]
    lgmml(*words, "--drop-column", "title")
    expected = LGMML.load(model_file).score_in_caller_order(data)
    np.testing.assert_array_equal(np.load(tmp_path / "scores.npy"), expected)
    message = refused(capsys, *words)
    assert message.endswith("data.parquet: the model was trained on 5 features, but the schema names 6")
    content = (tmp_path / "data.parquet").read_bytes()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
    words[2] = "-"
    lgmml(*words, "--input-format", "parquet", "--drop-column", "title")
    np.testing.assert_array_equal(np.load(tmp_path / "scores.npy"), expected)


def test_a_shuffled_copy_gets_the_same_scores(tmp_path: Path, model_file: Path) -> None:
    file = write(small_data(seed=7), tmp_path, "txt")
    lines = file.read_text().splitlines(keepends=True)
    order = np.random.default_rng(0).permutation(len(lines))
    mixed = tmp_path / "mixed.txt"
    mixed.write_text("".join(lines[i] for i in order))
    lgmml("score", model_file, file, "-o", tmp_path / "a.txt")
    lgmml("score", model_file, mixed, "-o", tmp_path / "b.txt")
    a, b = ((tmp_path / name).read_text().splitlines() for name in ("a.txt", "b.txt"))
    assert [a[i] for i in order] == b


def test_text_scores_are_exact(tmp_path: Path, model_file: Path) -> None:
    data = small_data(seed=7)
    lgmml("score", model_file, write(data, tmp_path, "txt"), "-o", tmp_path / "scores.txt")
    read = np.array((tmp_path / "scores.txt").read_text().split(), dtype=np.float32)
    np.testing.assert_array_equal(read, LGMML.load(model_file).score_in_caller_order(data))


@pytest.mark.parametrize("options", [["--policy", "knn"], ["--known-queries"]])
def test_options_of_the_model(tmp_path: Path, model_file: Path, options: list[str]) -> None:
    data = small_data()
    keywords = {"known_queries": True} if len(options) == 1 else {"policy": options[1]}
    expected = LGMML.load(model_file).score_in_caller_order(data, **keywords)
    file = write(data, tmp_path, "txt")
    lgmml("score", model_file, file, "-o", tmp_path / "scores.npy", *options)
    np.testing.assert_allclose(np.load(tmp_path / "scores.npy"), expected, rtol=1e-6, atol=1e-7)
    lgmml("evaluate", model_file, file, "--json", tmp_path / "e.json", *options)
    found = json.loads((tmp_path / "e.json").read_text())
    assert found["policy"] == ("own Φ" if len(options) == 1 else options[1])


@pytest.mark.parametrize("ids", [True, False])
def test_trec_runs_rank_every_list(tmp_path: Path, model_file: Path, ids: bool) -> None:
    data = small_data(seed=7, shuffled=True, ids=ids)
    scores = torch.from_numpy(LGMML.load(model_file).score_in_caller_order(data))
    lgmml("score", model_file, write(data, tmp_path, "txt"), "-o", tmp_path / "out.run", "--tag", "my run")
    lines = [line.split() for line in (tmp_path / "out.run").read_text().splitlines()]
    assert len(lines) == data.num_documents
    names = np.array(data.doc_ids)[data.order.argsort()] if ids else np.arange(1, data.num_documents + 1).astype(str)
    queries = data.in_caller_order(data.query_index)
    seen = list(dict.fromkeys(data.qids[q] for q in queries.tolist()))
    for qid in seen:
        own = [line for line in lines if line[0] == str(qid)]
        rows = (queries == data.qids.index(qid)).nonzero()[:, 0]
        best = rows[scores[rows].argsort(descending=True, stable=True)]
        assert [line[2] for line in own] == [names[row] for row in best.tolist()]
        assert [int(line[3]) for line in own] == list(range(1, len(rows) + 1))
        assert {(line[1], line[5]) for line in own} == {("Q0", "my%20run")}
        np.testing.assert_array_equal(np.array([line[4] for line in own], np.float32), scores[best].numpy())


def test_files_without_labels(tmp_path: Path, model_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = small_data(seed=7)
    labelled = write(data, tmp_path, "txt")
    bare = tmp_path / "bare.txt"
    bare.write_text("".join(line.partition(" ")[2] + "\n" for line in labelled.read_text().splitlines()))
    lgmml("score", model_file, labelled, "-o", tmp_path / "a.txt")
    lgmml("score", model_file, bare, "-o", tmp_path / "b.txt")
    # Labels are part of the canonical order, so the arithmetic may be done in another one.
    a, b = (np.loadtxt(tmp_path / name) for name in ("a.txt", "b.txt"))
    np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)
    assert refused(capsys, "evaluate", model_file, bare).endswith("bare.txt: there are no labels to evaluate against")


def test_pipes(tmp_path: Path, model_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = small_data(seed=7, shuffled=True)
    out = io.TextIOWrapper(io.BytesIO())
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(write(data, tmp_path, "txt").read_bytes())))
    monkeypatch.setattr(sys, "stdout", out)
    lgmml("score", model_file, "-")
    read = np.array(out.buffer.getvalue().split(), dtype=np.float32)  # type: ignore[attr-defined]
    np.testing.assert_array_equal(read, LGMML.load(model_file).score_in_caller_order(data))
    lgmml("score", model_file, write(data, tmp_path, "txt"), "-o", "/dev/null")
    assert not Path("/dev/null").is_file()


def test_evaluate_prints_table_counts_and_definitions(
    tmp_path: Path, model_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = small_data(seed=7, shuffled=True)
    file = write(data, tmp_path, "txt")
    expected = evaluate(LGMML.load(model_file), load_letor(file, cache=False))
    lgmml("evaluate", model_file, file, "--json", tmp_path / "e.json", "--batch-documents", 5)
    printed = capsys.readouterr().out
    found = json.loads((tmp_path / "e.json").read_text())
    for name, mean in expected.means.items():
        assert f"{mean:.4f}" in printed
        assert expected.definitions[name].partition(": ")[2] in printed
        assert found["metrics"][name]["mean"] == pytest.approx(mean, abs=1e-6)
        assert found["metrics"][name]["counted"] == expected.counted[name]
        assert found["metrics"][name]["skipped"] == expected.skipped[name]
    lgmml("evaluate", model_file, file, "--metrics", "err,precision@2", "--max-grade", 2, "--json", "-")
    content = json.loads(capsys.readouterr().out)
    assert list(content["metrics"]) == ["err", "precision@2"]
    lgmml("evaluate", model_file, file, "--preset", "letor4", "--json", "-")
    assert "(letor4)" in json.loads(capsys.readouterr().out)["metrics"]["map"]["definition"]


def test_data_sets_and_lightgbm_files(tmp_path: Path, model_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = small_data(seed=7, ids=False)
    expected = evaluate(LGMML.load(model_file), data).means["map"]
    folder = tmp_path / "set" / "Fold2"
    folder.mkdir(parents=True)
    save_letor(data, folder / "test.txt")
    save_lightgbm(data, tmp_path / "rank.test")
    save_lightgbm(data, tmp_path / "any.name")
    (tmp_path / "tables").mkdir()
    save_table(data, tmp_path / "tables" / "test.csv.gz")
    places = [[tmp_path / "rank.test"], [tmp_path / "any.name"], [tmp_path / "tables"]]
    for words in ([tmp_path / "set", "--fold", 2], [folder, "--split", "test"], *places):
        lgmml("evaluate", model_file, *words, "--json", "-")
        assert json.loads(capsys.readouterr().out)["metrics"]["map"]["mean"] == pytest.approx(expected, abs=1e-6)
    message = refused(capsys, "evaluate", model_file, folder, "--split", "valid")
    assert message == "`split` must be one of 'test', got 'valid'"


def test_explain(tmp_path: Path, model_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = small_data(seed=7, shuffled=True)
    query = int(data.sizes.argmax())
    file = write(data, tmp_path, "txt")
    names = data.select([query]).doc_ids
    assert names is not None
    words = ["explain", model_file, file, "--qid", data.qids[query], "--document", names[0], "--over", 2]
    lgmml(*words, "--json", "--top", 3)
    found = json.loads(capsys.readouterr().out)
    expected = explain(LGMML.load(model_file), data, qid=data.qids[query], document=names[0], over=1)
    assert found["difference"] == pytest.approx(expected.difference, abs=1e-12)
    assert len(found["metrics"]) == 3
    total = sum(row["part"] for row in found["metrics"]) + found["other_metrics"]
    assert total == pytest.approx(found["difference"], abs=1e-12)
    total = sum(row["part"] for row in found["features"]) + found["other_features"]
    assert total == pytest.approx(found["difference"], abs=1e-12)
    lgmml(*words)
    printed = capsys.readouterr().out
    assert f"Query {data.qids[query]}: {names[0]} (score " in printed
    assert f"difference {expected.difference:+.6g}" in printed
    assert ", quantile" in printed
    assert "(anchor at " in printed
    assert "all others" in printed
    assert "has no document with the id 'x'" in refused(capsys, *words[:-3], "x", "--over", 1)
    for place in (0, 99):
        message = f"has documents 1 to {len(names)}, got {place}, which is the id of none of them either"
        assert message in refused(capsys, *words[:-1], place)
    assert "`top` must be positive, got 0" in refused(capsys, *words, "--top", 0)


def test_info(model_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lgmml("info", model_file)
    printed = capsys.readouterr().out
    for piece in (
        "remove_constant → (quantile + list_rank) → remove_constant → standardize → clip",
        "4 on 2 features, 3 on all features",
        "per_query",
        "auto",
    ):
        assert piece in printed
    lgmml("info", model_file, "--json")
    facts = json.loads(capsys.readouterr().out)
    assert (facts["local metrics (K)"], facts["raw features"], facts["format version"]) == (7, 5, VERSION)
    assert facts["features used"] == "4 in 8 columns"
    assert facts["share of Φ that is zero"] == pytest.approx(1 / 7, abs=1e-4)
    assert facts["kind"] == "model"
    lgmml("info", Path(__file__).parent.parent / "fixtures" / "release-0.1" / "last.ckpt", "--json")
    assert json.loads(capsys.readouterr().out)["kind"] == "checkpoint of a training run"


def test_errors_are_one_sentence(tmp_path: Path, model_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(small_data(), tmp_path, "txt")
    wide = tmp_path / "wide.txt"
    wide.write_text(file.read_text() + "1 qid:1 7:1\n")
    line = len(wide.read_text().splitlines())
    out = tmp_path / "out.txt"
    out.write_text("old")
    message = refused(capsys, "score", model_file, wide, "-o", out)
    assert message.endswith(
        f"wide.txt:{line}: feature index 7 is beyond the largest allowed, 5; the model was trained on 5 features"
    )
    assert out.read_text() == "old"
    assert not list(tmp_path.glob(".out*"))
    assert "no model file at" in refused(capsys, "info", tmp_path / "none")
    assert "none.txt: no such file" in refused(capsys, "score", model_file, tmp_path / "none.txt")
    assert "is not a model file" in refused(capsys, "info", file)
    torch.save({"weights": torch.zeros(2)}, tmp_path / "foreign.ckpt")
    assert "was not written by this package" in refused(capsys, "info", tmp_path / "foreign.ckpt")
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(model_file.read_bytes()[:-100])
    assert "is not a model file, or it is damaged" in refused(capsys, "score", cut, file)
    assert "`policy` must be one of 'mean', 'knn', 'amortized', 'ones'" in refused(
        capsys, "score", model_file, file, "--policy", "shared"
    )
    assert "`device` 'abacus' cannot be used here" in refused(capsys, "score", model_file, file, "--device", "abacus")
    assert "`threads` must be positive" in refused(capsys, "score", model_file, file, "--threads", 0)
    assert "did you mean 'ndcg'?" in refused(capsys, "evaluate", model_file, file, "--metrics", "ndgc")
    assert "`preset` must be one of" in refused(capsys, "evaluate", model_file, file, "--preset", "x")
    (tmp_path / "file").write_text("")
    assert "file: " in refused(capsys, "score", model_file, file, "-o", tmp_path / "file" / "x.txt")
    small_model().save(tmp_path / "shared.safetensors")
    message = refused(capsys, "score", tmp_path / "shared.safetensors", file, "--known-queries")
    assert message == "`known_queries` needs weights for each query; this model's are 'shared'"


def test_models_are_merged_by_what_ranks_labelled_lists_best(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = small_data(queries=30, seed=4)
    file = write(data, tmp_path, "txt")
    files = [tmp_path / f"{name}.safetensors" for name in ("one", "other", "both")]
    for seed, path in enumerate(files[:2]):
        small_model(seed=seed).save(path)
    lgmml("merge", files[0], file, "--with", files[1], "-o", files[2])
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in printed] == [str(path) for path in files[:2]]
    models = [LGMML.load(path) for path in files]
    weights = [float(line.split()[0]) for line in printed]
    expected = weights[0] * models[0].score(data) + weights[1] * models[1].score(data)
    torch.testing.assert_close(models[2].score(data), expected, rtol=1e-4, atol=1e-4)
    reached = [evaluate(model, data, metrics=["ndcg@10"]).means["ndcg@10"] for model in models]
    assert reached[2] >= max(reached[:2]) - 1e-9
    small_model(kernel="rbf").save(files[1])
    message = refused(capsys, "merge", files[0], file, "--with", files[1], "-o", files[2])
    assert "must agree on their kernel" in message
    with pytest.raises(SystemExit, match="2"):  # each model keeps its own
        cli.main(["merge", *map(str, (files[0], file, "--with", files[1], "-o", files[2])), "--policy", "ones"])
    assert "unrecognized arguments: --policy" in capsys.readouterr().err


def test_help_suffices(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("score", "evaluate", "explain", "merge", "export", "compare", "report", "info", "card", "sweep"):
        with pytest.raises(SystemExit) as stop:
            cli.main([command, "--help"])
        assert stop.value.code == 0
        printed = capsys.readouterr().out
        assert f"lgmml {command} " in printed
        assert "examples:" in printed


def test_bad_words(capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([], ["scor"], ["score"], ["score", "model", "data", "--format", "xml"]):
        with pytest.raises(SystemExit) as stop:
            cli.main(words)
        assert stop.value.code == 2
    assert "invalid choice: 'xml'" in capsys.readouterr().err


def test_train_hands_everything_to_hydra(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    monkeypatch.setattr(cli.start, "main", lambda command: seen.append(sys.argv[1:]))
    before = list(sys.argv)
    lgmml("train", "data=mq2008", "--help", "-m", "seed=0,1")
    assert seen == [["data=mq2008", "--help", "-m", "seed=0,1"]]
    assert sys.argv == before


@pytest.mark.slow
def test_as_a_process(tmp_path: Path, model_file: Path) -> None:
    """The reader of a pipe may stop early; a wrong file gives exit code 2 and no traceback."""
    file = write(small_data(200, seed=7), tmp_path, "txt")
    command = [sys.executable, "-m", "lgmml_torch.app.cli", "score", str(model_file)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [*command, str(file), "--batch-documents", "1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert b"Traceback" not in process.stderr.read()
    process.stderr.close()
    assert process.wait() == 141
    done = subprocess.run([*command, str(tmp_path / "none")], capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"lgmml: error: {tmp_path / 'none'}: no such file\n"


def test_columns_of_a_table_are_matched_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Names travel in the model file: a table with its columns in another order scores as before, not as if it were."""
    data = small_data(seed=3, ids=False).replace(feature_names=("a", "b", "c", "d", "e"))
    model = small_model(data=data)
    model.feature_names = data.feature_names
    model.save(tmp_path / "model.safetensors")
    assert LGMML.load(tmp_path / "model.safetensors").feature_names == data.feature_names
    X, qid = data.in_caller_order(data.features), data.in_caller_order(data.query_index)
    lines = ["e,c,qid,a,b,d"] + [
        f"{x[4]},{x[2]},{q},{x[0]},{x[1]},{x[3]}" for x, q in zip(X.tolist(), qid, strict=True)
    ]
    (tmp_path / "new.csv").write_text("\n".join(lines) + "\n")
    lgmml("score", tmp_path / "model.safetensors", tmp_path / "new.csv", "-o", tmp_path / "scores.npy")
    np.testing.assert_allclose(np.load(tmp_path / "scores.npy"), model.score_in_caller_order(data), rtol=1e-6)
    (tmp_path / "bad.csv").write_text("a,b,c,d,f,qid\n1,2,3,4,5,1\n")
    message = refused(capsys, "score", tmp_path / "model.safetensors", tmp_path / "bad.csv")
    assert "column 'e' is missing, and the model was trained on no column 'f'" in message
    with pytest.raises(LGMMLError, match="`data` must have the features the model was trained on, in their order"):
        model.score(data.replace(feature_names=("b", "a", "c", "d", "e")))
