"""The served example: answers, refusals, and many requests at once."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import urllib.error
import urllib.request
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import uvicorn

from examples.serve import load, scorers
from examples.serve.server import MOST_DOCUMENTS, RefusedError, answer, make_app
from lgmml_torch import LGMMLRanker
from lgmml_torch.models.ranker import LGMML
from tests.doors import FEATURES, small_data, small_model

NAMES = tuple("abcde")


@pytest.fixture(scope="module")
def model() -> LGMML:
    found = small_model(mode="amortized")
    found.feature_names = NAMES
    return found


@pytest.fixture(scope="module")
def address(model: LGMML, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    file = tmp_path_factory.mktemp("served") / "model.safetensors"
    model.save(file)
    with socket.socket() as free:
        free.bind((load.HOST, 0))
        port = free.getsockname()[1]
    server = uvicorn.Server(
        uvicorn.Config(make_app(scorers.open_scorer(file)), host=load.HOST, port=port, log_level="error")
    )
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        assert thread.is_alive()
    yield f"http://{load.HOST}:{port}"
    server.should_exit = True
    thread.join()


def post(address: str, content: Any) -> tuple[int, dict[str, Any]]:
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(f"{address}/rank", body), timeout=60) as response:
            return response.status, json.loads(response.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())


def test_scores_and_order_are_the_models(address: str, model: LGMML) -> None:
    data = small_data(seed=2)
    lists = [rows.tolist() for rows in data.features.split(data.sizes.tolist())]
    status, found = post(address, {"lists": lists})
    assert status == 200
    expected = [scores.numpy() for scores in model.score(data).split(data.sizes.tolist())]
    for one, scores, order in zip(expected, found["scores"], found["order"], strict=True):
        np.testing.assert_allclose(scores, one, rtol=1e-5)
        assert order == np.argsort(-np.array(scores), kind="stable").tolist()
    turned = [[document[::-1] for document in one] for one in lists]
    assert post(address, {"lists": turned, "features": list(NAMES[::-1])}) == (200, found)


@pytest.mark.parametrize(
    ("content", "status", "message"),
    [
        (b"{", 400, "the body must be JSON"),
        ([], 422, "`lists` must hold lists of documents, none of them empty"),
        ({"lists": [[]]}, 422, "`lists` must hold lists of documents, none of them empty"),
        ({"lists": [[[1.0]]]}, 422, "every document must be a list of 5 numbers, got shape (1,)"),
        ({"lists": [[[1.0] * 5, [1.0]]]}, 422, "every document must be a list of 5 numbers"),
        ({"lists": [[["x"] * 5]]}, 422, "every document must be a list of 5 numbers"),
        (b'{"lists": [[[NaN, 0, 0, 0, 0]]]}', 422, "every feature must be finite, got another in document 1"),
        ({"lists": [[[0] * 5]], "features": list("abcdf")}, 422, "once, missing are ['e']"),
        ({"lists": [[[0] * 5]], "features": "abcde"}, 422, "`features` must be a list of names"),
        ({"lists": [[0] * (MOST_DOCUMENTS + 1)]}, 413, "a request must have at most 100000 documents, got 100001"),
    ],
)
def test_bad_requests_are_answered_with_a_sentence(address: str, content: Any, status: int, message: str) -> None:
    code, found = post(address, content)
    assert code == status
    assert message in found["error"]


def test_nothing_is_lost_when_many_ask_at_once(address: str) -> None:
    args = Namespace(documents=[3, 20], requests=150, concurrency=30, seconds=60.0)
    rows = asyncio.run(load.measure(address, args))
    assert [row.split(" | ")[:4] for row in rows] == [["| LGMML", "3", "150", "0"], ["| LGMML", "20", "150", "0"]]


@pytest.mark.filterwarnings("ignore:of . rows, some have words that are missing")
def test_words_and_empty_cells_are_served_as_they_stand(tmp_path: Path) -> None:
    frame = pd.DataFrame({"colour": ["red", "blue", None] * 20, "price": [*range(59), None]}, dtype=object)
    frame["price"] = frame["price"].astype(float)
    qid = np.arange(60) // 6
    ranker = LGMMLRanker(rounds=3, epochs=0, random_state=0, categories=["colour"], missing="query-mean")
    ranker.fit(frame, np.arange(60) % 3, qid=qid)
    ranker.model_.save(tmp_path / "words.safetensors")
    scorer = scorers.open_scorer(tmp_path / "words.safetensors")
    rows = [[["red", 1], ["blue", None]], [[None, 3.5]]]
    found = answer(scorer, json.dumps({"lists": rows}).encode())
    expected = ranker.predict(pd.DataFrame(rows[0] + rows[1], columns=["colour", "price"]), qid=[0, 0, 1])
    np.testing.assert_allclose([*found["scores"][0], *found["scores"][1]], expected, rtol=1e-5)
    with pytest.raises(RefusedError, match=r"price"):
        answer(scorer, json.dumps({"lists": [[["red", "cheap"]]]}).encode())


def test_trees_are_served_the_same_way(tmp_path: Path) -> None:
    import lightgbm

    data = small_data()
    lists = lightgbm.Dataset(data.features.numpy(), data.labels.numpy(), group=data.sizes.numpy())
    settings = {"objective": "lambdarank", "min_data_in_leaf": 1, "verbosity": -1, "num_threads": 1}
    booster = lightgbm.train(settings, lists, 2)
    booster.save_model(tmp_path / "trees.txt")
    scorer = scorers.open_scorer(tmp_path / "trees.txt")
    assert (scorer.kind, scorer.features, scorer.names) == ("LightGBM", FEATURES, None)
    rows = data.features.double().numpy()
    np.testing.assert_array_equal(scorer.run(rows, data.offsets.numpy()), booster.predict(rows, num_threads=1))
    with pytest.raises(SystemExit, match="must end in one of"):
        scorers.open_scorer("model.pkl")
