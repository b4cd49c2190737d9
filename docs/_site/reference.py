"""The reference: public names from their docstrings, commands from their help.

A page lists names in a block ``{api}``, a name a line; a block ``{commands}`` stands for the help of all commands. A
build fails when a public name stands on no page or on two, and when a docstring names something that is nowhere.
"""

from __future__ import annotations

import argparse
import builtins
import importlib
import inspect
import pkgutil
import re
from functools import cache
from pathlib import Path
from typing import Any

from sphinx.util import logging

import lgmml_torch
from lgmml_torch.app.cli import build_parser

LOG = logging.getLogger(__name__)
API = re.compile(r"^```\{api\}\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)
COMMANDS = re.compile(r"^```\{commands\}\n```$", flags=re.MULTILINE)
LINK = re.compile(r"\]\(([\w./-]+)\)")
PLACES: dict[str, str] = {}  # of each name, the page that lists it


def setup(app: Any) -> dict[str, bool]:
    """Fill the two blocks when a page is read, and check names when all are."""
    app.connect("source-read", fill)
    app.connect("autodoc-skip-member", skip)
    app.connect("autodoc-process-docstring", as_written, priority=600)  # after napoleon
    app.connect("missing-reference", resolve)
    app.connect("env-check-consistency", check_public_names)
    return {"parallel_read_safe": False}


def fill(app: Any, page: str, source: list[str]) -> None:
    """What Sphinx reads in place of the blocks, and of links to folders, which a code host would list."""
    folder = Path(app.srcdir, page).parent
    text = LINK.sub(lambda link: f"]({first_page(folder, link[1])})", source[0])
    text = API.sub(lambda block: documented(page, block[1].split()), text)
    source[0] = COMMANDS.sub(lambda _: helps(), text)


def first_page(folder: Path, target: str) -> str:
    """The target of a link, or the first notebook of a folder that it names."""
    pages = sorted((folder / target).glob("*.ipynb"))
    return f"{target}/{pages[0].name}" if pages else target


def documented(page: str, names: list[str]) -> str:
    """Names, handed to autodoc as what they are."""
    lines = []
    for name in names:
        if name in PLACES and PLACES[name] != page:
            LOG.warning("`%s` stands on two pages: %s and %s", name, PLACES[name], page)
        PLACES[name] = page
        module, _, last = f"lgmml_torch.{name}".rpartition(".")
        found = getattr(importlib.import_module(module), last)
        kind = "autoclass" if inspect.isclass(found) else "autofunction"
        lines.append(f".. {kind}:: {module}.{last}\n")
    return "```{eval-rst}\n" + "\n".join(lines) + "```"


def helps() -> str:
    """A section for each command, with its help."""
    parser = build_parser()
    parts = [f"```text\n{parser.format_help()}```"]
    commands = next(action.choices for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    parts += [f"## lgmml {name}\n\n```text\n{command.format_help()}```" for name, command in commands.items()]
    return "\n\n".join(parts)


def skip(app: Any, kind: str, name: str, found: Any, skipped: bool, options: Any) -> bool | None:
    """What scikit-learn adds for its routing of metadata is documented there."""
    return True if re.fullmatch(r"set_\w+_request", name) else None


def as_written(app: Any, kind: str, name: str, found: Any, options: Any, lines: list[str]) -> None:
    """``model_`` would be a link in reStructuredText and lose its underscore, and NDCG@10 somebody's address."""
    lines[:] = [re.sub(r"^:ivar (\w+)_:", r":ivar \1\\_:", line) for line in lines]
    lines[:] = [re.sub(r"\b([A-Z]+)@(\w)", r"\1\\@\2", line) for line in lines]


def check_public_names(app: Any, env: Any) -> None:
    """Each public name has its place."""
    missing = sorted(set(lgmml_torch.__all__) - {"__version__"} - set(PLACES))
    if missing:
        LOG.warning("public names that no page of docs/api lists: %s", ", ".join(missing))


def resolve(app: Any, env: Any, node: Any, text: Any) -> Any:
    """A name without a page of its own is text where it exists in Python; any other is dead, which Sphinx tells."""
    if node.get("refdomain") != "py":
        return None
    home, owner = node.get("py:module") or "lgmml_torch", node.get("py:class") or ""
    return text if exists(node["reftarget"], home, owner) else None


def exists(name: str, home: str, owner: str) -> bool:
    """Whether a docstring may name it: in its class, its module, anywhere in the package, or in what is installed."""
    homes = [found for found in (member(f"{home}.{owner}"), member(home), builtins) if found is not None]
    return any(reach(place, name) is not None for place in homes) or name in all_names() or member(name) is not None


def member(path: str) -> Any:
    """What a dotted path leads to: a module, or something in one."""
    words = path.strip(".").split(".")
    for split in range(len(words), 0, -1):
        try:
            module = importlib.import_module(".".join(words[:split]))
        except ImportError:
            continue
        return reach(module, ".".join(words[split:])) if words[split:] else module
    return None


def reach(place: Any, path: str) -> Any:
    """An attribute of an attribute."""
    for word in path.split("."):
        place = getattr(place, word, None)
    return place


@cache
def all_names() -> set[str]:
    """Names of everything in the modules of the package, and of their classes' members."""
    found: set[str] = set()
    for info in pkgutil.walk_packages(lgmml_torch.__path__, "lgmml_torch."):
        module = importlib.import_module(info.name)
        found.update(vars(module), {info.name.rpartition(".")[2]})
        for name, value in vars(module).items():
            if inspect.isclass(value):
                found.update(f"{name}.{each}" for each in dir(value))
    return found
