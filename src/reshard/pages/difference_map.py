"""The differences between two checkpoints: a heat map of layers and modules, and a table."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from math import isfinite, sqrt
from typing import Any

from reshard.base.foreign_text import natural_key, printable_line
from reshard.commands.verification import Change, Comparison

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
MAX_ROWS = 1_000
"""The most rows in the table, with the largest changes."""
MAX_CELLS = 20_000
"""The most cells of a heat map that a browser draws smoothly."""


def heat_of(changes: Sequence[Change]) -> dict[str, Any]:
    """Cells of the heat map: [column, row, relative change, tooltip]. The experts of a layer are one cell.

    The relative change of a cell is that of all its tensors together: √(Σ(a-b)² / Σa²).
    """
    cells: dict[tuple[int, str], list[Change]] = defaultdict(list)
    for each in changes:
        cells[_layer_and_module(each.tensor)].append(each)
    layers = sorted({layer for layer, _ in cells})
    modules = sorted({module for _, module in cells}, key=_order)
    columns = {layer: index for index, layer in enumerate(layers)}
    rows = {module: index for index, module in enumerate(modules)}
    drawn = []
    for (layer, module), members in list(cells.items())[:MAX_CELLS]:
        relative = sqrt(sum(each.moved for each in members) / (sum(each.norm for each in members) or 1.0))
        elements, differ = sum(each.elements for each in members), sum(each.differ for each in members)
        tooltip = f"{differ:,} of {elements:,} elements differ"
        tooltip += f", in {len(members):,} tensors" if len(members) > 1 else ""
        drawn.append([columns[layer], rows[module], relative if isfinite(relative) else None, tooltip])
    return {
        "layers": ["no layer" if layer < 0 else str(layer) for layer in layers],
        "modules": [printable_line(module) for module in modules],
        "cells": drawn,
    }


def _order(module: str) -> tuple[bool, str]:
    """A sort key: modules without a layer come first."""
    return "*" in module, natural_key(module)


def _layer_and_module(name: str) -> tuple[int, str]:
    """The layer of a tensor (-1: none) and its module, with numbers replaced by stars."""
    number = _NUMBER.search(name)
    return int(number[0]) if number else -1, _NUMBER.sub("*", name)


def table_of(comparison: Comparison) -> list[dict[str, Any]]:
    """The tensors that differ: first those that cannot be compared, then by decreasing relative change."""
    measured = {each.tensor: each for each in comparison.changes}
    rows: list[dict[str, Any]] = []
    for row in [*comparison.rows, *comparison.rounded]:
        change = measured.get(row.tensor)
        rows.append(
            {
                "tensor": printable_line(row.tensor),
                "kind": row.what,
                "elements": "" if row.differ is None else f"{row.differ:,} of {row.elements:,}",
                "a": row.a,
                "b": row.b,
                "largest": row.largest if row.largest is not None and isfinite(row.largest) else None,
                "relative": change.relative if change and isfinite(change.relative) else None,
            }
        )
    rows.sort(
        key=lambda row: (row["relative"] is not None, -(row["relative"] or 0.0), natural_key(row["tensor"]))
    )
    return rows[:MAX_ROWS]
