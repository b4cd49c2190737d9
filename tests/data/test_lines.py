"""Lines of text: blocks, lines by their place, ends that are cut, and LETOR and LightGBM files by hand."""

from __future__ import annotations

import gzip
import io
import sys
from pathlib import Path
from typing import Any

import pytest

from lgmml_torch.checks import DataError, DataWarning
from lgmml_torch.data import letor, svmlight
from lgmml_torch.data.catalog import load_letor_splits
from lgmml_torch.data.letor import LetorSource, _read_sizes, load_file, load_letor, load_lightgbm
from lgmml_torch.data.source import DataSource, ReadOptions, open_source
from lgmml_torch.data.svmlight import TextFile, query_ids
from tests.data.test_source import in_order


def both_ways(source: DataSource, documents: int = 1) -> tuple[list[Any], list[Any]]:
    """Features, label, query and id of every row: read whole, and list by list."""
    X, y, queries, ids = in_order(source.read())
    whole = list(zip(X.tolist(), y.tolist(), queries, ids or [""] * len(X), strict=True))
    rows: dict[int, Any] = {}
    for batch in source.batches(documents):
        X, y, queries, ids = in_order(batch.data)
        found = zip(X.tolist(), y.tolist(), queries, ids or [""] * len(X), strict=True)
        rows |= dict(zip(batch.rows.tolist(), found, strict=True))
    return whole, [rows[row] for row in sorted(rows)]


class TestTextFile:
    def test_blocks_are_whole_lines(self, tmp_path: Path) -> None:
        for zipped in [False, True]:
            for size, wanted in [
                (1, [(1, b"ab\n"), (2, b"\n"), (3, b"cde\n"), (4, b"f")]),
                (4, [(1, b"ab\n\n"), (3, b"cde\n"), (4, b"f")]),
                (5, [(1, b"ab\n\ncde\n"), (4, b"f")]),
                (100, [(1, b"ab\n\ncde\nf")]),
            ]:
                content = b"ab\n\ncde\nf"
                (tmp_path / "a").write_bytes(gzip.compress(content) if zipped else content)
                file = TextFile(tmp_path / "a")
                assert file.zipped is zipped
                assert file.size == (tmp_path / "a").stat().st_size
                assert list(file.blocks(size)) == wanted
                assert list(file.blocks(100)) == [(1, content)]  # once more from the start
                file.close()

    def test_a_mark_of_the_byte_order_is_no_text(self, tmp_path: Path) -> None:
        (tmp_path / "a").write_bytes(b"\xef\xbb\xbfab\n\xef\xbb\xbfc\n")
        file = TextFile(tmp_path / "a")
        assert list(file.blocks(1)) == [(1, b"ab\n"), (2, b"\xef\xbb\xbfc\n")]
        assert list(file.blocks(100)) == [(1, b"ab\n\xef\xbb\xbfc\n")]
        file.close()

    def test_lines_end_somewhere(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        for length in [7, 8, 9, 10, 20]:
            monkeypatch.setattr(svmlight, "_MOST_LINE", 8)
            (tmp_path / "a").write_bytes(b"x\n" + b"y" * length + b"\n")
            file = TextFile(tmp_path / "a")
            if length < 9:
                assert [number for number, *_ in file.blocks(1)] == [1, 2]
            else:
                with pytest.raises(DataError, match=r"a:2: a line must have at most 8 bytes, got a longer one"):
                    list(file.blocks(1))
                with pytest.raises(DataError, match=r"a:2: a line must have at most 8 bytes, got a longer one"):
                    list(file.blocks(3)) if length > 10 else list(file.blocks(1))
            file.close()

    def test_standard_input_is_kept(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Pipe(io.BytesIO):
            def seekable(self) -> bool:
                return False

            def seek(self, *place: int) -> int:
                raise OSError("a pipe goes one way")

        content = b"1 qid:1 1:1\n0 qid:2 1:2\n"
        for stream in (io.BytesIO(content), Pipe(content)):
            monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(stream))
            with open_source("-") as source:
                whole, lists = both_ways(source)
            assert whole == lists == [([1.0], 1.0, 1, ""), ([2.0], 0.0, 2, "")]
            assert source.name == "<stdin>"
        started = io.BytesIO(content)
        started.read(5)  # somebody has looked already
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(started))
        file = TextFile("-")
        assert list(file.blocks(100)) == [(1, content)]
        file.close()

    def test_lists_in_any_order(self, tmp_path: Path) -> None:
        lines = "".join(f"1 qid:{row} 1:{row}\n" for row in range(1, 6))
        (tmp_path / "a.txt").write_bytes(gzip.compress(lines.encode()))
        with open_source(tmp_path / "a.txt") as source:
            for query in (1, 2, 2, 4, 3):
                assert source.only(str(query)).features.item() == query
        (tmp_path / "a.txt").write_bytes(gzip.compress(b"1 qid:1 1:1\n1 qid:2 1:2\n1 qid:1 1:3\n"))
        with open_source(tmp_path / "a.txt") as source:
            assert source.only("2").features.item() == 2
            assert source.only("1").features[:, 0].sort().values.tolist() == [1, 3]

    def test_ids(self) -> None:
        assert query_ids([b"1", b"-20", b"0"]) == [1, -20, 0]
        for word in (b"01", b"-0", b"+1", b"1.0", b"a", b"9" * 19):
            assert query_ids([b"1", word]) == ["1", word.decode()]
        assert query_ids([b"9" * 18]) == [10**18 - 1]
        assert query_ids([b"\xff"]) == ["\\xff"]

    def test_a_row_is_named_by_its_line(self, tmp_path: Path) -> None:
        (tmp_path / "a.txt").write_text("# head\n1 qid:1 1:1\n\n1 qid:1 1:2\n")
        with open_source(tmp_path / "a.txt") as source:
            assert (source.place(0), source.place(1)) == (f"{tmp_path / 'a.txt'}:2", f"{tmp_path / 'a.txt'}:4")


class TestLetor:
    def test_files_by_hand(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        for block in [1, 30, 1 << 18]:
            for content, wanted in [
                (
                    b"1 qid:b 1:1\n\n0 qid:a 2:2\n2 qid:b 1:3 2:4\n",
                    [([1, 0], 1, "b", ""), ([0, 2], 0, "a", ""), ([3, 4], 2, "b", "")],
                ),
                (
                    b"1 qid:1 1:1 #x\n0 qid:1 2:2\n2 qid:2 1:9",
                    [([1, 0], 1, 1, "x"), ([0, 2], 0, 1, ""), ([9, 0], 2, 2, "")],
                ),
                (b"1 qid:1 1:1\r\n0 qid:1 2:2 #docid=y\r\n", [([1, 0], 1, 1, ""), ([0, 2], 0, 1, "y")]),
                (b"1 qid:1 1:1\r\n0 qid:1 2:2 #docid=y", [([1, 0], 1, 1, ""), ([0, 2], 0, 1, "y")]),
                (b"1\tqid:3\t1:1\t2:5\n# c\n 0 qid:3 1:7 2:8 # z", [([1, 5], 1, 3, ""), ([7, 8], 0, 3, "z")]),
                (
                    b"1 qid:1\n1 qid:2 1:1\n1 qid:3 1:2 2:3\n",
                    [([0, 0], 1, 1, ""), ([1, 0], 1, 2, ""), ([2, 3], 1, 3, "")],
                ),
            ]:
                monkeypatch.setattr(letor, "_BLOCK_BYTES", block)
                for raw in (content, gzip.compress(content)):
                    (tmp_path / "a.txt").write_bytes(raw)
                    for options in (ReadOptions(), ReadOptions(num_features=2)):
                        with LetorSource(tmp_path / "a.txt", options) as source:
                            whole, lists = both_ways(source)
                        assert whole == wanted
                        assert lists == wanted

    @pytest.mark.parametrize("first", [0, 1])
    def test_sizes_beside_the_lines(self, tmp_path: Path, first: int) -> None:
        (tmp_path / "a").write_text(f"1 {first}:1\n0 # n\n\n2 {first + 2}:3\n")
        (tmp_path / "q").write_text("1\n\n 2 \n")
        with LetorSource(tmp_path / "a", ReadOptions(), sizes=tmp_path / "q", first_index=first) as source:
            whole, lists = both_ways(source)
            assert source.has_labels
        assert whole == lists == [([1, 0, 0], 1, 0, ""), ([0, 0, 0], 0, 1, "n"), ([0, 0, 3], 2, 1, "")]
        data = load_lightgbm(tmp_path / "a", query=tmp_path / "q", zero_based=first == 0, cache=False)
        assert in_order(data)[0].tolist() == [row for row, *_ in whole]
        with pytest.raises(DataError, match=rf"feature {first + 1} is absent"):
            load_lightgbm(tmp_path / "a", query=tmp_path / "q", zero_based=first == 0, absent="missing", cache=False)
        (tmp_path / "q").write_text("2\n2\n")
        message = r"q:2: the sizes add up to 4, but .*a has 3 documents"
        for way in (lambda source: source.read(), lambda source: list(source.batches())):
            with (
                pytest.raises(DataError, match=message),
                LetorSource(tmp_path / "a", ReadOptions(), sizes=tmp_path / "q", first_index=first) as source,
            ):
                way(source)

    def test_labels_may_look_like_anything_in_files_with_sizes(self, tmp_path: Path) -> None:
        (tmp_path / "a").write_text("qid:1 1:1\n")
        (tmp_path / "q").write_text("1\n")
        with pytest.raises(DataError, match=r"a:1: the label must be a finite number, got 'qid:1'"):
            load_lightgbm(tmp_path / "a", query=tmp_path / "q", cache=False)

    def test_sizes_are_looked_at_first(self, tmp_path: Path) -> None:
        (tmp_path / "a").write_text("x\n")
        with pytest.raises(DataError, match=r"q: no such file"):
            load_lightgbm(tmp_path / "a", query=tmp_path / "q", cache=False)

    def test_sizes(self, tmp_path: Path) -> None:
        for content, sizes in [
            (b"1\n2\n", [1, 2]),
            (b" 3 \r\n\n4", [3, 4]),
            (b"9" * 18, [10**18 - 1]),
            (b"007\n", [7]),
        ]:
            (tmp_path / "q").write_bytes(content)
            assert _read_sizes(tmp_path / "q").tolist() == sizes

    def test_bad_sizes(self, tmp_path: Path) -> None:
        for word in ["0", "-1", "1.5", "9" * 19, "x", "1 2", "00"]:
            (tmp_path / "q").write_text(f"1\n\n{word}\n")
            with pytest.raises(
                DataError, match=rf"q:3: the size of a query must be a positive whole number, got '{word}'"
            ):
                _read_sizes(tmp_path / "q")
            (tmp_path / "q").write_text("y" * 60)
            with pytest.raises(DataError, match=rf"got '{'y' * 40}\.\.\.'$"):
                _read_sizes(tmp_path / "q")

    def test_last_lines(self, tmp_path: Path) -> None:
        for counts, noted, message in [
            ([3, 2], [True, False], None),
            ([3, 3, 2], [False] * 3, "it has 2 features, all others 3"),
            ([3, 3, 3], [False] * 3, None),
            ([3, 3, 4], [False] * 3, None),
            ([3, 2, 1], [False] * 3, None),
            ([2, 3, 1], [False] * 3, None),
            ([3, 3, 2, 1], [False] * 4, None),
            ([1, 2, 3], [True, True, False], "it ends without a comment, which all others have"),
            ([1, 2, 3], [True, True, True], None),
            ([1, 2, 3], [True, False, False], None),
            ([1, 2, 3], [False, True, False], None),
        ]:
            lines = []
            for count, comment in zip(counts, noted, strict=True):
                features = " ".join(f"{index + 1}:1" for index in range(count))
                lines.append(f"1 qid:1 {features}{' #c' * comment}")
            (tmp_path / "f").write_text("\n".join(lines))
            if message is None:
                load_letor(tmp_path / "f", cache=False, num_features=9)
                continue
            with pytest.raises(DataError, match=rf"f:{len(lines)}: the last line is cut: {message}$"):
                load_letor(tmp_path / "f", cache=False, num_features=9)

    def test_a_cut_line_is_told_by_whoever_reads_it(self, tmp_path: Path) -> None:
        (tmp_path / "a.txt").write_text("1 qid:1 1:1 2:1\n1 qid:1 1:1 2:1\n1 qid:2 1:1 2:1\n1 qid:3 1:1")
        with (
            open_source(tmp_path / "a.txt") as source,
            pytest.raises(DataError, match=r"a.txt:4: the last line is cut"),
        ):
            source.only("1")
        (tmp_path / "a.txt").write_text("1 qid:1 1:1 2:1\n1 qid:1 1:1 2:1\n1 qid:2 1:1 2:1\n1 qid:3 1:1\n")
        with open_source(tmp_path / "a.txt") as source:
            assert source.only("3").num_documents == 1
            assert source.read().num_documents == 4

    def test_labels_by_the_first_line(self, tmp_path: Path) -> None:
        for content, labelled in [
            ("1 qid:1 1:1\n", True),
            ("qid:1 1:1\n", False),
            ("# qid:1\n\nqid:1 1:1 #x\n", False),
            ("0qid: qid:1 1:1\n", True),
        ]:
            (tmp_path / "a.txt").write_text(content)
            with LetorSource(tmp_path / "a.txt", ReadOptions()) as source:
                assert source.has_labels is labelled

    def test_an_empty_first_line_counts(self, tmp_path: Path) -> None:
        for head in ("\n", "\n\n", "# c\n"):
            (tmp_path / "a.txt").write_text(f"{head}qid:1 1:1\n")
            line = 1 + head.count("\n")
            with (
                pytest.raises(DataError, match=rf"a.txt:{line}: the line starts without a label"),
                LetorSource(tmp_path / "a.txt", ReadOptions()) as source,
            ):
                source.read(labelled=True)

    def test_without_features_the_line_is_named(self, tmp_path: Path) -> None:
        (tmp_path / "a.txt").write_text("1 qid:1\n\n1 qid:2\n")
        for way in (lambda source: source.read(), lambda source: list(source.batches())):
            with (
                pytest.raises(DataError, match=r"a.txt:4: no line up to here gives a feature"),
                LetorSource(tmp_path / "a.txt", ReadOptions()) as source,
            ):
                way(source)
        with LetorSource(tmp_path / "a.txt", ReadOptions(num_features=2)) as source:
            assert both_ways(source)[1] == [([0, 0], 1, 1, ""), ([0, 0], 1, 2, "")]

    def test_the_widest_file(self, tmp_path: Path) -> None:
        for index in (100_000, 100_001):
            (tmp_path / "a.txt").write_text(f"1 qid:1 1:1\n1 qid:2 {index}:1\n")
            with LetorSource(tmp_path / "a.txt", ReadOptions()) as source:
                if index == 100_000:
                    assert [batch.data.num_features for batch in source.batches(1)] == [100_000] * 2
                else:
                    with pytest.raises(DataError, match=r"a.txt:2: feature index 100001 is beyond"):
                        list(source.batches(1))

    def test_no_feature_at_all_for_a_model(self, tmp_path: Path) -> None:
        (tmp_path / "a.txt").write_text("1 qid:1\n")
        message = r"the highest feature index is 0, .* 2 features: features 1 to 2 count as 0"
        for way in (lambda source: source.read(), lambda source: list(source.batches())):
            with open_source(tmp_path / "a.txt", num_features=2) as source, pytest.warns(DataWarning, match=message):
                way(source)

    def test_what_is_absent_in_early_rows(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(letor, "_BLOCK_BYTES", 1)
        (tmp_path / "a.txt").write_text("1 qid:1 1:8\n1 qid:1 1:6 3:2\n0 qid:1 2:4\n")
        data = load_letor(tmp_path / "a.txt", absent="missing", missing="query-mean", cache=False)
        assert in_order(data)[0].tolist() == [[8, 4, 2], [6, 4, 2], [7, 4, 2]]
        assert in_order(load_letor(tmp_path / "a.txt", cache=False))[0].tolist() == [[8, 0, 0], [6, 0, 2], [0, 4, 0]]

    def test_sizes_and_the_first_index_are_part_of_the_key(self, tmp_path: Path) -> None:
        (tmp_path / "a").write_text("1 1:8\n")
        (tmp_path / "a.query").write_text("1\n")
        cache = tmp_path / "cache"
        assert load_lightgbm(tmp_path / "a", cache=cache).num_features == 1
        assert load_lightgbm(tmp_path / "a", cache=cache, zero_based=True).num_features == 2
        assert load_lightgbm(tmp_path / "a", cache=cache).num_features == 1
        assert len(list(cache.glob("*.lgc"))) == 2

    def test_names_are_not_cached(self, tmp_path: Path) -> None:
        (tmp_path / "a.txt").write_text("1 qid:1 1:1 2:2\n")
        cache = tmp_path / "cache"
        assert load_file(tmp_path / "a.txt", feature_names=["x", "y"], cache=cache).feature_names == ("x", "y")
        assert load_letor(tmp_path / "a.txt", num_features=2, cache=cache).feature_names is None
        assert load_file(tmp_path / "a.txt", feature_names=["v", "w"], cache=cache).feature_names == ("v", "w")
        assert len(list(cache.glob("*.lgc"))) == 1

    def test_files_of_a_folder(self, tmp_path: Path) -> None:
        for name in ("vali.txt.gz", "valid.txt", "train.txt.gz", "train.txt"):
            (tmp_path / name).write_text(f"1 qid:{name} 1:1\n")
        (tmp_path / "test.csv").write_text("qid,label,x\n1,1,1\n")
        parts = load_letor_splits(tmp_path, num_features=4, cache=False)
        assert {name: part.num_features for name, part in parts.items()} == {"train": 4, "valid": 4}
        assert {name: part.qids for name, part in parts.items()} == {"train": ("train.txt",), "valid": ("vali.txt.gz",)}
