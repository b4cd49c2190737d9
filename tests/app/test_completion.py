"""The script with which shells complete commands: shtab makes it from the parser."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from lgmml_torch.app import cli


@pytest.mark.parametrize("shell", ["bash", "zsh", "tcsh"])
def test_the_script_knows_commands_and_options(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["completion", shell]) == 0
    script = capsys.readouterr().out
    for word in ("evaluate", "sweep", "batch-documents", "importance"):
        assert word in script
    if shell != "tcsh" and shutil.which(shell):
        subprocess.run([shell, "-n"], input=script, text=True, check=True)


def test_help_comes_without_heavy_packages() -> None:
    script = """
import sys
from lgmml_torch.app import cli
try: cli.main(["--help"])
finally: print([name for name in ("torch", "numpy", "hydra", "shtab") if name in sys.modules])
"""
    done = subprocess.run([__import__("sys").executable, "-c", script], capture_output=True, text=True, check=True)
    assert "completion" in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"
