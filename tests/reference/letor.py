"""LETOR text read one character class at a time: slow, plain, and written without looking at the package's parser."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

DIGITS = "0123456789"


@dataclass
class Rows:
    labels: list[np.float32] = field(default_factory=list)
    qids: list[str] = field(default_factory=list)
    features: list[dict[int, np.float32]] = field(default_factory=list)
    doc_ids: list[str] = field(default_factory=list)


def read(data: bytes, *, last_index: int = 100_000) -> Rows:
    """Raise ValueError for whatever is not a well-formed file of finite numbers."""
    if data.startswith(b"\xef\xbb\xbf"):
        data = data[3:]
    rows = Rows()
    lines = data.split(b"\n")
    closed = lines[-1] == b""
    for line in lines[:-1] if closed else lines:
        read_line(line[:-1] if line.endswith(b"\r") else line, rows, last_index)
    if not rows.labels or not any(rows.features):
        raise ValueError("nothing in it")
    if not closed and len(rows.labels) > 2:
        *others, last = [len(row) for row in rows.features]
        if last < min(others) == max(others):
            raise ValueError("cut")
        if rows.doc_ids[-1] == "" and "" not in rows.doc_ids[:-1]:
            raise ValueError("cut in the comment")
    return rows


def read_line(line: bytes, rows: Rows, last_index: int) -> None:
    text, comment = (line[: line.index(b"#")], line[line.index(b"#") + 1 :]) if b"#" in line else (line, b"")
    for byte in text:
        if byte != 9 and not 32 <= byte <= 126:
            raise ValueError("not text")
    words = text.decode("ascii").split()
    if not words:
        return
    if len(words) < 2 or not words[1].startswith("qid:") or words[1].count(":") != 1 or words[1] == "qid:":
        raise ValueError("qid")
    label, features, highest = number(words[0]), {}, 0
    for word in words[2:]:
        name, value = word.split(":")
        if not name or any(c not in DIGITS for c in name) or not highest < int(name) <= last_index:
            raise ValueError("index")
        highest = int(name)
        features[highest] = number(value)
    rows.labels.append(label)
    rows.qids.append(words[1][4:])
    rows.features.append(features)
    rows.doc_ids.append(document(comment.strip().decode("utf-8", "backslashreplace")))


def number(text: str) -> np.float32:
    """Sign, digits with at most one point, exponent; Python alone would also take `1_0`, `inf` and blanks."""
    if any(c not in DIGITS + "+-.eE" for c in text):
        raise ValueError(text)
    with np.errstate(over="ignore"):
        value = np.float32(float(text))
    if not np.isfinite(value):
        raise ValueError(text)
    return value


def document(comment: str) -> str:
    """The word after the first `docid =` that has one, or the whole comment."""
    rest = comment
    while "docid" in rest:
        rest = rest[rest.index("docid") + 5 :]
        after = rest.lstrip(ASCII_BLANKS)
        if after.startswith("="):
            words = split_blanks(after[1:])
            if words:
                return words[0]
    return comment


ASCII_BLANKS = " \t\n\r\x0b\x0c"


def split_blanks(text: str) -> list[str]:
    for blank in ASCII_BLANKS:
        text = text.replace(blank, " ")
    return [word for word in text.split(" ") if word]
