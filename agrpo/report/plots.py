"""Line charts as SVG text: what a page needs to show curves without a script and without a network."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 460, 200
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 12, 10, 24
MOST_POINTS = 240  # per curve; more are averaged
COLOURS = ("#1f6feb", "#d1495b", "#2a9d5c", "#8b5cf6", "#d98c00", "#008b9a", "#b0377f", "#666e75")


@dataclass(frozen=True, slots=True)
class Curve:
    """One line of a chart, or its marks."""

    name: str
    points: Sequence[tuple[float, float]]
    colour: str = COLOURS[0]
    is_marks: bool = False


def chart(title: str, curves: Sequence[Curve], unit: str = "") -> str:
    """An SVG of all curves over one axis; empty where there is not one finite point."""
    shown = [Curve(c.name, _thinned(c.points), c.colour, c.is_marks) for c in curves]
    everything = [point for c in shown for point in c.points]
    if not everything:
        return ""
    xs, ys = [x for x, _ in everything], [y for _, y in everything]
    x_low, x_high = min(xs), max(xs)
    ticks = nice_ticks(min(ys), max(ys))
    y_low, y_high = min(ticks[0], min(ys)), max(ticks[-1], max(ys))

    def at(x: float, y: float) -> tuple[float, float]:
        across = (x - x_low) / (x_high - x_low) if x_high > x_low else 0.5
        up = (y - y_low) / (y_high - y_low)
        return _LEFT + across * (WIDTH - _LEFT - _RIGHT), HEIGHT - _BOTTOM - up * (HEIGHT - _TOP - _BOTTOM)

    parts = [_axes(ticks, x_low, x_high, at)]
    for curve in shown:
        places = [(*at(x, y), x, y) for x, y in curve.points]
        if not curve.is_marks:
            line = " ".join(f"{px:.1f},{py:.1f}" for px, py, _, _ in places)
            parts.append(f'<polyline points="{line}" fill="none" stroke="{curve.colour}" stroke-width="1.6"/>')
        opacity = 1 if curve.is_marks or len(places) == 1 else 0
        parts += [
            f'<circle cx="{px:.1f}" cy="{py:.1f}" r="4" fill="{curve.colour}" opacity="{opacity}" class="dot">'
            f"<title>{escape(curve.name)}, step {x:g}: {y:.4g} {escape(unit)}</title></circle>"
            for px, py, x, y in places
        ]
    legend = " ".join(f'<span><i style="background:{c.colour}"></i>{escape(c.name)}</span>' for c in shown if c.points)
    heading = escape(title) + (f" <small>{escape(unit)}</small>" if unit else "")
    body = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">{"".join(parts)}</svg>'
    return f'<figure><figcaption>{heading}</figcaption>{body}<div class="legend">{legend}</div></figure>'


def nice_ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Round numbers from at or below `low` to at or above `high`: 0.13 to 0.87 gives 0, 0.2, ..., 1.0."""
    if high - low <= 1e-12 * max(1.0, abs(high)):
        low, high = low - 0.5 * max(abs(low), 1e-6), high + 0.5 * max(abs(high), 1e-6)
    raw = (high - low) / count
    size = 10.0 ** math.floor(math.log10(raw))
    step = next(size * factor for factor in (1, 2, 2.5, 5, 10) if size * factor >= raw * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [i * step for i in range(first, last + 1)]


def number(value: float) -> str:
    """At most four digits: 1234567 -> 1.235e+06, 0.25 -> 0.25."""
    return f"{value:.4g}"


def _axes(ticks: list[float], x_low: float, x_high: float, at) -> str:
    parts = []
    for tick in ticks:
        _, y = at(x_low, tick)
        parts.append(f'<line x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 3.5:.1f}" text-anchor="end">{number(tick)}</text>')
    ends = [(x_low, "start"), (x_high, "end")] if x_high > x_low else [(x_low, "middle")]
    for x, anchor in ends:
        parts.append(f'<text x="{at(x, ticks[0])[0]:.1f}" y="{HEIGHT - 8}" text-anchor="{anchor}">{x:g}</text>')
    return "".join(parts)


def _thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Finite points; of more than MOST_POINTS, means of as many neighbours as are needed."""
    finite = [(float(x), float(y)) for x, y in points if math.isfinite(x) and math.isfinite(y)]
    size = math.ceil(len(finite) / MOST_POINTS) if finite else 1
    if size == 1:
        return finite
    pieces = [finite[i : i + size] for i in range(0, len(finite), size)]
    return [(sum(x for x, _ in p) / len(p), sum(y for _, y in p) / len(p)) for p in pieces]
