"""A set as a folder of Parquet shards, for sets larger than memory and for several processes.

A shard holds whole lists, a row per query, like the Parquet files of `lgmml_torch.save_table`. Lists are numbered over
the whole set in the order of their ids, and their documents stand in canonical order, so reading sorts nothing. A
column ``place`` keeps where each document stood in its list before: equal scores are ranked by it. The parts of a set
are folders ``train``, ``valid`` and ``test``, each with a manifest (`lgmml_torch.data.manifest`).
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lgmml_torch import distributed
from lgmml_torch.checks import DataError, LGMMLError, check_positive
from lgmml_torch.data.cache import Cache, resolve
from lgmml_torch.data.columns import Columns, require_arrow
from lgmml_torch.data.letor import SPLITS
from lgmml_torch.data.manifest import (
    INDEX,
    MANIFEST,
    SHARD,
    Index,
    Manifest,
    Shard,
    check_content,
    check_files,
    read_index,
    read_manifest,
    split_query,
    write_manifest,
)
from lgmml_torch.data.source import DataSource, PathLike
from lgmml_torch.data.write import nested_table, save_parquet
from lgmml_torch.distributed import SharedLists
from lgmml_torch.files import SUFFIX
from lgmml_torch.progress import progress_bar
from lgmml_torch.ragged import RankingData
from lgmml_torch.segments import argsort_segments, list_blocks, offsets_from_sizes, positions

if TYPE_CHECKING:
    import pyarrow as pa

_VALUES_AT_ONCE = 1 << 21  # features of a shard that are decoded together
_BUFFER = 1 << 20  # bytes read at a time
_PLACE = "place"  # the column with a document's place in its list, from 0, in the order of the source
SHARD_COLUMNS = Columns(drop=(_PLACE,))
_OWN_NAMES = r"shard-\d+\.parquet|index\.parquet|manifest\.json"
_OWN = re.compile(rf"(?:{_OWN_NAMES})|\.(?:{_OWN_NAMES})\..*{re.escape(SUFFIX)}")


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
        DataError: the folder holds something else, or what is wrong with the source.
    """
    check_positive("documents", documents)
    require_arrow()
    if isinstance(source, RankingData):
        _check_plain(source)
    home = Path(folder)
    check_room(home)
    total = source.num_documents if isinstance(source, RankingData) else source.num_rows
    if not total:
        raise DataError("there are no documents to write")
    text = _are_text(source.qids)
    labelled = isinstance(source, RankingData) or source.has_labels
    parts: list[_Part] = []
    written = 0
    clear_folder(home)
    with progress_bar("Writing shards", total, enabled=progress) as report:
        for data in _blocks(source, documents):
            if text:
                data = data.replace(qids=tuple(map(str, data.qids)))
            parts.append(_write_shard(home / SHARD.format(len(parts)), data, labelled=labelled))
            report(written := written + data.num_documents)
    shards, ids, sizes, lows, highs, have_ids = zip(*parts, strict=True)
    labels = (min(lows), max(highs))
    index = _write_index(home / INDEX, ids, sizes, text=text)
    manifest = Manifest(
        queries=index.queries,
        documents=total,
        features=data.num_features,
        dtype=str(data.features.dtype).removeprefix("torch."),
        feature_names=data.feature_names,
        labels=labels if labelled else None,
        doc_ids=any(have_ids),
        index=index,
        shards=shards,
        table=source.table,
    )
    write_manifest(home, manifest)
    return manifest


def _check_plain(data: RankingData) -> None:
    """Refuse what shards cannot hold, rather than lose it.

    Raises:
        DataError: there are weights or positions.
    """
    held = [name for name in ("query_weights", "document_weights", "positions") if getattr(data, name) is not None]
    if held:
        raise DataError(f"shards have no place for weights and positions, got {', '.join(held)}")


class _Part(NamedTuple):
    """What is to be remembered of a shard after it was written."""

    shard: Shard
    qids: tuple[Hashable, ...]
    sizes: Tensor
    low: float
    high: float
    doc_ids: bool


def check_room(home: Path) -> None:
    """Refuse a folder that holds anything but shards, whole or not.

    Raises:
        DataError: what else it holds.
    """
    if not home.exists():
        return
    if not home.is_dir():
        raise DataError(f"{home}: shards need a folder, this is a file")
    for path in sorted(home.iterdir()):
        if not _OWN.fullmatch(path.name) or path.is_dir():
            raise DataError(f"{home}: shards need a folder of their own, this one holds {path.name!r}")


def clear_folder(home: Path) -> None:
    """Make an empty folder for shards: those of before are removed, their manifest first."""
    check_room(home)
    home.mkdir(parents=True, exist_ok=True)
    (home / MANIFEST).unlink(missing_ok=True)
    for path in home.iterdir():
        path.unlink()


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


def _write_shard(file: Path, data: RankingData, *, labelled: bool) -> _Part:
    import pyarrow as pa

    place = torch.empty(data.num_documents, dtype=torch.int32)
    place[argsort_segments(data.order, data.offsets)] = positions(data.offsets).int()
    table = nested_table(data.replace(order=torch.arange(data.num_documents)))
    offsets = pa.array(data.offsets.numpy(), pa.int32())
    table = table.append_column(_PLACE, pa.ListArray.from_arrays(offsets, pa.array(place.numpy())))
    if not labelled:
        table = table.drop_columns(["label"])
    save_parquet(table, file)
    shard = Shard.of(file, data.num_queries, data.num_documents)
    low, high = float(data.labels.min()), float(data.labels.max())
    return _Part(shard, data.qids, data.sizes, low, high, data.doc_ids is not None)


def _write_index(file: Path, qids: Sequence[Sequence[Hashable]], sizes: Sequence[Tensor], *, text: bool) -> Shard:
    """Write the index of a set; both sequences have an entry for each shard."""
    import pyarrow as pa

    kind = pa.string() if text else pa.int64()
    names = pa.array(list(chain.from_iterable(qids)), kind)
    shard = torch.arange(len(qids)).repeat_interleave(torch.tensor(list(map(len, qids))))
    whole = torch.cat(list(sizes))
    Index(names, whole, shard).write(file)
    return Shard.of(file, len(names), int(whole.sum()))


def check_shards(folder: PathLike, *, progress: bool = True) -> Manifest:
    """Read every file of a folder of shards and compare it with the manifest and the index.

    Raises:
        DataError: a shard that is missing, cut, changed, written twice or not listed, or a query in two of them.
    """
    home, manifest = Path(folder), read_manifest(folder)
    check_files(home, manifest, manifest.shards)
    index = read_index(home, manifest)
    check_content(home, manifest.shards, None, progress=progress)
    for number in range(len(manifest.shards)):
        for _ in _pieces(home, manifest, index, number, ["qid", "features"]):
            pass
    return manifest


def open_shards(
    folder: PathLike,
    *,
    rank: int | None = None,
    world_size: int | None = None,
    cache: bool | PathLike | Cache = True,
    doc_ids: bool = False,
    progress: bool = True,
) -> RankingData:
    """The lists of one process; by their numbers in the set, and who has the others, see `RankingData.shared_lists`.

    Its shards are decoded once, one at a time, into a file of the cache, which is memory-mapped.

    Args:
        folder: a folder with a manifest.
        rank: the number of the process, from 0; by default of this one.
        world_size: how many processes share the set; by default all there are.
        cache: as for `lgmml_torch.load_letor`; without a cache all lists of the process are held in memory.
        doc_ids: read the ids of the documents too, which are held in memory.
        progress: show a bar if it takes more than two seconds.

    Raises:
        DataError: the shard that is missing, cut, changed or written twice, or a query that is in two of them.
    """
    if rank is None:
        rank = distributed.rank()
    processes = distributed.world_size() if world_size is None else world_size
    if not 0 <= rank < processes:
        raise LGMMLError(f"`rank` must lie in [0, world_size = {processes}), got {rank}")
    home, manifest = Path(folder), read_manifest(folder)
    owners = torch.tensor(manifest.owners(processes))
    own = (owners == rank).nonzero()[:, 0].tolist()
    shards = [manifest.shards[number] for number in own]
    check_files(home, manifest, shards)
    index = read_index(home, manifest)
    shared = SharedLists(index.sizes, owners[index.shard], rank)
    arrays = _load(home, manifest, index, own, resolve(cache), progress=progress)
    qids = index.qids.take(shared.own.numpy()).to_pylist()
    names = _doc_ids(home, shards) if doc_ids and manifest.doc_ids else None
    return RankingData(
        features=torch.from_numpy(arrays["features"]),
        labels=torch.from_numpy(arrays["labels"]),
        offsets=offsets_from_sizes(index.sizes[shared.own]),
        qids=tuple(qids),
        order=torch.from_numpy(arrays["order"]),
        doc_ids=names,
        feature_names=manifest.feature_names,
        shared_lists=shared,
        table=manifest.table,
    )


def _load(
    home: Path, manifest: Manifest, index: Index, own: Sequence[int], store: Cache | None, *, progress: bool
) -> dict[str, NDArray[Any]]:
    """Features, labels and order of some shards, which follow one another."""
    shards = [manifest.shards[number] for number in own]
    check_content(home, shards, store, progress=progress)
    total = sum([shard.documents for shard in shards])
    spec: dict[str, tuple[tuple[int, ...], Any]] = {
        "features": ((total, manifest.features), np.dtype(manifest.dtype)),
        "labels": ((total,), np.float32),
        "order": ((total,), np.int64),
    }

    def fill(targets: dict[str, NDArray[Any]]) -> None:
        done = 0
        with progress_bar("Reading shards", total, enabled=progress) as report:
            for number in own:
                for table, sizes in _pieces(home, manifest, index, number):
                    end = done + int(sizes.sum())
                    _decode(table, sizes, slice(done, end), targets)
                    report(done := end)
        _give_back()

    if store is not None and own:
        key = {"shards": 1, "content": [shard.sha256 for shard in shards]}
        return store.get_or_fill(key, spec, fill)
    arrays = {}
    for name, (shape, dtype) in spec.items():
        arrays[name] = np.zeros(shape, dtype)
    fill(arrays)
    return arrays


def _decode(table: pa.Table, sizes: Tensor, rows: slice, targets: dict[str, NDArray[Any]]) -> None:
    """Write the documents of some lists to their rows."""
    features = targets["features"][rows]
    features[...] = _flat(_flat(table["features"])).to_numpy().reshape(features.shape)
    if "label" in table.column_names:
        targets["labels"][rows] = _flat(table["label"]).to_numpy()
    offsets = offsets_from_sizes(sizes) + rows.start
    targets["order"][rows] = offsets[:-1].repeat_interleave(sizes).numpy() + _flat(table[_PLACE]).to_numpy()


def _pieces(
    home: Path, manifest: Manifest, index: Index, number: int, columns: list[str] | None = None
) -> Iterator[tuple[pa.Table, Tensor]]:
    """Some lists of a shard after the others, with their sizes, which must be those that the index gives it."""
    import pyarrow as pa
    from pyarrow import parquet

    shard, seen = manifest.shards[number], 0
    values = max(1, shard.documents * manifest.features)
    lists = max(1, _VALUES_AT_ONCE * shard.queries // values)
    with parquet.ParquetFile(home / shard.file, buffer_size=_BUFFER, pre_buffer=False) as file:
        for batch in file.iter_batches(lists, columns=columns, use_threads=False):
            table = pa.Table.from_batches([batch])
            yield table, _check_lists(home, manifest, index, number, table, seen)
            seen += len(table)
    if seen != len(index.of_shard(number)[1]):
        raise _other_queries(home / shard.file)


def _give_back() -> None:
    """Have Arrow return memory it does not need any more: it would keep what the largest piece took."""
    import pyarrow as pa

    pa.default_memory_pool().release_unused()


def _read(file: Path, columns: list[str] | None = None) -> pa.Table:
    from pyarrow import parquet

    return parquet.read_table(file, columns=columns, use_threads=False).combine_chunks()


def _flat(lists: Any) -> pa.Array:
    """The entries of lists, one after the other."""
    if hasattr(lists, "chunks"):
        lists = lists.combine_chunks()
    return lists.flatten()


def _check_lists(home: Path, manifest: Manifest, index: Index, number: int, table: pa.Table, first: int) -> Tensor:
    """The sizes of some lists of a shard, which must be those that the index gives it from ``first`` on."""
    import pyarrow.compute as pc

    file, found = manifest.shards[number].file, table["qid"].combine_chunks()
    expected, sizes = index.of_shard(number)
    expected, sizes = expected.slice(first, len(found)), sizes[first : first + len(found)]
    if not found.equals(expected):
        for qid in found.to_pylist():
            place = index.qids.index(qid).as_py()
            if place >= 0 and int(index.shard[place]) != number:
                raise split_query(home, qid, manifest.shards[int(index.shard[place])].file, file)
        raise _other_queries(home / file)
    lengths = pc.list_value_length(table["features"].combine_chunks()).to_numpy()
    if not np.array_equal(lengths, sizes.numpy()):
        raise DataError(f"{home / file}: the lists of this shard are not as long as the index says")
    return sizes


def _other_queries(file: Path) -> DataError:
    return DataError(f"{file}: the queries of this shard are not those that the index lists")


def document_keys(file: Path) -> dict[str, pa.Array]:
    """Of each document of a shard: its query, its place in the list and, where there are any, its id."""
    import pyarrow.compute as pc
    from pyarrow import parquet

    known = parquet.read_schema(file).names
    table = _read(file, [name for name in (SHARD_COLUMNS.qid, _PLACE, SHARD_COLUMNS.doc_id) if name in known])
    queries = pc.list_parent_indices(table[_PLACE].combine_chunks())
    keys = {SHARD_COLUMNS.qid: table[SHARD_COLUMNS.qid].combine_chunks().take(queries)}
    for name in table.column_names[1:]:
        keys[name] = _flat(table[name])
    return keys


def _doc_ids(home: Path, shards: Sequence[Shard]) -> tuple[str, ...]:
    """The ids of all documents; empty where a shard has none."""
    words: list[str] = []
    for shard in shards:
        ids = document_keys(home / shard.file).get(SHARD_COLUMNS.doc_id)
        if ids is None:
            words.extend([""] * shard.documents)
        else:
            words.extend(ids.to_pylist())
    return tuple(words)


def shard_folders(path: PathLike) -> dict[str, Path]:
    """The parts of a set of shards and their folders: one without a name if the folder has a manifest of its own."""
    home = Path(path)
    if (home / MANIFEST).is_file():
        return {"": home}
    found = {split: home / split for split in SPLITS if (home / split).is_dir()}
    for folder in found.values():
        for file in folder.iterdir():
            if _OWN.fullmatch(file.name):
                return found
    return {}


def open_shard_splits(
    path: PathLike, *, cache: bool | PathLike | Cache = True, doc_ids: bool = False, progress: bool = True
) -> dict[str, RankingData]:
    """Of each part of a set of shards the lists of this process; a folder that has a manifest is the training part.

    Args:
        path: a folder with folders ``train`` and, where there are any, ``valid`` and ``test``.
        cache: as for `open_shards`, like the arguments after it.
        doc_ids: see `open_shards`.
        progress: see `open_shards`.

    Raises:
        DataError: no shards there, parts with other features, no labels, or what `open_shards` finds.
    """
    folders = shard_folders(path)
    if not folders:
        raise DataError(f"{path}: no such set of shards; `lgmml convert` makes one")
    known: tuple[Path, Manifest] | None = None
    for folder in folders.values():
        manifest = read_manifest(folder)
        if manifest.labels is None:
            raise DataError(f"{folder}: there are no labels, and training needs them")
        first, like = known = known or (folder, manifest)
        if (manifest.features, manifest.feature_names, manifest.dtype) != (
            like.features, like.feature_names, like.dtype
        ):  # fmt: skip
            raise DataError(
                f"{folder}: the parts must have the same features, got {manifest.features} ({manifest.dtype}) here and "
                f"{like.features} ({like.dtype}) in {first}, or other names; convert them with one number of features"
            )
    parts = {}
    for split, folder in folders.items():
        parts[split or "train"] = open_shards(folder, cache=cache, doc_ids=doc_ids, progress=progress)
    return parts
