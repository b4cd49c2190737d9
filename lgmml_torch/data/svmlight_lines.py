"""Parsing SVMlight/LETOR text line by line: slower than `svmlight.parse_block`, but it can say what is wrong where."""

from __future__ import annotations

import re

import numpy as np

from lgmml_torch.checks import DataError
from lgmml_torch.data.svmlight import Block, Rules, decimal

_FOREIGN = re.compile(rb"[^\t\x20-\x7e]")
_SHOWN = 40


def parse_lines(block: bytes, rules: Rules, *, path: object, line: int = 1) -> Block:
    """Parse whole lines, the first of them number ``line`` of the file ``path``.

    Raises:
        DataError: ``file:line: what is wrong`` for the first line that is not as it should be.
    """
    labels: list[float] = []
    qids: list[bytes] = []
    counts: list[int] = []
    index: list[int] = []
    values: list[float] = []
    comments: list[bytes] = []
    for offset, raw in enumerate(block.removesuffix(b"\n").split(b"\n")):
        text, _, comment = raw.removesuffix(b"\r").partition(b"#")
        where = f"{path}:{line + offset}"
        if foreign := _FOREIGN.search(text):
            byte, column = foreign[0][0], foreign.start() + 1
            raise DataError(f"{where}: not plain text, found byte 0x{byte:02x} at column {column}")
        tokens = text.split()
        if not tokens:
            continue
        labels.append(_label(tokens[0], where))
        if rules.qid:
            qids.append(_qid(tokens[1] if len(tokens) > 1 else b"", where))
        features = tokens[2 if rules.qid else 1 :]
        previous = rules.first_index - 1
        for token in features:
            previous = _index(token, previous, where, rules)
            index.append(previous)
            values.append(_value(token, where, rules))
        counts.append(len(features))
        comments.append(comment.strip())
    return Block(
        np.array(labels, dtype=np.float32),
        qids,
        np.array(counts, dtype=np.int64),
        np.array(index, dtype=np.int64),
        np.array(values, dtype=rules.kind),
        comments if any(comments) else None,
    )


def shown(text: bytes) -> str:
    """A piece of the file for an error message: printable, and never long."""
    cut = text if len(text) <= _SHOWN else text[:_SHOWN] + b"..."
    return repr(cut.decode("ascii", "backslashreplace"))


def _fits(value: float, kind: type[np.float32] | type[np.float64]) -> bool:
    with np.errstate(over="ignore"):
        return bool(np.isfinite(kind(value)))


def _label(token: bytes, where: str) -> float:
    value = decimal(token)
    if value is None or not _fits(value, np.float32):
        raise DataError(f"{where}: the label must be a finite number, got {shown(token)}")
    return value


def _qid(token: bytes, where: str) -> bytes:
    name, colon, value = token.partition(b":")
    if name != b"qid" or not colon:
        got = f"got {shown(token)}" if token else "but the line ends"
        raise DataError(f"{where}: missing qid: `qid:…` must follow the label, {got}")
    if not value or b":" in value:
        raise DataError(f"{where}: `qid:` must be followed by the id of the query, got {shown(token)}")
    return value


def _index(token: bytes, previous: int, where: str, rules: Rules) -> int:
    text, colon, value = token.partition(b":")
    if not (colon and text and value):
        raise DataError(f"{where}: expected index:value, got {shown(token)}; is the line cut?")
    if text == b"qid":
        raise DataError(f"{where}: unexpected {shown(token)}: the id of the query comes once, after the label")
    if not text.isdigit():
        raise DataError(f"{where}: the feature index must be a whole number, got {shown(text)}")
    index = int(text) if len(text) <= 18 else 10**18
    if index < rules.first_index:
        raise DataError(f"{where}: feature indices start at {rules.first_index}, got {shown(token)}")
    if index == previous:
        raise DataError(f"{where}: feature {index} is given twice")
    if index < previous:
        raise DataError(f"{where}: feature indices must increase, got {index} after {previous}")
    if index > rules.last_index:
        given = rules.num_features is not None
        hint = "`num_features` says so" if given else "pass `num_features` if there really are so many"
        raise DataError(f"{where}: feature index {index} is beyond the largest allowed, {rules.last_index}; {hint}")
    return index


def _value(token: bytes, where: str, rules: Rules) -> float:
    name, _, text = token.partition(b":")
    feature = f"the value of feature {int(name)}"
    value = decimal(text)
    if value is None:
        raise DataError(f"{where}: {feature} must be a number, got {shown(text)}")
    if np.isnan(value):
        if rules.missing:
            return value
        hint = "`missing=` says what to put there (on the command line: --missing)"
        raise DataError(f"{where}: {feature} is missing, got {shown(text)}; {hint}")
    if not _fits(value, rules.kind):
        raise DataError(f"{where}: {feature} must be finite as {rules.kind.__name__}, got {shown(text)}")
    return value
