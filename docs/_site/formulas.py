"""Formulas as MathML, which browsers draw themselves: a page needs nothing from the network."""

from __future__ import annotations

from typing import Any

from docutils import nodes
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.util import logging

LOG = logging.getLogger(__name__)


def setup(app: Any) -> dict[str, bool]:
    """Give Sphinx one more way to write formulas."""
    app.add_html_math_renderer("mathml", (write_inline, None), (write_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def write_inline(writer: Any, node: nodes.math) -> None:
    """A formula within a sentence."""
    writer.body.append(to_mathml(node, as_block=False))
    raise nodes.SkipNode


def write_block(writer: Any, node: nodes.math_block) -> None:
    """A formula with lines of its own."""
    writer.body.append(f'<div class="math">{to_mathml(node, as_block=True)}</div>')
    raise nodes.SkipNode


def to_mathml(node: nodes.Element, *, as_block: bool) -> str:
    """MathML of TeX; a formula that cannot be written is a warning, so an error of a strict build."""
    text = node.astext().strip()
    try:
        return str(tex2mathml(text, as_block=as_block))
    except MathError as error:
        LOG.warning("no MathML for %r: %s", text, error, location=node)
        return f"<code>{text}</code>"
