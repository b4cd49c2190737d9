"""The two parsers of LETOR lines, block by block: the fast one answers for every good block, and for no bad one."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from lgmml_torch.checks import DataError
from lgmml_torch.data.svmlight import Block, Rules, _parse_block, _parse_lines, parse, shown

BARE = Rules(qid=False)
NO_LABELS = Rules(labels=False)
GAPS = Rules(missing=True)


def assert_same_block(found: Block | None, expected: Block) -> None:
    assert found is not None
    for name in ("labels", "counts", "index", "values"):
        one, other = getattr(found, name), getattr(expected, name)
        assert one.dtype == other.dtype, name
        assert np.array_equal(one, other, equal_nan=True), name
    assert (found.qids, found.comments) == (expected.qids, expected.comments)


def test_good_blocks() -> None:
    for text, rules, labels, qids, rows, comments in [
        (b"1 qid:7 1:2\n", Rules(), [1], [b"7"], [{1: 2}], None),
        (b"1 qid:7 1:2", Rules(), [1], [b"7"], [{1: 2}], None),
        (b"1 qid:7\n", Rules(), [1], [b"7"], [{}], None),
        (
            b"1 qid:7\n0 qid:a~ 3:4 12:5\n2 qid:8 1:1\n",
            Rules(),
            [1, 0, 2],
            [b"7", b"a~", b"8"],
            [{}, {3: 4, 12: 5}, {1: 1}],
            None,
        ),
        (b"-1.5 qid:x 1:-2 2:-0.25\n", Rules(), [-1.5], [b"x"], [{1: -2, 2: -0.25}], None),
        (b"1\tqid:7\t1:2\n", Rules(), [1], [b"7"], [{1: 2}], None),
        (b"  1   qid:7  1:2  \n", Rules(), [1], [b"7"], [{1: 2}], None),
        (b"\n\n1 qid:7 1:2\n \n\n0 qid:7 1:3\n\n", Rules(), [1, 0], [b"7", b"7"], [{1: 2}, {1: 3}], None),
        (b"1 qid:7 1:2\r\n0 qid:7 1:3\r\n", Rules(), [1, 0], [b"7", b"7"], [{1: 2}, {1: 3}], None),
        (b"1 qid:7 1:2\r\n0 qid:7 1:3\r", Rules(), [1, 0], [b"7", b"7"], [{1: 2}, {1: 3}], None),
        (b"1 qid:7 1:2 # a b \n0 qid:7 1:3\n", Rules(), [1, 0], [b"7", b"7"], [{1: 2}, {1: 3}], [b"a b", b""]),
        (b"# head\n1 qid:7 1:2#x\n#\n0 qid:7 1:3#y", Rules(), [1, 0], [b"7", b"7"], [{1: 2}, {1: 3}], [b"x", b"y"]),
        (b"1 qid:7 1:2 #\n0 qid:7 1:3 # \n", Rules(), [1, 0], [b"7", b"7"], [{1: 2}, {1: 3}], None),
        (b"1 1:2 2:3\n0\n4 2:1\n", BARE, [1, 0, 4], [], [{1: 2, 2: 3}, {}, {2: 1}], None),
        (b"1\n", BARE, [1], [], [{}], None),
        (
            b"qid:7 1:2\n  qid:8\n\n# c\n\tqid:9 2:1\n",
            NO_LABELS,
            [0, 0, 0],
            [b"7", b"8", b"9"],
            [{1: 2}, {}, {2: 1}],
            None,
        ),
        (b"qid:7 1:2 # qid:8\n", NO_LABELS, [0], [b"7"], [{1: 2}], [b"qid:8"]),
        (b"1 qid:7 0:2 1:3\n", Rules(first_index=0), [1], [b"7"], [{0: 2, 1: 3}], None),
        (b"1 qid:7 100000:2\n", Rules(), [1], [b"7"], [{100000: 2}], None),
        (b"1 qid:7 99999:2\n", Rules(first_index=0), [1], [b"7"], [{99999: 2}], None),
        (b"1 qid:7 3:2\n", Rules(num_features=3), [1], [b"7"], [{3: 2}], None),
        (b"1 qid:7 2:2\n", Rules(num_features=3, first_index=0), [1], [b"7"], [{2: 2}], None),
        (b"1 qid:7 123456789:2\n", Rules(num_features=10**9), [1], [b"7"], [{123456789: 2}], None),
        (
            b"1 qid:7 123456789:2\n1 qid:7 1:2\n",
            Rules(num_features=10**9),
            [1, 1],
            [b"7", b"7"],
            [{123456789: 2}, {1: 2}],
            None,
        ),
        (b"1 qid:7 1:2\n0 qid:8\n", Rules(), [1, 0], [b"7", b"8"], [{1: 2}, {}], None),
        (b"1 qid:7 009:2 10:1\n", Rules(), [1], [b"7"], [{9: 2, 10: 1}], None),
        (b"1 qid:7 1:nan 2:NULL 3:1\n", GAPS, [1], [b"7"], [{1: np.nan, 2: np.nan, 3: 1}], None),
        (b"1 qid:7 1:1e30\n", Rules(kind=np.float64), [1], [b"7"], [{1: 1e30}], None),
        (b"1e2 qid:7 1:1e300\n", Rules(kind=np.float64), [100], [b"7"], [{1: 1e300}], None),
        (b"# only\n", Rules(), [], [], [], None),
        (b"", Rules(), [], [], [], None),
        (b" \n\t\n", Rules(kind=np.float64), [], [], [], None),
    ]:
        slow = _parse_lines(text, rules, path="f")
        assert slow.labels.tolist() == labels
        assert slow.qids == qids
        assert slow.counts.tolist() == [len(row) for row in rows]
        assert slow.index.tolist() == [index for row in rows for index in row]
        assert np.array_equal(
            slow.values, np.array([v for row in rows for v in row.values()], rules.kind), equal_nan=True
        )
        assert slow.comments == comments
        types = (np.float32, np.int64, np.int64, np.float64)
        assert tuple(a.dtype for a in (slow.labels, slow.counts, slow.index, slow.values)) == types
        assert_same_block(_parse_block(text, rules), slow)
        assert_same_block(parse(text, rules, path="f"), slow)


def test_bad_blocks() -> None:
    """The fast parser leaves them to the one that names the line."""
    for text, rules in [
        (b"1 qid:7 1:2 1:3\n", Rules()),
        (b"1 qid:7 2:2 1:3\n", Rules()),
        (b"1 qid:7 1:1\n0 qid:7 2:2 2:3\n", Rules()),
        (b"1 qid:7 0:1\n", Rules()),
        (b"1 qid:7 1:1\n1 qid:7 0:1\n", Rules()),
        (b"1 qid:7 100001:1\n", Rules()),
        (b"1 qid:7 100000:1\n", Rules(first_index=0)),
        (b"1 qid:7 1:1 4:1\n", Rules(num_features=3)),
        (b"1 qid:7 1:1 3:1\n", Rules(num_features=3, first_index=0)),
        (b"1 1:2\n", Rules()),
        (b"1 qie:7 1:2\n", Rules()),
        (b"1 qidd:7 1:2\n", Rules()),
        (b"1 qid:7 1:2\n1 pid:7 1:2\n", Rules()),
        (b"1 qid:7 1:2\n1 qid1:7 1:2\n", Rules()),
        (b"1 qid:7 1:2\n1\n", Rules()),
        (b"1 qid:7 1\n", Rules()),
        (b"1 qid:7 1:\n", Rules()),
        (b"1 qid:7 :1\n", Rules()),
        (b"1 qid: 1:1\n", Rules()),
        (b"1 qid:7:8 1:1\n", Rules()),
        (b"1 qid:7 1:1:1\n", Rules()),
        (b"1 qid:7 1:2 3\n1 qid:7 1:2 :3\n", Rules()),
        (b"1 qid:7 1:2 3\n4:5 qid:7 1:2\n", Rules()),
        (b"1 qid:7 a:1\n", Rules()),
        (b"1 qid:7 1a:1\n", Rules()),
        (b"1 qid:7 1:1 /:1\n", Rules()),
        (b"1 qid:7 1:1 ;:1\n", Rules()),
        (b"x qid:7 1:1\n", Rules()),
        (b"nan qid:7 1:1\n", Rules()),
        (b"nan qid:7 1:1\n", GAPS),
        (b"1e39 qid:7 1:1\n", Rules(kind=np.float64)),
        (b"1 qid:7 1:nan\n", Rules()),
        (b"1 qid:7 1:x\n", GAPS),
        (b"1 qid:7 1:1e39\n", Rules()),
        (b"1 qid:7 1:1 2:-1e39\n", Rules()),
        (b"1 qid:7 1:1e309\n", Rules(kind=np.float64)),
        (b"1 qid:7 1:inf\n", GAPS),
        (b"1 qid:7 1:1.2.3\n", Rules()),
        (b"1 qid:7 1:.\n", Rules()),
        (b"1 qid:7 1:-\n", Rules()),
        (b"1 qid:7 1:--1\n", Rules()),
        (b"1 qid:7 1:1-\n", Rules()),
        (b"1 qid:\x7f 1:1\n", Rules()),
        (b"1 qid:\xe9 1:1\n", Rules()),
        (b"1 qid:7\x0b1:1\n", Rules()),
        (b"1 qid:7 1:1\r2:1\n", Rules()),
        (b"1 qid:7 1:1\n\x00\n", Rules()),
        (b"1 qid:7 1:2\n", NO_LABELS),
        (b"qid:7 1:2\n", Rules()),
        (b"1 qid:7 1:2\n", BARE),
        (b"1 x\n", BARE),
        (b"1 qid:7:1:2\n", Rules()),
        (b"1 qid:7 1 2 3:4\n", Rules()),
        (b"1 2\n3:4 5:6\n1 1:2\n", BARE),
        (b"1 qid:7 1:1 a:1\n", Rules()),
    ]:
        assert _parse_block(text, rules) is None
        with pytest.raises(DataError, match=r"^f:\d+: "):
            _parse_lines(text, rules, path="f")
        good = b"1 qid:7 1:1\n" if rules.qid else b"1 1:1\n"
        good = good if rules.labels else b"qid:7 1:1\n"
        with pytest.raises(DataError, match=r"^f:(9|10): "):
            parse(good + text, rules, path="f", line=8)


def test_the_line_is_counted_from_the_first_of_the_block() -> None:
    for line in (1, 5):
        for look in (parse, _parse_lines):
            with pytest.raises(DataError, match=rf"^f:{line + 2}: "):
                look(b"1 qid:1 1:1\n\nx\n", Rules(), path="f", line=line)
    for look in (parse, _parse_lines):
        with pytest.raises(DataError, match=r"^f:1: "):
            look(b"x\n", Rules(), path="f")


def test_messages() -> None:
    for text, rules, message in [
        (
            b"1 qid:1 100001:1",
            Rules(),
            "feature index 100001 is beyond the largest allowed, 100000; pass `num_features` if",
        ),
        (
            b"1 qid:1 4:1",
            Rules(num_features=3),
            "feature index 4 is beyond the largest allowed, 3; `num_features` says so",
        ),
        (
            b"1 qid:1 3:1",
            Rules(num_features=3, first_index=0, because="why"),
            "3 is beyond the largest allowed, 2; why",
        ),
        (b"1 qid:1 " + b"1" * 19 + b":1", Rules(), "feature index 1000000000000000000 is beyond"),
        (b"1 qid:1 " + b"1" * 18 + b":1", Rules(), "feature index 111111111111111111 is beyond"),
        (b"1 qid:1 0:1", Rules(), "feature indices start at 1, got '0:1'"),
        (b"1 qid:1 2:1 2:1", Rules(), "feature 2 is given twice"),
        (b"1 qid:1 3:1 2:1", Rules(), "feature indices must increase, got 2 after 3"),
        (b"1 qid:1 1:1 qid:2", Rules(), "unexpected 'qid:2': the id of the query comes once"),
        (b"1 qid:1 1:" + b"z" * 40, Rules(), f"must be a number, got '{'z' * 40}'$"),
        (b"1 qid:1 1:" + b"z" * 41, Rules(), rf"must be a number, got '{'z' * 40}\.\.\.'$"),
        (b"1 pid:1", Rules(), "missing qid: `qid:…` must follow the label, got 'pid:1'"),
        (b"1 qid", Rules(), "missing qid: `qid:…` must follow the label, got 'qid'"),
        (b"1", Rules(), "missing qid: `qid:…` must follow the label, but the line ends"),
        (b"1 qid:", Rules(), "`qid:` must be followed by the id of the query, got 'qid:'"),
        (b"1 qid:1 1:1e39", Rules(), "the value of feature 1 must be finite as float32, got '1e39'"),
        (b"1 qid:1 1:-1e309", Rules(kind=np.float64), "must be finite as float64, got '-1e309'"),
        (b"1e39 qid:1", Rules(), "the label must be a finite number, got '1e39'"),
        (b"1 qid:1 \xc3", Rules(), "not plain text, found byte 0xc3 at column 9"),
        (b"\x01", Rules(), "not plain text, found byte 0x01 at column 1"),
    ]:
        with pytest.raises(DataError, match=message):
            _parse_lines(text + b"\n", rules, path="f")


def test_largest_indices() -> None:
    assert (Rules().last_index, Rules(first_index=0).last_index) == (100_000, 99_999)
    assert (Rules(num_features=7).last_index, Rules(num_features=7, first_index=0).last_index) == (7, 6)
    wide = Rules(num_features=10**18)
    for digits in (9, 10, 18):
        found = parse(b"1 qid:1 " + b"1" * digits + b":1\n", wide, path="f")
        assert found.index.tolist() == [int("1" * digits)]
    assert _parse_block(b"1 qid:1 " + b"1" * 9 + b":1\n", wide) is not None
    assert _parse_block(b"1 qid:1 " + b"1" * 10 + b":1\n", wide) is None
    assert Rules() == Rules(True, 1, None, False, np.float32, True, "`num_features` says so")


def test_long_numbers_are_rounded_once() -> None:
    for digits in [14, 15, 16, 17, 30]:
        rng = random.Random(digits)
        words = []
        for _ in range(300):
            word = "".join(rng.choice("0123456789") for _ in range(digits))
            point = rng.randint(0, digits)
            words.append(rng.choice(("", "-")) + word[:point] + "." * rng.randint(0, 1) + word[point:])
        text = " ".join(f"{place}:{word}" for place, word in enumerate(words, start=1))
        found = _parse_block(f"3 qid:1 {text}\n".encode(), Rules(kind=np.float64))
        assert found is not None
        assert found.values.tolist() == [float(word) for word in words]


def test_very_long_numbers() -> None:
    for length in [15, 16, 17, 253, 254, 255, 256, 257, 258, 510, 511, 512, 513, 600]:
        word = b"0" * (length - 1) + b"7"
        for sign in (b"", b"-"):
            found = _parse_block(b"1 qid:1 1:3 2:" + sign + word + b" 3:12\n", Rules())
            assert found is not None
            assert found.values.tolist() == [3, float(sign + b"7"), 12]


def test_words_for_numbers() -> None:
    rules = Rules(missing=True, kind=np.float64)

    def value(text: bytes) -> float:
        return float(_parse_lines(b"1 qid:1 1:" + text + b"\n", rules, path="f").values[0])

    for text in (b"1", b"+1", b"-1.5e-3", b".5", b"5.", b"1E5"):
        assert value(text) == float(text)
    for text in (b"nan", b"NaN", b"NULL", b"null"):
        assert np.isnan(value(text))
    for text in (b"", b"1_0", b" 1", b"inf", b"0x1", b"1e", b".", b"--1", b"none"):
        with pytest.raises(DataError):
            value(text)
    assert shown(b"a\xff") == r"'a\\xff'"


def test_random_blocks_agree() -> None:
    rng = random.Random(3)
    for _ in range(60):
        lines = []
        for _ in range(rng.randint(1, 8)):
            index = sorted(rng.sample(range(1, 40), rng.randint(0, 6)))
            values = [rng.choice(["0", "1.5", "-2", "1e-3", "0.1234567890123456", "12"]) for _ in index]
            features = "".join(f" {i}:{value}" for i, value in zip(index, values, strict=True))
            lines.append(f"{rng.randint(0, 4)} qid:{rng.randint(1, 999)}{features}{rng.choice(['', ' #d', ' '])}")
        text = ("\n".join(lines) + rng.choice(["", "\n"])).encode()
        for rules in (Rules(), replace(Rules(), kind=np.float64)):
            assert_same_block(_parse_block(text, rules), _parse_lines(text, rules, path="f"))
