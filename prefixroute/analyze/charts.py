"""Line charts as SVG, to be put into a page: no script, no font, no external resource.

Rules:
1. Sizes are those of the view box; the page scales it. Text stays readable at the width of a phone.
2. The horizontal axis is logarithmic where its range is wide; values of 0 are left out there.
3. Lines differ in dashes as well as in colour. The page defines the colours, by class.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from math import floor, log10
from typing import NamedTuple

WIDTH, HEIGHT = 560, 310
LEFT, RIGHT, TOP, BOTTOM = 66, 20, 20, 58


class Series(NamedTuple):
    """A line: its name, its points, and the error of each point (empty: no errors)."""

    name: str
    points: Sequence[tuple[float, float]]
    errors: Sequence[float] = ()


class Axis(NamedTuple):
    """An axis: what it shows, and how its numbers are written."""

    label: str
    write: Callable[[float], str]


def short(value: float) -> str:
    """Write a number in few characters: 1.5k, 20M."""
    for limit, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.3g}{suffix}"
    return f"{value:.3g}"


def percent(value: float) -> str:
    """Write a share as a percentage."""
    return f"{100 * value:.3g}%"


def line_chart(title: str, across: Axis, up: Axis, series: Sequence[Series], level: float | None = None) -> str:
    """Return a chart as an SVG element, empty without points. A `level` is marked by a line, and is on the axis."""
    shown = [(one, [point for point in one.points if point[0] > 0]) for one in series]
    xs = [x for _, points in shown for x, _ in points]
    ys = [y for _, points in shown for _, y in points] + ([] if level is None else [level])
    if not xs:
        return ""
    low_x, high_x = log10(min(xs)), log10(max(xs))
    if high_x - low_x < 1e-9:
        low_x, high_x = low_x - 0.5, high_x + 0.5
    steps = _steps(min(0.0, *ys) if min(ys) < 0.5 * max(ys) else min(ys), max(ys))
    low_y, high_y = steps[0], steps[-1]

    def at(x: float, y: float) -> tuple[float, float]:
        right = LEFT + (log10(x) - low_x) / (high_x - low_x) * (WIDTH - LEFT - RIGHT)
        down = TOP + (high_y - y) / (high_y - low_y) * (HEIGHT - TOP - BOTTOM)
        return round(right, 1), round(min(max(down, TOP), HEIGHT - BOTTOM), 1)

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">']
    for step in steps:
        _, y = at(10**low_x, step)
        parts.append(f'<line class="grid" x1="{LEFT}" y1="{y}" x2="{WIDTH - RIGHT}" y2="{y}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4}" text-anchor="end">{escape(up.write(step))}</text>')
    for value in _ticks(xs):
        x, _ = at(value, low_y)
        parts.append(f'<line class="grid" x1="{x}" y1="{TOP}" x2="{x}" y2="{HEIGHT - BOTTOM}"/>')
        parts.append(
            f'<text x="{x}" y="{HEIGHT - BOTTOM + 25}" text-anchor="middle">{escape(across.write(value))}</text>'
        )
    if level is not None:
        _, y = at(10**low_x, level)
        parts.append(f'<line class="level" x1="{LEFT}" y1="{y}" x2="{WIDTH - RIGHT}" y2="{y}"/>')
    for number, (one, points) in enumerate(shown):
        if not points:
            continue
        parts += _band(points, one.errors, at, number)
        path = " ".join(f"{x},{y}" for x, y in (at(*point) for point in points))
        parts.append(f'<polyline class="s{number}" points="{path}"/>')
        if len(points) <= 12:
            parts += [f'<circle class="s{number}" cx="{x}" cy="{y}" r="3"/>' for x, y in (at(*p) for p in points)]
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{HEIGHT - 8}" text-anchor="middle">{escape(across.label)}</text></svg>')
    keys = "".join(f'<span class="k{i}">{escape(one.name)}</span>' for i, one in enumerate(series))
    return f"<figure><figcaption>{escape(title)}</figcaption>{''.join(parts)}<p class=keys>{keys}</p></figure>"


def _band(
    points: Sequence[tuple[float, float]],
    errors: Sequence[float],
    at: Callable[[float, float], tuple[float, float]],
    number: int,
) -> list[str]:
    if not any(errors):
        return []
    pairs = list(zip(points, errors, strict=False))
    above = [at(x, y + error) for (x, y), error in pairs]
    below = [at(x, y - error) for (x, y), error in reversed(pairs)]
    path = " ".join(f"{x},{y}" for x, y in above + below)
    return [f'<polygon class="b{number}" points="{path}"/>']


def _steps(low: float, high: float) -> list[float]:
    """Return four to eight round values, from at most `low` to at least `high`."""
    if high - low < 1e-9:
        high = low + (abs(low) or 1.0)
    span = high - low
    size = 10 ** floor(log10(span))
    for by in (0.2, 0.25, 0.5, 1.0):
        if span / (size * by) <= 6:
            size *= by
            break
    first = floor(low / size + 1e-9)
    found = [first * size]
    while found[-1] < high - 1e-9:
        found.append((first + len(found)) * size)
    return found if len(found) > 1 else [*found, found[0] + size]


def _ticks(xs: Sequence[float]) -> list[float]:
    """Return up to six values of a logarithmic axis: the points themselves if they are few, else powers of ten."""
    several = sorted(set(xs))
    if len(several) <= 6:
        return several
    powers = [10.0**k for k in range(floor(log10(several[0])) + 1, floor(log10(several[-1])) + 1)]
    if len(powers) < 2:
        return [several[0], several[-1]]
    return powers if len(powers) <= 6 else powers[:: -(-len(powers) // 6)]
