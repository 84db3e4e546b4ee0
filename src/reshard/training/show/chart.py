"""Line charts over steps for a page: of any number of points, and of one or several runs.

Lines are SVG paths in a box of `SIZE` × `SIZE` that the page stretches to its width; numbers and marks are placed in
percent of it, so that they keep their size. Each chart is laid out on a linear and on a logarithmic scale, each with
the points and with their means: the page switches between them without redrawing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from reshard.training.show.display import short

Point = tuple[int, float]

SIZE = 1000
COLUMNS = 400
"""Columns into which points are thinned out, at most four in each."""
SMOOTH_FROM = 12
"""The least number of points for which a line has means."""


@dataclass(frozen=True)
class Series:
    """What one run measured, and `beside` it the evaluations: few points, with a dot for each."""

    points: Sequence[Point]
    beside: Sequence[Point] = ()


@dataclass(frozen=True)
class Line:
    """A path of the run with this index. `kind` is points, means, or beside; `dots` are isolated points."""

    run: int
    kind: str
    path: str
    dots: str


@dataclass(frozen=True)
class Tick:
    """A number on an axis, and its position in percent."""

    at: float
    text: str


@dataclass(frozen=True)
class Drawing:
    """A chart on one scale."""

    lines: tuple[Line, ...]
    ticks: tuple[Tick, ...]


@dataclass(frozen=True)
class Chart:
    """A chart. `logarithmic` is None if no value is above 0.

    `broken` are the steps whose value is not finite. `hover` is [step, percent from the left, value] for the points of
    each run.
    """

    title: str
    linear: Drawing
    logarithmic: Drawing | None
    steps: tuple[Tick, ...]
    broken: tuple[Tick, ...]
    hover: list[list[list[float]]]


def chart(title: str, series: Sequence[Series], *, noisy: bool = True) -> Chart:
    """The chart of one measured value of several runs. A `noisy` value also gets means."""
    every = [point for each in series for point in (*each.points, *each.beside)]
    across = Span.over([step for step, _ in every])
    values = [value for _, value in every if math.isfinite(value)]
    positive = [value for value in values if value > 0]
    broken = sorted({step for step, value in every if not math.isfinite(value)})
    return Chart(
        title,
        _drawing(series, across, Span.over(values, margin=0.05), noisy=noisy),
        _drawing(series, across, LogSpan.over(positive), noisy=noisy) if positive else None,
        tuple(
            Tick(round(100 * across.at(step), 2), f"{step:.0f}")
            for step in ticks(across.low, across.high, 4)
            if step == round(step)
        ),
        tuple(_apart(broken, across)),
        [
            [
                [step, round(100 * across.at(step), 2), float(f"{value:.6g}")]
                for step, value in thinned(each.points or each.beside)
                if math.isfinite(value)
            ]
            for each in series
        ],
    )


@dataclass(frozen=True)
class Span:
    """A linear axis."""

    low: float
    high: float

    @staticmethod
    def over(values: Sequence[float], margin: float = 0.0) -> Span:
        """A span of all values. A single value has room on both sides; 0 stays the edge of positive values."""
        low, high = (min(values), max(values)) if values else (0.0, 1.0)
        if high <= low:
            around = abs(low) / 2 or 1
            low, high = low - around, high + around
        more = margin * (high - low)
        return Span(0.0 if low >= 0 > low - more else low - more, high + more)

    def at(self, value: float) -> float:
        """The position of a value on the axis, from 0 to 1."""
        return (value - self.low) / (self.high - self.low)

    def ticks(self) -> list[float]:
        """Round numbers on the axis."""
        return ticks(self.low, self.high, 5)


class LogSpan(Span):
    """A logarithmic axis for positive values."""

    @staticmethod
    def over(values: Sequence[float], margin: float = 0.05) -> LogSpan:
        low, high = math.log10(min(values)), math.log10(max(values))
        more = margin * (high - low) or 0.1
        return LogSpan(10 ** (low - more), 10 ** (high + more))

    def at(self, value: float) -> float:
        return math.log(value / self.low) / math.log(self.high / self.low)

    def ticks(self) -> list[float]:
        """Powers of ten; if there are few, also 2 and 5 times these, or the ticks of a linear axis."""
        decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        for factors, least in (((1,), 3), ((1, 2, 5), 3)):
            found = [factor * 10.0**power for power in decades for factor in factors]
            found = [value for value in found if self.low <= value <= self.high]
            if len(found) >= least:
                return found[:: -(-len(found) // 6)]
        return [value for value in ticks(self.low, self.high, 5) if value > 0]


def _drawing(series: Sequence[Series], across: Span, up: Span, *, noisy: bool) -> Drawing:
    lines: list[Line] = []
    for run, each in enumerate(series):
        smooth = means(each.points) if noisy and len(each.points) >= SMOOTH_FROM else each.points
        for kind, points in (("points", each.points), ("means", smooth), ("beside", each.beside)):
            if points:
                path, dots = _paths(thinned(points), across, up, every=kind == "beside")
                lines.append(Line(run, kind, path, dots))
    return Drawing(tuple(lines), tuple(Tick(round(100 * up.at(v), 2), label(v)) for v in up.ticks()))


def _paths(points: Iterable[Point], across: Span, up: Span, *, every: bool) -> tuple[str, str]:
    """The path of each run of consecutive points, and the dots: isolated points, or `every` point."""
    lines, dots = [], []
    for run in _runs(points, up):
        places = [f"{SIZE * across.at(step):.1f} {SIZE * (1 - up.at(value)):.1f}" for step, value in run]
        lines += ["M" + "L".join(places)] if len(places) > 1 else []
        dots += [f"M{place}h0" for place in places] if every or len(places) == 1 else []
    return "".join(lines), "".join(dots)


def _runs(points: Iterable[Point], up: Span) -> Iterator[list[Point]]:
    """Runs of consecutive points, split at values that are not finite or not on the axis."""
    run: list[Point] = []
    for point in points:
        if math.isfinite(point[1]) and (point[1] > 0 or not isinstance(up, LogSpan)):
            run.append(point)
        elif run:
            yield run
            run = []
    if run:
        yield run


def thinned(points: Sequence[Point], columns: int = COLUMNS) -> Iterator[Point]:
    """At most four points per column: first, minimum, maximum and last; and all values that are not finite."""
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
    """Moving average over a fiftieth of all points, but at least five; values that are not finite are left out."""
    finite = [point for point in points if math.isfinite(point[1])]
    window = max(len(finite) // 50, 5)
    total, result = 0.0, []
    for index, (step, value) in enumerate(finite):
        if index % window:
            total += value - (finite[index - window][1] if index >= window else 0.0)
        else:  # summed anew, because one huge value costs the others their digits
            total = math.fsum(each for _, each in finite[max(index - window + 1, 0) : index + 1])
        result.append((step, total / min(index + 1, window)))
    return result


def ticks(low: float, high: float, count: int) -> list[float]:
    """About `count` round numbers between two bounds."""
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]


def label(value: float) -> str:
    """A number with four digits: 0.25, 1e-05, 12.3k."""
    return short(value) if abs(value) >= 10_000 else f"{value:.4g}"


def _apart(steps: Sequence[int], across: Span) -> Iterator[Tick]:
    """Marks of steps that do not overlap."""
    before = -math.inf
    for step in steps:
        at = 100 * across.at(step)
        if at - before >= 0.3:
            before = at
            yield Tick(round(at, 2), str(step))
