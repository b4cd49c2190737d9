"""A server that ranks lists: python -m examples.serve.server MODEL [--port 8000].

POST /rank takes ``{"lists": [[[1.5, 0.2, …], …], …]}``, a list of lists of documents, each its features; with
``"features": ["name", …]`` columns may stand in any order. A model of words takes words; one with a rule for missing
values takes null. It answers ``{"scores": [[…], …], "order": [[…], …]}``; ``order`` holds the places of the documents,
best first. GET / says what is served.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

try:
    import uvicorn
    from fastapi import FastAPI, Request
    from fastapi.concurrency import run_in_threadpool
    from fastapi.responses import JSONResponse
except ImportError as error:
    raise SystemExit(f"{error}: the server needs FastAPI; pip install 'lgmml-torch[serve]' brings it") from error

from examples.serve.scorers import Scorer, open_scorer

MOST_DOCUMENTS = 100_000
MOST_BYTES = 64 << 20


class RefusedError(Exception):
    """A request that cannot be answered: the status, and why in one sentence."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


def make_app(scorer: Scorer) -> FastAPI:
    """The server of one ranker."""
    app = FastAPI(title="Ranking server", docs_url=None, redoc_url=None)
    turns = asyncio.Semaphore(os.cpu_count() or 1)  # more threads than cores would stand in each other's way

    @app.exception_handler(RefusedError)
    async def refuse(request: Request, error: RefusedError) -> JSONResponse:
        return JSONResponse({"error": str(error)}, status_code=error.status)

    @app.get("/")
    async def about() -> dict[str, Any]:
        return {"model": scorer.kind, "features": scorer.features, "names": scorer.names}

    @app.post("/rank")
    async def rank(request: Request) -> JSONResponse:
        body = b""
        async for part in request.stream():
            body += part
            if len(body) > MOST_BYTES:
                raise RefusedError(413, f"a request must have at most {MOST_BYTES} bytes")
        async with turns:
            return JSONResponse(await run_in_threadpool(answer, scorer, body))

    return app


def answer(scorer: Scorer, body: bytes) -> dict[str, Any]:
    """Scores and order of the lists of a request."""
    features, offsets = read_lists(scorer, body)
    try:
        scores = scorer.run(features, offsets)
    except (ValueError, TypeError) as error:  # a word where a number must stand, an empty cell
        raise RefusedError(422, str(error)) from error
    lists = [scores[start:stop] for start, stop in pairwise(offsets.tolist())]
    return {
        "scores": [one.tolist() for one in lists],
        "order": [np.argsort(-one, kind="stable").tolist() for one in lists],
    }


def read_lists(scorer: Scorer, body: bytes) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """The documents of all lists, and where each list begins.

    Raises:
        RefusedError: what is wrong with the request.
    """
    try:
        content = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RefusedError(400, f"the body must be JSON: {error}") from error
    lists = content.get("lists") if isinstance(content, dict) else None
    if not isinstance(lists, list) or not lists or not all(isinstance(one, list) and one for one in lists):
        raise RefusedError(422, "`lists` must hold lists of documents, none of them empty")
    offsets = np.cumsum([0, *(len(one) for one in lists)])
    if offsets[-1] > MOST_DOCUMENTS:
        raise RefusedError(413, f"a request must have at most {MOST_DOCUMENTS} documents, got {offsets[-1]}")
    given = content.get("features")
    order = None if given is None else columns(scorer, given)
    width = scorer.features if given is None else len(given)
    try:
        features = np.array([document for one in lists for document in one], dtype=scorer.dtype)
    except (ValueError, TypeError) as error:
        raise RefusedError(422, f"every document must be a list of {width} numbers: {error}") from error
    if features.ndim != 2 or features.shape[1] != width:
        raise RefusedError(422, f"every document must be a list of {width} numbers, got shape {features.shape[1:]}")
    if scorer.dtype is not object and not np.isfinite(features).all():
        row = int(np.flatnonzero(~np.isfinite(features).all(axis=1))[0])
        raise RefusedError(422, f"every feature must be finite, got another in document {row + 1} of the request")
    return features if order is None else np.ascontiguousarray(features[:, order]), offsets


def columns(scorer: Scorer, given: Any) -> list[int]:
    """Where the model's features stand among the given ones."""
    if scorer.names is None:
        raise RefusedError(422, "`features` must be left out: this model was trained on features without names")
    if not isinstance(given, list) or not all(isinstance(name, str) for name in given):
        raise RefusedError(422, "`features` must be a list of names")
    missing = [name for name in scorer.names if name not in given]
    if missing or len(set(given)) != len(given):
        raise RefusedError(422, f"`features` must name each of the model's features once, missing are {missing[:3]}")
    return [given.index(name) for name in scorer.names]


def main() -> None:
    """Serve a model file on this machine."""
    parser = argparse.ArgumentParser(prog="python -m examples.serve.server", description=__doc__)
    parser.add_argument("model", help=".safetensors, .onnx (lgmml export --batch) or LightGBM's .txt")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    args = parser.parse_args()
    app = make_app(open_scorer(args.model))
    uvicorn.run(app, host=args.host, port=args.port, log_level="warning", access_log=False, backlog=4096)


if __name__ == "__main__":
    main()
