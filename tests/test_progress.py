"""The bar shows itself only on a terminal, and only when the work is long."""

from __future__ import annotations

import io
import sys

import pytest

from lgmml_torch.progress import progress_bar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stream", "enabled", "delay", "shown"),
    [
        (Terminal, True, 0.0, True),
        (Terminal, True, 60.0, False),
        (Terminal, False, 0.0, False),
        (io.StringIO, True, 0.0, False),
    ],
)
def test_when_it_shows(stream, enabled: bool, delay: float, shown: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    output = stream()
    monkeypatch.setattr(sys, "stderr", output)
    monkeypatch.setenv("TERM", "xterm")
    with progress_bar("Reading", 10, enabled=enabled, delay=delay) as report:
        report(5)
        report(10)
    assert ("Reading" in output.getvalue()) == shown


def test_it_goes_away_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    output = Terminal()
    monkeypatch.setattr(sys, "stderr", output)

    def fail() -> None:
        with progress_bar("Reading", 10, delay=0.0) as report:
            report(1)
            report(1 // 0)

    with pytest.raises(ZeroDivisionError):
        fail()
    size = len(output.getvalue())
    assert size
    with progress_bar("Again", 1) as report:
        report(1)
    assert len(output.getvalue()) == size
