"""What a folder of shards says about itself, and whether its files are still what was written.

``manifest.json`` is written last, so a folder without one was not written to the end. It counts what is there and gives
size and digest of every file. ``index.parquet`` names the query of every list of the set, its number of documents and
its shard, in the order of the lists.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from lgmml_torch.checks import DataError
from lgmml_torch.data.cache import Cache
from lgmml_torch.data.columns import require_arrow
from lgmml_torch.data.source import PathLike
from lgmml_torch.data.write import save_parquet
from lgmml_torch.files import write_text
from lgmml_torch.progress import progress_bar
from lgmml_torch.segments import offsets_from_sizes, segment_sum

if TYPE_CHECKING:
    import pyarrow as pa

MANIFEST, INDEX, SHARD = "manifest.json", "index.parquet", "shard-{:05d}.parquet"
_FORMAT, _VERSION = "lgmml_torch shards", 1


@dataclass(frozen=True)
class Shard:
    """One file with whole lists; the index counts as one too.

    Attributes:
        file: its name in the folder.
        bytes: its size.
        sha256: of its bytes.
        queries: lists in it.
        documents: documents in it.
    """

    file: str
    bytes: int
    sha256: str
    queries: int
    documents: int

    @classmethod
    def of(cls, path: Path, queries: int, documents: int) -> Shard:
        """Describe a file that was just written."""
        return cls(path.name, path.stat().st_size, digest(path), queries, documents)


@dataclass(frozen=True)
class Manifest:
    """A set of lists, cut into shards.

    Attributes:
        queries: lists in all shards.
        documents: documents in all shards.
        features: of each document.
        dtype: of the features, ``float32`` or ``float64``.
        feature_names: their names, or None.
        labels: the lowest and the highest label; None where the documents have none.
        doc_ids: whether documents have ids.
        index: the file that lists all queries.
        shards: the files, in the order of the lists.
        table: how the rows were read, see `RankingData`; None in folders of earlier releases.
    """

    queries: int
    documents: int
    features: int
    dtype: str
    feature_names: tuple[str, ...] | None
    labels: tuple[float, float] | None
    doc_ids: bool
    index: Shard
    shards: tuple[Shard, ...]
    table: Mapping[str, Any] | None = None

    def __str__(self) -> str:
        labels = "no labels"
        if self.labels is not None:
            labels = f"labels {self.labels[0]:g}–{self.labels[1]:g}"
        return (
            f"{self.queries:,} queries, {self.documents:,} documents, {self.features:,} features ({self.dtype}), "
            f"{labels}, {len(self.shards):,} shards"
        )

    def owners(self, processes: int) -> list[int]:
        """The process that has each shard: runs of shards with about the same number of documents.

        Every process works this out alike. With fewer shards than processes some have none.
        """
        sizes = np.array([shard.documents for shard in self.shards])
        middles = 2 * np.cumsum(sizes) - sizes  # twice, so that they are whole numbers
        owners: list[int] = (middles * processes // (2 * self.documents)).tolist()
        return owners


def digest(path: Path) -> str:
    """The SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Say that the folder is complete."""
    content = {"format": _FORMAT, "version": _VERSION, **asdict(manifest)}
    write_text(folder / MANIFEST, json.dumps(content, indent=1) + "\n")


def read_manifest(folder: PathLike) -> Manifest:
    """What the folder says about itself; the shards themselves are not looked at.

    Raises:
        DataError: there is no manifest, it is damaged, of another version, or names the same shard twice.
    """
    file = Path(folder) / MANIFEST
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        form, version = content["format"], content["version"]
    except (FileNotFoundError, NotADirectoryError):
        why = "this is no folder of shards"
        if any(Path(folder).glob("*.parquet")):
            why = "the shards were not written to the end"
        raise DataError(f"{file}: no such file; {why}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{file}: not a manifest of shards: {error!r}") from error
    if form != _FORMAT or version != _VERSION:
        raise DataError(f"{file}: the format must be {_FORMAT!r}, version {_VERSION}, got {form!r}, version {version}")
    try:
        manifest = _decoded(content)
    except (KeyError, TypeError) as error:
        raise DataError(f"{file}: the manifest is damaged: {error}") from error
    _check_counts(manifest, file)
    return manifest


def _decoded(content: dict[str, Any]) -> Manifest:
    values: dict[str, Any] = {"table": content.get("table")}
    for entry in fields(Manifest):
        if entry.name != "table":
            values[entry.name] = content[entry.name]
    for name in ("feature_names", "labels"):
        if values[name] is not None:
            values[name] = tuple(values[name])
    values["index"] = Shard(**values["index"])
    values["shards"] = tuple([Shard(**shard) for shard in values["shards"]])
    return Manifest(**values)


def _check_counts(manifest: Manifest, file: Path) -> None:
    if not manifest.shards:
        raise DataError(f"{file}: there must be at least one shard, got none")
    for name in ("queries", "documents"):
        total, told = 0, getattr(manifest, name)
        for shard in manifest.shards:
            total += getattr(shard, name)
        if total != told:
            raise DataError(f"{file}: the shards must have {told} {name} together, got {total}")
    known: dict[str, str] = {}
    for shard in manifest.shards:
        if (other := known.setdefault(shard.sha256, shard.file)) != shard.file:
            raise DataError(f"{file}: a shard must not be written twice, but {other} and {shard.file} have one content")
    if len({shard.file for shard in manifest.shards}) != len(manifest.shards):
        raise DataError(f"{file}: a shard must not be listed twice")


def check_files(folder: Path, manifest: Manifest, shards: Iterable[Shard]) -> None:
    """Require some of the shards, and the index, to be there in their full length, and no file that is not listed.

    Raises:
        DataError: the file, and what is wrong with it.
    """
    for shard in (manifest.index, *shards):
        file = folder / shard.file
        if not file.is_file():
            raise DataError(f"{file}: the manifest lists this file, but it is missing")
        if (size := file.stat().st_size) != shard.bytes:
            how = "cut" if size < shard.bytes else "changed"
            raise DataError(f"{file}: the file is {how}: it has {size} bytes, the manifest says {shard.bytes}")
    listed = [shard.file for shard in (manifest.index, *manifest.shards)]
    for file in sorted(folder.glob("*.parquet")):
        if file.name not in listed:
            raise DataError(f"{file}: the manifest does not list this file; was a shard written twice?")


def check_content(folder: Path, shards: Sequence[Shard], store: Cache | None, *, progress: bool = True) -> None:
    """Require files to have the bytes that were written; the cache remembers those that were not touched since.

    Raises:
        DataError: the file that was changed.
    """
    done, total = 0, sum([shard.bytes for shard in shards])
    content: Callable[[Path], str] = digest
    if store is not None:
        content = store.content
    with progress_bar("Checking shards", total, enabled=progress) as report:
        for shard in shards:
            file = folder / shard.file
            if content(file) != shard.sha256:
                raise DataError(f"{file}: the file was changed: its content does not match the manifest")
            report(done := done + shard.bytes)


@dataclass(frozen=True, eq=False)
class Index:
    """All lists of a set, in their order.

    Attributes:
        qids: the query of each, an array of pyarrow.
        sizes: ``(Q,)`` documents of each.
        shard: ``(Q,)`` the number of its shard.
    """

    qids: pa.Array
    sizes: Tensor
    shard: Tensor

    def of_shard(self, number: int) -> tuple[pa.Array, Tensor]:
        """Queries and sizes of the lists of one shard."""
        first, last = torch.searchsorted(self.shard, torch.tensor([number, number + 1])).tolist()
        return self.qids.slice(first, last - first), self.sizes[first:last]

    def write(self, path: Path) -> None:
        """As Parquet, atomically."""
        import pyarrow as pa

        columns = {"qid": self.qids, "documents": self.sizes.numpy(), "shard": self.shard.numpy()}
        save_parquet(pa.table(columns), path)


def read_index(folder: Path, manifest: Manifest) -> Index:
    """The lists of a set, as the index gives them.

    Raises:
        DataError: it was changed, does not fit the manifest, or has a query in two shards.
    """
    require_arrow()
    from pyarrow import parquet

    check_content(folder, [manifest.index], None)
    file = folder / manifest.index.file
    table = parquet.read_table(file, use_threads=False).combine_chunks()
    sizes = torch.from_numpy(table["documents"].to_numpy().astype(np.int64))
    shard = torch.from_numpy(table["shard"].to_numpy().astype(np.int64))
    qids = table["qid"].combine_chunks()
    _check_queries(folder, manifest, qids, shard)
    rises = bool((shard.diff() >= 0).all())
    counts = torch.bincount(shard, minlength=len(manifest.shards)).tolist()
    if not rises or counts != [entry.queries for entry in manifest.shards]:
        raise DataError(f"{file}: the index must have the queries of each shard that the manifest counts, in its order")
    documents = segment_sum(sizes, offsets_from_sizes(torch.tensor(counts))).tolist()
    if documents != [entry.documents for entry in manifest.shards]:
        raise DataError(f"{file}: the index must have the documents of each shard that the manifest counts")
    return Index(qids, sizes, shard)


def _check_queries(folder: Path, manifest: Manifest, qids: pa.Array, shard: Tensor) -> None:
    """Require every query to stand in one shard only."""
    import pyarrow.compute as pc

    if len(pc.unique(qids)) == len(qids):
        return
    counts = pc.value_counts(qids)
    twice = counts.field("values").filter(pc.greater(counts.field("counts"), 1))[0]
    places = shard[torch.from_numpy(pc.equal(qids, twice).to_numpy(zero_copy_only=False))].tolist()
    one, other = manifest.shards[places[0]], manifest.shards[places[1]]
    raise split_query(folder, twice.as_py(), one.file, other.file)


def split_query(folder: Path, qid: Any, one: str, other: str) -> DataError:
    """What to say about a query that stands in two shards."""
    return DataError(f"{folder}: a query must stand in one shard, but query {qid!r} is in {one} and in {other}")
