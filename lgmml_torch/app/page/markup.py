"""HTML and SVG by construction: text is always escaped, only what `tag` made is not."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

VOID = {"meta", "br", "line", "rect", "circle", "path", "polyline"}  # written without an end


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


Child = object  # text, number, Markup, or a sequence of them; None and "" leave nothing


def tag(name: str, *children: Child, **attributes: object) -> Markup:
    """An element; a trailing underline and other underlines in an attribute's name are Python's, not HTML's.

    >>> tag("p", "a < b", tag("b", 3), class_="x", data_q='"')
    '<p class="x" data-q="&quot;">a &lt; b<b>3</b></p>'
    """
    given = {key.rstrip("_").replace("_", "-"): value for key, value in attributes.items() if value is not None}
    words = "".join(f' {key}="{escape(str(value), quote=True)}"' for key, value in given.items())
    inner = join(children)
    if name in VOID and not inner:
        return Markup(f"<{name}{words}/>")
    return Markup(f"<{name}{words}>{inner}</{name}>")


def join(children: Iterable[Child]) -> Markup:
    """Children one after the other."""
    return Markup("".join(_text(child) for child in children))


def _text(child: Child) -> str:
    if child is None:
        return ""
    if isinstance(child, Markup):
        return child
    if isinstance(child, (list, tuple)):
        return join(child)
    return escape(str(child), quote=True)


def table(header: Sequence[Child], rows: Iterable[Sequence[Child]], *, numbers: Iterable[int] = ()) -> Markup:
    """A table that scrolls sideways where it must; columns ``numbers`` stand at the right."""
    right = set(numbers)

    def cell(name: str, column: int, content: Child) -> Markup:
        return tag(name, content, class_="num" if column in right else None)

    head = tag("tr", [cell("th", i, item) for i, item in enumerate(header)])
    body = [tag("tr", [cell("td", i, item) for i, item in enumerate(row)]) for row in rows]
    return tag("div", tag("table", tag("thead", head), tag("tbody", body)), class_="scroll")
