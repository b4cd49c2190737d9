"""Notebooks as pages: their text, code and stored results, which ``tests/test_notebooks.py`` makes again."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from myst_parser.parsers.sphinx_ import MystParser

COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def setup(app: Any) -> dict[str, bool]:
    """Let Sphinx read ``.ipynb`` files."""
    app.add_source_suffix(".ipynb", "notebook")
    app.add_source_parser(NotebookParser)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


class NotebookParser(MystParser):
    """A notebook, read as the Markdown page it amounts to."""

    supported = ("notebook",)

    def parse(self, inputstring: str, document: Any) -> None:
        """Fill the document from the text of a notebook."""
        super().parse("\n\n".join(to_markdown(json.loads(inputstring))), document)


def to_markdown(notebook: dict[str, Any]) -> Iterator[str]:
    """The cells, one after the other, each with what it gave."""
    for cell in notebook["cells"]:
        text = "".join(cell["source"])
        yield text if cell["cell_type"] == "markdown" else fenced("python", text)
        for output in cell.get("outputs", []):
            yield result(output)


def result(output: dict[str, Any]) -> str:
    """What a cell printed or drew; a picture is part of the page."""
    data = output.get("data", {})
    if "image/png" in data:
        picture = "".join("".join(data["image/png"]).split())
        return f"![what the code above draws](data:image/png;base64,{picture})"
    return fenced("text", COLOURS.sub("", "".join(output.get("text") or data["text/plain"])))


def fenced(language: str, text: str) -> str:
    """A block of code; longer fences than any in it."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}{language}\n{text.rstrip()}\n{fence}"
