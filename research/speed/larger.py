"""A set several times larger than the memory it may use: trained and scored under a limit, as shards or as it lies.

Run with ``python -m research.speed.larger`` as somebody who may make control groups. Settings follow as ``name=value``:

    gib=8          raw features of the training lists
    limit=2        GiB of memory that training and scoring may use, page cache included
    features=1000
    subset=300     lists of the comparison with a run in memory
    folder=…       where everything goes (about three times ``gib``); the shards stay there for the next time. By
                   default a temporary one
    bank=trained   or boosted
    files=0        train on so many Parquet files, a row per document and a column per feature, instead of shards; the
                   lists are dealt out to the files, and one in fifty stands in two of them
    server=…       the command of moto's server (``moto_server``): the Parquet files then lie in a store of this machine

The limit is a control group's: what is mapped from files counts, and is given back when something else needs the room.
A process that needs more than the limit is killed. The comparison trains on the first lists of the set twice, from
shards under the limit and from a table in memory, and compares models and test NDCG@10.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from pyarrow import fs, parquet

from lgmml_torch.data.generated import LetorLike
from lgmml_torch.data.source import DataSource, ReadOptions, SourceRows
from lgmml_torch.data.write import save_table, write_shards
from lgmml_torch.files import replacing
from lgmml_torch.models.ranker import LGMML
from research.speed.harness import GIB, parse, print_table, save_result

ROOT = Path(__file__).parent.parent.parent
DEFAULTS: dict[str, Any] = {
    "gib": 8.0, "limit": 2.0, "features": 1000, "subset": 300, "folder": "", "bank": "trained",
    "files": 0, "server": "",
}  # fmt: skip
DOCUMENTS = 100  # of a list, on average
OTHERS = 200  # lists for validation, and for the test
SETTINGS = {
    "trained": [
        "experiment=trained", "preprocess=quantile", "local_metrics.num_metrics=16", "local_metrics.rank=2",
        "trainer.max_epochs=1",
    ],
    "boosted": ["local_metrics=boosted", "preprocess=quantile", "local_metrics.rounds=10", "trainer.max_epochs=1"],
}  # fmt: skip
COMMON = ["loader.num_workers=0", "logger=none", "threads=1"]


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    """Whether two models have the same bits; NaN equals NaN."""
    if a.keys() != b.keys():
        return False
    pairs = [(value, b[name]) for name, value in a.items()]
    return all(x.isnan().equal(y.isnan()) and x.nan_to_num().equal(y.nan_to_num()) for x, y in pairs)


class GeneratedLists(DataSource):
    """Some lists of a generated set, made when they are asked for."""

    def __init__(self, lists: LetorLike, first: int, last: int) -> None:
        super().__init__("generated lists", ReadOptions(progress=False))
        self.lists, self.first, self.last = lists, first, last

    def _index(self) -> tuple[NDArray[np.int64], Sequence[int]]:
        sizes = self.lists.sizes[self.first : self.last]
        return np.repeat(np.arange(len(sizes)), sizes), range(self.first, self.last)

    def _read(self, rows: NDArray[np.int64]) -> SourceRows:
        queries, starts = np.unique(self.codes[rows], return_index=True)
        made = [self.lists.query(self.first + int(query)) for query in queries]
        begin = np.concatenate([[0], np.cumsum(self.lists.sizes[self.first : self.last])])
        parts = [rows[start:stop] for start, stop in zip(starts, [*starts[1:], len(rows)], strict=True)]
        taken = [part - begin[query] for query, part in zip(queries, parts, strict=True)]
        features = np.concatenate([one.features[part] for one, part in zip(made, taken, strict=True)])
        return SourceRows(
            features, np.concatenate([one.labels[part] for one, part in zip(made, taken, strict=True)]), None
        )


@contextmanager
def limited(gib: float) -> Iterator[Path]:
    """A control group whose processes may use so much memory together, of either version of the interface.

    Raises:
        SystemExit: no group can be made here.
    """
    first = Path("/sys/fs/cgroup/memory")
    tree, name = (first, "memory.limit_in_bytes") if first.is_dir() else (Path("/sys/fs/cgroup"), "memory.max")
    group = tree / f"lgmml-{os.getpid()}"
    try:
        group.mkdir()
        (group / name).write_text(str(int(gib * GIB)))
    except OSError as error:
        sys.exit(f"no control group with a limit of memory can be made here: {error}")
    try:
        yield group
    finally:
        group.rmdir()


def run(words: list[str], group: Path, cwd: Path) -> dict[str, float]:
    """Run a command in a group: its seconds, and the most memory of its own it had."""
    start = time.perf_counter()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    entry = f"echo $$ > {group}/cgroup.procs && exec {sys.executable} -m lgmml_torch.app.cli " + " ".join(words)
    most = 0
    with subprocess.Popen(["bash", "-c", entry], cwd=cwd, env=environment) as process:
        while process.poll() is None:
            time.sleep(0.2)
            most = max(most, _anonymous(process.pid))
    if process.returncode:
        sys.exit(f"`lgmml {' '.join(words)}` ended with {process.returncode}")
    return {"seconds": time.perf_counter() - start, "own MiB": most / 2**20}


def _anonymous(process: int) -> int:
    """Bytes that a process has of its own, which cannot be given back."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon")), 0)


def write(lists: LetorLike, folder: Path, train: int) -> float:
    """Write shards, where there are none: the first lists train, the last are for validation and test; GiB of files."""
    ends = lists.num_queries - 2 * OTHERS, lists.num_queries - OTHERS, lists.num_queries
    parts = {"train": (0, train), "valid": ends[:2], "test": ends[1:]}
    for name, (first, last) in parts.items():
        if not (folder / name / "manifest.json").exists():
            write_shards(GeneratedLists(lists, first, last), folder / name, documents=20_000)
    return sum(file.stat().st_size for file in (folder / "train").glob("*")) / GIB


def write_files(lists: LetorLike, folder: Path, train: int, files: int) -> float:
    """Write Parquet files as other programs do, where there are none; GiB of those to train on."""
    ends = lists.num_queries - 2 * OTHERS, lists.num_queries - OTHERS, lists.num_queries
    parts = {"train": (range(train), files), "valid": (range(*ends[:2]), 1), "test": (range(*ends[1:]), 1)}
    for name, (queries, count) in parts.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            file = folder / name / f"part-{number:02d}.parquet"
            if not file.exists():
                with replacing(file) as temporary:
                    parquet.write_table(_rows(lists, queries, number, count), temporary)
    return sum(file.stat().st_size for file in (folder / "train").glob("*")) / GIB


def _rows(lists: LetorLike, queries: range, number: int, count: int) -> pa.Table:
    """The rows of one of so many files."""
    qids, labels, features = [], [], []
    for query in queries:
        first = 7 * query % count
        spread = query % 50 == 0
        if first != number and not (spread and (first + 1) % count == number):
            continue
        one = lists.query(query)
        own = np.arange(len(one.labels))
        if spread and count > 1:
            own = own[own % 2 == int(first != number)]
        qids.append(np.full(len(own), query))
        labels.append(one.labels[own])
        features.append(one.features[own])
    whole = np.concatenate(features).T.copy()
    columns = {f"f{place}": values for place, values in enumerate(whole)}
    return pa.table({"qid": np.concatenate(qids), "label": np.concatenate(labels), **columns})


@contextmanager
def served(command: str, folder: Path) -> Iterator[str]:
    """The address of a folder's copy in a store of this machine."""
    port = 5077
    store = {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "AWS_DEFAULT_REGION": "us-east-1"}
    os.environ.update(store, AWS_ACCESS_KEY_ID="any", AWS_SECRET_ACCESS_KEY="any")
    with subprocess.Popen([command, "-H", "127.0.0.1", "-p", str(port)], stderr=subprocess.DEVNULL) as server:
        try:
            time.sleep(10)
            system, _ = fs.FileSystem.from_uri("s3://larger?allow_bucket_creation=true")
            system.create_dir("larger")
            fs.copy_files(str(folder), "larger/set", destination_filesystem=system)
            yield "s3://larger/set"
        finally:
            server.terminate()


def words_of(path: str, data: str, run_folder: str, bank: str, limit: str = "") -> list[str]:
    return [
        "train", f"data={data}", f"data.path={path}", *SETTINGS[bank], *COMMON, f"hydra.run.dir={run_folder}",
        f"paths.cache_dir=cache{limit}",
    ]  # fmt: skip


def compare(lists: LetorLike, folder: Path, group: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """The first lists of the set, from shards under the limit and from tables in memory."""
    if settings["files"]:
        write_files(lists, folder / "subset", settings["subset"], settings["files"])
    else:
        write(lists, folder / "subset", settings["subset"])
    ends = lists.num_queries - 2 * OTHERS, lists.num_queries - OTHERS, lists.num_queries
    table = folder / "table"
    table.mkdir(exist_ok=True)
    for name, (first, last) in {"train": (0, settings["subset"]), "vali": ends[:2], "test": ends[1:]}.items():
        save_table(GeneratedLists(lists, first, last).read(), table / f"{name}.parquet")
    kind = "folder" if settings["files"] else "shards"
    run(words_of("subset", kind, "run-shards", settings["bank"]), group, folder)
    outside = group.parent  # without a limit
    run(words_of("table", "table", "run-table", settings["bank"]), outside, folder)
    models = [LGMML.load(folder / name / "model.safetensors").state_dict() for name in ("run-shards", "run-table")]
    apart = max(
        float((models[0][name].double() - models[1][name].double()).abs().nan_to_num().max())
        for name in models[0] if models[0][name].numel() and models[0][name].shape == models[1][name].shape
    )  # fmt: skip
    return {
        "shards": _test_value(folder / "run-shards"),
        "memory": _test_value(folder / "run-table"),
        "equal bit for bit": equal(*models),
        "largest difference of the models": apart,
    }


def _test_value(run_folder: Path) -> float:
    report = json.loads((run_folder / "report.json").read_text(encoding="utf-8"))
    found = [one for one in report["evaluations"] if one["split"].startswith("test")]
    value: float = found[0]["metrics"]["ndcg@10"]["mean"]
    return value


@contextmanager
def _home(folder: str) -> Iterator[Path]:
    """A folder of its own below the given one, cleared of earlier runs, or a temporary one."""
    if not folder:
        with tempfile.TemporaryDirectory() as made:
            yield Path(made)
        return
    home = Path(folder, "lgmml-larger")
    home.mkdir(parents=True, exist_ok=True)
    for path in home.iterdir():
        if path.is_dir() and not path.name.startswith(("shards-", "folder-")):
            shutil.rmtree(path)
    yield home


def main(words: Sequence[str] | None = None) -> None:
    settings = parse(sys.argv[1:] if words is None else words, DEFAULTS, __doc__)
    queries = max(settings["subset"], int(settings["gib"] * GIB / (4 * settings["features"] * DOCUMENTS)))
    total = queries + 2 * OTHERS
    lists = LetorLike(total, settings["features"], num_documents=total * DOCUMENTS, seed=0)
    with _home(settings["folder"]) as folder, limited(settings["limit"]) as group, ExitStack() as stack:
        found: dict[str, Any] = {}
        kind = "folder" if settings["files"] else "shards"
        path = f"{kind}-{queries}-{settings['features']}"
        if settings["files"]:
            found["files GiB"] = write_files(lists, folder / path, queries, settings["files"])
        else:
            found["shards GiB"] = write(lists, folder / path, queries)
        if settings["server"]:
            path = stack.enter_context(served(settings["server"], folder / path))
        scores = "scores.npy" if settings["files"] else "scores"
        found["train"] = run(words_of(path, kind, "run", settings["bank"]), group, folder)
        found["score"] = run(["score", "run/model.safetensors", f"{path}/train", "--output", scores], group, folder)
        found["test ndcg@10"] = _test_value(folder / "run")
        found["subset"] = compare(lists, folder, group, settings)
    rows = {name: [f"{found[name].get(key, 0):,.0f}" for key in ("seconds", "own MiB")] for name in ("train", "score")}
    print_table("under the limit", ["", "seconds", "MiB of its own"], [[name, *row] for name, row in rows.items()])
    print(json.dumps(found, indent=1))
    name = f"larger-{settings['bank']}" + "-files" * bool(settings["files"]) + "-store" * bool(settings["server"])
    save_result(name, {"settings": settings, **found})


if __name__ == "__main__":
    main()
