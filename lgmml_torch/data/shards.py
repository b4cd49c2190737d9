"""A set as a folder of Parquet shards, for sets larger than memory and for several processes.

A shard holds whole lists, a row per query, like the Parquet files of `lgmml_torch.save_table`. Lists are numbered over
the whole set in the order of their ids, and their documents stand in canonical order, so reading sorts nothing. A
column ``place`` keeps where each document stood in its list before: equal scores are ranked by it. The parts of a set
are folders ``train``, ``valid`` and ``test``.

``manifest.json`` is written last, so a folder without one was not written to the end. It counts what is there and gives
size and SHA-256 of every file. ``index.parquet`` names the query of every list of the set, its number of documents and
its shard, in the order of the lists.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lgmml_torch import distributed
from lgmml_torch.categories import Categories, WordColumns, vocabularies
from lgmml_torch.checks import DataError, LGMMLError
from lgmml_torch.data.cache import Cache, digest
from lgmml_torch.data.columns import Columns, pa
from lgmml_torch.data.folder import ParquetFiles, decode_lists, shared_data
from lgmml_torch.data.letor import SPLITS
from lgmml_torch.data.source import PathLike, ReadOptions
from lgmml_torch.distributed import SharedLists
from lgmml_torch.files import SUFFIX, as_tuples, write_text
from lgmml_torch.progress import progress_bar
from lgmml_torch.ragged import RankingData
from lgmml_torch.segments import offsets_from_sizes

MANIFEST, INDEX, SHARD = "manifest.json", "index.parquet", "shard-{:05d}.parquet"
_FORMAT, _VERSION = "lgmml_torch shards", 1
PLACE = "place"  # the column with a document's place in its list, from 0, in the order of the source
SHARD_COLUMNS = Columns(drop=(PLACE,))
_OWN_NAMES = r"shard-\d+\.parquet|index\.parquet|manifest\.json"
# Files of a folder of shards, whole or on their way to their place.
_SHARD_FILE = re.compile(rf"(?:{_OWN_NAMES})|\.(?:{_OWN_NAMES})\..*{re.escape(SUFFIX)}")


@dataclass(frozen=True)
class Shard:
    """One file with whole lists; the index counts as one too."""

    file: str  # its name in the folder
    bytes: int
    sha256: str
    queries: int
    documents: int

    @classmethod
    def of(cls, path: Path, queries: int, documents: int) -> Shard:
        """Describe a file that was just written."""
        return cls(path.name, path.stat().st_size, digest(path), queries, documents)

    def check_content(self, folder: Path, store: Cache | None) -> None:
        """Require the bytes that were written; the cache remembers files that were not touched since."""
        file = folder / self.file
        found = digest(file) if store is None else store.content(file)
        if found != self.sha256:
            raise DataError(f"{file}: the file was changed: its content does not match the manifest")


@dataclass(frozen=True)
class Manifest:
    """A set of lists, cut into shards."""

    queries: int  # lists in all shards
    documents: int
    features: int  # of each document
    dtype: str  # of the features, ``float32`` or ``float64``
    feature_names: tuple[str, ...] | None
    labels: tuple[float, float] | None  # the lowest and the highest; None where the documents have none
    doc_ids: bool  # whether documents have ids
    index: Shard  # the file that lists all queries
    shards: tuple[Shard, ...]  # in the order of the lists
    table: Mapping[str, Any] | None = None  # how the rows were read, see `RankingData`
    categories: Categories | None = None  # the words of each feature, see `RankingData`

    def __str__(self) -> str:
        labels = "no labels"
        if self.labels is not None:
            labels = f"labels {self.labels[0]:g}–{self.labels[1]:g}"
        return (
            f"{self.queries:,} queries, {self.documents:,} documents, {self.features:,} features ({self.dtype}), "
            f"{labels}, {len(self.shards):,} shards"
        )

    @classmethod
    def read(cls, folder: PathLike) -> Manifest:
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
        if (form, version) != (_FORMAT, _VERSION):
            rule = f"the format must be {_FORMAT!r}, version {_VERSION}"
            raise DataError(f"{file}: {rule}, got {form!r}, version {version}")
        try:
            manifest = cls(**_decoded(content))
        except (KeyError, TypeError) as error:
            raise DataError(f"{file}: the manifest is damaged: {error}") from error
        manifest._check_counts(file)
        return manifest

    def write(self, folder: Path) -> None:
        """Say that the folder is complete."""
        content = {"format": _FORMAT, "version": _VERSION, **asdict(self)}
        write_text(folder / MANIFEST, json.dumps(content, indent=1) + "\n")

    def _check_counts(self, file: Path) -> None:
        if not self.shards:
            raise DataError(f"{file}: there must be at least one shard, got none")
        for name in ("queries", "documents"):
            told, total = getattr(self, name), sum(map(attrgetter(name), self.shards))
            if total != told:
                raise DataError(f"{file}: the shards must have {told} {name} together, got {total}")

    def check_files(self, folder: Path, shards: Iterable[Shard]) -> None:
        """Require some of the shards, and the index, to be there in full, and no file that is not listed."""
        for shard in (self.index, *shards):
            file = folder / shard.file
            if not file.is_file():
                raise DataError(f"{file}: the manifest lists this file, but it is missing")
            if (size := file.stat().st_size) != shard.bytes:
                how = "cut" if size < shard.bytes else "changed"
                raise DataError(f"{file}: the file is {how}: it has {size} bytes, the manifest says {shard.bytes}")
        listed = [shard.file for shard in (self.index, *self.shards)]
        for file in sorted(folder.glob("*.parquet")):
            if file.name not in listed:
                raise DataError(f"{file}: the manifest does not list this file; was a shard written twice?")


def _decoded(content: dict[str, Any]) -> dict[str, Any]:
    """The attributes of a manifest; the last two are absent in folders of earlier releases."""
    content = {"table": None, "categories": None, **content}
    values: dict[str, Any] = {entry.name: as_tuples(content[entry.name]) for entry in fields(Manifest)}
    values["index"] = Shard(**values["index"])
    values["shards"] = tuple([Shard(**shard) for shard in values["shards"]])
    for name in ("feature_names", "labels", "categories"):
        if values[name] is not None:
            values[name] = tuple(values[name])
    return values


def _check_contents(folder: Path, shards: Sequence[Shard], store: Cache | None, *, progress: bool) -> None:
    done, total = 0, sum([shard.bytes for shard in shards])
    with progress_bar("Checking shards", total, enabled=progress) as report:
        for shard in shards:
            shard.check_content(folder, store)
            report(done := done + shard.bytes)


def check_shards(folder: PathLike, *, progress: bool = True) -> Manifest:
    """Read every file of a folder of shards and compare it with the manifest.

    Raises:
        DataError: a file that is missing, cut, changed or not listed.
    """
    home, manifest = Path(folder), Manifest.read(folder)
    manifest.check_files(home, manifest.shards)
    _check_contents(home, [manifest.index, *manifest.shards], None, progress=progress)
    return manifest


def check_room(home: Path) -> None:
    """Refuse a folder that holds anything but shards, whole or not."""
    if home.exists() and not home.is_dir():
        raise DataError(f"{home}: shards need a folder, this is a file")
    if not home.exists():
        return
    for path in sorted(home.iterdir()):
        if not _SHARD_FILE.fullmatch(path.name) or path.is_dir():
            raise DataError(f"{home}: shards need a folder of their own, this one holds {path.name!r}")


def clear_folder(home: Path) -> None:
    """Make an empty folder for shards: those of before are removed, their manifest first."""
    check_room(home)
    home.mkdir(parents=True, exist_ok=True)
    (home / MANIFEST).unlink(missing_ok=True)
    for path in home.iterdir():
        path.unlink()


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
        DataError: the file that is missing, cut, changed or not listed.
    """
    if rank is None:
        rank = distributed.rank()
    processes = distributed.world_size() if world_size is None else world_size
    if not 0 <= rank < processes:
        raise LGMMLError(f"`rank` must lie in [0, world_size = {processes}), got {rank}")
    home, manifest = Path(folder), Manifest.read(folder)
    owners = SharedLists.owners(torch.tensor([shard.documents for shard in manifest.shards]), processes)
    shards = [manifest.shards[number] for number in (owners == rank).nonzero()[:, 0].tolist()]
    manifest.check_files(home, shards)
    manifest.index.check_content(home, None)
    index = pa.parquet.read_table(home / manifest.index.file, use_threads=False).combine_chunks()
    sizes = torch.tensor(index["documents"].to_numpy())
    shared = SharedLists(sizes, owners[torch.tensor(index["shard"].to_numpy())], rank)
    qids = index["qid"].take(shared.own.numpy()).to_pylist()
    store = Cache.of(cache)
    _check_contents(home, shards, store, progress=progress)
    about = {"feature_names": manifest.feature_names, "categories": manifest.categories, "table": manifest.table}
    if not shards:
        empty = {"features": np.zeros((0, manifest.features), manifest.dtype), "labels": np.zeros(0, np.float32)}
        return shared_data({**empty, "place": np.zeros(0, np.int32)}, 0, shared, qids, **about)
    options = ReadOptions(
        missing="zero",  # a word outside its vocabulary, no other gap is left
        dtype=getattr(torch, manifest.dtype),
        columns=SHARD_COLUMNS,
        progress=progress,
        categories=WordColumns(vocabularies(manifest.feature_names, manifest.categories)),
        doc_ids=False,
    )
    key = {"shards": 2, "content": [shard.sha256 for shard in shards]}
    system = pa.fs.LocalFileSystem()
    infos = system.get_file_info([str(home / shard.file) for shard in shards])
    with ParquetFiles(system, "", infos).source(options) as source:
        places = source.numbers(PLACE).astype(np.int32)
        source.number_queries()  # ids that became text may sort in another way
        arrays = decode_lists(source, offsets_from_sizes(sizes[shared.own])[:-1], store, key, places=places)
        if doc_ids and manifest.doc_ids:
            about["doc_ids"] = tuple(source.column(SHARD_COLUMNS.doc_id))
    return shared_data(arrays, 0, shared, qids, **about)


def shard_folders(path: PathLike) -> dict[str, Path]:
    """The parts of a set of shards and their folders: one without a name if the folder has a manifest of its own."""
    home = Path(path)
    if (home / MANIFEST).is_file():
        return {"": home}
    found = {split: home / split for split in SPLITS if (home / split).is_dir()}
    for folder in found.values():
        for file in folder.iterdir():
            if _SHARD_FILE.fullmatch(file.name):
                return found
    return {}


def open_shard_splits(path: PathLike, **options: Any) -> dict[str, RankingData]:
    """Of each part of a set of shards the lists of this process; a folder that has a manifest is the training part.

    Args:
        path: a folder with folders ``train`` and, where there are any, ``valid`` and ``test``.
        options: those of `open_shards`.

    Raises:
        DataError: no shards there, parts with other features, no labels, or what `open_shards` finds.
    """
    folders = shard_folders(path)
    if not folders:
        raise DataError(f"{path}: no such set of shards; `lgmml convert` makes one")
    first = next(iter(folders.values()))
    like = Manifest.read(first)
    for folder in folders.values():
        manifest = Manifest.read(folder)
        if manifest.labels is None:
            raise DataError(f"{folder}: there are no labels, and training needs them")
        for name in ("features", "feature_names", "dtype"):
            if getattr(manifest, name) != getattr(like, name):
                raise DataError(
                    f"{folder}: the parts must have the same features, got {manifest.features} ({manifest.dtype}) here "
                    f"and {like.features} ({like.dtype}) in {first}, or other names; convert them with one number of "
                    "features"
                )
    parts = {}
    for split, folder in folders.items():
        parts[split or "train"] = open_shards(folder, **options)
    return parts
