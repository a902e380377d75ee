"""A curve drawn with characters: braille dots on a terminal, plain ASCII where the output may go to a file."""

from __future__ import annotations

import math
from collections.abc import Sequence

BRAILLE = 0x2800
# Bit of each dot in a braille cell, [row][column]
DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))

Points = Sequence[tuple[float, float]]


def curve(line: Points, marks: Points = (), *, width: int = 78, height: int = 12, ascii_only: bool = True) -> str:
    """`line` as a connected curve with `marks` as O over it, in `height` rows of at most `width` characters.

    More points than columns are averaged per column. Not a number is left out; nothing to draw gives an empty text.
    """
    line = [(x, y) for x, y in line if math.isfinite(x) and math.isfinite(y)]
    marks = [(x, y) for x, y in marks if math.isfinite(x) and math.isfinite(y)]
    both = [*line, *marks]
    if not both:
        return ""
    x_low, x_high = min(x for x, _ in both), max(x for x, _ in both)
    y_low, y_high = _padded(min(y for _, y in both), max(y for _, y in both))
    rows = max(height - 1, 3)
    span = y_high - y_low
    labels = {row: _label(y_high - span * row / (rows - 1), span) for row in (0, rows // 2, rows - 1)}
    margin = max(map(len, labels.values()))
    columns = max(width - margin - 2, 8)
    per_x, per_y = (1, 1) if ascii_only else (2, 4)

    def place(x: float, y: float, num_x: int, num_y: int) -> tuple[int, int]:
        across = (x - x_low) / (x_high - x_low) if x_high > x_low else 0.0
        down = (y_high - y) / (y_high - y_low)
        return round(across * (num_x - 1)), round(down * (num_y - 1))

    dots = _connected(_per_column([place(x, y, columns * per_x, rows * per_y) for x, y in line]))
    cells = _cells(dots, columns, rows, ascii_only)
    for x, y in marks:
        column, row = place(x, y, columns, rows)
        cells[row][column] = "O"
    side = "|" if ascii_only else "│"
    drawn = [f"{labels.get(i, ''):>{margin}} {side}{''.join(row)}".rstrip() for i, row in enumerate(cells)]
    first, last = f"{x_low:g}", f"{x_high:g}"
    between = max(columns - len(first), 1) if x_high > x_low else 0
    axis = " " * (margin + 2) + first + (f"{last:>{between}}" if between else "")
    return "\n".join([*drawn, axis])


def _padded(low: float, high: float) -> tuple[float, float]:
    """A range that is never empty: 0.5..0.5 becomes 0.0..1.0."""
    return (low, high) if high - low > 1e-9 * max(1.0, abs(high)) else (low - 0.5, high + 0.5)


def _label(value: float, span: float) -> str:
    """As many decimals as tell the ends of the axis apart."""
    if abs(value) >= 1000:
        return f"{value:.3g}"
    return f"{value:.2f}" if span >= 0.05 else f"{value:.4f}"


def _per_column(dots: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """One dot per column, at the mean height of its points, left to right."""
    heights: dict[int, list[int]] = {}
    for column, row in dots:
        heights.setdefault(column, []).append(row)
    return [(column, round(sum(rows) / len(rows))) for column, rows in sorted(heights.items())]


def _connected(dots: list[tuple[int, int]]) -> set[tuple[int, int]]:
    """All dots on the straight lines between neighbours."""
    filled = set(dots)
    for (x0, y0), (x1, y1) in zip(dots, dots[1:], strict=False):
        steps = max(x1 - x0, abs(y1 - y0))
        filled |= {(round(x0 + (x1 - x0) * i / steps), round(y0 + (y1 - y0) * i / steps)) for i in range(steps)}
    return filled


def _cells(dots: set[tuple[int, int]], columns: int, rows: int, ascii_only: bool) -> list[list[str]]:
    if ascii_only:
        return [["*" if (column, row) in dots else " " for column in range(columns)] for row in range(rows)]
    bits = [[0] * columns for _ in range(rows)]
    for x, y in dots:
        bits[y // 4][x // 2] |= DOTS[y % 4][x % 2]
    return [[chr(BRAILLE + b) if b else " " for b in row] for row in bits]
