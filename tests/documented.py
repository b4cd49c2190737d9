"""The commands of the documentation: found in its pages, made small, given the files they name, and run in one process.

python -m tests.documented COMMANDS RESULTS: run a list (JSON) in the working folder, one after the other. A list of
words is a command, a text is Python; all Python shares its names.
"""

from __future__ import annotations

import atexit
import io
import json
import re
import runpy
import shlex
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from lgmml_torch.app import cli
from lgmml_torch.data.generated import letor_like
from lgmml_torch.data.write import save_letor
from lgmml_torch.functional.calibration import GradeMap
from lgmml_torch.ragged import RankingData
from tests.doors import FEATURES, save_lightgbm, small_model

ROOT = Path(__file__).parent.parent
FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)

REFUSED = ("lgmml", "train", "experiment=trained", "loss.margin=0.7")  # a line of the README that shows a refusal


@dataclass(frozen=True)
class Command:
    """One command, and where it stands."""

    page: str
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.page.removeprefix('../')}: {shlex.join(self.words)}"

    @property
    def kind(self) -> str | None:
        """What sort of command it is; None for one that nobody checks."""
        for kind, start in KINDS.items():
            if self.words[: len(start)] == start:
                return kind
        return None

    @property
    def trains(self) -> bool:
        """Whether it fits models, which can be made small."""
        sweeps = self.words[:2] == ("lgmml", "sweep") and "--table" not in self.words
        return sweeps or self.kind == "train" or self.words[:2] == ("lgmml", "train")


KINDS = {
    "torchrun": ("torchrun",),
    "train": ("python", "train.py"),
    "module": ("python", "-m"),
    "lgmml": ("lgmml",),
    "make": ("make",),
    "pip": ("pip", "install"),
    "export": ("export",),
}


def blocks(page: str, language: str) -> list[str]:
    """The fenced blocks of a page in one language."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    return [body for label, body in FENCE.findall(text) if label == language]


def parse(block: str) -> list[tuple[str, ...]]:
    """The commands of a block: comments left out, lines ending in a backslash joined, && and ; taken apart.

    >>> parse("make a && make b  # both\\nlgmml score m \\\\\\n  'new file.txt'; make c")
    [('make', 'a'), ('make', 'b'), ('lgmml', 'score', 'm', 'new file.txt'), ('make', 'c')]
    """
    found: list[tuple[str, ...]] = []
    for line in block.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=";&|")
        lexer.whitespace_split = True
        words: list[str] = []
        for word in [*lexer, ";"]:
            if word in ("&&", ";"):
                found += [tuple(words)] if words else []
                words = []
            else:
                words.append(word)
    return found


def steps(page: str) -> list[tuple[str, ...] | str]:
    """The commands and the blocks of Python of a page, in their order."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    found: list[tuple[str, ...] | str] = []
    for label, body in FENCE.findall(text):
        if label == "bash":
            found += parse(body)
        if label == "python":
            found.append(body)
    return found


def table_lines(page: str, column: str) -> list[tuple[str, ...] | str]:
    """What the last column of a table holds: commands, and lines of Python. The table is the one with this column."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    rows = text.partition(f"| {column} |\n")[2].partition("\n\n")[0].splitlines()[1:]
    lines = [re.findall(r"`([^`]+)` \|$", row)[0] for row in rows]
    return [tuple(shlex.split(line)) if line.startswith("lgmml ") else line for line in lines]


def commands(pages: list[str]) -> list[Command]:
    """All commands in the shell blocks of some pages, in their order."""
    return [Command(page, words) for page in pages for block in blocks(page, "bash") for words in parse(block)]


def make_targets() -> set[str]:
    """What the Makefile can make."""
    return set(re.findall(r"^([\w-]+):(?!=)", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))


TINY = {
    "trainer.max_epochs": "1", "trainer.accelerator": "cpu", "trainer.enable_progress_bar": "false",
    "trainer.devices": "1", "callbacks": "quiet", "logger": "none", "loader.num_workers": "0", "threads": "1",
    "paths.cache_dir": "cache",
}  # fmt: skip
TINY_GENERATED = {"data.num_queries": "24", "data.num_features": "5"}
ALWAYS = ("trainer.devices",)  # processes are started by other tests


def tiny(words: tuple[str, ...]) -> list[str]:
    """A training command with the smallest settings that still do everything; what it sets itself stays."""
    given = dict(word.lstrip("+").split("=", 1) for word in words[2:] if "=" in word)
    sizes = {**TINY, **({} if "data" in given else TINY_GENERATED)}
    paper = given.get("experiment", "").startswith(("paper", "lgmml")) or given.get("local_metrics") in (
        "sampled",
        "extrapolated",
    )
    counted = paper or given.get("experiment") == "trained"
    sizes["local_metrics.num_metrics" if counted else "local_metrics.rounds"] = "3"
    if paper:  # which has callbacks of its own
        del sizes["callbacks"]
        sizes["callbacks.progress"] = "null"
    added = [f"{key}={value}" for key, value in sizes.items() if key not in given or key in ALWAYS]
    kept = [word for word in words[2:] if word.split("=")[0] not in ALWAYS]
    kept = [word.replace("data.fold=1,2,3,4,5", "data.fold=1,2") for word in kept]
    if "--trials" in kept:
        kept[kept.index("--trials") + 1] = "1"
    end = next((i for i, word in enumerate(kept) if word.startswith("--")), len(kept))  # settings stand together
    return [*kept[:end], *added, *kept[end:]]


def lists(seed: int, qid: str | None = None) -> RankingData:
    """A few lists of the small model's width; the first has nine documents and, if wanted, a given id."""
    g = torch.Generator().manual_seed(seed)
    names = [qid or "7"] * 9 + ["8"] * 4 + ["9"] * 5
    X = torch.rand(len(names), FEATURES, generator=g)
    return RankingData.from_arrays(X, torch.arange(len(names)) % 3, qid=names)


def write_data(data: RankingData, file: Path) -> None:
    """In the format the name asks for."""
    file.parent.mkdir(parents=True, exist_ok=True)
    X, y = data.in_caller_order(data.features).numpy(), data.in_caller_order(data.labels).numpy()
    qid = [data.qids[query] for query in data.in_caller_order(data.query_index).tolist()]
    if file.suffix == ".npz":
        np.savez(file, X=X, y=y, qid=qid)
    elif file.suffix == ".csv":
        rows = [f"{q},{label},{','.join(map(str, row))}\n" for q, label, row in zip(qid, y, X, strict=True)]
        file.write_text("qid,label," + ",".join(f"f{i}" for i in range(X.shape[1])) + "\n" + "".join(rows))
    else:
        save_letor(data, file)


def provide(command: Command, folder: Path) -> None:
    """Make the model and data files that a command of `lgmml` names, and the folders that one of `train.py` does."""
    if command.kind == "lgmml":
        words = [word for word in command.words[2:] if not word.startswith("-")]
        qid = command.words[command.words.index("--qid") + 1] if "--qid" in command.words else None
        results = {command.words[i + 1] for i, word in enumerate(command.words) if word in ("-o", "--output", "--json")}
        for word in words:
            file = folder / word
            if word.endswith((".safetensors", ".ckpt")):
                mode = "per_query" if {"--policy", "--known-queries"} & set(command.words) else "shared"
                model = small_model(mode=mode)
                model.grade_map = GradeMap((0.0, 1.0), centre=0.0, slope=1.0, cuts=(0.0,))
                model.save(file.with_suffix(".safetensors"))
                file.with_suffix(".safetensors").rename(file)
            elif word.endswith(".parquet"):
                options = dict(zip(command.words[3:], command.words[4:], strict=False))
                write_table(file, qid=options.get("--qid-column", "qid"), text=[options.get("--drop-column", "")])
            elif word.endswith((".txt", ".gz", ".csv", ".npz")) and word not in results and (qid or not file.exists()):
                write_data(lists(0, qid), file)
    for word in command.words:
        key, _, value = word.partition("=")
        if key == "data.name" and "/" in value:
            write_parts(folder / value)
        if value and key in ("base", "reference") and value.endswith(".txt"):
            write_trees(folder / value)
        if key == "data.path" and "data=shards" not in command.words:  # those an earlier command has made
            given = dict(word.split("=", 1) for word in command.words if "=" in word)
            text = [
                name for key in ("drop", "categories") for name in given.get(f"data.{key}", "").strip("[]").split(",")
            ]
            names = {name: given.get(f"data.{name}", name) for name in ("qid", "label")}
            whole = [given[f"data.{key}"] for key in ("weight", "position") if f"data.{key}" in given]
            write_table(folder / value, **names, text=text, whole=whole, split=given.get("data.split"))


def write_trees(file: Path) -> None:
    """A small LightGBM model of the data sets' features."""
    import lightgbm

    data = letor_like(16, FEATURES, num_documents=160, seed=3)
    lists = lightgbm.Dataset(data.features.numpy(), data.labels.numpy(), group=data.sizes.numpy())
    lightgbm.train({"objective": "lambdarank", "num_leaves": 4, "verbosity": -1}, lists, 3).save_model(file)


def write_table(
    file: Path,
    *,
    qid: str = "qid",
    label: str = "label",
    text: Sequence[str] = (),
    whole: Sequence[str] = (),
    split: str | None = None,
) -> None:
    """A table of sixteen lists with columns of these names; a gap in every column of a table with a split."""
    import pandas as pd

    data = letor_like(16, FEATURES, num_documents=160, seed=3)
    frame = pd.DataFrame(data.features.numpy(), columns=[f"f{i}" for i in range(FEATURES)])
    frame[qid], frame[label] = data.query_index.numpy(), data.labels.numpy()
    for name in filter(None, text):
        frame[name] = "some words"
    for name in whole:
        frame[name] = np.arange(len(frame)) % 7 + 1
    if split is not None:
        frame[split] = frame[qid].map(lambda query: ("train", "train", "valid", "test")[query % 4])
        frame.loc[::17, "f0"] = None
    if file.suffix == ".parquet":
        frame.to_parquet(file)
    else:
        frame.to_csv(file, index=False)


def write_parts(folder: Path) -> None:
    """A folder with train.txt, vali.txt and test.txt."""
    for seed, name in enumerate(("train", "vali", "test")):
        write_data(letor_like(8, FEATURES, num_documents=80, seed=seed), folder / f"{name}.txt")


def write_datasets(folder: Path) -> None:
    """Tiny data in the layouts of the data sets the commands name: what a user has below LGMML_DATA."""
    for name in ("mq2008", "ohsumed"):
        for fold in range(1, 6):
            write_parts(folder / name / f"Fold{fold}")
    (folder / "lgbm-rank").mkdir(parents=True)
    (folder / "debian").mkdir()
    for seed, part in enumerate(("train", "vali", "test")):
        write_data(letor_like(15, FEATURES, num_documents=150, seed=seed), folder / "debian" / f"{part}.npz")
    (folder / "debian" / "features.txt").write_text("".join(f"f{i}\n" for i in range(FEATURES)))
    for seed, part in enumerate(("train", "test")):
        save_lightgbm(letor_like(15, FEATURES, num_documents=150, seed=seed), folder / "lgbm-rank" / f"rank.{part}")


def start_server(words: list[str]) -> None:
    """Start a server, and wait until it answers; it ends with this process."""
    server = subprocess.Popen([sys.executable, *words[1:]])
    atexit.register(server.wait)
    atexit.register(server.terminate)
    while server.poll() is None:
        with socket.socket() as tried:
            if tried.connect_ex(("127.0.0.1", int(words[-1]))) == 0:
                return
        time.sleep(0.1)
    raise RuntimeError(f"{shlex.join(words)} ended with {server.returncode}")


def run(words: list[str] | str, names: dict[str, object]) -> tuple[int, str]:
    """One command or block of Python in this process: its exit code and what it wrote."""
    told = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
    code = 0
    with redirect_stdout(told), redirect_stderr(told):
        try:
            if isinstance(words, str):
                exec(compile(words, "block", "exec"), names)
            elif words[0] == "lgmml":
                code = cli.main(words[1:])
            elif words[2] == "examples.serve.server":
                start_server(words)
            elif words[1] == "-m":
                sys.argv = [words[2], *words[3:]]
                runpy.run_module(words[2], run_name="__main__")
            else:
                sys.argv = [str(ROOT / "train.py"), *words[2:]]
                runpy.run_path(sys.argv[0], run_name="__main__")
        except SystemExit as stop:
            code = int(stop.code or 0)
        except BaseException:
            traceback.print_exc()
            code = 1
    told.seek(0)
    return code, told.read()


def main() -> None:
    todo, results = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    found = []
    names: dict[str, object] = {}
    for words in todo:
        start = time.perf_counter()
        code, told = run(words, names)
        found.append({"code": code, "told": told[-4000:], "seconds": time.perf_counter() - start})
        results.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
