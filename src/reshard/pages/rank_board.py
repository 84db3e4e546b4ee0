"""The contents of each rank: a board of ranks if the layout is known, else of files."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from reshard.algebra.layout import Layout
from reshard.algebra.tensors import cells_of
from reshard.base.errors import ReshardError
from reshard.base.foreign_text import natural_key, printable_line
from reshard.base.quantities import size
from reshard.commands.inspection import Inspection
from reshard.families.sized_family import Model
from reshard.formats.checkpoint import Checkpoint

MAX_CELLS = 1_024
"""The most cells on a board; only the first are drawn."""
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks|block)\.(\d+)\.")
_EXPERT = re.compile(r"experts\.(\d+)\.")


@dataclass(frozen=True)
class Cell:
    """A rank or a file: its name, its contents in a line or two, and all details for a tooltip."""

    name: str
    lines: tuple[str, ...]
    details: str
    weight: float = 0.0
    """Its bytes, relative to the largest; 0 if unknown."""


@dataclass(frozen=True)
class Board:
    """Rows of cells, each with a title. `left` cells are not drawn."""

    title: str
    note: str
    rows: tuple[tuple[str, tuple[Cell, ...]], ...]
    left: int = 0


def board_of(inspection: Inspection) -> Board:
    """The ranks of a Megatron checkpoint; the files of any other one."""
    layout, model = inspection.checkpoint.layout.complete(), inspection.model
    if inspection.checkpoint.has_megatron_names and model and layout.world_size > 1:
        try:
            return _of_ranks(layout.over(model.dims.layers), model)
        except ReshardError:
            pass  # unknown stages: show the files instead
    return _of_files(inspection.checkpoint)


def _of_ranks(layout: Layout, model: Model) -> Board:
    dims, rows, drawn = model.dims, [], 0
    layers: dict[int, list[range]] = defaultdict(list)
    for stage, _, numbers in layout.chunks(dims.layers):
        layers[stage].append(numbers)
    for stage in range(layout.pp):
        cells = []
        for index in range(min(layout.stage_ranks, MAX_CELLS - drawn)):
            tp, ep = index % layout.tp, index // layout.etp % layout.ep
            lines = [f"layers {_ranges(layers[stage])}", *_of_rank(layout, model, tp, ep)]
            ends = [
                *(["embedding"] if stage == 0 else []),
                *(["norm and head"] if stage == layout.pp - 1 else []),
            ]
            lines += [", ".join(ends)] if ends else []
            where = f"stage {stage}, tensor-parallel rank {tp}"
            where += f", expert-parallel rank {ep}" if layout.ep > 1 else ""
            name = f"rank {stage * layout.stage_ranks + index}"
            cells.append(Cell(name, tuple(lines), f"{name}: {where}\n" + "\n".join(lines)))
        drawn += len(cells)
        if cells:
            rows.append((f"stage {stage}", tuple(cells)))
    return Board(
        "Ranks",
        f"{layout}: {layout.world_size} ranks, without data-parallel copies.",
        tuple(rows),
        layout.world_size - drawn,
    )


def _of_rank(layout: Layout, model: Model, tp: int, ep: int) -> list[str]:
    """The part of each of its layers that a rank stores."""
    dims = model.dims
    parts = [_share_text("heads", dims.heads, tp, layout.tp)]
    if dims.groups != dims.heads:
        parts.append(_share_text("KV heads", dims.groups, tp, layout.tp))
    if dims.experts:
        parts.append(_share_text("experts", dims.experts, ep, layout.ep))
    return [each for each in parts if each]


def _share_text(what: str, total: int, index: int, parts: int) -> str:
    if total % parts:
        return f"{what}: {total} over {parts} ranks, some of them copies" if total and total < parts else ""
    each = total // parts
    return f"{what} {_ranges([range(index * each, (index + 1) * each)])}" if each else ""


def _ranges(ranges: list[range]) -> str:
    return ", ".join(f"{each[0]}–{each[-1]}" if len(each) > 1 else str(each[0]) for each in ranges)


@dataclass
class _File:
    tensors: int = 0
    nbytes: int = 0
    layers: set[int] = field(default_factory=set)
    experts: set[int] = field(default_factory=set)


def _of_files(checkpoint: Checkpoint) -> Board:
    files: dict[str, _File] = defaultdict(_File)
    for name, tensor in checkpoint.tensors.items():
        layer, expert = _LAYER.search(name), _EXPERT.search(name)
        nbytes: dict[str, int] = defaultdict(int)
        for piece in tensor.view.pieces:
            for cells in cells_of(type(tensor.view)(tensor.shape, (piece,))):
                nbytes[cells.storage.path] += piece.numel * cells.dtype.itemsize
        for path, count in nbytes.items():
            if path:
                file = files[path]
                file.tensors += 1
                file.nbytes += count
                file.layers.update([int(layer[1])] if layer else [])
                file.experts.update([int(expert[1])] if expert else [])
    largest = max((each.nbytes for each in files.values()), default=1) or 1
    drawn = tuple(_cell(path, files[path], largest) for path in sorted(files, key=natural_key)[:MAX_CELLS])
    return Board(
        "Files",
        "The format records no ranks for its tensors; these are its files, and which tensors have bytes in each.",
        (("", drawn),) if drawn else (),
        len(files) - len(drawn),
    )


def _cell(path: str, file: _File, largest: int) -> Cell:
    lines = [f"{size(file.nbytes)}, {file.tensors:,} tensors"]
    lines += [f"layers {_runs(file.layers)}"] if file.layers else []
    lines += [f"experts {_runs(file.experts)}"] if file.experts else []
    name = printable_line(Path(path).name)
    return Cell(name, tuple(lines), "\n".join([printable_line(path), *lines]), file.nbytes / largest)


def _runs(numbers: set[int]) -> str:
    """Numbers as ranges: 0–3, 8, 10–12."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    texts = [str(a) if a == b else f"{a}–{b}" for a, b in runs]
    return ", ".join(texts[:4]) + (f" and {len(texts) - 4} more" if len(texts) > 4 else "")
