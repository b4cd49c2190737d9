"""``lgmml convert`` and the commands on what it writes: scores by shard, resumed after a stop, in several processes."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from lgmml_torch.app.commands import data as score_shards
from lgmml_torch.data.shards import SHARD, Manifest, open_shard_splits, open_shards
from lgmml_torch.data.write import save_letor, save_table
from lgmml_torch.files import SUFFIX
from lgmml_torch.models.ranker import LGMML
from lgmml_torch.ragged import RankingData
from tests.app.test_cli import lgmml, refused
from tests.data.test_shards import assert_same_lists
from tests.data.test_source import write
from tests.doors import FEATURES, small_data, small_model

pq = pytest.importorskip("pyarrow.parquet")


@pytest.fixture
def model_file(tmp_path: Path) -> Path:
    small_model(mode="per_query").save(tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """The lists of a shuffled file, in several shards."""
    save_letor(small_data(seed=7, shuffled=True), tmp_path / "new.txt")
    lgmml("convert", tmp_path / "new.txt", tmp_path / "shards", "--documents", 15)
    return tmp_path / "shards"


def scores_of(folder: Path) -> dict[tuple[int, int], float]:
    """By query and place in its list."""
    found = {}
    for file in sorted(folder.iterdir()):
        table = pq.read_table(file)
        assert table.column_names == ["qid", "place", "docid", "score"]
        keys = zip(table["qid"].to_pylist(), table["place"].to_pylist(), strict=True)
        found |= dict(zip(keys, table["score"].to_pylist(), strict=True))
    return found


def expected_scores(model_file: Path, data: RankingData) -> dict[tuple[int, int], float]:
    scores = LGMML.load(model_file).score_in_caller_order(data)
    count: dict[int, int] = {}
    found = {}
    for query, score in zip(data.in_caller_order(data.query_index).tolist(), scores.tolist(), strict=True):
        place = count[query] = count.get(query, -1) + 1
        found[int(str(data.qids[query])), place] = score
    return found


class TestConvert:
    @pytest.mark.parametrize("kind", ["txt.gz", "parquet"])
    def test_any_file(self, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str) -> None:
        data = small_data(shuffled=True)
        lgmml("convert", write(data, tmp_path, kind), tmp_path / "shards", "--documents", 20)
        out = capsys.readouterr().out
        count = len(Manifest.read(tmp_path / "shards").shards)
        documents = f"12 queries, {data.num_documents} documents, 5 features (float32), labels 0–2, {count} shards"
        assert out == f"{tmp_path / 'shards'}: {documents}\n"
        found = open_shards(tmp_path / "shards", doc_ids=True)
        assert_same_lists(found, data.replace(feature_names=found.feature_names))

    def test_columns_and_gaps(self, tmp_path: Path) -> None:
        pd = pytest.importorskip("pandas")
        frame = pd.DataFrame({"query": [2, 1, 2], "grade": [1, 0, 0], "x": [1.0, 2.0, None], "title": list("abc")})
        frame.to_parquet(tmp_path / "t.parquet")
        names = ["--qid-column", "query", "--label-column", "grade", "--drop-column", "title"]
        lgmml("convert", tmp_path / "t.parquet", tmp_path / "shards", *names, "--missing", "zero")
        found = open_shards(tmp_path / "shards")
        assert (found.qids, found.feature_names) == ((1, 2), ("x",))
        assert found.in_caller_order(found.features[:, 0]).tolist() == [2, 1, 0]

    def test_a_set_with_its_parts(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        parts = {"train": small_data(seed=1), "vali": small_data(seed=2), "test": small_data(seed=3)}
        (tmp_path / "set").mkdir()
        for name, data in parts.items():
            save_letor(data, tmp_path / "set" / f"{name}.txt")
        for _ in range(2):  # the second time in place of the first
            lgmml("convert", tmp_path / "set", tmp_path / "shards")
            assert capsys.readouterr().out.count("12 queries") == 3
        found = open_shard_splits(tmp_path / "shards", doc_ids=True)
        assert list(found) == ["train", "valid", "test"]
        for part, data in zip(found.values(), parts.values(), strict=True):
            assert_same_lists(part, data)
        lgmml("convert", tmp_path / "set", tmp_path / "one", "--split", "valid")
        assert_same_lists(open_shards(tmp_path / "one", doc_ids=True), parts["vali"])
        message = refused(capsys, "convert", tmp_path / "set", tmp_path / "one")
        assert message.endswith("one: the parts of a set need a folder of their own, this one holds 'index.parquet'")
        message = refused(capsys, "convert", tmp_path / "set" / "test.txt", tmp_path / "shards")
        assert message.endswith("shards: shards need a folder of their own, this one holds 'test'")
        message = refused(capsys, "convert", tmp_path / "set", tmp_path / "set")
        assert message.endswith("this one holds 'test.txt'")
        message = refused(capsys, "convert", tmp_path / "set", tmp_path / "new", "--split", "tset")
        assert message.endswith("got 'tset'; did you mean 'test'?")
        assert not (tmp_path / "new").exists()

    def test_what_is_there_stays_until_there_is_something_to_write(
        self, tmp_path: Path, shards: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (tmp_path / "empty.txt").write_text("")
        (tmp_path / "nothing").mkdir()
        for words in (["empty.txt"], ["nowhere.txt"], ["nothing"], ["nothing", "--split", "test"]):
            refused(capsys, "convert", tmp_path / words[0], shards, *words[1:])
            assert open_shards(shards).num_queries == 12
        message = refused(capsys, "convert", shards / SHARD.format(0), shards)
        assert message.startswith(f"{shards}: the folder for the shards must not be the one that ")
        assert open_shards(shards).num_queries == 12

    def test_as_many_features_as_asked_for(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (tmp_path / "a.txt").write_text("1 qid:1 1:1 2:3\n0 qid:1 1:2\n")
        lgmml("convert", tmp_path / "a.txt", tmp_path / "shards", "--num-features", 4)
        assert open_shards(tmp_path / "shards").num_features == 4
        assert refused(capsys, "convert", tmp_path / "b.txt", tmp_path / "new").endswith("b.txt: no such file")
        assert "`documents` must be positive" in refused(
            capsys, "convert", tmp_path / "a.txt", tmp_path / "new", "--documents", 0
        )


class TestScore:
    def test_scores_are_those_of_the_file(
        self, tmp_path: Path, shards: Path, model_file: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        data, count = small_data(seed=7, shuffled=True), len(Manifest.read(shards).shards)
        words = ["score", model_file, shards, "--output", tmp_path / "scores"]
        capsys.readouterr()
        lgmml(*words)
        out = capsys.readouterr().out
        assert f"scores: {count} shards scored, 0 were there already; {data.num_documents} documents in " in out
        assert out.endswith(" documents per second\n")
        expected = expected_scores(model_file, data)
        found = scores_of(tmp_path / "scores")
        assert found.keys() == expected.keys()
        np.testing.assert_allclose([found[key] for key in expected], list(expected.values()), rtol=1e-5, atol=1e-6)
        self.stop_and_go_on(tmp_path, shards, model_file, capsys)

    def stop_and_go_on(
        self, tmp_path: Path, shards: Path, model_file: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """What is there of this model, these settings and this shard is kept; everything else is made again."""
        words, scores = ["score", model_file, shards, "-o", tmp_path / "scores"], tmp_path / "scores"
        count = len(Manifest.read(shards).shards)
        before = {file.name: file.read_bytes() for file in scores.iterdir()}
        times = {file.name: file.stat().st_mtime_ns for file in scores.iterdir()}

        def run(*more: object) -> str:
            lgmml(*words, *more)
            return capsys.readouterr().out

        assert f"scores: 0 shards scored, {count} were there already; 0 documents\n" in run()
        (scores / SHARD.format(1)).unlink()
        (scores / f".shard-00001.parquet.abc{SUFFIX}").write_bytes(b"half")
        (scores / SHARD.format(2)).write_bytes(before[SHARD.format(2)][:-9])
        assert f"scores: 2 shards scored, {count - 2} were there already" in run()
        assert {file.name: file.read_bytes() for file in scores.iterdir()} == before
        assert (scores / SHARD.format(0)).stat().st_mtime_ns == times[SHARD.format(0)]
        shutil.copy(scores / SHARD.format(3), scores / SHARD.format(0))  # scores of another shard
        assert "scores: 1 shards scored" in run()
        assert f"scores: {count} shards scored, 0 were" in run("--known-queries")
        small_model(seed=2, mode="per_query").save(model_file)
        assert f"scores: {count} shards scored, 0 were" in run("--known-queries")

    def test_in_several_processes(self, tmp_path: Path, shards: Path, model_file: Path) -> None:
        for jobs in (1, 2):
            lgmml("score", model_file, shards, "-o", tmp_path / f"scores{jobs}", "--jobs", jobs, "--threads", 1)
        assert scores_of(tmp_path / "scores1") == pytest.approx(scores_of(tmp_path / "scores2"), rel=1e-5)

    def test_what_is_refused(
        self, tmp_path: Path, shards: Path, model_file: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        words = ["score", model_file, shards]
        assert "`output` must name a folder, without `format`" in refused(capsys, *words)
        assert "`output` must name a folder" in refused(capsys, *words, "-o", tmp_path / "x", "--format", "text")
        assert "`jobs` must be positive, got 0" in refused(capsys, *words, "-o", tmp_path / "x", "--jobs", 0)
        assert "this one holds 'index.parquet'" in refused(capsys, *words, "-o", shards)
        wide = small_data(ids=False).replace(features=torch.zeros(small_data().num_documents, FEATURES + 1))
        save_table(wide, tmp_path / "wide.parquet")
        lgmml("convert", tmp_path / "wide.parquet", tmp_path / "wide")
        message = refused(capsys, "score", model_file, tmp_path / "wide", "-o", tmp_path / "x")
        assert message.endswith(f"the model was trained on {FEATURES} features, but column 'features' holds 6")
        file = shards / SHARD.format(2)
        good = file.read_bytes()
        file.write_bytes(bytes([*good[:60], good[60] ^ 1, *good[61:]]))
        message = refused(capsys, *words, "-o", tmp_path / "x")
        assert message.endswith("shard-00002.parquet: the file was changed: its content does not match the manifest")
        file.write_bytes(good[:-1])
        assert "shard-00002.parquet: the file is cut" in refused(capsys, *words, "-o", tmp_path / "x")

    def test_a_process_that_dies(
        self, tmp_path: Path, shards: Path, model_file: Path, capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:  # fmt: skip
        monkeypatch.setattr(score_shards, "_start", os.abort)  # which takes no argument: the process ends in an error
        message = refused(capsys, "score", model_file, shards, "-o", tmp_path / "x", "--jobs", 2)
        assert message == "a process ended before its shard was scored; the same command goes on from here"


def test_other_commands_read_shards(
    tmp_path: Path, shards: Path, model_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tables = []
    for data in (tmp_path / "new.txt", shards):
        capsys.readouterr()
        lgmml("evaluate", model_file, data)
        tables.append([line.split()[-8:] for line in capsys.readouterr().out.splitlines() if "0." in line])
    assert tables[0] == tables[1]
    shutil.copytree(shards, tmp_path / "parts" / "test")
    lgmml("explain", model_file, tmp_path / "parts", "--qid", 12, "--document", 1, "--over", 2)
    message = refused(capsys, "evaluate", model_file, tmp_path / "parts", "--split", "valid")
    assert message == "`split` must be one of 'test', got 'valid'"
