"""Parquet where it lies: a folder, a pattern or a store gives what one table in memory gives."""

from __future__ import annotations

import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lgmml_torch.app import cli
from lgmml_torch.app.compose import load_splits
from lgmml_torch.app.config import load_config
from lgmml_torch.checks import DataError
from lgmml_torch.data.catalog import open_ray, open_table
from lgmml_torch.data.shards import open_shards
from lgmml_torch.data.source import open_source
from lgmml_torch.models.ranker import LGMML
from lgmml_torch.ragged import RankingData
from tests.processes import free_port, in_processes

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")


def assert_same_lists(found: RankingData, expected: RankingData) -> None:
    """Bit for bit; of the caller's order what it says within each list."""
    for name in ("qids", "doc_ids", "feature_names", "categories", "table"):
        assert getattr(found, name) == getattr(expected, name)
    assert found.features.numpy().tobytes() == expected.features.numpy().tobytes()
    assert torch.equal(found.labels, expected.labels)
    assert torch.equal(found.offsets, expected.offsets)
    assert torch.equal(found.order.sort().values, torch.arange(found.num_documents))
    for start, stop in pairwise(expected.offsets.tolist()):
        assert torch.equal(found.order[start:stop].argsort(), expected.order[start:stop].argsort())


def table_of(queries: int = 30, *, text: bool = False, seed: int = 0) -> Any:
    """A row per document; the rows of each query are scattered over the whole table.

    Ids ascend: equal rows, which gaps may give, stand by id in memory and by row where ids are not read.
    """
    rng = np.random.default_rng(seed)
    qid = rng.integers(0, queries, queries * 8)
    columns = {
        "qid": [f"q{number}" for number in qid] if text else qid,
        "label": rng.integers(0, 3, len(qid)).astype(float),
        "docid": [f"d{row:04d}" for row in range(len(qid))],
        "price": rng.normal(size=len(qid)),
        "sold": rng.integers(0, 9, len(qid)),
    }
    return pa.table(columns)


def write_files(table: Any, folder: Path, files: int = 5, *, keys: str = "") -> Path:
    """The rows one after the other in several files, in folders of their own where ``keys`` says so."""
    step = -(-len(table) // files)
    for number in range(files):
        place = folder / keys.format(number)
        place.mkdir(parents=True, exist_ok=True)
        pq.write_table(table.slice(number * step, step), place / f"part-{number}.parquet", row_group_size=13)
    return folder


@pytest.mark.parametrize("text", [False, True])
@pytest.mark.parametrize("keys", ["", "deep/a{}"])
def test_a_folder_is_the_table_it_was_cut_from(tmp_path: Path, keys: str, text: bool) -> None:
    table = table_of(text=text)
    folder = write_files(table, tmp_path / "set", keys=keys)
    (folder / "_SUCCESS").touch()
    (folder / "_old").mkdir()
    (folder / "_old" / "x.parquet").write_text("not read")
    with open_source(table) as source:
        expected = source.read()
        batches = list(source.batches(20))
    for path in (folder, f"{folder}/", f"{folder}/**/*.parquet", folder.as_uri()):
        with open_source(path) as source:
            assert_same_lists(source.read(), expected)
            assert torch.equal(source.read().order, expected.order)
            for one, other in zip(source.batches(20), batches, strict=True):
                assert_same_lists(one.data, other.data)
                assert np.array_equal(one.rows, other.rows)


def test_patterns_choose_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = table_of()
    write_files(table, tmp_path, files=4)
    monkeypatch.chdir(tmp_path)
    for path in (f"{tmp_path}/part-*", "*.parquet", "./*.parquet", ".", "./", f"../{tmp_path.name}"):
        with open_source(path) as source:
            assert source.num_rows == len(table)
    with open_source(f"{tmp_path}/*-1.parquet") as source:
        assert source.num_rows == 60
        assert source.name.endswith("part-1.parquet")
    with pytest.raises(DataError, match=r"/\*\.csv: only Parquet is read from folders, patterns and stores, got 'csv'"):
        open_source(f"{tmp_path}/*.csv")
    with pytest.raises(DataError, match=r"none-\*: there are no Parquet files"):
        open_source(f"{tmp_path}/none-*")


@pytest.mark.parametrize("stream", [False, True])
def test_folders_named_after_values_give_columns(tmp_path: Path, stream: bool) -> None:
    table = table_of()
    folder = write_files(table, tmp_path / "set", keys="year=202{0}/part=%61b")
    step = len(table) // 5
    whole = table.append_column("year", pa.array(2020 + np.arange(len(table)) // step))
    pq.write_table(whole, tmp_path / "whole.parquet")
    with pytest.raises(DataError, match=r"column 'part' must hold numbers, got text"):
        open_source(folder)
    found = open_table(folder, drop=["part"], cache=tmp_path / "cache", stream=stream)
    for name, part in open_table(tmp_path / "whole.parquet").items():
        assert found[name].feature_names == ("price", "sold", "year")
        assert_same_lists(found[name].replace(doc_ids=None), part.replace(doc_ids=None, table=found[name].table))


@pytest.mark.parametrize("missing", ["error", "query-mean"])
@pytest.mark.parametrize("layout", ["cut", "column", "folders"])
def test_streamed_parts_are_those_in_memory(tmp_path: Path, layout: str, missing: str) -> None:
    """From the cache and without, and again from the cache."""
    table, words = table_of(text=True), ["train", "valid", "test", "train"]
    settings: dict[str, Any] = {"missing": missing, "categories": ["colour"]}
    colours = pa.array([f"c{int(value) % 3}" for value in table["sold"].to_pylist()])
    table = table.append_column("colour", colours)
    if missing != "error":
        gaps = pa.array(np.arange(len(table)) % 7 == 0)
        table = table.set_column(3, "price", pa.compute.if_else(gaps, None, table["price"]))
    parts = pa.array([words[int(str(qid)[1:]) % 4] for qid in table["qid"].to_pylist()])
    if layout == "column":
        table, settings["split"] = table.append_column("part", parts), "part"
    path = tmp_path / "set"
    if layout == "folders":
        for word in words:
            write_files(table.filter(pa.compute.equal(parts, word)), path / word)
    else:
        write_files(table, path)
    expected = open_table(path, **settings)
    for cache in (tmp_path / "cache", False, tmp_path / "cache"):
        found = open_table(path, stream=True, cache=cache, **settings)
        assert list(found) == list(expected) == ["train", "valid", "test"]
        for name, part in expected.items():
            assert_same_lists(found[name], part.replace(doc_ids=None))
            shared = found[name].shared_lists
            assert shared is not None
            assert torch.equal(shared.sizes, part.sizes)


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    folder = write_files(table_of(), tmp_path / "set")
    first = open_table(folder, stream=True, cache=tmp_path / "cache")
    pq.write_table(table_of(seed=1).slice(0, 48), folder / "part-0.parquet")
    second = open_table(folder, stream=True, cache=tmp_path / "cache")
    expected = open_table(folder)
    assert_same_lists(second["train"], expected["train"].replace(doc_ids=None))
    assert not torch.equal(first["train"].features.sum(), second["train"].features.sum())


class TestFilesMustAgree:
    @staticmethod
    def refused(tmp_path: Path, change: Any) -> str:
        table = table_of()
        folder = write_files(table, tmp_path / "set", files=3)
        pq.write_table(change(table.slice(0, 10)), folder / "part-1.parquet")
        with pytest.raises(DataError) as caught, open_source(folder) as source:
            source.read()
        return str(caught.value).replace(f"{folder}/", "")

    def test_names(self, tmp_path: Path) -> None:
        gone = self.refused(tmp_path, lambda table: table.drop_columns(["price"]))
        assert gone == "part-1.parquet: column 'price' is missing; all files must have the columns of part-0.parquet"
        new = self.refused(tmp_path, lambda table: table.append_column("more", table["price"]))
        assert new.startswith("part-1.parquet: there should be no column 'more'; all files")

    def test_kinds(self, tmp_path: Path) -> None:
        def as_text(table: Any) -> Any:
            return table.set_column(4, "sold", table["sold"].cast(pa.string()))

        expected = "part-1.parquet: column 'sold' must hold numbers as in part-0.parquet, got text"
        assert self.refused(tmp_path, as_text) == expected

    def test_whole_numbers_and_fractions_are_numbers(self, tmp_path: Path) -> None:
        table = table_of()
        folder = write_files(table, tmp_path / "set", files=3)
        turned = table.slice(80, 80).select(["sold", "price", "docid", "qid", "label"])
        pq.write_table(turned.set_column(0, "sold", turned["sold"].cast(pa.float64())), folder / "part-1.parquet")
        with open_source(folder) as found, open_source(table) as expected:
            assert_same_lists(found.read(), expected.read())

    def test_a_column_of_gaps_suits_every_kind(self, tmp_path: Path) -> None:
        table = table_of().append_column("colour", pa.array(["red", "blue"] * 120))
        folder = write_files(table, tmp_path / "set", files=3)
        gaps = table.slice(80, 80).set_column(5, "colour", pa.nulls(80)).set_column(3, "price", pa.nulls(80))
        pq.write_table(gaps, folder / "part-1.parquet")
        with open_source(folder, categories=["colour"], missing="zero") as source:
            data = source.read()
        assert data.categories == (None, None, ("blue", "red"))
        in_order = data.in_caller_order(data.features)
        assert torch.equal(in_order[80:160, 0], torch.zeros(80))
        assert in_order[:, 2].tolist() == [1, 0] * 40 + [-1] * 80 + [1, 0] * 40

    def test_gaps_are_named_by_file_and_row(self, tmp_path: Path) -> None:
        def with_gap(table: Any) -> Any:
            return table.set_column(3, "price", pa.array([1.0, None, *[2.0] * 8]))

        assert self.refused(tmp_path, with_gap).startswith("part-1.parquet: row 2 (from 1): column 'price' is missing")

    def test_a_damaged_file_is_named(self, tmp_path: Path) -> None:
        folder = write_files(table_of(), tmp_path / "set")
        (folder / "part-3.parquet").write_bytes(b"PAR1 and nothing else PAR1")
        with pytest.raises(DataError, match=r"part-3.parquet: not a readable Parquet file"):
            open_source(folder)


def test_lists_of_a_row_each_in_several_files(tmp_path: Path) -> None:
    """With a row per query, a query in two files is one list."""
    for number in (0, 1):
        nested = pa.table({"qid": [7, 8 + number], "label": [[1.0, 0.0], [2.0]], "x": [[1.0, 2.0], [3.0 + number]]})
        pq.write_table(nested, tmp_path / f"{number}.parquet")
    with open_source(tmp_path) as source:
        data = source.read()
    assert data.qids == (7, 8, 9)
    assert data.sizes.tolist() == [4, 1, 1]
    assert data.in_caller_order(data.features)[:, 0].tolist() == [1, 2, 3, 1, 2, 4]


def test_what_cannot_be_streamed_or_reached(tmp_path: Path) -> None:
    folder = write_files(table_of(), tmp_path / "set")
    with pytest.raises(DataError, match="`stream` has no place for weights and positions"):
        open_table(folder, weight="sold", stream=True)
    with pytest.raises(DataError, match="training needs labels"):
        open_table(folder, label="grade", stream=True, cache=False)
    with pytest.raises(DataError, match=r"nowhere://x: not a readable Parquet file: Unrecognized filesystem type"):
        open_source("nowhere://x")


def test_text_is_streamed_too(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    lines = [f"{row % 3} qid:{row % 20} 1:{rng.random():.3f} 3:{row}" for row in range(200)]
    (tmp_path / "all.txt").write_text("\n".join(lines) + "\n")
    found = open_table(tmp_path / "all.txt", stream=True, cache=tmp_path / "cache")
    for name, part in open_table(tmp_path / "all.txt", cache=False).items():
        assert_same_lists(found[name], part)


def own_lists(folder: str, cache: str) -> dict[str, Any]:
    data = open_table(folder, stream=True, cache=cache)["train"]
    return {
        "qids": list(data.qids),
        "all": data.all_lists.take(data.features, torch.arange(int(data.all_lists.offsets[-1]))),
    }


def test_processes_share_one_cache(tmp_path: Path) -> None:
    folder = write_files(table_of(), tmp_path / "set")
    expected = open_table(folder)["train"]
    found = in_processes(3, own_lists, str(folder), str(tmp_path / "cache"))
    assert [qid for one in found for qid in one["qids"]] == list(expected.qids)
    for one in found:
        assert torch.equal(one["all"], expected.features)
    assert len(list((tmp_path / "cache").glob("*.lgc"))) == 1


class RowsOfRay:
    """What of a `ray.data.Dataset` is used."""

    def __init__(self, table: Any) -> None:
        self.table = table

    def iter_batches(self, *, batch_size: int | None, batch_format: str) -> Iterator[Any]:
        assert (batch_size, batch_format) == (None, "pyarrow")
        for start in range(0, len(self.table), 50):
            yield self.table.slice(start, 50)


def test_rows_of_ray_are_a_table(tmp_path: Path) -> None:
    table = table_of(text=True)
    found = open_ray(RowsOfRay(table), fractions=(0.5, 0.5, 0))
    for name, part in open_table(write_files(table, tmp_path), fractions=(0.5, 0.5, 0)).items():
        assert_same_lists(found[name], part.replace(doc_ids=None))


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("home")
    table = table_of()
    words = pa.array([("red", "green", "blue")[number % 3] for number in table["sold"].to_pylist()])
    table = table.append_column("colour", words.dictionary_encode())
    write_files(table, home / "set", keys="day=2026-01-0{}")
    pq.write_table(table, home / "whole.parquet")
    return home


@pytest.fixture(scope="module")
def models(home: Path) -> list[LGMML]:
    settings = [
        "local_metrics=boosted",
        "local_metrics.rounds=3",
        "trainer.max_epochs=1",
        "logger=none",
        "threads=1",
    ]
    runs = {"folder": ["data=folder", f"data.path={home}/set", "data.drop=[day]"]}
    runs["file"] = ["data=table", f"data.path={home}/whole.parquet"]
    for name, words in runs.items():
        cache = f"paths.cache_dir={home}/cache"
        assert cli.main(["train", *words, *settings, cache, f"hydra.run.dir={home}/{name}"]) == 0
    return [LGMML.load(home / name / "model.safetensors") for name in runs]


def test_the_model_is_that_of_one_table(models: list[LGMML]) -> None:
    states = [model.state_dict() for model in models]
    for name, values in states[0].items():
        assert torch.equal(values.nan_to_num(), states[1][name].nan_to_num()), name


def test_scores_are_those_of_one_table(home: Path, models: list[LGMML]) -> None:
    for name, data in {"folder": "set", "pattern": "set/*/*.parquet", "file": "whole.parquet"}.items():
        scores = f"{home}/{name}.npy"
        assert cli.main(["score", f"{home}/folder/model.safetensors", f"{home}/{data}", "-o", scores]) == 0
    expected = np.load(home / "file.npy")
    for name in ("folder", "pattern"):
        assert np.array_equal(np.load(home / f"{name}.npy"), expected)


def test_inspect_prints_a_command_that_works(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", f"{home}/set"]) == 0
    *_, command = capsys.readouterr().out.splitlines()
    words = shlex.split(command.removeprefix("train with: "))
    assert words[:3] == ["lgmml", "train", "data=folder"]
    splits = load_splits(load_config([*words[2:], f"paths.cache_dir={home}/cache"]))
    assert sum(part.num_documents for part in splits.values()) == len(table_of())


@pytest.mark.usefixtures("models")
def test_convert_makes_shards_of_it(home: Path) -> None:
    assert cli.main(["convert", f"{home}/set", f"{home}/shards", "--drop-column", "day"]) == 0
    model = f"{home}/folder/model.safetensors"
    assert cli.main(["score", model, f"{home}/shards", "--output", f"{home}/of-shards"]) == 0
    assert cli.main(["score", model, f"{home}/whole.parquet", "-o", f"{home}/of-rows.npy"]) == 0
    scores = dict(zip(table_of()["docid"].to_pylist(), np.load(home / "of-rows.npy").tolist(), strict=True))
    for row in pq.read_table(home / "of-shards").to_pylist():
        assert row["score"] == pytest.approx(scores[row["docid"]], rel=1e-5)
    with open_source(home / "whole.parquet") as source:
        expected = source.read()
    found = open_shards(home / "shards", cache=False, doc_ids=True)
    assert_same_lists(found.replace(table=None), expected.replace(table=None))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """An object store on this machine, found by the usual environment variables."""
    pytest.importorskip("moto", reason="moto and its server are not installed (moto[s3], flask, flask-cors)")
    port, log = free_port(), tmp_path_factory.mktemp("moto") / "log"
    words = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    variables = {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "AWS_DEFAULT_REGION": "us-east-1"}
    variables |= {"AWS_ACCESS_KEY_ID": "any", "AWS_SECRET_ACCESS_KEY": "any"}
    with pytest.MonkeyPatch.context() as patch, log.open("w") as stream:
        for name, value in variables.items():
            patch.setenv(name, value)
        with subprocess.Popen(words, stdout=stream, stderr=stream) as server:
            for _ in range(600):
                if "Running on" in log.read_text() or server.poll() is not None:
                    break
                time.sleep(0.1)
            yield
            server.terminate()


@pytest.mark.usefixtures("store")
def test_an_object_store_is_a_folder(tmp_path: Path) -> None:
    from pyarrow import fs

    folder = write_files(table_of(), tmp_path / "set", keys="day={}")
    for word in ("train", "test"):
        write_files(table_of(), tmp_path / "parts" / word, files=2)
    system, _ = fs.FileSystem.from_uri("s3://shop?allow_bucket_creation=true")
    system.create_dir("shop")
    fs.copy_files(str(tmp_path), "shop", destination_filesystem=system)
    with open_source(folder) as source:
        expected = source.read()
    for path in ("s3://shop/set", "s3://shop/set/", "s3://shop/set/day=*/part-*.parquet", "s3://shop/set/**/*.parquet"):
        with open_source(path) as source:
            assert_same_lists(source.read(), expected)
    for stream in (False, True):
        found = open_table("s3://shop/set", stream=stream, cache=tmp_path / "cache")
        for name, part in open_table(folder).items():
            assert torch.equal(found[name].features, part.features)
        parts = open_table("s3://shop/parts", stream=stream, cache=tmp_path / "cache")
        assert list(parts) == ["train", "test"]
    with pytest.raises(DataError, match="s3://shop/none: there are no Parquet files"):
        open_source("s3://shop/none")
    system.delete_file("shop/set/day=1/part-1.parquet")
    with system.open_output_stream("shop/set/day=1/part-1.parquet") as file:
        file.write(b"PAR1 damaged PAR1")
    with pytest.raises(DataError, match=r"s3://shop/set/day=1/part-1.parquet: not a readable Parquet file"):
        open_source("s3://shop/set")


def test_a_closed_folder_holds_no_file_open(tmp_path: Path) -> None:
    folder = write_files(table_of(), tmp_path / "set")

    def held() -> list[str]:
        found = []
        for handle in Path("/proc/self/fd").iterdir():
            with suppress(OSError):  # that of the folder itself is closed by now
                found.append(str(handle.readlink()))
        return [name for name in found if name.startswith(str(folder))]

    with open_source(folder) as source:
        source.read()
        assert held()
    assert not held()
