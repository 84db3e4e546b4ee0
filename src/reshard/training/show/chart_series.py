"""What runs measured, thinned out and smoothed for the charts of a page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Point = tuple[int, float]

CHART_COLUMNS = 400
"""Columns into which points are thinned out, at most four in each."""
SMOOTHED_FROM_POINTS = 12
"""The least number of points for which a line has means."""


@dataclass(frozen=True)
class ChartSeries:
    """What one run measured, and `beside` it the evaluations: few points, with a dot for each."""

    points: Sequence[Point]
    beside: Sequence[Point] = ()


def chart(
    title: str, series: Sequence[ChartSeries], *, noisy: bool = True, beside: str = ""
) -> dict[str, Any]:
    """The data of a chart of one measured value of several runs. A `noisy` value also gets means.

    `broken` are the steps whose value is not finite; there the lines have gaps.
    """
    values = [point for each in series for point in (*each.points, *each.beside)]
    runs = [
        {
            "points": _shown(each.points),
            "means": _shown(means(each.points)) if noisy and len(each.points) >= SMOOTHED_FROM_POINTS else [],
            "beside": _shown(each.beside),
        }
        for each in series
    ]
    broken = sorted({step for step, value in values if not math.isfinite(value)})
    content = {
        "runs": runs,
        "positive": any(value > 0 for _, value in values),
        "broken": broken[:: len(broken) // CHART_COLUMNS + 1],
    }
    return {"title": title, "beside": beside, "content": content}


def _shown(points: Sequence[Point]) -> list[tuple[int, float | None]]:
    return [
        (step, float(f"{value:.6g}") if math.isfinite(value) else None) for step, value in thinned(points)
    ]


def thinned(points: Sequence[Point]) -> list[Point]:
    """At most four points per column: first, minimum, maximum and last; and all values that are not finite."""
    if len(points) <= 4 * CHART_COLUMNS:
        return list(points)
    size = -(-len(points) // CHART_COLUMNS)
    columns = (points[begin : begin + size] for begin in range(0, len(points), size))
    return [point for column in columns for point in _extremes(column)]


def _extremes(points: Sequence[Point]) -> list[Point]:
    finite = sorted((point for point in points if math.isfinite(point[1])), key=lambda point: point[1])
    broken = (point for point in points if not math.isfinite(point[1]))
    return sorted({points[0], points[-1], *finite[:1], *finite[-1:], *broken}, key=lambda point: point[0])


def means(points: Sequence[Point]) -> list[Point]:
    """Moving average over a fiftieth of all points, but at least five; values that are not finite are left out."""
    finite = [point for point in points if math.isfinite(point[1])]
    window = max(len(finite) // 50, 5)
    sums = np.convolve([0.0, *(value for _, value in finite)], np.ones(window))[1:]
    counts = (min(number, window) for number in range(1, len(finite) + 1))
    return [
        (step, float(total) / count) for (step, _), total, count in zip(finite, sums, counts, strict=False)
    ]
