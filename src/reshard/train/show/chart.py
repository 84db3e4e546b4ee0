"""A line over steps as SVG, drawn without a browser, for one point as for a hundred thousand."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from html import escape

Point = tuple[int, float]

WIDTH, HEIGHT = 900, 240
LEFT, RIGHT, TOP, BOTTOM = 64, 14, 14, 30
SMOOTH_FROM = 100
"""Points from which on a mean over the last fiftieth of them is drawn over the points."""


def svg(title: str, points: Sequence[Point], beside: Sequence[Point] = (), *, noisy: bool = True) -> str:
    """The chart of a series, with numbers at its axes. Points that are no numbers are marked at the top.

    Over one that is `noisy` its mean is drawn; `beside` it another series of few points, with a dot for each.
    """
    finite = [point for point in points if math.isfinite(point[1])]
    few = [point for point in beside if math.isfinite(point[1])]
    broken = [step for step, value in (*points, *beside) if not math.isfinite(value)]
    scale = _Scale([*points, *beside], [*finite, *few])
    shown = list(decimated(points))
    smooth = list(decimated(means(points))) if noisy and len(finite) >= SMOOTH_FROM else []
    hover = [[step, round(scale.x(step), 1), value] for step, value in shown if math.isfinite(value)]
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)} over steps" '
        f"data-points='{json.dumps(hover)}'>",
        *scale.grid(),
        *_lines(shown, scale, "raw faint" if smooth else "raw"),
        *_lines(smooth, scale, "mean"),
        *(_lines(list(decimated(few)), scale, "beside") if len(few) > 1 else ()),
        *(_dot(point, scale, "beside") for point in decimated(few)),
        *(_mark(scale.x(step), step) for step in _apart(sorted(broken), scale)),
        '<line class="cross" y1="0" y2="0"/><text class="told"></text></svg>',
    ]
    return "".join(parts)


def decimated(points: Sequence[Point], columns: int = WIDTH) -> Iterator[Point]:
    """At most four points for each column: the first, the least, the greatest and the last; all that are no numbers."""
    if len(points) <= 4 * columns:
        yield from points
        return
    low, high = points[0][0], points[-1][0]
    at = 0
    for column in range(columns):
        end = low + (high - low) * (column + 1) / columns
        begin = at
        while at < len(points) and (points[at][0] <= end or column == columns - 1):
            at += 1
        yield from _extremes(points[begin:at])


def _extremes(points: Sequence[Point]) -> list[Point]:
    finite = [point for point in points if math.isfinite(point[1])]
    kept = {point for point in points if not math.isfinite(point[1])}
    if finite:
        kept |= {finite[0], finite[-1]}
        kept |= {min(finite, key=lambda point: point[1]), max(finite, key=lambda point: point[1])}
    return sorted(kept, key=lambda point: point[0])


def means(points: Sequence[Point]) -> list[Point]:
    """The mean over the last fiftieth of all points, at each; what is no number is left out."""
    finite = [point for point in points if math.isfinite(point[1])]
    window = max(len(finite) // 50, 1)
    total, result = 0.0, []
    for index, (step, value) in enumerate(finite):
        total += value - (finite[index - window][1] if index >= window else 0.0)
        result.append((step, total / min(index + 1, window)))
    return result


class _Scale:
    """From steps and values to places in the picture."""

    def __init__(self, points: Sequence[Point], finite: Sequence[Point]) -> None:
        steps, values = [step for step, _ in points] or [0], [value for _, value in finite] or [0.0]
        self._x0, self._x1 = _widened(min(steps), max(steps))
        low, high = _widened(min(values), max(values))
        margin = 0.05 * (high - low)
        self._y0 = 0.0 if low >= 0 > low - margin else low - margin
        self._y1 = high + margin

    def x(self, step: float) -> float:
        return LEFT + (step - self._x0) / (self._x1 - self._x0) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (value - self._y0) / (self._y1 - self._y0) * (HEIGHT - TOP - BOTTOM)

    def grid(self) -> Iterator[str]:
        """Lines and numbers."""
        for value in ticks(self._y0, self._y1, 5):
            y = self.y(value)
            yield f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
            yield f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{value:.4g}</text>'
        for step in ticks(self._x0, self._x1, 8):
            if step == round(step):
                x = self.x(step)
                anchor = "end" if x > WIDTH - 2 * RIGHT else "middle"
                yield f'<text x="{x:.1f}" y="{HEIGHT - 8}" text-anchor="{anchor}">{step:.0f}</text>'


def _widened(low: float, high: float) -> tuple[float, float]:
    """The same bounds, apart from each other."""
    if high > low:
        return low, high
    around = abs(low) / 2 or 1
    return low - around, high + around


def ticks(low: float, high: float, count: int) -> list[float]:
    """Round numbers between two bounds, about so many."""
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]


def _lines(points: Sequence[Point], scale: _Scale, kind: str) -> Iterator[str]:
    """A line for each run of numbers, a dot for one that is alone."""
    run: list[Point] = []
    for point in [*points, (0, math.nan)]:
        if math.isfinite(point[1]):
            run.append(point)
            continue
        if len(run) == 1:
            yield _dot(run[0], scale, kind)
        elif run:
            places = " ".join(f"{scale.x(step):.1f},{scale.y(value):.1f}" for step, value in run)
            yield f'<polyline class="{kind}" points="{places}"/>'
        run = []


def _dot(point: Point, scale: _Scale, kind: str) -> str:
    x, y = scale.x(point[0]), scale.y(point[1])
    return f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>'


def _apart(steps: Sequence[int], scale: _Scale) -> Iterator[int]:
    """Steps whose marks do not lie on each other."""
    before = -math.inf
    for step in steps:
        if scale.x(step) - before >= 3:
            before = scale.x(step)
            yield step


def _mark(x: float, step: int) -> str:
    path = f"M{x - 5:.1f} {TOP - 12} h10 l-5 9 z"
    return f'<path class="broken" d="{path}"><title>step {step} is no number</title></path>'
