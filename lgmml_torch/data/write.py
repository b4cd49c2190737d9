"""Writing ranking data as files that the loaders, and other people's, read back to the same numbers."""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from lgmml_torch.checks import DataError, check_positive
from lgmml_torch.data.arrow import NAMES
from lgmml_torch.data.columns import Columns, pa, require_arrow
from lgmml_torch.data.folder import places_of
from lgmml_torch.data.shards import INDEX, PLACE, SHARD, Manifest, Shard, check_room, clear_folder
from lgmml_torch.data.source import DataSource, PathLike
from lgmml_torch.files import replacing
from lgmml_torch.progress import progress_bar
from lgmml_torch.ragged import RankingData
from lgmml_torch.segments import list_blocks, offsets_from_sizes

if TYPE_CHECKING:
    from pyarrow import Table

_EXTRAS = ("query_weights", "document_weights", "positions")  # that shards have no place for


def save_letor(data: RankingData, path: PathLike, *, sparse: bool = False) -> None:
    """Write ``label qid:… 1:… 2:… #docid = …`` lines in the caller's order; gzipped if the name ends in ``.gz``.

    Numbers are written with as few digits as give back the same bits.

    Args:
        data: what to write. Query ids become text.
        path: the file.
        sparse: leave zeros out (also −0, which then comes back as 0).

    Raises:
        DataError: if an id cannot stand in such a line, or there are categories.
    """
    if data.categories is not None:
        raise DataError("`data` must hold numbers only to be saved in such lines, got categories; save it as a table")
    words = list(map(_query_word, data.qids))
    queries = data.in_caller_order(data.query_index).tolist()
    with _text(path) as text:
        text.writelines(_lines(data, [words[query] for query in queries], sparse))


def save_table(data: RankingData, path: PathLike) -> None:
    """Write a table with columns ``qid``, ``label``, ``docid`` (where there are ids) and the features.

    ``.parquet`` (zstd), ``.arrow`` and ``.feather`` get a row per query, in the order in which the queries first
    appear, with lists in the other columns; their features keep their precision, and their names stand in the
    metadata. ``.csv`` and ``.tsv``, optionally with ``.gz``, get a row per document in the caller's order. Categories
    are written as words; one that is not in the vocabulary is left empty.

    Args:
        data: what to write. Features without names are called ``f1``, ``f2``, … in text.
        path: the file; its ending decides.

    Raises:
        DataError: for an ending that means none of these, or names that mean other columns.
        MissingDependencyError: pyarrow is needed for files that are not text.
    """
    suffix = Path(str(path).removesuffix(".gz")).suffix.lower()
    if suffix == ".csv":
        _save_csv(data, path, ",")
    elif suffix == ".tsv":
        _save_csv(data, path, "\t")
    elif suffix in (".parquet", ".arrow", ".feather") and Path(path).suffix != ".gz":
        table = _nested_table(data)
        if suffix == ".parquet":
            save_parquet(table, path)
            return
        with replacing(path) as temporary:
            pa.feather.write_feather(table, str(temporary), compression="uncompressed")
    else:
        raise DataError(f"`path` must end in .parquet, .arrow, .feather, .csv or .tsv, got {str(path)!r}")


def _save_csv(data: RankingData, path: PathLike, delimiter: str) -> None:
    special = Columns()
    names = data.feature_names or [f"f{column + 1}" for column in range(data.num_features)]
    head = [special.qid, special.label]
    if data.doc_ids is not None:
        head.append(special.doc_id)
    for name in (special.qid, special.label, special.doc_id):
        if name in names:
            raise DataError(f"a feature must not be called {name!r} to be saved, that is another column")
    rows = data.in_caller_order(torch.arange(data.num_documents)).tolist()
    queries = data.query_index.tolist()
    words: list[list[str] | None] = [None] * len(names)
    for column, known in enumerate(data.categories or ()):
        if known is not None:
            words[column] = [*known, ""]  # the last is for −1, a word that is not known
    with _text(path) as text:
        writer = csv.writer(text, delimiter=delimiter, lineterminator="\n")
        writer.writerow([*head, *names])
        for row in rows:
            own = []
            if data.doc_ids is not None:
                own.append(data.doc_ids[row])
            cells = [str(data.qids[queries[row]]), _number(data.labels[row].numpy()[()]), *own]
            for value, entries in zip(data.features[row].numpy(), words, strict=True):
                cells.append(_number(value) if entries is None else entries[int(value)])
            joined = "".join(cells)
            if "\n" in joined or "\r" in joined:
                raise DataError(f"an id must stand on one line to be saved, got {cells[0]!r} or {own}")
            writer.writerow(cells)


@contextmanager
def _text(path: PathLike) -> Iterator[io.TextIOWrapper]:
    """A text file to write, gzipped if its name says so."""
    file = Path(path)
    with replacing(file) as temporary, temporary.open("wb") as raw:
        # No time stamp inside: the same data gives the same file.
        stream: Any = raw
        if file.suffix == ".gz":
            stream = gzip.GzipFile("", "wb", fileobj=raw, mtime=0)
        with stream, io.TextIOWrapper(stream, encoding="utf-8", newline="") as text:
            yield text


def _lines(data: RankingData, queries: list[str], sparse: bool) -> Iterator[str]:
    rows = data.in_caller_order(torch.arange(data.num_documents)).tolist()
    names = [f"{column + 1}:" for column in range(data.num_features)]
    for query, row in zip(queries, rows, strict=True):
        values = data.features[row].numpy()
        columns: Iterable[int] = range(data.num_features)
        if sparse:
            columns = np.flatnonzero(values)
        features = "".join([f" {names[column]}{_number(values[column])}" for column in columns])
        comment = ""
        if data.doc_ids is not None:
            comment = _comment(data.doc_ids[row])
        yield f"{_number(data.labels[row].numpy()[()])} qid:{query}{features}{comment}\n"


def _number(value: Any) -> str:
    """The shortest text whose float64 rounds to the same number; whole numbers without a point."""
    if abs(value) < 1e15 and value == np.trunc(value):
        if not value and np.signbit(value):
            return "-0"
        return str(int(value))
    text = str(value)
    # Shortest for float32 means read as float32; by way of float64 it could in principle be rounded twice.
    return text if type(value)(float(text)) == value else repr(float(value))


def _query_word(qid: object) -> str:
    word = str(qid)
    if not word or not word.isascii() or not word.isprintable() or set(word) & set(" :#"):
        raise DataError(f"a query id must be printable ASCII without blanks, ':' and '#' to be saved, got {qid!r}")
    return word


def _comment(doc_id: str) -> str:
    if not doc_id:
        return ""
    if len(doc_id.split()) != 1:
        raise DataError(f"a document id must be one word to be saved, got {doc_id!r}")
    return f" #docid = {doc_id}"


def save_parquet(table: Table, path: PathLike) -> None:
    """Write a table as Parquet (zstd), atomically."""
    with replacing(path) as temporary:
        pa.parquet.write_table(table, temporary, compression="zstd", row_group_size=2048)


def _nested_table(data: RankingData) -> Table:
    """A row per query, in the order in which the queries first appear, with lists in the other columns."""
    rows = data.in_caller_order(torch.arange(data.num_documents))
    first = data.query_index[rows]  # queries in the caller's order, which may be scattered
    seen = list(dict.fromkeys(first.tolist()))
    place = torch.empty(data.num_queries, dtype=torch.long)
    place[seen] = torch.arange(len(seen))
    rows = rows[place[first].argsort(stable=True)]
    offsets = pa.array(np.concatenate([[0], np.cumsum(data.sizes[seen].numpy())]), pa.int32())
    qids: list[Any] = [data.qids[query] for query in seen]
    id_type = pa.int64()
    if _are_text(qids):
        qids, id_type = list(map(str, qids)), pa.string()
    columns = {
        "qid": pa.array(qids, id_type),
        "label": pa.ListArray.from_arrays(offsets, pa.array(data.labels[rows].numpy())),
    }
    for name, values in _feature_arrays(data.features[rows].numpy(), data).items():
        columns[name] = pa.ListArray.from_arrays(offsets, values)
    if data.doc_ids is not None:
        words = pa.array([data.doc_ids[row] for row in rows.tolist()], pa.string())
        columns["docid"] = pa.ListArray.from_arrays(offsets, words)
    table = pa.table(columns)
    if data.feature_names is not None and data.categories is None:
        table = table.replace_schema_metadata({NAMES: json.dumps(data.feature_names)})
    return table


def _feature_arrays(features: NDArray[Any], data: RankingData) -> dict[str, Any]:
    """One column of vectors; with categories a column for each feature, theirs in Arrow's type for them."""
    if data.categories is None:
        return {"features": pa.FixedSizeListArray.from_arrays(pa.array(features.reshape(-1)), data.num_features)}
    out = {}
    for name, words, values in zip(data.feature_names or (), data.categories, features.T, strict=True):
        if name in ("qid", "label", "docid", PLACE):
            raise DataError(f"a feature must not be called {name!r} to be saved with categories: it is another column")
        if words is None:
            out[name] = pa.array(np.ascontiguousarray(values))
        else:
            entries = [*words, None]
            found = [entries[code] for code in values.astype(int).tolist()]
            out[name] = pa.array(found, pa.string()).dictionary_encode()
    return out


def write_shards(
    source: DataSource | RankingData, folder: PathLike, *, documents: int = 50_000, progress: bool = True
) -> Manifest:
    """Write a set as shards; only one of them is in memory at a time.

    A folder of shards that is there already, or the rest of one, is replaced. Until all is written there is no
    manifest, and nobody reads the folder.

    Args:
        source: what to write. Query ids that are not all whole numbers become text.
        folder: where to; it must hold nothing else.
        documents: in a shard, at most; a longer list has a shard of its own.
        progress: show a bar if it takes more than two seconds.

    Raises:
        DataError: the folder holds something else, there are weights or positions, or what is wrong with the source.
    """
    check_positive("documents", documents)
    require_arrow()
    if held := [name for name in _EXTRAS if getattr(source, name, None) is not None]:
        raise DataError(f"shards have no place for weights and positions, got {', '.join(held)}")
    home = Path(folder)
    check_room(home)
    total = source.num_documents if isinstance(source, RankingData) else source.num_rows
    if not total:
        raise DataError("there are no documents to write")
    text = _are_text(source.qids)
    labelled = isinstance(source, RankingData) or source.has_labels
    shards, labels, written = list[Shard](), list[float](), 0
    index: dict[str, list[Any]] = {"qid": [], "documents": [], "shard": []}
    clear_folder(home)
    with progress_bar("Writing shards", total, enabled=progress) as report:
        for data in _blocks(source, documents):
            if text:
                data = data.replace(qids=tuple(map(str, data.qids)))
            index["qid"].extend(data.qids)
            index["documents"].extend(data.sizes.tolist())
            index["shard"].extend([len(shards)] * data.num_queries)
            labels.extend([float(data.labels.min()), float(data.labels.max())])
            shards.append(_write_shard(home / SHARD.format(len(shards)), data, labelled=labelled))
            report(written := written + data.num_documents)
    save_parquet(pa.table(index), home / INDEX)
    manifest = Manifest(
        queries=len(index["qid"]),
        documents=total,
        features=data.num_features,
        dtype=str(data.features.dtype).removeprefix("torch."),
        feature_names=data.feature_names,
        labels=(min(labels), max(labels)) if labelled else None,
        doc_ids=data.doc_ids is not None,
        index=Shard.of(home / INDEX, len(index["qid"]), total),
        shards=tuple(shards),
        table=source.table,
        categories=data.categories,
    )
    manifest.write(home)
    return manifest


def _are_text(qids: Sequence[Hashable]) -> bool:
    """Whether the ids have to be written as text, because they are not all whole numbers."""
    if all(type(qid) is int and -(2**63) <= qid < 2**63 for qid in qids):
        return False
    known: dict[str, Hashable] = {}
    for qid in qids:
        if (other := known.setdefault(str(qid), qid)) is not qid:
            raise DataError(f"query ids must differ as text to be written, got {other!r} and {qid!r}")
    return True


def _blocks(source: DataSource | RankingData, documents: int) -> Iterator[RankingData]:
    """Some whole lists after the other, in the order of their ids."""
    if isinstance(source, DataSource):
        for batch in source.batches(documents, by_id=True):
            yield batch.data
        return
    filled = source.sizes.nonzero()[:, 0]  # a list without documents is none
    for first, last in list_blocks(offsets_from_sizes(source.sizes[filled]), documents):
        yield source.select(filled[first:last])


def _write_shard(file: Path, data: RankingData, *, labelled: bool) -> Shard:
    place = places_of(data)
    table = _nested_table(data.replace(order=torch.arange(data.num_documents)))
    offsets = pa.array(data.offsets.numpy(), pa.int32())
    table = table.append_column(PLACE, pa.ListArray.from_arrays(offsets, pa.array(place.numpy())))
    if not labelled:
        table = table.drop_columns(["label"])
    save_parquet(table, file)
    return Shard.of(file, data.num_queries, data.num_documents)
