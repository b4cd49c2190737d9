"""Parts of a set, and lists that need not fit into memory: they are decoded once into a file of the cache.

Lists stand there in the order of their ids, and their documents in canonical order, as `DataSource.read` gives them.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lgmml_torch import distributed
from lgmml_torch.checks import DataError, did_you_mean
from lgmml_torch.data.cache import Arrays, Cache
from lgmml_torch.data.letor import SPLITS
from lgmml_torch.data.source import DataSource, PathLike, ReadOptions, is_folder, open_file
from lgmml_torch.distributed import SharedLists
from lgmml_torch.inputs import canonical_ranks, place_vector
from lgmml_torch.progress import progress_bar
from lgmml_torch.ragged import RankingData
from lgmml_torch.segments import argsort_segments, offsets_from_sizes, positions

_VALUES_AT_ONCE = 1 << 22  # features that are decoded and sorted together


def even_owners(
    sizes: Tensor,  # (n,)
    processes: int,
) -> Tensor:  # (n,)
    """The process that has each of some pieces: runs of pieces with about the same number of documents.

    Every process works this out alike. With fewer pieces than processes some have none.
    """
    middles = 2 * sizes.cumsum(0) - sizes  # twice, so that they are whole numbers
    return middles * processes // (2 * max(1, int(sizes.sum())))


def places_of(data: RankingData) -> Tensor:  # (N,) int32
    """Where each document stands in its list in the caller's order, from 0."""
    places = torch.empty(data.num_documents, dtype=torch.int32)
    places[argsort_segments(data.order, data.offsets)] = positions(data.offsets).int()
    return places


def decode_lists(
    source: DataSource,
    starts: Tensor,  # (Q,)
    store: Cache | None,
    key: Mapping[str, Any],
    *,
    places: NDArray[np.int32] | None = None,  # (N,)
) -> Arrays:
    """Features, labels and places (see `places_of`) of all documents; in memory without a cache.

    Lists are numbered in the order of their ids; ``starts`` is the row of the first document of each. ``places`` are
    those of the rows of the source, where they do not follow from the order of the rows.
    """
    width, total = source.num_features, source.num_rows
    shapes: dict[str, tuple[tuple[int, ...], Any]] = {
        "features": ((total, width), np.dtype(source.options.kind)),
        "labels": ((total,), np.dtype(np.float32)),
        "place": ((total,), np.dtype(np.int32)),
    }

    def fill(targets: Arrays) -> None:
        query = done = 0
        with progress_bar("Decoding", total, enabled=source.options.progress) as report:
            for batch in source.batches(max(1, _VALUES_AT_ONCE // width), by_id=True):
                data = batch.data
                place = places_of(data)
                if places is not None:
                    place = torch.from_numpy(places[batch.rows])[data.order]
                firsts = starts[query : query + data.num_queries].repeat_interleave(data.sizes)
                rows = (firsts + positions(data.offsets)).numpy()
                for name, values in (("features", data.features), ("labels", data.labels), ("place", place)):
                    targets[name][rows] = values.numpy()
                query += data.num_queries
                report(done := done + data.num_documents)

    if store is not None:
        return store.get_or_fill(key, shapes, fill)
    arrays = {}
    for name, (shape, dtype) in shapes.items():
        arrays[name] = np.zeros(shape, dtype)
    fill(arrays)
    return arrays


def _numbered_lists(source: DataSource) -> RankingData:
    """The lists of a source without features and labels; their ids are their places among the sorted ids."""
    ranks = canonical_ranks(source.qids)[source.codes]
    sizes = np.bincount(ranks, minlength=len(source.qids))
    return RankingData(
        features=torch.empty(len(ranks), 0),
        labels=torch.zeros(len(ranks)),
        offsets=offsets_from_sizes(torch.from_numpy(sizes)),
        qids=tuple(range(len(sizes))),
        order=torch.from_numpy(np.argsort(ranks, kind="stable")),
    )


def shared_data(arrays: Arrays, start: int, shared: SharedLists, qids: Sequence[Hashable], **rest: Any) -> RankingData:
    """The lists of this process, which stand together in ``arrays`` (see `decode_lists`) from row ``start`` on."""
    sizes = shared.sizes[shared.own]
    offsets = offsets_from_sizes(sizes)
    rows = slice(start, start + int(offsets[-1]))
    return RankingData(
        features=torch.from_numpy(arrays["features"][rows]),
        labels=torch.from_numpy(arrays["labels"][rows]),
        offsets=offsets,
        qids=tuple(qids),
        order=offsets[:-1].repeat_interleave(sizes) + torch.from_numpy(arrays["place"][rows]),
        shared_lists=shared,
        **rest,
    )


def stream_table(
    path: PathLike,
    options: ReadOptions,
    cut: Callable[[RankingData], Mapping[str, RankingData]],
    store: Cache | None,
    only: str = "",
) -> dict[str, RankingData]:
    """The parts of a table; of each the lists of this process, as `lgmml_torch.data.shards.open_shards` gives them.

    ``cut`` puts each of the `_numbered_lists` into one of the parts, unless all of them belong to ``only`` one.
    """
    with open_file(path, replace(options, doc_ids=False)) as source:
        source.check_labelled()
        parts: Mapping[str, RankingData] = {only: _numbered_lists(source)}
        if not only:
            parts = cut(parts[only])
        lists = torch.cat([torch.tensor(part.qids, dtype=torch.long) for part in parts.values()])
        starts = torch.empty_like(lists)
        starts[lists] = offsets_from_sizes(torch.cat([part.sizes for part in parts.values()]))[:-1]
        if distributed.rank() > 0:
            distributed.all_gather(None)  # the first process fills the cache
        try:
            arrays = decode_lists(source, starts, store, _key(path, source, lists))
        finally:  # what fails in one process fails in the others, too
            if distributed.rank() == 0:
                distributed.all_gather(None)
        ids = np.argsort(canonical_ranks(source.qids))
        about = {"feature_names": source.feature_names, "categories": source.categories, "table": source.table}
        found, start = {}, 0
        for name, part in parts.items():
            owner = even_owners(part.sizes, distributed.world_size())
            shared = SharedLists(part.sizes, owner, distributed.rank())
            qids = [source.qids[ids[part.qids[number]]] for number in shared.own.tolist()]
            before = int(part.sizes[owner < shared.rank].sum())
            found[name] = shared_data(arrays, start + before, shared, qids, **about)
            start += part.num_documents
        return found


def _key(path: PathLike, source: DataSource, lists: Tensor) -> dict[str, Any]:
    """What the numbers depend on: names, sizes and times of the files, how they are read, and the cut."""
    if is_folder(path):
        from lgmml_torch.data.folder import ParquetFiles

        files = ParquetFiles.find(path).state
    else:
        status = Path(path).stat()
        files = [[os.fspath(path), status.st_size, status.st_mtime_ns]]
    cut = hashlib.sha256(lists.numpy().tobytes()).hexdigest()
    return {"stream": 1, "files": files, "options": repr(source.options), "cut": cut}


def split_by_words(data: RankingData, words: Sequence[str], where: str) -> dict[str, RankingData]:
    """Parts by a word for each row, which must be the same for all rows of a query."""
    known: dict[str, int] = {}
    for number, (split, aliases) in enumerate(SPLITS.items()):
        known.update(dict.fromkeys((split, *aliases), number))
    numbers = []
    for row, word in enumerate(words):
        if word.strip().lower() not in known:
            raise DataError(f"{where} must say train, valid or test, got {word!r} at row {row + 1} (from 1)")
        numbers.append(known[word.strip().lower()])
    codes = torch.tensor(numbers)[data.order]
    first = codes[data.offsets[:-1]]
    if len(mixed := (codes != first[data.query_index]).nonzero()):
        qid = data.qids[int(data.query_index[mixed[0]])]
        raise DataError(f"{where} must be the same for all rows of a query, got several for query {qid!r}")
    parts = {}
    for number, split in enumerate(SPLITS):
        queries = (first == number).nonzero()[:, 0]
        if len(queries):
            parts[split] = data.select(queries)
    return parts


def split_queries(data: RankingData, fractions: Sequence[float], *, seed: int) -> dict[str, RankingData]:
    """Parts ``train``, ``valid`` and ``test``, cut by query; a part whose share is 0 is left out."""
    if len(fractions) != len(SPLITS):
        raise DataError(f"`fractions` must be three shares, of train, valid and test, got {list(fractions)}")
    shares = dict(zip(SPLITS, map(float, fractions), strict=True))
    parts = {}
    for name, part in zip(shares, data.split(tuple(shares.values()), seed=seed), strict=True):
        if shares[name]:
            parts[name] = part
    return parts


def column_words(
    asked: str, files: Sequence[PathLike], name: str, reading: ReadOptions, kind: str | None, *, needed: bool = True
) -> list[str]:
    """The text of a column, row by row, file after file; nothing of a file without it, where it is not needed."""
    words: list[str] = []
    for file in files:
        with open_file(file, reading, kind=kind) as source:
            header = getattr(source, "header", None) or []
            if name in header:
                words.extend(source.column(name))  # type: ignore[attr-defined]
            elif needed:
                hint = did_you_mean(name, header)
                raise DataError(f"{file}: `{asked}` needs a table with a column {name!r}{hint}")
    return words


def with_extras(
    data: RankingData, files: Sequence[PathLike], reading: ReadOptions, kind: str | None, *, needed: bool
) -> RankingData:
    """The lists with the weights and positions that columns of their files hold."""
    for asked, name in (("weight", reading.columns.weight), ("position", reading.columns.position)):
        if name is None:
            continue
        words = column_words(asked, files, name, reading, kind, needed=needed)
        if not words:
            continue
        values = _numbers(words, name)
        if asked == "weight":
            data = data.weighed(values, name=name)
        else:
            places = torch.from_numpy(place_vector(name, values, data.num_documents))
            data = data.replace(positions=places[data.order])
    return data


def _numbers(words: Sequence[str], name: str) -> NDArray[np.float64]:
    values = np.empty(len(words))
    for row, word in enumerate(words):
        try:
            values[row] = float(word)
        except ValueError:
            raise DataError(f"column {name!r} must hold numbers, got {word!r} at row {row + 1} (from 1)") from None
    return values
