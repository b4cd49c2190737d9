"""Fixtures shared by all tests."""

from __future__ import annotations

import contextlib
import logging
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from tests.processor import Processor

settings.register_profile("any machine", deadline=None)  # a busy one may take ten times as long
settings.load_profile("any machine")


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """One thread, as forked processes have: the number of threads changes the last bits, too."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder with the research data sets; the test skips without it, and fails where CI demands it."""
    folder = os.environ.get("LGMML_DATA", "")
    if folder and Path(folder).is_dir():
        return Path(folder)
    reason = f"real data not found: LGMML_DATA={folder!r}"
    if os.environ.get("LGMML_REQUIRE_DATA"):
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(autouse=True, scope="session")
def _processor() -> Iterator[None]:
    """With ``LGMML_PROCESSOR=<seed>`` all tests run on a pretend processor, which rounds in its own way."""
    seed = os.environ.get("LGMML_PROCESSOR", "")
    with Processor(int(seed)) if seed else contextlib.nullcontext():
        yield


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tests leave the user's cache alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LGMML_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True)
def _loggers_are_heard() -> None:
    """A run that an earlier test made in this process may have silenced some of them."""
    for name, logger in logging.root.manager.loggerDict.items():
        if isinstance(logger, logging.Logger) and name.startswith("lgmml_torch"):
            logger.disabled = False
            logger.setLevel(logging.NOTSET)


# Whole runs, commands, fits and exports: part of `make test`, too long for `make test-fast`.
END_TO_END = {
    "test_docs.py",
    "test_estimator.py",
    "test_export.py",
    "test_notebooks.py",
    "test_sklearn.py",
}
END_TO_END_FOLDERS = {Path(__file__).parent / name for name in ("app", "fitting", "research", "tools", "training")}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep the fast tier fast; with ``LGMML_ORDER=<seed>`` files, and tests within them, run in random order."""
    for item in items:
        if item.path.name in END_TO_END or item.path.parent in END_TO_END_FOLDERS:
            item.add_marker(pytest.mark.slow)
    seed = os.environ.get("LGMML_ORDER", "")
    if seed:
        rng = random.Random(seed)
        files = sorted({item.path for item in items})
        place = {path: rng.random() for path in files}
        drawn = {item.nodeid: rng.random() for item in items}
        items.sort(key=lambda item: (place[item.path], drawn[item.nodeid]))
