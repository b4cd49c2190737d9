"""A load test on this machine: python -m examples.serve.load MODEL [MODEL …] [--requests 10000].

Starts the server with each model in turn, on a free port of 127.0.0.1, sends requests of one list each, as many at once
as asked for, and prints requests per second and latencies. Every answer is compared with the one the same list got
while the server was idle: one that is missing, late by a minute or different counts as lost. With --work no server is
started: the table has the processor time of one request, which does not depend on what else the machine does.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np

try:
    import aiohttp
except ImportError as error:
    raise SystemExit(f"{error}: the load test needs aiohttp; pip install 'lgmml-torch[serve]' brings it") from error

HOST = "127.0.0.1"
BODIES = 8  # different lists of each length
PATIENCE = 60.0  # seconds for one answer


class Outcome(NamedTuple):
    """What came of the requests of one length."""

    documents: int
    sent: int
    lost: int
    seconds: float
    latencies: list[float]

    def row(self, kind: str) -> str:
        """A line of the table."""
        times = [f"{value * 1000:.1f}" for value in np.percentile(self.latencies, [50, 95, 99])]
        cells = [
            kind,
            f"{self.documents:,}",
            f"{self.sent:,}",
            str(self.lost),
            f"{self.sent / self.seconds:.0f}",
            *times,
        ]
        return f"| {' | '.join(cells)} |"


HEAD = (
    "| model | documents | requests | lost | a second | p50 ms | p95 ms | p99 ms |\n|---|--:|--:|--:|--:|--:|--:|--:|"
)


@contextmanager
def serving(model: str) -> Iterator[str]:
    """The address of a server that was started for a model and ends with the block."""
    with socket.socket() as free:
        free.bind((HOST, 0))
        port = free.getsockname()[1]
    server = subprocess.Popen([sys.executable, "-m", "examples.serve.server", model, "--port", str(port)])
    try:
        for _ in range(600):
            with socket.socket() as probe:
                if probe.connect_ex((HOST, port)) == 0:
                    break
            if server.poll() is not None:
                raise SystemExit(f"the server of {model} did not start")
            time.sleep(0.1)
        else:
            raise SystemExit(f"the server of {model} did not start within a minute")
        yield f"http://{HOST}:{port}"
    finally:
        server.terminate()
        server.wait(timeout=30)


async def measure(address: str, args: argparse.Namespace) -> list[str]:
    """A row for each length of list."""
    connector = aiohttp.TCPConnector(limit=args.concurrency)
    timeout = aiohttp.ClientTimeout(total=PATIENCE)
    async with aiohttp.ClientSession(address, connector=connector, timeout=timeout) as session:
        async with session.get("/") as response:
            about = await response.json()
        rows = []
        for documents in args.documents:
            outcome = await send(session, about["features"], documents, args)
            rows.append(outcome.row(about["model"]))
            sys.stdout.write(rows[-1] + "\n")
            sys.stdout.flush()
    return rows


async def send(session: aiohttp.ClientSession, features: int, documents: int, args: argparse.Namespace) -> Outcome:
    """So many requests, so many at once; after the time allowed no more are sent."""
    bodies = make_bodies(features, documents)
    expected = []
    for body in bodies:
        async with session.post("/rank", data=body) as response:
            response.raise_for_status()
            expected.append(await response.json())
    latencies: list[float] = []
    lost, numbers, start = 0, iter(range(args.requests)), time.perf_counter()

    async def client() -> None:
        nonlocal lost
        for number in numbers:
            if time.perf_counter() - start > args.seconds:
                return
            begun = time.perf_counter()
            try:
                async with session.post("/rank", data=bodies[number % BODIES]) as response:
                    right = response.status == 200 and same(await response.json(), expected[number % BODIES])
            except (aiohttp.ClientError, TimeoutError):
                right = False
            lost += not right
            latencies.append(time.perf_counter() - begun)

    await asyncio.gather(*(client() for _ in range(args.concurrency)))
    return Outcome(documents, len(latencies), lost, time.perf_counter() - start, latencies)


def make_bodies(features: int, documents: int) -> list[bytes]:
    """Requests of one random list each."""
    lists = np.random.default_rng(documents).random((BODIES, documents, features)).round(4).tolist()
    return [json.dumps({"lists": [one]}).encode() for one in lists]


def work(model: str, args: argparse.Namespace) -> None:
    """Print the processor time of a whole request, and of scoring alone, in milliseconds."""
    from examples.serve.scorers import open_scorer
    from examples.serve.server import answer, read_lists

    scorer = open_scorer(model)
    for documents in args.documents:
        bodies = make_bodies(scorer.features, documents)
        lists = [read_lists(scorer, body) for body in bodies]
        whole = processor_time(lambda number: answer(scorer, bodies[number % BODIES]), args.requests)  # noqa: B023
        alone = processor_time(lambda number: scorer.run(*lists[number % BODIES]), args.requests)  # noqa: B023
        sys.stdout.write(f"| {scorer.kind} | {documents:,} | {whole:.2f} | {alone:.2f} |\n")


def processor_time(call: Callable[[int], object], count: int) -> float:
    """Milliseconds of one call, after a few to warm up."""
    for number in range(BODIES):
        call(number)
    start = time.process_time()
    for number in range(count):
        call(number)
    return (time.process_time() - start) / count * 1000


def same(found: dict[str, list[list[float]]], expected: dict[str, list[list[float]]]) -> bool:
    """Whether an answer is that of the idle server: the same order, and scores to rounding."""
    return found["order"] == expected["order"] and np.allclose(found["scores"], expected["scores"], rtol=1e-5)


def main(words: Sequence[str] | None = None) -> int:
    """Print a table of all models and lengths; 1 when an answer was lost."""
    parser = argparse.ArgumentParser(prog="python -m examples.serve.load", description=__doc__)
    parser.add_argument("models", nargs="+", help=".safetensors, .onnx (lgmml export --batch) or LightGBM's .txt")
    parser.add_argument("--requests", type=int, default=1_000, help="for each length (default: 1000)")
    parser.add_argument("--concurrency", type=int, default=64, help="requests under way at once (default: 64)")
    parser.add_argument("--documents", type=int, nargs="+", default=[10, 100, 1_000], help="lengths of lists")
    parser.add_argument("--seconds", type=float, default=120.0, help="for each length at most (default: 120)")
    parser.add_argument("--work", action="store_true", help="processor time of a request instead, without a server")
    args = parser.parse_args(words)
    if args.work:
        sys.stdout.write("| model | documents | request ms | of which scoring |\n|---|--:|--:|--:|\n")
        for model in args.models:
            work(model, args)
        return 0
    sys.stdout.write(HEAD + "\n")
    rows: list[str] = []
    for model in args.models:
        with serving(model) as address:
            rows += asyncio.run(measure(address, args))
    return int(any(row.split("|")[4].strip() != "0" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
