"""HTML and SVG for the page of a run: elements whose text is always escaped, and charts as inline SVG.

Colours are the page's own classes, so that charts follow its theme. Values appear on hovering. All charts are 440 units
wide: beside one another on a wide window, below one another on a narrow one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from itertools import chain
from typing import NamedTuple

_VOID = {"meta", "br", "line", "rect", "circle", "path", "polyline"}  # written without an end


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


Child = object  # text, number, Markup, or a sequence of them; None and "" leave nothing


def tag(name: str, *children: Child, **attributes: object) -> Markup:
    """An element; a trailing underline and other underlines in an attribute's name are Python's, not HTML's.

    >>> tag("p", "a < b", tag("b", 3), class_="x", data_q='"')
    '<p class="x" data-q="&quot;">a &lt; b<b>3</b></p>'
    """
    words = ""
    for key, value in attributes.items():
        if value is not None:
            words += f' {key.rstrip("_").replace("_", "-")}="{escape(str(value), quote=True)}"'
    inner = _join(children)
    if name in _VOID and not inner:
        return Markup(f"<{name}{words}/>")
    return Markup(f"<{name}{words}>{inner}</{name}>")


def _join(children: Iterable[Child]) -> Markup:
    """Children one after the other."""
    return Markup("".join(map(_text, children)))


def _text(child: Child) -> str:
    if child is None:
        return ""
    if isinstance(child, Markup):
        return child
    if isinstance(child, (list, tuple)):
        return _join(child)
    return escape(str(child), quote=True)


def table(header: Sequence[Child], rows: Iterable[Sequence[Child]], *, numbers: Iterable[int] = ()) -> Markup:
    """A table that scrolls sideways where it must; columns ``numbers`` stand at the right."""
    right = set(numbers)
    head = _row("th", header, right)
    body = [_row("td", row, right) for row in rows]
    return tag("div", tag("table", tag("thead", head), tag("tbody", body)), class_="scroll")


def _row(name: str, contents: Sequence[Child], right: set[int]) -> Markup:
    cells = []
    for column, content in enumerate(contents):
        style = None
        if column in right:
            style = "num"
        cells.append(tag(name, content, class_=style))
    return tag("tr", cells)


_WIDTH = 440.0
_RIGHT, _TOP, _BOTTOM = 14.0, 22.0, 42.0
_LETTER = 6.0  # about the width of a letter
_POINTS = 400  # of a line that are drawn, at most


class Point(NamedTuple):
    """A value over a place, with its interval where there is one."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None


class Bar(NamedTuple):
    """A row of a chart of bars."""

    label: str
    value: float
    low: float | None = None
    high: float | None = None
    note: str = ""


def _ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About ``count`` round numbers from below ``low`` to above ``high``.

    >>> _ticks(0.13, 0.52)
    [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]
    >>> _ticks(3, 3)
    [2.0, 2.5, 3.0, 3.5, 4.0]
    """
    if not high - low > 1e-12 * max(abs(low), abs(high)):
        low, high = low - 1, high + 1
    rough = (high - low) / count
    unit = 10.0 ** math.floor(math.log10(rough))
    step = 10 * unit
    for factor in (5, 2.5, 2, 1):
        if unit * factor >= rough * 0.999:
            step = unit * factor
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(number * step, 12) for number in range(first, last + 1)]


def _short(value: float) -> str:
    """A number for an axis.

    >>> [_short(value) for value in (0.25, 1200000.0, 0.0, 1e-05, 30.0)]
    ['0.25', '1.2M', '0', '1e-05', '30']
    """
    if abs(value) >= 1e9:
        return f"{value:.3g}"
    if abs(value) >= 1e6:
        return f"{value / 1e6:.4g}M"
    return f"{value:.5g}"


class _Frame:
    """The area between the axes, and what has been drawn; room for the labels of y is left, or ``left``."""

    def __init__(self, xs: Sequence[float], ys: Sequence[float], height: float, left: float | None = None) -> None:
        self.x_ticks, self.y_ticks, self.height = list(xs), list(ys), height
        if left is None:
            longest = max(map(len, map(_short, self.y_ticks)))
            left = max(_LETTER * longest + 30, 48.0)
        self.left = left
        self.drawn: list[Markup] = []

    def x(self, value: float) -> float:
        low, high = self.x_ticks[0], self.x_ticks[-1]
        return round(self.left + (value - low) / (high - low) * (_WIDTH - _RIGHT - self.left), 1)

    def y(self, value: float) -> float:
        low, high = self.y_ticks[0], self.y_ticks[-1]
        return round(self.height - _BOTTOM - (value - low) / (high - low) * (self.height - _BOTTOM - _TOP), 1)

    def axes(self, x: str, y: str, x_labels: Mapping[float, str]) -> None:
        """Grid lines at the ticks of y, labels at both axes, and what the axes mean."""
        floor = self.height - _BOTTOM
        for value in self.y_ticks:
            self.line(self.left, self.y(value), _WIDTH - _RIGHT, self.y(value), "grid")
            self.text(self.left - 6, self.y(value) + 4, _short(value), "end")
        for value, label in x_labels.items():
            self.centred(self.x(value), floor + 16, label)
        self.centred((self.left + _WIDTH - _RIGHT) / 2, self.height - 6, x, "axis")
        middle = (_TOP + floor) / 2
        turned = {"transform": f"rotate(-90 11 {middle:.1f})"}
        self.drawn.append(tag("text", y, x=11, y=round(middle, 1), text_anchor="middle", class_="axis", **turned))

    def line(self, x1: float, y1: float, x2: float, y2: float, style: str) -> None:
        self.drawn.append(tag("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=style))

    def text(self, x: float, y: float, content: str, anchor: str = "start", style: str | None = None) -> None:
        place = {"x": round(x, 1), "y": round(y, 1), "text_anchor": anchor}
        self.drawn.append(tag("text", content, class_=style, **place))

    def centred(self, x: float, y: float, content: str, style: str | None = None) -> None:
        """Text around a place, moved where the edge of the chart would cut it."""
        half = _LETTER * len(content) / 2
        self.text(max(min(x, _WIDTH - half), half), y, content, "middle", style)

    def mark(self, value: float, content: str) -> None:
        """A line across the chart, and over its upper end what it marks."""
        self.line(self.x(value), _TOP, self.x(value), self.height - _BOTTOM, "kept")
        self.centred(self.x(value), _TOP - 7, content)

    def rect(self, x: float, y: float, width: float, height: float, style: str, hint: str) -> None:
        size = {"x": round(x, 1), "y": round(y, 1), "width": round(max(width, 0.5), 1), "height": round(height, 1)}
        self.drawn.append(tag("rect", tag("title", hint), class_=style, **size))

    def dot(self, x: float, y: float, style: str, hint: str, radius: float = 3.2) -> None:
        self.drawn.append(tag("circle", tag("title", hint), cx=x, cy=y, r=radius, class_=style))

    def svg(self, title: str) -> Markup:
        box = f"0 0 {_WIDTH:g} {self.height:g}"
        return tag("svg", self.drawn, viewBox=box, role="img", aria_label=title, class_="chart")


def figure(title: str, chart: Markup, note: str = "") -> Markup:
    """A chart with its title above and a sentence below."""
    content = [tag("figcaption", title), chart]
    if note:
        content.append(tag("p", note, class_="note"))
    return tag("figure", content)


def line_chart(
    lines: Mapping[str, Sequence[Point]],
    *,
    x: str,
    y: str,
    title: str,
    kept: tuple[float, str] | None = None,
    also: Sequence[float] = (),
) -> Markup:
    """Lines over a common axis, with bands where there are intervals; a long line is drawn by evenly spaced points.

    ``kept`` marks a place on the axis; ``also`` are values that the other axis must hold, for charts to be compared.
    """
    points = list(chain.from_iterable(lines.values()))
    values, places = list(also), [point.x for point in points]
    for point in points:
        values += _given(point.y, point.low, point.high)
    last = max(places)
    grid = [places[0] - 1, places[0], places[0] + 1]
    if len(set(places)) > 1:
        grid = _ticks(min(places), last)
        grid = [max(grid[0], min(places)), *grid[1:-1], last]
    frame = _Frame(grid, _ticks(min(values), max(values)), 250)
    whole = all(map(_is_whole, places))
    labels = {}
    for value in grid[:-1]:
        if (_is_whole(value) or not whole) and frame.x(last) - frame.x(value) > 34:
            labels[value] = _short(value)
    frame.axes(x, y, {**labels, last: _short(last)})
    if min(values) < 0 < max(values):
        frame.line(frame.left, frame.y(0), _WIDTH - _RIGHT, frame.y(0), "zero")
    if kept is not None:
        frame.mark(*kept)
    for number, (name, line) in enumerate(lines.items()):
        _draw_line(frame, name, _thinned(line), number + 1, x)
    if len(lines) > 1:
        _legend(frame, list(lines))
    return frame.svg(title)


def _is_whole(value: float) -> bool:
    return float(value).is_integer()


def _given(*values: float | None) -> list[float]:
    return [value for value in values if value is not None]


def _thinned(line: Sequence[Point]) -> Sequence[Point]:
    """At most `_POINTS` of the points, the first and the last among them."""
    if len(line) <= _POINTS:
        return line
    step = (len(line) - 1) / (_POINTS - 1)
    return [line[round(number * step)] for number in range(_POINTS)]


def _draw_line(frame: _Frame, name: str, line: Sequence[Point], number: int, x: str) -> None:
    there, back = list[str](), list[str]()
    for p in line:
        if p.low is not None and p.high is not None:
            there.append(f"{frame.x(p.x)},{frame.y(p.high)}")
            back.append(f"{frame.x(p.x)},{frame.y(p.low)}")
    if len(there) > 1:
        outline = " L".join(there + back[::-1])
        frame.drawn.append(tag("path", d=f"M{outline} Z", class_=f"band c{number}"))
    path = " ".join(f"{frame.x(p.x)},{frame.y(p.y)}" for p in line)
    frame.drawn.append(tag("polyline", points=path, class_=f"line c{number}"))
    if len(line) > 120:
        return
    radius = 1.8
    if len(line) <= 30:
        radius = 3.2
    for p in line:
        span = ""
        if p.low is not None:
            span = f" [{p.low:.4g}, {p.high:.4g}]"
        frame.dot(frame.x(p.x), frame.y(p.y), f"dot c{number}", f"{name}, {x} {p.x:g}: {p.y:.4g}{span}", radius)


def _legend(frame: _Frame, names: Sequence[str]) -> None:
    """Names of the lines, in a row of their own below the chart, where nothing can run through them."""
    frame.height += 20
    at = frame.left
    for number, name in enumerate(names):
        frame.line(round(at, 1), frame.height - 10, round(at + 20, 1), frame.height - 10, f"line c{number + 1}")
        frame.text(at + 26, frame.height - 6, name)
        at += 26 + _LETTER * len(name) + 22


def histogram(
    values: Sequence[float], *, low: float, high: float, bins: int, x: str, y: str, title: str,
    mean: float | None = None,
) -> Markup:  # fmt: skip
    """Counts of values in equal bins of a range whose ends are known, with a line at their mean."""
    counts = [0] * bins
    for value in values:
        counts[min(int((value - low) / (high - low) * bins), bins - 1)] += 1
    grid = _ticks(0, max(counts))
    if not grid[1].is_integer():  # halves of what is counted are no numbers to read
        apart = max(1, math.ceil(grid[1]))
        grid = list(map(float, range(0, max(counts) + apart, apart)))
    frame = _Frame([low, high], grid, 250)
    step = (high - low) / bins
    labels = {}
    for fifth in range(6):
        place = low + (high - low) * fifth / 5
        labels[place] = _short(place)
    frame.axes(x, y, labels)
    for number, count in enumerate(counts):
        left, right = frame.x(low + number * step), frame.x(low + (number + 1) * step)
        hint = f"{low + number * step:.2f}–{low + (number + 1) * step:.2f}: {count}"
        if count:
            frame.rect(left + 0.5, frame.y(count), right - left - 1, frame.y(0) - frame.y(count), "fill c1", hint)
    if mean is not None:
        frame.mark(mean, f"mean {mean:.3f}")
    return frame.svg(title)


def bar_chart(
    bars: Sequence[Bar],
    *,
    x: str,
    title: str,
    form: Callable[[float], str] = "{:.3g}".format,
    style: Callable[[Bar], str] = lambda _: "c1",
) -> Markup:
    """Horizontal bars, a row each, with whiskers where there are intervals; long names are cut, hovering shows all."""
    room = min(max((len(bar.label) for bar in bars), default=1), 24)
    row, height = 22.0, 22.0 * len(bars) + _TOP + _BOTTOM
    ends = [0.0]
    for bar in bars:
        ends += _given(bar.value, bar.low, bar.high)
    frame = _Frame(_ticks(min(ends), max(ends), 4), [0.0, 1.0], height, left=_LETTER * room + 16)
    for value in frame.x_ticks:
        frame.line(frame.x(value), _TOP, frame.x(value), height - _BOTTOM, "grid")
        frame.centred(frame.x(value), height - _BOTTOM + 16, form(value))
    frame.centred((frame.left + _WIDTH - _RIGHT) / 2, height - 6, x, "axis")
    for number, bar in enumerate(bars):
        top = _TOP + number * row
        left, right = sorted((frame.x(0), frame.x(bar.value)))
        hint, middle, label = f"{bar.label}: {form(bar.value)}", top + row / 2, bar.label
        if bar.low is not None and bar.high is not None:
            hint += f" [{form(bar.low)}, {form(bar.high)}]"
        if bar.note:
            hint += f"; {bar.note}"
        frame.rect(left, top + 3, right - left, row - 6, f"fill {style(bar)}", hint)
        if bar.low is not None and bar.high is not None:
            frame.line(frame.x(bar.low), middle, frame.x(bar.high), middle, "whisker")
        if len(label) > room:
            label = label[: room - 1] + "…"
        named = tag("text", tag("title", hint), label, x=frame.left - 8, y=middle + 4, text_anchor="end")
        frame.drawn.append(named)
    frame.line(frame.x(0), _TOP, frame.x(0), height - _BOTTOM, "zero")
    return frame.svg(title)
