"""Several processes against one: bank, trained metrics and scoring over shards, with bytes sent and memory of each.

Run with ``python -m research.speed.processes``. Settings follow as ``name=value``:

    queries=1500     generated lists, of about 100 documents
    features=60
    rounds=20        of boosting
    epochs=2         of trained metrics
    counts=1,2       numbers of processes, of one thread each, one after the other

Each process opens its own shards. Efficiency is the time of one process over n times that of n of them: on a machine
with fewer free cores than processes it says something about the machine. Memory is what is resident, files that are
mapped included, over what it was when everything was imported and nothing read.
"""

from __future__ import annotations

import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.spawn import start_processes

from lgmml_torch import distributed
from lgmml_torch.data.generated import letor_like
from lgmml_torch.data.shards import open_shards
from lgmml_torch.data.write import write_shards
from lgmml_torch.functional.measures import mean_measure
from lgmml_torch.ragged import RankingData
from lgmml_torch.training.preprocessed import SAMPLE_VALUES
from research.compare import fit_bank, train_weights
from research.protocol import RankingFold
from research.speed.harness import parse, print_table, resident, save_result, watched

DEFAULTS: dict[str, Any] = {"queries": 1500, "features": 60, "rounds": 20, "epochs": 2, "counts": "1,2"}
SHARDS = 12
KNOTS = 1024  # of a feature, at most
TRAINED = ["experiment=trained", "local_metrics.num_metrics=64", "preprocess.ramps=0", "loader.num_workers=0"]


def prepare(folder: Path, settings: dict[str, Any]) -> int:
    """Write the shards; the number of documents that train."""
    parts = letor_like(settings["queries"], settings["features"], seed=0).split((0.8, 0.1, 0.1), seed=0)
    for name, part in zip(("train", "valid", "test"), parts, strict=True):
        write_shards(part, folder / name, documents=max(1, part.num_documents // SHARDS))
    return parts[0].num_documents


def work(folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """What one process does, stage by stage, all of them together."""
    rank, size = distributed.rank(), distributed.world_size()
    found: dict[str, Any] = {"MiB at the start": resident()["resident"] * 1024}
    with watched() as most:
        _stages(found, folder, settings, rank, size)
    found["MiB at most"] = most["resident"] * 1024
    return found


def _stages(found: dict[str, Any], folder: Path, settings: dict[str, Any], rank: int, size: int) -> None:
    cache = folder / f"cache-{size}-{rank}"
    fold = RankingFold(*(open_shards(folder / name, cache=cache) for name in ("train", "valid", "test")))
    found |= {"documents": fold.train.num_documents, "MB of features": fold.train.features.nbytes / 1e6}
    boosted = ["local_metrics=boosted", f"local_metrics.rounds={settings['rounds']}", "loader.num_workers=0"]
    bank = _timed(found, "bank", lambda: fit_bank(fold, boosted, 0))
    found |= {"bank bytes sent": 0, "bank calls": 0, "columns": bank.bank.metrics.num_features}
    if fold.train.shared_lists is not None:
        sent = fold.train.shared_lists.traffic
        found |= {"bank bytes sent": sent["bytes"], "bank calls": sent["calls"]}
    asked = [*TRAINED, f"trainer.max_epochs={settings['epochs']}"]
    start = fit_bank(fold, asked, 0)
    trained = _timed(found, "trained", lambda: train_weights(start, asked, 0))
    scores = _timed(found, "scoring", lambda: trained.model.score(fold.train))
    found["scored"] = len(scores)
    found["test ndcg@10"] = _of_all(trained.model.score(fold.test), fold.test)


def _timed(found: dict[str, Any], name: str, call: Callable[[], Any]) -> Any:
    """The result; the clock runs from when all processes begin to when the last one is done."""
    distributed.all_gather(None)
    start = time.perf_counter()
    result = call()
    distributed.all_gather(None)
    found[f"{name} seconds"] = time.perf_counter() - start
    return result


def _of_all(scores: torch.Tensor, data: RankingData) -> float:
    each = distributed.all_gather((mean_measure(scores, data) if len(scores) else 0.0, data.num_queries))
    return float(sum(value * count for value, count in each) / sum(count for _, count in each))


def _process(rank: int, count: int, port: int, folder: Path, settings: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(count)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    distributed.join()
    torch.save(work(folder, settings), folder / f"{count}-{rank}.pt")


def measure(count: int, folder: Path, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """What each of so many processes found."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    start_processes(_process, (count, port, folder, settings), nprocs=count)  # type: ignore[no-untyped-call]
    return [torch.load(folder / f"{count}-{rank}.pt", weights_only=True) for rank in range(count)]


def predicted_bytes(found: dict[str, Any], count: int, settings: dict[str, Any], documents: int) -> float:
    """What a process sends while a bank is fitted, by the formula of docs/distributed.md, with even shares."""
    lists, cap, rounds, width = 10_000, 2_500, settings["rounds"], settings["features"]
    each_round = 12 * lists + 4 * found["columns"] * cap
    values = width * min(documents, SAMPLE_VALUES // width)
    once = 4 * values * (count - 1) / count + 12 * KNOTS * width
    queries = int(settings["queries"] * 0.8) * (1 + 8 + 8 * -(-rounds // 5))
    return float((rounds * each_round + once + queries) / count)


def main() -> None:
    """The command line."""
    settings = parse(sys.argv[1:], DEFAULTS, __doc__)
    counts = [int(word) for word in settings["counts"].split(",")]
    with tempfile.TemporaryDirectory() as home:
        documents = prepare(Path(home), settings)
        found = {count: measure(count, Path(home), settings) for count in counts}
    rows = []
    alone = found[counts[0]][0]
    for count, each in found.items():
        first = each[0]
        row: list[object] = [count, max(part["documents"] for part in each)]
        for name in ("bank", "trained", "scoring"):
            seconds = first[f"{name} seconds"]
            row.append(f"{seconds:.2f} s ({alone[f'{name} seconds'] / seconds / count * counts[0]:.0%})")
        row += [max(part["bank bytes sent"] for part in each) / 1e6, f"{first['test ndcg@10']:.8f}"]
        row.append(" / ".join(f"{part['MiB at most'] - part['MiB at the start']:.0f}" for part in each))
        row.append(" / ".join(f"{part['MB of features'] / 1.048576:.0f}" for part in each))
        rows.append(row)
    columns = [
        "processes",
        "documents of one",
        "bank",
        "trained",
        "scoring",
        "MB sent",
        "test NDCG@10",
        "MiB more than at the start",
    ]
    columns.append("MiB of features")
    print_table(f"{documents:,} documents, one thread each; efficiency in brackets", columns, rows)
    for count in counts[1:]:
        expected = predicted_bytes(alone, count, settings, documents)
        print(f"the formula gives {expected / 1e6:.3g} MB for each of {count} processes")
    save_result("processes", {"settings": settings, "documents": documents, "found": found})


if __name__ == "__main__":
    main()
