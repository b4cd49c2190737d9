"""What shells offer for the beginning of a command."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lgmml_torch.app import cli
from lgmml_torch.app.words import COMMANDS, build_parser, parsers_of

ROOT = Path(__file__).parents[2]
# What the shell knows of the line, what it then calls, and what came of it.
ASK = 'COMP_WORDS=({words}); COMP_CWORD={place}; _lgmml; printf "%s\\n" "${{COMPREPLY[@]}}"'
SHELLS = {"bash": ["bash", "--norc", "-c"], "zsh": ["zsh", "-f", "-c"]}


@pytest.fixture(params=[name for name in SHELLS if shutil.which(name)])
def shell(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def offered(shell: str, capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    assert cli.main(["completion", shell]) == 0
    text = capsys.readouterr().out
    if shell == "zsh":  # arrays as those of completion functions, which bashcompinit hands over
        text = text.replace("&& compinit\n", "&& compinit -u -D\n") + "\nemulate ksh\n"
    asked = ASK.format(words=" ".join(f"'{word}'" for word in words), place=len(words) - 1)
    done = subprocess.run([*SHELLS[shell], text + asked], capture_output=True, text=True, check=True)
    assert not done.stderr
    return done.stdout.split()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["lgmml", "ev"], ["evaluate"]),
        (["lgmml", "score", "m.safetensors", "--ba"], ["--batch-documents"]),
        (["lgmml", "score", "m.safetensors", "t.txt", "--format", ""], ["text", "npy", "trec"]),
        (["lgmml", "completion", "z"], ["zsh"]),
        (["lgmml", "score", "mod"], []),
        (["lgmml", "train", "loca"], ["local_metrics="]),
        (["lgmml", "train", "loss", "="], ["lambdarank", "softmax", "warp"]),
        (["lgmml", "train", "seed=1", "loss", "=", "so"], ["softmax"]),
        (["lgmml", "train", "loss=so"], ["loss=softmax"]),
    ],
)
def test_what_is_offered(shell: str, words: list[str], expected: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert offered(shell, capsys, *words) == expected


def test_every_command_and_option_is_offered(capsys: pytest.CaptureFixture[str]) -> None:
    assert {*COMMANDS} <= {*offered("bash", capsys, "lgmml", "")}
    for name, parser in parsers_of(build_parser()).items():
        options = set(re.findall(r"--[a-z][a-z-]+", parser.format_usage()))
        assert options <= {*offered("bash", capsys, "lgmml", name, "--")}, name


def test_the_script_comes_without_heavy_packages() -> None:
    script = """
import sys
from lgmml_torch.app import cli
cli.main(["completion", "bash"])
print([name for name in ("torch", "numpy", "hydra") if name in sys.modules], file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stderr.strip() == "[]"
