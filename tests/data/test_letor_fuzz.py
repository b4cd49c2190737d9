"""Thousands of damaged files: the loader accepts exactly what the naive reader accepts, with the same numbers."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from lgmml_torch.checks import DataError
from lgmml_torch.data import letor
from lgmml_torch.data.letor import LetorSource, load_letor
from lgmml_torch.data.source import ReadOptions
from lgmml_torch.ragged import RankingData
from tests.reference import letor as oracle

BASES = [
    b"2 qid:1 1:0.5 2:0.25 3:1 #docid = a\n0 qid:1 1:-3 2:.5 3:0 #docid = b\n1 qid:2 1:1e2 2:7 3:12.75 #docid = c\n",
    b"2 qid:11 1:0.123456 2:3\n0 qid:11 1:12345.678 2:0\n0 qid:12 1:3 2:123456789012345\n1 qid:12 1:0 2:1",
    b"1 qid:7 3:1 5:2.5\r\n0 qid:7 1:1 12:3\r\n0.5 qid:8\r\n",
    b"\n1 qid:a  1:0.1234567890123456789\t2:1E-5 \n# c\n3 qid:b 2:+4\n",
]
PIECES = [
    b" ", b"\n", b":", b"#", b"\t", b"\r", b"\r\n", b"0", b"1", b"9", b".", b"-", b"+", b"e", b"E5", b"e-400", b"nan",
    b"NULL", b"inf", b"qid:", b"qid:1", b" 1:2", b" 9:9", b"1:", b":1", b"\x00", b"\xff", b"\xc3\xa9", b"\x0b", b"_",
    b"0x1", b"1e39", b"99999999999", b"docid=", b"00", b"\n\n", b"0 qid:1 1:1\n", b"100000:", b"100001:",
]  # fmt: skip


def mutate(rng: random.Random, base: bytes) -> bytes:
    data = bytearray(base)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        at = rng.randrange(len(data) + 1)
        to = min(len(data), at + rng.choice((1, 1, 1, 2, 5, 20)))
        match rng.randrange(6):
            case 0:  # overwrite
                data[at:to] = rng.choice(PIECES)
            case 1:  # insert
                data[at:at] = rng.choice(PIECES)
            case 2:  # delete
                del data[at:to]
            case 3:  # truncate
                del data[at:]
            case 4:  # repeat a stretch
                data[at:at] = data[at:to]
            case 5:  # any byte at all
                data[at : at + 1] = bytes([rng.randrange(256)])
    return bytes(data)


def in_file_order(data: RankingData) -> tuple[bytes, list[float], list[str], list[str] | None]:
    """Everything a loader says about a file, in the order of its lines."""
    queries = [str(data.qids[query]) for query in data.in_caller_order(data.query_index).tolist()]
    ids = None if data.doc_ids is None else [data.doc_ids[row] for row in data.order.argsort().tolist()]
    features = data.in_caller_order(data.features).numpy().tobytes()
    return features, data.in_caller_order(data.labels).tolist(), queries, ids


def read_lists(source: LetorSource) -> None:
    """The naive reader wants labels; to score, none are needed."""
    list(source.batches())
    if not source.has_labels:
        raise DataError("file.txt:1: no labels")


def assert_agrees(path: Path, data: bytes) -> None:
    """Read whole and list by list, a file means what the naive reader says, or is refused."""
    path.unlink(missing_ok=True)  # some file systems flush to the disk when a file is overwritten
    path.write_bytes(data)
    try:
        want = oracle.read(data)
    except ValueError:
        with (
            pytest.raises(DataError, match=r"(file\.txt:\d+: |damaged or cut)"),
            LetorSource(path, ReadOptions()) as source,
        ):
            source.read(labelled=True)
        with (
            pytest.raises(DataError, match=r"(file\.txt:\d+: |damaged or cut)"),
            LetorSource(path, ReadOptions()) as source,
        ):
            read_lists(source)
        return
    dense = np.zeros((len(want.labels), max(max(row, default=0) for row in want.features)), dtype=np.float32)
    for row, features in enumerate(want.features):
        for index, value in features.items():
            dense[row, index - 1] = value
    expected = dense.tobytes(), want.labels, want.qids, want.doc_ids if any(want.doc_ids) else None
    with LetorSource(path, ReadOptions()) as source:
        assert in_file_order(source.read(labelled=True)) == expected
    with LetorSource(path, ReadOptions()) as source:
        (batch,) = source.batches()
        assert in_file_order(batch.data) == expected


@pytest.mark.slow
def test_fuzz(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for block_bytes in [1, 1 << 19]:
        monkeypatch.setattr(letor, "_BLOCK_BYTES", block_bytes)
        for seed in range(1500):
            rng = random.Random(seed)
            assert_agrees(tmp_path / "file.txt", mutate(rng, BASES[seed % len(BASES)]))


def test_every_truncation(tmp_path: Path) -> None:
    for base in BASES:
        for end in range(len(base) + 1):
            assert_agrees(tmp_path / "file.txt", base[:end])


def test_loading_damaged_files_leaves_nothing_behind(tmp_path: Path) -> None:
    for base in BASES:
        rng, cache = random.Random(0), tmp_path / "cache"
        for _ in range(25):
            data = mutate(rng, base)
            (tmp_path / "file.txt").unlink(missing_ok=True)
            (tmp_path / "file.txt").write_bytes(data)
            try:
                oracle.read(data)
                good = True
            except ValueError:
                good = False
            entries = len(list(cache.glob("*.lgc")))
            if good:
                load_letor(tmp_path / "file.txt", cache=cache)
            else:
                with pytest.raises(DataError):
                    load_letor(tmp_path / "file.txt", cache=cache)
                assert len(list(cache.glob("*.lgc"))) == entries
            assert not list(cache.glob("*tmp"))
