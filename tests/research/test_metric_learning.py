from __future__ import annotations

from pathlib import Path

from research.metric_learning import table

PAGE = Path(__file__).parents[2] / "docs" / "metric_learning.md"


def test_the_page_shows_the_stored_figures() -> None:
    assert table() in PAGE.read_text(encoding="utf-8")
