"""Shards: what was written comes back bit for bit, whoever has which lists, and every kind of damage is named."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lgmml_torch.checks import DataError, LGMMLError, MissingDependencyError
from lgmml_torch.data import folder as parquet_folder
from lgmml_torch.data import shards
from lgmml_torch.data.cache import Cache
from lgmml_torch.data.generated import letor_like
from lgmml_torch.data.shards import (
    INDEX,
    SHARD,
    Manifest,
    Shard,
    check_shards,
    open_shard_splits,
    open_shards,
)
from lgmml_torch.data.source import open_source
from lgmml_torch.data.write import save_parquet, write_shards
from lgmml_torch.distributed import SharedLists
from lgmml_torch.files import SUFFIX
from lgmml_torch.functional.measures import ndcg
from lgmml_torch.ragged import RankingData
from lgmml_torch.segments import positions
from tests.data.test_source import write
from tests.doors import FEATURES, small_data
from tests.processes import in_processes

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")


def assert_same_lists(found: RankingData, expected: RankingData) -> None:
    """Bit for bit; the caller's order counts within lists, because the lists themselves are written by id."""
    assert found.qids == expected.qids
    assert found.doc_ids == expected.doc_ids
    assert found.feature_names == expected.feature_names
    assert found.features.dtype == expected.features.dtype
    assert found.features.numpy().tobytes() == expected.features.numpy().tobytes()
    assert torch.equal(found.labels, expected.labels)
    assert torch.equal(found.offsets, expected.offsets)
    assert torch.equal(found.order.sort().values, torch.arange(found.num_documents))
    starts = found.offsets[:-1].repeat_interleave(found.sizes)
    for query in range(len(expected)):
        rows = slice(int(expected.offsets[query]), int(expected.offsets[query + 1]))
        assert torch.equal((found.order - starts)[rows], expected.order[rows].argsort().argsort())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Twelve lists in several shards."""
    write_shards(small_data(shuffled=True), tmp_path / "set", documents=15)
    return tmp_path / "set"


def test_what_was_written_comes_back(tmp_path: Path) -> None:
    for kind in ["txt", "txt.gz", "csv", "npz", "parquet", "nested.parquet", "lightgbm"]:
        for shuffled in [False, True]:
            data = small_data(queries=14, seed=3, shuffled=shuffled and kind != "lightgbm")
            with open_source(write(data, tmp_path, kind)) as source:
                manifest = write_shards(source, tmp_path / "set", documents=15)
            with open_source(tmp_path / f"data.{kind}", kind="lightgbm" if kind == "lightgbm" else None) as source:
                expected = source.read()
            assert (manifest.queries, manifest.documents) == (14, expected.num_documents)
            assert (manifest.features, manifest.dtype) == (FEATURES, "float32")
            assert manifest.labels == (float(expected.labels.min()), float(expected.labels.max()))
            assert len(manifest.shards) > 3
            assert all(shard.documents <= 15 for shard in manifest.shards)
            assert check_shards(tmp_path / "set") == manifest == Manifest.read(tmp_path / "set")
            found = open_shards(tmp_path / "set", cache=tmp_path / "cache", doc_ids=True)
            assert_same_lists(found, expected)
            assert_same_lists(open_shards(tmp_path / "set", cache=False, doc_ids=True), expected)
            assert found.shared_lists is not None
            assert torch.equal(found.shared_lists.sizes, expected.sizes)
            assert not found.shared_lists.owner.any()


def test_a_data_set_in_memory_and_other_ids(tmp_path: Path) -> None:
    X = torch.tensor([[1.0, -0.0], [1.0, 0.0], [1e-45, 2.0], [1.0, 5.0], [3.0, 4.0]], dtype=torch.float64)
    qid = ["b\nb", "10", "b\nb", "9", "ä"]
    data = RankingData.from_arrays(X, [0, 1, 0, 2, 0.5], qid=qid, dtype=torch.float64, feature_names=["x", "place"])
    manifest = write_shards(data, tmp_path / "set", documents=1)
    assert [shard.queries for shard in manifest.shards] == [1, 1, 1, 1]
    found = open_shards(tmp_path / "set", cache=tmp_path / "cache")
    assert_same_lists(found, data)
    assert found.qids == ("10", "9", "b\nb", "ä")
    mixed = RankingData.from_arrays(X, torch.zeros(5), qid=[2.5, 2.5, 10, 3, "a"])
    write_shards(mixed, tmp_path / "set")  # in place of the others
    assert_same_lists(open_shards(tmp_path / "set"), mixed.replace(qids=("2.5", "3", "10", "a")))
    twice = RankingData.from_arrays(X, torch.zeros(5), qid=[1, "1", 2, 3, 4])
    with pytest.raises(DataError, match=r"query ids must differ as text to be written, got 1 and '1'"):
        write_shards(twice, tmp_path / "set")
    with pytest.raises(DataError, match="there are no documents to write"):
        write_shards(data.select([]), tmp_path / "set")
    with pytest.raises(LGMMLError, match="`documents` must be positive, got 0"):
        write_shards(data, tmp_path / "set", documents=0)
    empty = RankingData(X[:1], torch.ones(1), torch.tensor([0, 0, 1, 1]), (1, 2, 3), torch.arange(1))
    write_shards(empty, tmp_path / "set")
    assert open_shards(tmp_path / "set").qids == (2,)


def test_equal_scores_are_ranked_as_in_the_source(tmp_path: Path) -> None:
    """Documents are written by label; ranked in that order, ties would always look as bad as can be."""
    data = RankingData.from_arrays(torch.ones(6, 2), [2, 0, 1, 0, 2, 1], qid=[1, 1, 1, 2, 2, 2])
    write_shards(data, tmp_path / "set")
    found = open_shards(tmp_path / "set")
    values = [ndcg(torch.zeros(6), part.labels, part.offsets, k=1, tie_order=part.order) for part in (data, found)]
    assert torch.equal(values[0], values[1])


def test_every_list_is_had_once(folder: Path, tmp_path: Path) -> None:
    for world_size in [1, 2, 3, 5, 40]:
        data = small_data(shuffled=True)
        parts = [
            open_shards(folder, rank=r, world_size=world_size, cache=tmp_path / "cache") for r in range(world_size)
        ]
        assert [qid for part in parts for qid in part.qids] == list(data.qids)
        assert torch.cat([part.features for part in parts]).numpy().tobytes() == data.features.numpy().tobytes()
        for rank, part in enumerate(parts):
            shared = part.shared_lists
            assert shared is not None
            assert shared.rank == rank
            assert torch.equal(shared.sizes, data.sizes)
            assert torch.equal(shared.owner, parts[0].shared_lists.owner)  # type: ignore[union-attr]
            assert part.qids == tuple(data.qids[query] for query in shared.own.tolist())
            assert torch.equal(
                shared.own_rows, data.offsets[shared.own].repeat_interleave(part.sizes) + positions(part.offsets)
            )
            assert part.features.shape == (len(shared.own_rows), FEATURES)
        if world_size < 4:
            sizes = [part.num_documents for part in parts]
            assert max(sizes) - min(sizes) <= 2 * 15
        if world_size == 40:  # more processes than lists
            assert sum(part.num_queries == 0 for part in parts) >= 28


def own_lists(folder: str) -> dict[str, Any]:
    data = open_shards(folder, cache=False)
    assert data.shared_lists is not None
    rows = torch.arange(int(data.shared_lists.sizes.sum()))
    return {"qids": list(data.qids), "all": data.all_lists.take(data.features, rows)}


def test_processes_read_their_own(folder: Path) -> None:
    data = small_data(shuffled=True)
    found = in_processes(2, own_lists, str(folder))
    assert found[0]["qids"] + found[1]["qids"] == list(data.qids)
    assert all(part["qids"] for part in found)
    for part in found:
        assert torch.equal(part["all"], data.features)


def test_a_process_does_not_need_the_shards_of_others(folder: Path) -> None:
    first = open_shards(folder, rank=0, world_size=2)
    last = Manifest.read(folder).shards[-1].file
    (folder / last).unlink()
    assert open_shards(folder, rank=0, world_size=2).qids == first.qids
    with pytest.raises(DataError, match=rf"{last}: the manifest lists this file, but it is missing"):
        open_shards(folder, rank=1, world_size=2)
    with pytest.raises(LGMMLError, match=r"`rank` must lie in \[0, world_size = 2\), got 2"):
        open_shards(folder, rank=2, world_size=2)


class TestDamage:
    def test_missing_cut_and_changed(self, folder: Path, tmp_path: Path) -> None:
        cache = Cache(tmp_path / "cache")
        open_shards(folder, cache=cache)  # what the cache has does not hide what happens to the files
        for name in (SHARD.format(1), INDEX):
            file = folder / name
            good = file.read_bytes()
            for content, message in (
                (good[:-7], r"the file is cut: it has \d+ bytes, the manifest says \d+"),
                (good + b"x", r"the file is changed: it has \d+ bytes"),
                (bytes([*good[:50], good[50] ^ 1, *good[51:]]), r"the file was changed: its content does not match"),
                (None, r"the manifest lists this file, but it is missing"),
            ):
                file.unlink(missing_ok=True)
                if content is not None:
                    file.write_bytes(content)
                for look in (check_shards, lambda folder: open_shards(folder, cache=cache)):
                    with pytest.raises(DataError, match=rf"{name}: {message}"):
                        look(folder)
            file.write_bytes(good)
            check_shards(folder)

    def test_a_file_that_is_not_listed(self, folder: Path) -> None:
        shutil.copy(folder / SHARD.format(0), folder / "shard-0 (copy).parquet")
        for look in (check_shards, open_shards):
            with pytest.raises(DataError, match=r"shard-0 \(copy\).parquet: the manifest does not list this file"):
                look(folder)
        (folder / "shard-0 (copy).parquet").unlink()

    def test_a_damaged_manifest(self, folder: Path) -> None:
        for change, message in [
            (lambda c: c.update(format="other"), r"the format must be 'lgmml_torch shards', version 1, got 'other'"),
            (lambda c: c.update(version=2), r".* version 1, got 'lgmml_torch shards', version 2"),
            (lambda c: c.pop("version"), r"not a manifest of shards: KeyError\('version'\)"),
            (lambda c: c.pop("labels"), r"the manifest is damaged: 'labels'"),
            (lambda c: c.update(labels=3), r"the manifest is damaged: .*int"),
            (lambda c: c.update(feature_names=5), r"the manifest is damaged: .*int"),
            (lambda c: c["shards"][0].pop("bytes"), r"the manifest is damaged: .*'bytes'"),
            (lambda c: c["shards"].pop(), r"the shards must have 12 queries together, got \d+"),
            (lambda c: c.update(documents=1), r"the shards must have 1 documents together, got \d+"),
            (lambda c: c.update(shards=[]), r"there must be at least one shard, got none"),
        ]:
            good = (folder / "manifest.json").read_text()
            content = json.loads(good)
            change(content)
            (folder / "manifest.json").write_text(json.dumps(content))
            with pytest.raises(DataError, match=rf"manifest.json: {message}"):
                open_shards(folder)
            (folder / "manifest.json").write_text(good)


class TestWriting:
    def test_a_killed_writer_leaves_nothing_that_is_read(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        home = tmp_path / "set"

        def killed(table: Any, path: Path) -> None:
            if path.name == SHARD.format(2):
                (home / f".{path.name}.abc{SUFFIX}").write_bytes(b"half of it")
                raise KeyboardInterrupt
            save_parquet(table, path)

        write_shards(small_data(seed=5), home, documents=3)  # many more shards, of another set
        monkeypatch.setattr("lgmml_torch.data.write.save_parquet", killed)
        with pytest.raises(KeyboardInterrupt):
            write_shards(small_data(), home, documents=15)
        with pytest.raises(DataError, match=r"manifest.json: no such file; the shards were not written to the end"):
            open_shards(home)
        monkeypatch.undo()
        manifest = write_shards(small_data(), home, documents=15)
        written = {"manifest.json", INDEX, *(shard.file for shard in manifest.shards)}
        assert {path.name for path in home.iterdir()} == written
        check_shards(home)
        assert_same_lists(open_shards(home, doc_ids=True), small_data())

    def test_other_things_are_left_alone(self, tmp_path: Path) -> None:
        (tmp_path / "notes.txt").write_text("mine")
        with pytest.raises(DataError, match=r"shards need a folder of their own, this one holds 'notes.txt'"):
            write_shards(small_data(), tmp_path)
        with pytest.raises(DataError, match=r"notes.txt: shards need a folder, this is a file"):
            write_shards(small_data(), tmp_path / "notes.txt")
        assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]

    def test_without_labels_or_with_some_ids(self, tmp_path: Path) -> None:
        lines = ["qid:2 1:1 2:2", "qid:1 1:3 #docid = a", "qid:2 1:4"]
        (tmp_path / "new.txt").write_text("".join(f"{line}\n" for line in lines))
        with open_source(tmp_path / "new.txt") as source:
            manifest = write_shards(source, tmp_path / "set", documents=1)
        assert manifest.labels is None
        assert "no labels" in str(manifest)
        found = open_shards(tmp_path / "set", doc_ids=True)
        assert found.doc_ids == ("a", "", "")
        assert found.labels.tolist() == [0, 0, 0]
        with pytest.raises(DataError, match=r"set: there are no labels, and training needs them"):
            open_shard_splits(tmp_path / "set")


class TestParts:
    def test_splits_that_are_there(self, tmp_path: Path) -> None:
        for seed, name in enumerate(("train", "test")):
            write_shards(small_data(seed=seed), tmp_path / "set" / name)
        found = open_shard_splits(tmp_path / "set", cache=tmp_path / "cache")
        assert list(found) == ["train", "test"]
        assert torch.equal(found["test"].features, small_data(seed=1).features)
        assert list(open_shard_splits(tmp_path / "set" / "test")) == ["train"]
        (tmp_path / "set" / "valid").mkdir()
        with pytest.raises(DataError, match=r"valid.manifest.json: no such file"):
            open_shard_splits(tmp_path / "set")
        with pytest.raises(DataError, match=r"nowhere: no such set of shards; `lgmml convert` makes one"):
            open_shard_splits(tmp_path / "nowhere")

    def test_parts_must_have_the_same_features(self, tmp_path: Path) -> None:
        data = small_data()
        write_shards(data, tmp_path / "train")
        for other in (
            data.replace(features=data.features[:, :3]),
            data.to(dtype=torch.float64),
            data.replace(feature_names=tuple("abcde")),
        ):
            write_shards(other, tmp_path / "valid")
            with pytest.raises(DataError, match=r"valid: the parts must have the same features, got [35] \(fl.*train"):
                open_shard_splits(tmp_path)


def test_owners_are_even() -> None:
    def owners(*documents: int, processes: int) -> list[int]:
        return SharedLists.owners(torch.tensor(documents), processes).tolist()

    assert owners(5, 5, 5, 5, processes=2) == [0, 0, 1, 1]
    assert owners(1, 1, 1, 9, processes=2) == [0, 0, 0, 1]
    assert owners(7, processes=3) == [1]
    many = owners(*[50_000] * 1000, processes=7)
    assert many == sorted(many)
    counts = np.bincount(many)
    assert counts.max() - counts.min() <= 1


def told(*documents: int, **changes: Any) -> Manifest:
    """The manifest of shards of so many documents, a query each."""
    entries = tuple(Shard(f"{i}", 1, f"{i}", 1, n) for i, n in enumerate(documents))
    made = Manifest(len(entries), sum(documents), 1, "float32", None, None, False, entries[0], entries)
    return replace(made, **changes)


def test_a_manifest_in_words() -> None:
    assert str(told(1000, 234, labels=(0.0, 4.0))) == (
        "2 queries, 1,234 documents, 1 features (float32), labels 0–4, 2 shards"
    )
    assert "no labels" in str(told(3))


def test_the_manifest_as_a_file(folder: Path) -> None:
    text = (folder / "manifest.json").read_text()
    content = json.loads(text)
    assert text.startswith('{\n "format": "lgmml_torch shards",\n "version": 1,\n "queries": 12,')
    assert text.endswith("}\n")
    assert [shard["file"] for shard in content["shards"]] == [SHARD.format(i) for i in range(len(content["shards"]))]
    assert (content["feature_names"], content["doc_ids"]) == (None, True)
    assert content["index"]["file"] == "index.parquet"
    assert content["index"]["documents"] == content["documents"]


def test_names_ids_and_labels_are_told(tmp_path: Path) -> None:
    data = small_data(ids=False).replace(feature_names=tuple("abcde"))
    manifest = write_shards(data, tmp_path / "set", documents=10)
    assert (manifest.feature_names, manifest.doc_ids, manifest.labels) == (tuple("abcde"), False, (0.0, 2.0))
    assert Manifest.read(tmp_path / "set") == manifest
    assert open_shards(tmp_path / "set", doc_ids=True).doc_ids is None
    write_shards(small_data(), tmp_path / "set")
    assert open_shards(tmp_path / "set").doc_ids is None
    assert open_shards(tmp_path / "set", doc_ids=True).doc_ids == small_data().doc_ids
    both = open_shard_splits(tmp_path / "set", cache=False, doc_ids=True)["train"]
    assert both.doc_ids == small_data().doc_ids
    assert open_shard_splits(tmp_path / "set", cache=False)["train"].doc_ids is None


def test_a_folder_without_a_manifest(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"manifest.json: no such file; this is no folder of shards"):
        Manifest.read(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"manifest.json: no such file; this is no folder of shards"):
        Manifest.read(tmp_path / "file")
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(DataError, match=r"manifest.json: not a manifest of shards: JSONDecodeError"):
        Manifest.read(tmp_path)
    (tmp_path / "manifest.json").write_text("[]")
    with pytest.raises(DataError, match=r"manifest.json: not a manifest of shards: TypeError"):
        Manifest.read(tmp_path)


def test_ids_are_whole_numbers_or_text(tmp_path: Path) -> None:
    for qids, text in [
        ([2**63 - 1, -(2**63)], False),
        ([2**63, 1], True),
        ([-(2**63) - 1, 1], True),
        ([10**6, 10**9], False),
        ([True, 2], True),
        (["a", "b"], True),
        ([1.5, 2], True),
    ]:
        data = RankingData.from_arrays(torch.eye(2), [0, 1], qid=[0, 1]).replace(qids=tuple(qids))
        write_shards(data, tmp_path / "set")
        assert open_shards(tmp_path / "set").qids == tuple(str(qid) if text else qid for qid in qids)


def test_shards_keep_no_weights(tmp_path: Path) -> None:
    data = RankingData.from_arrays(torch.eye(2), [0, 1], qid=[0, 1], positions=[1, 2], query_weights=[1, 2])
    with pytest.raises(
        DataError, match=r"shards have no place for weights and positions, got query_weights, positions$"
    ):
        write_shards(data, tmp_path / "set")
    weighed = RankingData.from_arrays(torch.eye(2), [0, 1], qid=[0, 0]).weighed([1.0, 2.0])
    with pytest.raises(DataError, match=r"got document_weights$"):
        write_shards(weighed, tmp_path / "set")
    assert not (tmp_path / "set").exists()


def test_a_folder_of_shards_is_their_own(tmp_path: Path) -> None:
    home = tmp_path / "set"
    write_shards(small_data(), home)
    (home / f".shard-00007.parquet.x{SUFFIX}").write_text("half")
    write_shards(small_data(seed=1), home)
    assert sorted(path.name for path in home.iterdir()) == ["index.parquet", "manifest.json", "shard-00000.parquet"]
    (home / "shard-00001.parquet").mkdir()
    with pytest.raises(DataError, match=r"shards need a folder of their own, this one holds 'shard-00001.parquet'"):
        write_shards(small_data(), home)
    (home / "shard-00001.parquet").rmdir()
    assert_same_lists(open_shards(home, doc_ids=True), small_data(seed=1))  # nothing was removed


def test_keys_of_documents(tmp_path: Path) -> None:
    data = RankingData.from_arrays(torch.eye(3), [1, 0, 2], qid=[7, 8, 7], doc_ids=["a", "b", "c"])
    write_shards(data, tmp_path / "set")
    with open_source(tmp_path / "set" / SHARD.format(0), columns=shards.SHARD_COLUMNS) as source:
        qids = [source.qids[code] for code in source.codes]
        rows = sorted(zip(qids, source.column("place"), source.column("docid"), strict=True))
    assert rows == [(7, "0", "a"), (7, "1", "c"), (8, "0", "b")]
    write_shards(data.replace(doc_ids=None), tmp_path / "set")
    with open_source(tmp_path / "set" / SHARD.format(0), columns=shards.SHARD_COLUMNS) as source:
        assert list(source.header) == ["qid", "label", "features", "place"]


def test_places_in_the_set_are_those_of_the_process(folder: Path) -> None:
    """The order is counted over the lists of the process, whichever they are."""
    for rank in range(3):
        part = open_shards(folder, rank=rank, world_size=3, cache=False)
        assert torch.equal(part.order.sort().values, torch.arange(part.num_documents))
        assert torch.equal(part.query_index[part.order.argsort()], part.query_index)


def test_ranks_must_be_there(folder: Path) -> None:
    for rank in (-1, 2):
        with pytest.raises(LGMMLError, match=rf"`rank` must lie in \[0, world_size = 2\), got {rank}"):
            open_shards(folder, rank=rank, world_size=2)
    assert open_shards(folder, rank=0, world_size=1).num_queries == 12
    assert open_shards(folder, rank=0).num_queries == 12


def test_the_cache_is_named_by_the_content(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = Cache(tmp_path / "cache")
    open_shards(folder, cache=cache)
    open_shards(folder, rank=1, world_size=2, cache=cache)
    assert len(list(cache.folder.glob("*.lgc"))) == 2
    shutil.copytree(folder, tmp_path / "copy")
    open_shards(tmp_path / "copy", cache=cache)
    assert len(list(cache.folder.glob("*.lgc"))) == 2
    content = [shard.sha256 for shard in Manifest.read(folder).shards]
    assert cache.path({"shards": 2, "content": content}).is_dir()
    monkeypatch.setenv("LGMML_CACHE", str(tmp_path / "default"))
    open_shards(folder)
    open_shard_splits(folder)
    assert len(list((tmp_path / "default").glob("*.lgc"))) == 1


def test_a_process_without_lists_leaves_no_entry(folder: Path, tmp_path: Path) -> None:
    parts = [open_shards(folder, rank=rank, world_size=40, cache=tmp_path / "cache") for rank in range(40)]
    empty = [part for part in parts if not part.num_queries]
    assert empty[0].features.shape == (0, FEATURES)
    assert empty[0].qids == ()
    assert len(list((tmp_path / "cache").glob("*.lgc"))) == 40 - len(empty)


def test_which_folders_are_parts(tmp_path: Path) -> None:
    for name in ("train", "valid", "test", "other"):
        (tmp_path / name).mkdir()
    assert shards.shard_folders(tmp_path) == {}
    (tmp_path / "train" / "train.txt").write_text("")
    assert shards.shard_folders(tmp_path) == {}
    (tmp_path / "test" / SHARD.format(0)).write_text("")
    assert shards.shard_folders(tmp_path) == {name: tmp_path / name for name in ("train", "valid", "test")}
    (tmp_path / "manifest.json").write_text("")
    assert shards.shard_folders(tmp_path) == {"": tmp_path}


@pytest.mark.parametrize("values", [1, 40, 1 << 21])
def test_shards_are_read_in_pieces(folder: Path, values: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However few lists a piece has, all of them come, in their order."""
    expected = open_shards(folder, cache=False)
    monkeypatch.setattr(parquet_folder, "_VALUES_AT_ONCE", values)
    found = open_shards(folder, cache=False)
    for name in ("features", "labels", "order", "offsets"):
        assert getattr(found, name).equal(getattr(expected, name))


def test_a_shard_is_a_file_like_others(folder: Path) -> None:
    with open_source(folder / SHARD.format(0), columns=shards.SHARD_COLUMNS) as source:
        found = source.read(labelled=True)
    assert found.num_features == FEATURES
    assert torch.equal(found.features, small_data(shuffled=True).select(range(found.num_queries)).features)


def test_a_folder_of_others_is_refused_before_anything_is_read(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").write_text("")
    with open_source(folder / SHARD.format(0), columns=shards.SHARD_COLUMNS) as source:
        with pytest.raises(DataError, match=r"shards need a folder of their own, this one holds 'mine.txt'"):
            write_shards(source, tmp_path / "notes")
        assert "_queries" not in vars(source)  # nobody has asked whose rows they are


def test_categories_keep_their_words(tmp_path: Path) -> None:
    """Words, numbers and words outside the vocabulary; a vocabulary may hold words that no document has."""
    colours, rng = ("blue", "green", "red"), np.random.default_rng(0)
    X = np.column_stack([rng.integers(-1, 2, 40), rng.normal(size=40)]).astype(np.float32)
    plain = RankingData.from_arrays(X, rng.integers(0, 3, 40), qid=np.arange(40) % 6, feature_names=["colour", "price"])
    data = plain.replace(categories=(colours, None))
    manifest = write_shards(data, tmp_path / "set", documents=15)
    assert manifest.categories == Manifest.read(tmp_path / "set").categories == (colours, None)
    for cache in (False, tmp_path / "cache"):
        found = open_shards(tmp_path / "set", cache=cache)
        assert_same_lists(found, data)
        assert found.categories == data.categories
    halves = [open_shards(tmp_path / "set", rank=rank, world_size=2, cache=False) for rank in range(2)]
    assert torch.equal(torch.cat([half.features for half in halves]), data.features)
    with pytest.raises(DataError, match="a feature must not be called 'place' to be saved with categories"):
        write_shards(data.replace(feature_names=("colour", "place")), tmp_path / "set")


def test_without_pyarrow_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingDependencyError, match="`pyarrow` is needed"):
        write_shards(letor_like(4, 3, seed=0), tmp_path / "shards", progress=False)
    assert not (tmp_path / "shards").exists()
