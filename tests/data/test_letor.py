"""The text loaders: values, layouts, oddities, and every kind of bad input with its file and line."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest
import torch

from lgmml_torch.checks import DataError, LGMMLError
from lgmml_torch.data import letor
from lgmml_torch.data.catalog import load_letor_splits
from lgmml_torch.data.letor import load_letor, load_lightgbm
from lgmml_torch.data.svmlight import Rules, _parse_block, _parse_lines
from lgmml_torch.data.write import save_letor
from lgmml_torch.ragged import RankingData
from tests.doors import save_lightgbm
from tests.reference import letor as oracle

GOOD = b"2 qid:10 1:0.5 2:-1 3:1e-3 #docid = a\n0 qid:10 1:.25 2:+7. 3:0 #docid = b\n1 qid:9 1:1 2:2 3:3 #docid = c\n"


def write(folder: Path, data: bytes, name: str = "file.txt") -> Path:
    path = folder / name
    path.write_bytes(data)
    return path


def load(folder: Path, data: bytes, **options: object) -> RankingData:
    return load_letor(write(folder, data), cache=False, **options)  # type: ignore[arg-type]


def assert_same(a: RankingData, b: RankingData) -> None:
    assert a.qids == b.qids
    assert a.doc_ids == b.doc_ids
    for name in ("features", "labels", "offsets", "order"):
        assert torch.equal(getattr(a, name), getattr(b, name)), name


def random_data(seed: int, *, queries: int = 7, features: int = 5, doc_ids: bool = False) -> RankingData:
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 6, queries)
    rows = int(sizes.sum())
    X = (rng.normal(size=(rows, features)) * 10.0 ** rng.integers(-30, 30, (rows, features))).astype(np.float32)
    X[rng.random(X.shape) < 0.3] = 0
    X[:, -1] = 1
    qid = np.repeat(rng.permutation(100)[:queries], sizes)
    names = [f"d{i}" for i in range(rows)] if doc_ids else None
    return RankingData.from_arrays(X, rng.integers(0, 9, rows) / 2, qid=qid, doc_ids=names)


def test_a_file_by_hand(tmp_path: Path) -> None:
    data = load(tmp_path, GOOD)
    assert data.qids == (9, 10)
    assert data.doc_ids == ("c", "b", "a")
    assert data.labels.tolist() == [1, 0, 2]
    assert torch.equal(data.features, torch.tensor([[1, 2, 3], [0.25, 7, 0], [0.5, -1, 1e-3]]))
    assert data.in_caller_order(data.labels).tolist() == [2, 0, 1]


def test_other_ways_to_write_the_same(tmp_path: Path, monkeypatch) -> None:
    for change in [
        lambda good: good.replace(b"\n", b"\r\n"),
        lambda good: good.removesuffix(b"\n"),
        lambda good: good.replace(b"\n", b"\r\n").removesuffix(b"\n"),
        lambda good: good.replace(b" ", b"\t").replace(b"docid\t=\t", b"docid = "),
        lambda good: good.replace(b" ", b"  \t "),
        lambda good: good.replace(b" #", b"#"),
        lambda good: b"\n# a head\n\n" + good.replace(b"\n", b"\n\n  \n"),
        lambda good: b"\xef\xbb\xbf" + good,
        lambda good: good.replace(b" #", b"   #").replace(b"2 qid", b" 2.0 qid"),
        gzip.compress,
    ]:
        for block_bytes in [1, 50, 1 << 19]:
            monkeypatch.setattr(letor, "_BLOCK_BYTES", block_bytes)
            assert_same(load(tmp_path, change(GOOD)), load(tmp_path, GOOD))


def test_what_comments_become(tmp_path: Path) -> None:
    text = "1 qid:1 1:1 #docid = GX-1 inc = 1\n2 qid:1 1:2 # free text \n3 qid:1 1:3\n4 qid:1 1:4 #docid=x\n"
    text += "5 qid:1 1:5 #ä\n"
    assert load(tmp_path, text.encode()).doc_ids == ("GX-1", "free text", "", "x", "ä")
    assert load(tmp_path, b"1 qid:1 1:5 #\xff\n").doc_ids == ("\\xff",)
    assert load(tmp_path, b"1 qid:1 1:5\n").doc_ids is None


def test_query_ids_lose_nothing(tmp_path: Path) -> None:
    assert load(tmp_path, b"1 qid:12345678901234567 1:1\n1 qid:-3 1:1\n").qids == (-3, 12345678901234567)
    assert load(tmp_path, b"1 qid:07 1:1\n1 qid:7 1:1\n").qids == ("07", "7")
    assert load(tmp_path, b"1 qid:a 1:1\n1 qid:1234567890123456789 1:1\n").qids == ("1234567890123456789", "a")


@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
def test_every_value_is_the_one_python_reads(kind: torch.dtype, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    texts = [f"{m}{'.' if p else ''}{rng.integers(0, 10**p) if p else ''}" for m in range(30) for p in range(17)]
    texts += [repr(float(x)) for x in rng.normal(size=500) * 10.0 ** rng.integers(-37, 37, 500)]
    texts += [f"{x:.{d}f}" for x in rng.normal(size=60) * 1e3 for d in range(14)]
    texts += [
        "-0",
        "-0.0",
        "1e-50",
        "3.4028235e38",
        "-.5",
        "+.5",
        "5.",
        "1E5",
        "0" * 30 + "1",
        "1" + "0" * 20,
        "1e-400",
    ]
    texts += [
        "1" + "0" * 20,
        "0.30000001192092896",
        "16777217",
        "9007199254740993",
        "999999999999999",
        "999999999999.999",
    ]
    line = "0 qid:1 " + " ".join(f"{i + 1}:{text}" for i, text in enumerate(texts)) + "\n"
    got = load(tmp_path, line.encode(), dtype=kind).features[0]
    want = torch.from_numpy(np.array([float(text) for text in texts]).astype(np.float32)).to(kind)
    if kind == torch.float64:
        want = torch.tensor([float(text) for text in texts], dtype=kind)
    assert torch.equal(got, want)
    assert torch.equal(got.signbit(), want.signbit())


def test_blocks_and_lines_and_the_oracle_agree(tmp_path: Path) -> None:
    for seed in range(5):
        path = tmp_path / "a.txt"
        save_letor(random_data(seed, doc_ids=bool(seed % 2)), path, sparse=bool(seed % 3))
        text = path.read_bytes()
        fast, slow, want = _parse_block(text, Rules()), _parse_lines(text, Rules(), path=path), oracle.read(text)
        assert fast is not None
        for name in ("labels", "counts", "index", "values"):
            assert np.array_equal(getattr(fast, name), getattr(slow, name))
        assert fast.qids == slow.qids == [qid.encode() for qid in want.qids]
        assert fast.comments == slow.comments
        assert fast.values.tolist() == [value for row in want.features for value in row.values()]


def test_bad_lines(tmp_path: Path, monkeypatch) -> None:
    for text, message in [
        ("x qid:1 1:1", "the label must be a finite number, got 'x'"),
        ("nan qid:1 1:1", "the label must be a finite number, got 'nan'"),
        ("1e39 qid:1 1:1", "the label must be a finite number, got '1e39'"),
        ("qid:1 1:1", "the label must be a finite number, got 'qid:1'"),
        ("1 1:1", "missing qid: `qid:…` must follow the label, got '1:1'"),
        ("1", "missing qid: `qid:…` must follow the label, but the line ends"),
        ("1 qid: 1:1", "must be followed by the id of the query, got 'qid:'"),
        ("1 qid:1:2 1:1", "must be followed by the id of the query, got 'qid:1:2'"),
        ("1 qid:1 qid:2 1:1", "unexpected 'qid:2': the id of the query comes once"),
        ("1 qid:1 1:a", "the value of feature 1 must be a number, got 'a'"),
        ("1 qid:1 1:0x10", "the value of feature 1 must be a number, got '0x10'"),
        ("1 qid:1 1:1_0", "the value of feature 1 must be a number, got '1_0'"),
        ("1 qid:1 1:1-2", "the value of feature 1 must be a number, got '1-2'"),
        ("1 qid:1 1:1.2.3", "the value of feature 1 must be a number, got '1.2.3'"),
        ("1 qid:1 1:.", "the value of feature 1 must be a number, got '.'"),
        ("1 qid:1 1:-", "the value of feature 1 must be a number, got '-'"),
        ("1 qid:1 1:1:2", "the value of feature 1 must be a number, got '1:2'"),
        ("1 qid:1 1:" + "z" * 99, "must be a number, got 'z{40}\\.\\.\\.'"),
        ("1 qid:1 1:1 1:2", "feature 1 is given twice"),
        ("1 qid:1 1:1 3:1 2:2", "feature indices must increase, got 2 after 3"),
        ("1 qid:1 0:1", "feature indices start at 1, got '0:1'"),
        ("1 qid:1 -1:1", "the feature index must be a whole number, got '-1'"),
        ("1 qid:1 a:1", "the feature index must be a whole number, got 'a'"),
        ("1 qid:1 1:1 2", "expected index:value, got '2'; is the line cut\\?"),
        ("1 qid:1 1:1 2:", "expected index:value, got '2:'; is the line cut\\?"),
        ("1 qid:1 1:1 :3", "expected index:value, got ':3'; is the line cut\\?"),
        ("1 qid:1 1:NULL", "the value of feature 1 is missing, got 'NULL'; `missing=` says"),
        ("1 qid:1 1:nan", "the value of feature 1 is missing, got 'nan'"),
        ("1 qid:1 1:inf", "the value of feature 1 must be a number, got 'inf'"),
        ("1 qid:1 1:1e999", "the value of feature 1 must be finite as float32, got '1e999'"),
        ("1 qid:1 1:1e39", "the value of feature 1 must be finite as float32, got '1e39'"),
        ("1 qid:1 100001:1", "feature index 100001 is beyond the largest allowed, 100000; pass `num_features`"),
        ("1 qid:1 9" + "0" * 30 + ":1", "is beyond the largest allowed"),
        ("1 qid:1 1:1\x00", "not plain text, found byte 0x00 at column 12"),
        ("1 qid:1\x0b1:1", "not plain text, found byte 0x0b at column 8"),
        ("1 qid:1 1:1\r 2:2", "not plain text, found byte 0x0d at column 12"),
        ("1 qid:é 1:1", "not plain text, found byte 0xc3 at column 7"),
    ]:
        for block_bytes in [1, 1 << 19]:
            monkeypatch.setattr(letor, "_BLOCK_BYTES", block_bytes)
            path = write(tmp_path, GOOD + text.encode() + b"\n" + GOOD)
            cache = tmp_path / "cache"
            with pytest.raises(DataError, match=rf"file\.txt:4: .*{message}"):
                load_letor(path, cache=cache)
            assert [file.suffix for file in cache.glob("*")] in ([], [".source"])


def test_more_features_than_in_training(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"file\.txt:1: feature index 3 is beyond the largest allowed, 2; `num_f"):
        load(tmp_path, GOOD, num_features=2)
    assert load(tmp_path, GOOD, num_features=5).features[:, 3:].abs().sum() == 0


def test_empty_files(tmp_path: Path) -> None:
    for text in [b"", b"\n\n", b"# only\n", b"  \t\n"]:
        with pytest.raises(DataError, match=r"file\.txt:1: the file holds no documents"):
            load(tmp_path, text)


def test_files_without_features_or_that_do_not_exist(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no line up to here gives a feature"):
        load(tmp_path, b"1 qid:1\n")
    assert load(tmp_path, b"1 qid:1\n", num_features=2).features.tolist() == [[0, 0]]
    with pytest.raises(DataError, match=r"nowhere\.txt: no such file"):
        load_letor(tmp_path / "nowhere.txt")
    with pytest.raises(DataError, match="no such file"):
        load_letor(tmp_path)


def test_binary_junk(tmp_path: Path) -> None:
    junk = np.random.default_rng(0).integers(0, 256, 5000, dtype=np.uint8).tobytes()
    with pytest.raises(DataError, match=r"file\.txt:1: not plain text"):
        load(tmp_path, b"\x00" + junk)
    with pytest.raises(DataError, match="the compressed file is damaged or cut"):
        load(tmp_path, b"\x1f\x8b" + junk)
    with pytest.raises(DataError, match="the compressed file is damaged or cut"):
        load(tmp_path, gzip.compress(GOOD * 1000)[:-20])


def test_a_last_line_that_is_cut(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"file\.txt:6: the last line is cut: it has 2 features, all others 3"):
        load(tmp_path, (GOOD + GOOD).removesuffix(b" 3:3 #docid = c\n"))
    with pytest.raises(DataError, match=r"file\.txt:6: the last line is cut: it ends without a comment"):
        load(tmp_path, (GOOD + GOOD).removesuffix(b" #docid = c\n"))
    sparse = b"1 qid:1 1:1 2:2\n1 qid:1 1:1\n1 qid:1 2:1"
    assert load(tmp_path, sparse).num_documents == 3


def test_missing_values_follow_the_named_policy(tmp_path: Path) -> None:
    text = b"0 qid:1 1:4 2:NULL\n1 qid:1 1:NULL 2:nan\n2 qid:1 1:-2 2:1\n0 qid:2 1:nUlL 2:5\n"

    def column(policy: str, number: int) -> list[float]:
        data = load(tmp_path, text, missing=policy)
        return data.in_caller_order(data.features)[:, number].tolist()

    assert column("zero", 0) == [4, 0, -2, 0]
    assert column("query-min", 0) == [4, -2, -2, 0]
    assert column("query-mean", 0) == [4, 1, -2, 0]
    assert column("query-min", 1) == [1, 1, 1, 5]


def test_absent_features_are_zero_or_missing(tmp_path: Path) -> None:
    text = b"0 qid:1 1:4 2:2\n\n1 qid:1 1:3\n"
    assert load(tmp_path, text).features.tolist() == [[4, 2], [3, 0]]
    assert load(tmp_path, text, absent="missing", missing="query-min").features.tolist() == [[4, 2], [3, 2]]
    with pytest.raises(DataError, match=r"file\.txt:3: feature 2 is absent; `missing=` says"):
        load(tmp_path, text, absent="missing")
    with pytest.raises(DataError, match=r"file\.txt:1: feature 2 is absent"):
        load(tmp_path, gzip.compress(b"0 qid:1 1:4\n1 qid:1 1:4 2:2\n"), absent="missing")


def test_bad_options(tmp_path: Path) -> None:
    with pytest.raises(LGMMLError, match=r"`missing` must be one of 'error', 'zero', .*did you mean 'zero'"):
        load(tmp_path, GOOD, missing="zeros")
    with pytest.raises(LGMMLError, match="`absent` must be one of 'zero', 'missing', got 'nan'"):
        load(tmp_path, GOOD, absent="nan")
    with pytest.raises(LGMMLError, match=r"`dtype` must be torch\.float32 or torch\.float64, got torch\.float16"):
        load(tmp_path, GOOD, dtype=torch.float16)
    with pytest.raises(LGMMLError, match="`num_features` must be positive, got 0"):
        load(tmp_path, GOOD, num_features=0)


def test_indices_that_keep_rising(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(letor, "_BLOCK_BYTES", 1)
    text = "".join(f"0 qid:{i} {i}:{i}\n" for i in range(1, 60))
    assert torch.equal(load(tmp_path, text.encode()).features, torch.diag(torch.arange(1.0, 60)))
    zipped = load(tmp_path, gzip.compress(text.encode()))
    assert torch.equal(zipped.features, torch.diag(torch.arange(1.0, 60)))


def test_saved_letor_files_come_back_bit_for_bit(tmp_path: Path) -> None:
    for name in ["a.txt", "a.txt.gz"]:
        for sparse in [False, True]:
            for seed in range(4):
                data = random_data(seed, doc_ids=bool(seed % 2))
                save_letor(data, tmp_path / name, sparse=sparse)
                assert_same(load_letor(tmp_path / name, cache=False), data)


def test_lightgbm_files_come_back_bit_for_bit(tmp_path: Path) -> None:
    data = random_data(0)
    save_lightgbm(data, tmp_path / "rank.train")
    back = load_lightgbm(tmp_path / "rank.train", cache=False)
    assert torch.equal(back.in_caller_order(back.features), data.in_caller_order(data.features))
    assert torch.equal(back.in_caller_order(back.labels), data.in_caller_order(data.labels))
    assert back.num_queries == data.num_queries


def test_what_cannot_be_saved(tmp_path: Path) -> None:
    x, y = torch.eye(2), torch.zeros(2)
    for qid in ("a b", "", "a#", "a:b", "é"):
        with pytest.raises(DataError, match="a query id must be printable ASCII"):
            save_letor(RankingData.from_arrays(x, y, qid=[qid, "ok"]), tmp_path / "a")
    with pytest.raises(DataError, match="a document id must be one word to be saved, got 'a b'"):
        save_letor(RankingData.from_arrays(x, y, qid=[1, 1], doc_ids=["a b", "c"]), tmp_path / "a")


def test_lightgbm_files(tmp_path: Path) -> None:
    path = write(tmp_path, b"1 1:1\n0\n2 2:3 #x\n", "rank.train")
    sizes = write(tmp_path, b"1\n2\n", "rank.train.query")
    data = load_lightgbm(path, cache=tmp_path / "cache")
    assert data.qids == (0, 1)
    assert data.features.tolist() == [[1, 0], [0, 0], [0, 3]]
    assert load_lightgbm(path, zero_based=True, cache=False).num_features == 3
    for text, message in [
        (b"1\n3\n", r"rank\.train\.query:2: the sizes add up to 4, but .*rank\.train has 3 documents"),
        (b"1\nx\n", r"rank\.train\.query:2: the size of a query must be a positive whole number, got 'x'"),
        (b"3\n0\n", r"rank\.train\.query:2: the size of a query must be a positive whole number, got '0'"),
        (b"\n-3\n", r"rank\.train\.query:2: the size of a query must be"),
    ]:
        sizes.write_bytes(text)
        with pytest.raises(DataError, match=message):
            load_lightgbm(path, cache=tmp_path / "cache")
    sizes.unlink()
    with pytest.raises(DataError, match=r"rank\.train\.query: no such file; it must give the number of documents"):
        load_lightgbm(path)
    with pytest.raises(DataError, match=r"rank\.train:1: feature indices start at 1, got '0:1'"):
        load_lightgbm(write(tmp_path, b"1 0:1\n", "rank.train"), query=write(tmp_path, b"1", "q"), cache=False)


def test_splits_agree_on_the_number_of_features(tmp_path: Path) -> None:
    write(tmp_path, b"0 qid:1 1:1 2:1\n", "train.txt")
    write(tmp_path, b"0 qid:2 1:1 4:1\n", "vali.txt")
    write(tmp_path, gzip.compress(b"0 qid:3 1:1\n"), "test.txt.gz")
    parts = load_letor_splits(tmp_path, cache=tmp_path / "cache")
    assert {name: part.features.shape for name, part in parts.items()} == dict.fromkeys(
        ("train", "valid", "test"), (1, 4)
    )
    with pytest.raises(DataError, match=r"vali\.txt:1: feature index 4 is beyond the largest allowed, 3"):
        load_letor_splits(tmp_path, num_features=3, cache=False)
    with pytest.raises(DataError, match=r"no train\.txt, vali\.txt or test\.txt in "):
        load_letor_splits(tmp_path / "cache")
