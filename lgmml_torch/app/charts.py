"""Charts for the page of a run, as inline SVG whose text is always escaped.

Colours are the page's own classes, so that charts follow its theme. Values appear on hovering. All charts are 440 units
wide: beside one another on a wide window, below one another on a narrow one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

from markupsafe import Markup

_WIDTH = 440.0
_RIGHT, _TOP, _BOTTOM = 14.0, 22.0, 42.0
_LETTER = 6.0  # about the width of a letter
_POINTS = 400  # of a line that are drawn, at most
_BINS = 20  # of a histogram


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


def _ticks(low: float, high: float, count: int = 5, *, whole: bool = False) -> list[float]:
    """About ``count`` round numbers from below ``low`` to above ``high``.

    >>> _ticks(0.13, 0.52), _ticks(0, 11, whole=True)
    ([0.1, 0.2, 0.3, 0.4, 0.5, 0.6], [0.0, 3.0, 6.0, 9.0, 12.0])
    """
    if not high - low > 1e-12 * max(abs(low), abs(high)):
        low, high = low - 1, high + 1
    rough, factors = (high - low) / count, [5, 2.5, 2, 1]
    if whole:
        rough, factors = max(rough, 1.0), [5, 3, 2, 1]
    unit = 10.0 ** math.floor(math.log10(rough))
    step = 10 * unit
    for factor in factors:
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


class Chart:
    """The area between the axes, and what has been drawn; room for the labels of y is left, or ``left``."""

    def __init__(self, xs: Sequence[float], ys: Sequence[float], height: float, left: float | None = None) -> None:
        self.x_ticks, self.y_ticks, self.height = list(xs), list(ys), height
        if left is None:
            longest = max(map(len, map(_short, self.y_ticks)))
            left = max(_LETTER * longest + 30, 48.0)
        self.left = left
        self.drawn: list[Markup] = []

    def _x(self, value: float) -> float:
        low, high = self.x_ticks[0], self.x_ticks[-1]
        return round(self.left + (value - low) / (high - low) * (_WIDTH - _RIGHT - self.left), 1)

    def _y(self, value: float) -> float:
        low, high = self.y_ticks[0], self.y_ticks[-1]
        return round(self.height - _BOTTOM - (value - low) / (high - low) * (self.height - _BOTTOM - _TOP), 1)

    def _axes(self, x: str, y: str, x_labels: Mapping[float, str]) -> None:
        """Grid lines at the ticks of y, labels at both axes, and what the axes mean."""
        floor = self.height - _BOTTOM
        for value in self.y_ticks:
            self._line(self.left, self._y(value), _WIDTH - _RIGHT, self._y(value), "grid")
            self._text(self.left - 6, self._y(value) + 4, _short(value), "end")
        for value, label in x_labels.items():
            self._centred(self._x(value), floor + 16, label)
        self._centred((self.left + _WIDTH - _RIGHT) / 2, self.height - 6, x, "axis")
        middle = (_TOP + floor) / 2
        turned = (
            '<text x="11" y="{0:.1f}" text-anchor="middle" class="axis" transform="rotate(-90 11 {0:.1f})">{1}</text>'
        )
        self._draw(turned, middle, y)

    def _draw(self, element: str, *facts: object) -> None:
        """Add an element; facts are escaped."""
        self.drawn.append(Markup(element).format(*facts))

    def _line(self, x1: float, y1: float, x2: float, y2: float, style: str) -> None:
        self._draw('<line x1="{}" y1="{}" x2="{}" y2="{}" class="{}"/>', x1, y1, x2, y2, style)

    def _text(self, x: float, y: float, content: str, anchor: str = "start", style: str = "") -> None:
        kind = Markup("")
        if style:
            kind = Markup(' class="{}"').format(style)
        self._draw('<text{} x="{:.1f}" y="{:.1f}" text-anchor="{}">{}</text>', kind, x, y, anchor, content)

    def _centred(self, x: float, y: float, content: str, style: str = "") -> None:
        """Text around a place, moved where the edge of the chart would cut it."""
        half = _LETTER * len(content) / 2
        self._text(max(min(x, _WIDTH - half), half), y, content, "middle", style)

    def _mark(self, value: float, content: str) -> None:
        """A line across the chart, and over its upper end what it marks."""
        self._line(self._x(value), _TOP, self._x(value), self.height - _BOTTOM, "kept")
        self._centred(self._x(value), _TOP - 7, content)

    def _rect(self, x: float, y: float, width: float, height: float, style: str, hint: str) -> None:
        element = '<rect class="{}" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}"><title>{}</title></rect>'
        self._draw(element, style, x, y, max(width, 0.5), height, hint)

    def _figure(self, title: str, note: str) -> Markup:
        element = Markup('<svg viewBox="0 0 {:g} {:g}" role="img" aria-label="{}" class="chart">{}</svg>')
        return figure(title, element.format(_WIDTH, self.height, title, Markup("").join(self.drawn)), note)

    @classmethod
    def lines(
        cls,
        lines: Mapping[str, Sequence[Point]],
        *,
        x: str,
        y: str,
        title: str,
        note: str = "",
        kept: float | None = None,
        also: Sequence[float] = (),
    ) -> Markup:
        """Lines over a common axis, with bands where there are intervals; a long line is drawn by evenly spaced points.

        ``kept`` marks a place on the axis; ``also`` are values that the other axis must hold.
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
        frame = cls(grid, _ticks(min(values), max(values)), 250)
        whole = all(map(_is_whole, places))
        labels = {}
        for value in grid[:-1]:
            if (_is_whole(value) or not whole) and frame._x(last) - frame._x(value) > 34:
                labels[value] = _short(value)
        frame._axes(x, y, {**labels, last: _short(last)})
        if min(values) < 0 < max(values):
            frame._line(frame.left, frame._y(0), _WIDTH - _RIGHT, frame._y(0), "zero")
        if kept is not None:
            frame._mark(kept, f"kept: {kept}")
        for number, (name, line) in enumerate(lines.items()):
            if len(line) > _POINTS:
                step = (len(line) - 1) / (_POINTS - 1)
                line = [line[round(place * step)] for place in range(_POINTS)]
            frame._draw_line(name, line, number + 1, x)
        if len(lines) > 1:
            frame._legend(list(lines))
        return frame._figure(title, note)

    def _draw_line(self, name: str, line: Sequence[Point], number: int, x: str) -> None:
        there, back = list[str](), list[str]()
        for p in line:
            if p.low is not None and p.high is not None:
                there.append(f"{self._x(p.x)},{self._y(p.high)}")
                back.append(f"{self._x(p.x)},{self._y(p.low)}")
        if len(there) > 1:
            outline = " L".join(there + back[::-1])
            self._draw('<path d="M{} Z" class="band c{}"/>', outline, number)
        path = " ".join(f"{self._x(p.x)},{self._y(p.y)}" for p in line)
        self._draw('<polyline points="{}" class="line c{}"/>', path, number)
        if len(line) > 120:
            return
        radius = 1.8
        if len(line) <= 30:
            radius = 3.2
        for p in line:
            span = ""
            if p.low is not None:
                span = f" [{p.low:.4g}, {p.high:.4g}]"
            element = '<circle cx="{}" cy="{}" r="{}" class="dot c{}"><title>{}</title></circle>'
            hint = f"{name}, {x} {p.x:g}: {p.y:.4g}{span}"
            self._draw(element, self._x(p.x), self._y(p.y), radius, number, hint)

    def _legend(self, names: Sequence[str]) -> None:
        """Names of the lines, in a row of their own below the chart, where nothing can run through them."""
        self.height += 20
        at = self.left
        for number, name in enumerate(names):
            self._line(round(at, 1), self.height - 10, round(at + 20, 1), self.height - 10, f"line c{number + 1}")
            self._text(at + 26, self.height - 6, name)
            at += 26 + _LETTER * len(name) + 22

    @classmethod
    def histogram(
        cls, values: Sequence[float], *, high: float, mean: float, x: str, y: str, title: str, note: str
    ) -> Markup:
        """Counts of values in equal parts of the range from 0 to ``high``, with a line at their mean."""
        counts, step = [0] * _BINS, high / _BINS
        for value in values:
            counts[min(int(value / high * _BINS), _BINS - 1)] += 1
        frame = cls([0.0, high], _ticks(0, max(counts), whole=True), 250)
        labels = {}
        for fifth in range(6):
            labels[high * fifth / 5] = _short(high * fifth / 5)
        frame._axes(x, y, labels)
        for number, count in enumerate(counts):
            left, right, top = frame._x(number * step), frame._x((number + 1) * step), frame._y(count)
            hint = f"{number * step:.2f}–{(number + 1) * step:.2f}: {count}"
            if count:
                frame._rect(left + 0.5, top, right - left - 1, frame._y(0) - top, "fill c1", hint)
        frame._mark(mean, f"mean {mean:.3f}")
        return frame._figure(title, note)

    @classmethod
    def bars(
        cls, bars: Sequence[Bar], *, x: str, title: str, note: str = "", form: Callable[[float], str] = "{:.3g}".format
    ) -> Markup:
        """Horizontal bars; long names are cut, hovering shows all.

        The colour goes by sign; where there are intervals, bars have whiskers, and are grey where 0 lies inside.
        """
        room = min(max((len(bar.label) for bar in bars), default=1), 24)
        row, height = 22.0, 22.0 * len(bars) + _TOP + _BOTTOM
        ends = [0.0]
        for bar in bars:
            ends += _given(bar.value, bar.low, bar.high)
        frame = cls(_ticks(min(ends), max(ends), 4), [0.0, 1.0], height, left=_LETTER * room + 16)
        for value in frame.x_ticks:
            frame._line(frame._x(value), _TOP, frame._x(value), height - _BOTTOM, "grid")
            frame._centred(frame._x(value), height - _BOTTOM + 16, form(value))
        frame._centred((frame.left + _WIDTH - _RIGHT) / 2, height - 6, x, "axis")
        for number, bar in enumerate(bars):
            top = _TOP + number * row
            left, right = sorted((frame._x(0), frame._x(bar.value)))
            hint, middle, label, colour = f"{bar.label}: {form(bar.value)}", top + row / 2, bar.label, "c1"
            if bar.value < 0:
                colour = "c2"
            if bar.low is not None and bar.high is not None:
                hint += f" [{form(bar.low)}, {form(bar.high)}]"
                if bar.low <= 0 <= bar.high:
                    colour = "c0"
            if bar.note:
                hint += f"; {bar.note}"
            frame._rect(left, top + 3, right - left, row - 6, f"fill {colour}", hint)
            if bar.low is not None and bar.high is not None:
                frame._line(frame._x(bar.low), middle, frame._x(bar.high), middle, "whisker")
            if len(label) > room:
                label = label[: room - 1] + "…"
            element = '<text x="{}" y="{}" text-anchor="end"><title>{}</title>{}</text>'
            frame._draw(element, frame.left - 8, middle + 4, hint, label)
        frame._line(frame._x(0), _TOP, frame._x(0), height - _BOTTOM, "zero")
        return frame._figure(title, note)


def _is_whole(value: float) -> bool:
    return float(value).is_integer()


def _given(*values: float | None) -> list[float]:
    return [value for value in values if value is not None]


def figure(title: str, chart: Markup, note: str = "") -> Markup:
    """A chart with its title above and a sentence below."""
    below = Markup("")
    if note:
        below = Markup('<p class="note">{}</p>').format(note)
    return Markup("<figure><figcaption>{}</figcaption>{}{}</figure>").format(title, chart, below)
