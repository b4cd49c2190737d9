"""Which columns of a table are the query, the label, the document id and the features."""

from __future__ import annotations

import importlib
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lgmml_torch.checks import DataError, did_you_mean, require
from lgmml_torch.inputs import check_distinct

if TYPE_CHECKING:
    from pyarrow import DataType

    from lgmml_torch.data.source import ReadOptions

_SHOWN = 6  # names in a message
_INDEX = re.compile(r"|Unnamed: \d+|__index_level_\d+__")  # names that pandas gives the index of a table


@dataclass(frozen=True)
class Columns:
    """Names of the columns of a table that are no features."""

    qid: str = "qid"  # the query of each row
    label: str = "label"  # its relevance; may be absent where nothing is trained
    doc_id: str = "docid"  # the id of the document; may be absent
    drop: tuple[str, ...] = ()  # columns to leave out
    weight: str | None = None  # what the relevance of each row counts, see `RankingData.weighed`; may be absent
    position: str | None = None  # where each row was shown; may be absent
    spare: tuple[str, ...] = ()  # more columns to leave out; they may be absent

    @property
    def left_out(self) -> list[str]:
        """The columns that are neither features nor the query, label or document id."""
        return [*self.drop, *self.spare, *filter(None, (self.weight, self.position))]

    def record(self) -> dict[str, Any]:
        """In primitives, for a model."""
        return {"qid": self.qid, "label": self.label, "doc_id": self.doc_id, "spare": self.left_out}

    @classmethod
    def of(cls, table: Mapping[str, Any] | None) -> Columns:
        """The columns of a table that a model remembers, see `RankingData.table`; the usual ones without any.

        >>> Columns.of({"missing": "zero", "qid": "query", "spare": ["title"]})
        Columns(qid='query', label='label', doc_id='docid', drop=(), weight=None, position=None, spare=('title',))
        """
        known = table or {}
        named = {name: known[name] for name in ("qid", "label", "doc_id") if name in known}
        return cls(**named, spare=tuple(known.get("spare", ())))


@dataclass(frozen=True)
class _Layout:
    """Positions of the columns of a table."""

    qid: int
    label: int | None
    doc_id: int | None
    features: tuple[int, ...]  # in the order in which they are wanted
    names: tuple[str, ...]  # of the features


def lay_out(header: Sequence[str], options: ReadOptions, where: str, *, what: str = "the header") -> _Layout:
    """Find the columns; every one that is not the query, label or document id and is not dropped is a feature.

    Raises:
        DataError: for a name that comes twice, a query column that is not there, or other features than asked for.
    """
    columns = options.columns
    check_distinct(header, f"{where}: ")
    place = dict(zip(header, range(len(header)), strict=True))
    for name in (columns.qid, *columns.drop):
        if name not in place:
            hint = did_you_mean(name, list(header)) or f"; there are {_listed(header)}"
            raise DataError(f"{where}: {what} must name a column {name!r}{hint}")
    special = {columns.qid, columns.label, columns.doc_id, *columns.left_out}
    found = tuple(_without(header, special))
    wanted = options.feature_names
    if wanted is not None:
        check_same_names(found, wanted, where, model=options.model)
        found = wanted
    options.categories.check_present(found, where)
    options.check_width(len(found), where, f"{what} names")
    if not found:
        raise DataError(f"{where}: {what} names no feature")
    for name in found:
        if _INDEX.fullmatch(name) and wanted is None:
            hint = "save the table without it (`index=False`), or leave it out (data.drop=, --drop-column)"
            raise DataError(f"{where}: column {name!r} is no feature, but the index of a pandas table; {hint}")
    features = tuple(place[name] for name in found)
    return _Layout(place[columns.qid], place.get(columns.label), place.get(columns.doc_id), features, found)


def check_same_names(found: Sequence[str], wanted: Sequence[str], where: str, *, model: bool) -> None:
    """Require the same names, in any order; the error lists those that are missing and those that are unknown."""
    gone = _without(wanted, set(found))
    new = _without(found, set(wanted))
    if not gone and not new:
        return
    parts = []
    if len(gone) == 1:
        parts.append(f"column {_listed(gone)} is missing")
    elif gone:
        parts.append(f"columns {_listed(gone)} are missing")
    if new:
        known = "there should be"
        if model:
            known = "the model was trained on"
        parts.append(f"{known} no column {_listed(new)}{did_you_mean(new[0], gone)}")
    raise DataError(f"{where}: {', and '.join(parts)}")


def _without(names: Sequence[str], known: Collection[str | None]) -> list[str]:
    """The names that are not among the known ones."""
    return [name for name in names if name not in known]


def _listed(names: Sequence[str]) -> str:
    text = ", ".join(map(repr, names[:_SHOWN]))
    if len(names) > _SHOWN:
        text += ", …"
    return text


def require_arrow(purpose: str = "for Parquet and Arrow files") -> Any:
    """The package pyarrow; where it is not installed the error says which extra brings it."""
    return require("pyarrow", purpose, "arrow")


class _Arrow:
    """The package pyarrow, imported when something of it is used: most formats do without."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        package = require_arrow()
        if not hasattr(package, name):
            importlib.import_module(f"pyarrow.{name}")
        return getattr(package, name)


pa: Any = _Arrow()


@contextmanager
def readable(name: str, word: str) -> Iterator[None]:
    """Turn what pyarrow says about a damaged file into one sentence."""
    try:
        yield
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:  # the last: names of columns that are no text
        raise DataError(f"{name}: not a readable {word} file: {str(error).partition(chr(10))[0]}") from error


def is_list(dtype: DataType) -> bool:
    """Whether the entries of a column are lists."""
    return bool(pa.types.is_list(dtype) or pa.types.is_large_list(dtype) or pa.types.is_fixed_size_list(dtype))


def inner(dtype: Any) -> Any:
    """The type of the entries of lists, or the type itself."""
    return dtype.value_type if is_list(dtype) else dtype


def no_number(dtype: DataType) -> str | None:
    """What a column holds if not numbers; None for numbers, for true and false, and for nothing at all."""
    numeric = (pa.types.is_boolean, pa.types.is_integer, pa.types.is_floating, pa.types.is_decimal, pa.types.is_null)
    for matches in numeric:
        if matches(dtype):
            return None
    if pa.types.is_temporal(dtype):
        return "dates"
    if pa.types.is_dictionary(dtype):
        return "categories"
    return "text"
