"""Small charts as SVG text: lines, horizontal bars with intervals, stacked horizontal bars.

Drawn by hand instead of by a plotting library so that a page stays light, sharp on a phone (the drawing is 440 units
wide and text 11, so it stays readable when scaled to a narrow screen) and free of fonts of its own.
"""

from __future__ import annotations

import dataclasses
import html
import math
from collections.abc import Sequence

Number = int | float
WIDTH = 440
_AXIS = "#c9ced6"
_GRID = "#eceff3"
_TEXT = "#4a5260"
_INK = "#1d2430"
# A character of the 11-unit sans-serif text takes about this many units.
_CHARACTER = 6.1


@dataclasses.dataclass(frozen=True)
class Line:
    """One line of a line chart.

    Attributes:
        name: for the legend and tooltips.
        points: (x, y) pairs; pairs with a number that is not finite are left out.
        color: CSS colour.
        dashed: drawn with dashes.
        markers: a dot at each point.
        faint: thin and pale, for the noisy version of another line.
    """

    name: str
    points: Sequence[tuple[Number, Number]]
    color: str
    dashed: bool = False
    markers: bool = False
    faint: bool = False


@dataclasses.dataclass(frozen=True)
class Bar:
    """One bar of a bar chart, with an optional interval and a second value as a diamond."""

    label: str
    value: Number
    color: str
    low: Number | None = None
    high: Number | None = None
    marker: Number | None = None


@dataclasses.dataclass(frozen=True)
class Stack:
    """One bar made of parts: (name, value, colour)."""

    label: str
    parts: Sequence[tuple[str, Number, str]]


def ticks(low: Number, high: Number, target: int = 5) -> list[Number]:
    """Round values (1, 2, 2.5 or 5 times a power of ten) that cover [low, high], about `target` of them."""
    if not (math.isfinite(low) and math.isfinite(high)) or high < low:
        raise ValueError(f"`low` and `high` must be finite and ordered; got {low!r}, {high!r}")
    span = high - low or abs(high) or 1.0
    raw = span / max(target - 1, 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1.0, 2.0, 2.5, 5.0, 10.0) if factor * power >= raw * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(index * step, 12) for index in range(first, max(last, first + 1) + 1)]


def number(value: Number) -> str:
    """A short decimal number for an axis or a label."""
    if value == 0:
        return "0"
    if abs(value) >= 1e6:
        return f"{value / 1e6:.3g}M"
    if abs(value) >= 1e4:
        return f"{value / 1e3:.3g}k"
    return f"{value:.3f}".rstrip("0").rstrip(".") if abs(value) >= 1e-3 else f"{value:.2g}"


def _text(x: Number, y: Number, text: str, *, anchor: str = "start", color: str = _TEXT, bold: bool = False) -> str:
    weight = ' font-weight="600"' if bold else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{color}"{weight}>{html.escape(text)}</text>'


def _svg(height: Number, title: str, body: Sequence[str]) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{html.escape(title, quote=True)}" '
        f'font-size="11" xmlns="http://www.w3.org/2000/svg">{"".join(body)}</svg>'
    )


def line_chart(
    lines: Sequence[Line],
    *,
    title: str,
    x_label: str,
    y_range: tuple[Number, Number] | None = None,
    integer_x: bool = False,
    height: int = 230,
) -> str:
    """A line chart; an empty text when no line has a point.

    Args:
        lines: what to draw, later ones on top.
        title: read by screen readers (the visible heading is the page's).
        x_label: under the horizontal axis.
        y_range: fixed ends of the vertical axis; None fits the data.
        integer_x: one tick a whole number instead of round ticks (draft positions).
        height: units.
    """
    lines = [
        dataclasses.replace(line, points=[p for p in line.points if math.isfinite(p[0]) and math.isfinite(p[1])])
        for line in lines
    ]
    xs = [x for line in lines for x, _ in line.points]
    ys = [y for line in lines for _, y in line.points]
    if not xs:
        return ""
    y_ticks = ticks(*(y_range or (min(ys), max(ys))))
    x_ticks = (
        [float(x) for x in range(math.floor(min(xs)), math.ceil(max(xs)) + 1)] if integer_x else ticks(min(xs), max(xs))
    )
    x_low, x_high = (min(xs), max(xs)) if not integer_x else (x_ticks[0] - 0.3, x_ticks[-1] + 0.3)
    x_high = x_high if x_high > x_low else x_low + 1.0
    y_low, y_high = y_ticks[0], y_ticks[-1]
    left = 12 + _CHARACTER * max(len(number(y)) for y in y_ticks)
    right, top, bottom = WIDTH - 14, 10, height - 36

    def at(x: Number, y: Number) -> tuple[Number, Number]:
        return (
            left + (right - left) * (x - x_low) / (x_high - x_low),
            bottom - (bottom - top) * (y - y_low) / (y_high - y_low),
        )

    body = []
    for y in y_ticks:
        _, v = at(x_low, y)
        body.append(f'<path d="M{left:.1f} {v:.1f}H{right}" stroke="{_GRID if y != y_low else _AXIS}"/>')
        body.append(_text(left - 6, v + 4, number(y), anchor="end"))
    for x in x_ticks:
        if x_low <= x <= x_high:
            u, _ = at(x, y_low)
            body.append(_text(u, bottom + 15, number(x), anchor="middle"))
    body.append(_text((left + right) / 2, height - 4, x_label, anchor="middle"))
    for line in lines:
        body.extend(_draw_line(line, at))
    return _svg(height, title, body)


def _draw_line(line: Line, at) -> list[str]:
    placed = [at(x, y) for x, y in line.points]
    if not placed:
        return []
    style = ' stroke-width="1" opacity=".45"' if line.faint else ' stroke-width="2"'
    dash = ' stroke-dasharray="5 4"' if line.dashed else ""
    path = "M" + "L".join(f"{u:.1f} {v:.1f}" for u, v in placed)
    drawn = [f'<path d="{path}" fill="none" stroke="{line.color}" stroke-linejoin="round"{style}{dash}/>']
    if line.markers or len(placed) == 1:
        for (u, v), (x, y) in zip(placed, line.points, strict=True):
            label = html.escape(f"{line.name}: {number(y)} at {number(x)}")
            drawn.append(
                f'<circle cx="{u:.1f}" cy="{v:.1f}" r="3.5" fill="{line.color}" stroke="#fff">'
                f"<title>{label}</title></circle>"
            )
    return drawn


def _left_margin(labels: Sequence[str]) -> Number:
    return min(14 + _CHARACTER * max(len(label) for label in labels), WIDTH * 0.42)


def bar_chart(bars: Sequence[Bar], *, title: str, reference: Number | None = None, unit: str = "") -> str:
    """Horizontal bars from zero, with intervals as whiskers and second values as diamonds; empty without bars.

    Args:
        bars: from top to bottom.
        title: read by screen readers.
        reference: a vertical line, for example 1.0 for "no gain".
        unit: written behind each value.
    """
    if not bars:
        return ""
    left, right, top, pitch = _left_margin([bar.label for bar in bars]), WIDTH - 58, 8, 26
    largest = max([bar.value for bar in bars] + [bar.high or 0.0 for bar in bars] + [bar.marker or 0.0 for bar in bars])
    x_ticks = ticks(0.0, max(largest, reference or 0.0) or 1.0)
    scale = (right - left) / x_ticks[-1]
    bottom = top + pitch * len(bars)
    body = []
    for x in x_ticks:
        u = left + scale * x
        body.append(f'<path d="M{u:.1f} {top}V{bottom}" stroke="{_GRID if x else _AXIS}"/>')
        body.append(_text(u, bottom + 15, number(x), anchor="middle"))
    for index, bar in enumerate(bars):
        middle = top + pitch * (index + 0.5)
        width = scale * max(bar.value, 0.0)
        body.append(_text(left - 7, middle + 4, bar.label, anchor="end", color=_INK))
        body.append(
            f'<rect x="{left:.1f}" y="{middle - 8:.1f}" width="{width:.1f}" height="16" rx="2" fill="{bar.color}">'
            f"<title>{html.escape(bar.label)}: {number(bar.value)}{html.escape(unit)}</title></rect>"
        )
        end = left + width
        if bar.low is not None and bar.high is not None:
            u, v = left + scale * bar.low, left + scale * bar.high
            end = max(end, v)
            body.append(
                f'<path d="M{u:.1f} {middle}H{v:.1f}M{u:.1f} {middle - 4}v8M{v:.1f} {middle - 4}v8" '
                f'stroke="{_INK}" stroke-width="1.3" fill="none"/>'
            )
        if bar.marker is not None:
            u = left + scale * bar.marker
            end = max(end, u + 5)
            body.append(
                f'<path d="M{u:.1f} {middle - 6}l5 6l-5 6l-5 -6z" fill="#fff" stroke="{_INK}" stroke-width="1.3">'
                f"<title>predicted {number(bar.marker)}</title></path>"
            )
        body.append(_text(end + 6, middle + 4, f"{bar.value:.2f}{unit}", color=_INK, bold=True))
    if reference is not None:
        u = left + scale * reference
        body.append(f'<path d="M{u:.1f} {top}V{bottom}" stroke="{_INK}" stroke-dasharray="3 3"/>')
    return _svg(bottom + 22, title, body)


def stacked_chart(stacks: Sequence[Stack], *, title: str, unit: str) -> str:
    """Horizontal bars made of parts, with their total at the end; empty without bars."""
    stacks = [stack for stack in stacks if stack.parts]
    if not stacks:
        return ""
    left, right, top, pitch = _left_margin([stack.label for stack in stacks]), WIDTH - 64, 8, 26
    totals = [sum(value for _, value, _ in stack.parts) for stack in stacks]
    x_ticks = ticks(0.0, max(totals) or 1.0)
    scale = (right - left) / x_ticks[-1]
    bottom = top + pitch * len(stacks)
    body = []
    for x in x_ticks:
        u = left + scale * x
        body.append(f'<path d="M{u:.1f} {top}V{bottom}" stroke="{_GRID if x else _AXIS}"/>')
        body.append(_text(u, bottom + 15, number(x), anchor="middle"))
    for index, (stack, total) in enumerate(zip(stacks, totals, strict=True)):
        middle = top + pitch * (index + 0.5)
        body.append(_text(left - 7, middle + 4, stack.label, anchor="end", color=_INK))
        u = left
        for name, value, color in stack.parts:
            width = scale * max(value, 0.0)
            share = f"{100 * value / total:.0f} %" if total else ""
            body.append(
                f'<rect x="{u:.1f}" y="{middle - 8:.1f}" width="{width:.2f}" height="16" fill="{color}" '
                f'stroke="#fff" stroke-width=".6"><title>{html.escape(name)}: {number(value)} {html.escape(unit)}'
                f" ({share})</title></rect>"
            )
            u += width
        body.append(_text(u + 6, middle + 4, f"{total:.3g} {unit}", color=_INK, bold=True))
    return _svg(bottom + 22, title, body)
