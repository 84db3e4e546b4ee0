"""The index algebra: tensors that know where each of their elements is stored.

A `View` is a shape and a list of `Piece`s. A piece is a strided bijection between some elements of a
source and some elements of the view, both counted in row-major *linear* order. Reshaping is therefore
free, concatenation appends pieces, and slicing, permuting, cutting into shards, and composing a view
with the views of its sources are all one operation: two strided runs meet in the linear space that they
share (`_meet`). Every piece can be read in either direction, so a rule that is declared once
serves import and export.

There is no I/O here, and no element is ever read: sources are any hashable names.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import NamedTuple

Axis = tuple[int, int, int]
"""(count, source stride, target stride), in elements."""


class Piece(NamedTuple):
    """Elements `start + Σ i·source_stride` of `source` are elements `at + Σ i·target_stride` of the view.

    Axes are ordered by falling target stride, and nested: one step of an axis is at least as long as
    everything inside it, on both sides. Axes of one element are left out.
    """

    source: Hashable
    start: int
    at: int
    axes: tuple[Axis, ...]

    @property
    def numel(self) -> int:
        return prod(count for count, _, _ in self.axes)

    @property
    def end(self) -> int:
        """One past the last element of the view that this piece covers."""
        return self.at + 1 + sum((count - 1) * target for count, _, target in self.axes)

    @property
    def source_end(self) -> int:
        """One past the last element of the source that this piece covers."""
        return self.start + 1 + sum((count - 1) * source for count, source, _ in self.axes)

    def swapped(self, source: Hashable) -> Piece:
        """The inverse bijection: `source` names the former view."""
        axes = sorted(((n, target, step) for n, step, target in self.axes), key=_by_target)
        return Piece(source, self.at, self.start, tuple(axes))


def _by_target(axis: Axis) -> int:
    return -axis[2]


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """The element strides of a contiguous tensor."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


class _Run(NamedTuple):
    """Elements `start + Σ i·step` of a linear space that two runs share are elements `at + Σ i·stride` elsewhere.

    Axes are (count, step, stride), nested, outermost first.
    """

    start: int
    at: int
    axes: tuple[Axis, ...]

    def cell(self, index: int) -> _Run:
        """What the outermost axis has at `index`."""
        _, step, stride = self.axes[0]
        return _Run(self.start + index * step, self.at + index * stride, self.axes[1:])


def _span(axes: Sequence[Axis]) -> int:
    """The extent of a run in the shared space."""
    reach = 1
    for count, step, _ in axes:
        reach += (count - 1) * step
    return reach


def _flipped(axes: Iterable[Axis]) -> tuple[Axis, ...]:
    """Axes with their two strides exchanged."""
    return tuple((count, target, source) for count, source, target in axes)


def _meet(one: _Run, other: _Run, done: tuple[Axis, ...] = ()) -> Iterator[tuple[int, int, tuple[Axis, ...]]]:
    """Yield the intersection of two runs, as (element of one, element of the other, axes).

    Axes are (count, stride of one, stride of the other), beginning with those that are `done`. The run whose outermost
    step is longer is walked cell by cell; the other one is cut so that it takes the same steps, until both step
    together and only the distance between them matters.
    """
    if one.start + _span(one.axes) <= other.start or other.start + _span(other.axes) <= one.start:
        return
    if not one.axes and not other.axes:
        yield one.at, other.at, done
    elif not one.axes or (other.axes and other.axes[0][1] > one.axes[0][1]):
        for at, other_at, axes in _meet(other, one, _flipped(done)):
            yield other_at, at, _flipped(axes)
    elif other.axes and other.axes[0][1] == one.axes[0][1]:
        yield from _meet_in_step(one, other, done)
    elif parts := _cut_to_cells(one, other):
        for part in parts:
            yield from _meet(one, part, done)
    else:
        count, step, _ = one.axes[0]
        first = max(0, (other.start - one.start - _span(one.axes[1:])) // step + 1)
        last = min(count - 1, (other.start + _span(other.axes) - 1 - one.start) // step)
        for index in range(first, last + 1):
            yield from _meet(one.cell(index), other, done)


def _meet_in_step(
    one: _Run, other: _Run, done: tuple[Axis, ...]
) -> Iterator[tuple[int, int, tuple[Axis, ...]]]:
    """`_meet` for two runs whose outermost steps are equal."""
    (count, step, stride), (other_count, _, other_stride) = one.axes[0], other.axes[0]
    gap = other.start - one.start
    # Cell i of one meets cell j of the other only if i - j is one of at most two adjacent numbers.
    first = (gap - _span(one.axes[1:])) // step + 1
    last = -((-gap - _span(other.axes[1:])) // step) - 1
    for ahead in range(first, last + 1):
        behind = max(0, -ahead)
        together = min(other_count, count - ahead) - behind
        if together > 0:
            axes = (*done, (together, stride, other_stride)) if together > 1 else done
            yield from _meet(one.cell(behind + ahead), other.cell(behind), axes)


def _cut_to_cells(one: _Run, other: _Run) -> list[_Run]:
    """The other run in parts that take the outermost step of one; nothing if it does not fill two cells of that."""
    step = one.axes[0][1]
    if not other.axes or step % other.axes[0][1]:
        return []
    count, short, stride = other.axes[0]
    per_cell = step // short
    head = min(count, -((other.start - one.start) // short) % per_cell)
    cells, tail = divmod(count - head, per_cell)
    if cells < 2:
        return []
    cuts = [
        (0, [(head, short, stride)]),
        (head, [(cells, step, per_cell * stride), (per_cell, short, stride)]),
        (count - tail, [(tail, short, stride)]),
    ]
    parts = []
    for skipped, axes in cuts:
        if axes[0][0]:
            kept = tuple(axis for axis in axes if axis[0] > 1)
            parts.append(
                _Run(other.start + skipped * short, other.at + skipped * stride, kept + other.axes[1:])
            )
    return parts


def _merged_axes(axes: Iterable[Axis]) -> tuple[Axis, ...]:
    """Drop axes of one element, and merge adjacent axes that form one axis."""
    merged: list[Axis] = []
    for axis in axes:
        if axis[0] == 1:
            continue
        if merged:
            (outer, outer_source, outer_target), (count, source, target) = merged[-1], axis
            if outer_source == count * source and outer_target == count * target:
                merged[-1] = (outer * count, source, target)
                continue
        merged.append(axis)
    return tuple(merged)


@lru_cache(maxsize=4096)  # the layers of a model repeat the same few shapes
def _whole_axes(shape: tuple[int, ...], strides: tuple[int, ...] | None) -> tuple[Axis, ...] | None:
    """The axes of a complete tensor; None if it is empty."""
    mine = row_major(shape)
    return _merged_axes(zip(shape, strides or mine, mine, strict=True)) if prod(shape) else None


def _tidy(axes: Iterable[Axis]) -> tuple[Axis, ...]:
    """The axes of a piece: by falling target stride, merged."""
    return _merged_axes(sorted(axes, key=_by_target))


@dataclass(frozen=True, slots=True)
class View:
    """A tensor of `shape` whose elements come from `pieces`. Elements that no piece covers are gaps."""

    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @staticmethod
    def of(source: Hashable, *shape: int, start: int = 0, strides: Sequence[int] | None = None) -> View:
        """All of `source` as a tensor of `shape`, from `start`, contiguous unless `strides` are given."""
        axes = _whole_axes(shape, tuple(strides) if strides else None)
        return View(shape, () if axes is None else (Piece(source, start, 0, axes),))

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def reshape(self, *shape: int) -> View:
        """The same elements in the same linear order with another shape."""
        if prod(shape) != self.numel:
            raise ValueError(f"cannot reshape {list(self.shape)} to {list(shape)}")
        return View(tuple(shape), self.pieces)

    def split(self, axis: int, *sizes: int) -> View:
        """Split one axis into several whose sizes multiply to its size."""
        axis %= len(self.shape)
        return self.reshape(*self.shape[:axis], *sizes, *self.shape[axis + 1 :])

    def merge(self, axis: int, count: int = 2) -> View:
        """Merge `count` adjacent axes into one: the inverse of `split`."""
        axis %= len(self.shape)
        merged = prod(self.shape[axis : axis + count])
        return self.reshape(*self.shape[:axis], merged, *self.shape[axis + count :])

    def permute(self, *order: int) -> View:
        """Reorder axes: axis `i` of the result is axis `order[i]` of this view."""
        shape = tuple(self.shape[axis] for axis in order)
        stride = dict(zip(order, row_major(shape), strict=True))
        return self._placed(shape, [0] * len(shape), self.shape, [stride[i] for i in range(len(order))])

    def __getitem__(self, index: int | slice | tuple[int | slice, ...]) -> View:
        """Basic indexing with integers and slices of step one, as in numpy."""
        index = index if isinstance(index, tuple) else (index,)
        low, size, keep = [], [], []
        for axis, extent in enumerate(self.shape):
            item = index[axis] if axis < len(index) else slice(None)
            if isinstance(item, slice):
                begin, end, step = item.indices(extent)
                if step != 1:
                    raise ValueError("slices take no step")
                low.append(begin)
                size.append(max(0, end - begin))
                keep.append(axis)
            else:
                if not -extent <= item < extent:
                    raise IndexError(f"index {item} of an axis of size {extent}")
                low.append(item % extent)
                size.append(1)
        shape = tuple(size[axis] for axis in keep)
        return self._placed(size, low, size, row_major(size)).reshape(*shape)

    def box(self, low: Sequence[int], size: Sequence[int]) -> View:
        """The elements from `low` to `low + size` on every axis."""
        return self[tuple(slice(begin, begin + n) for begin, n in zip(low, size, strict=True))]

    def unstacked(self) -> Iterator[View]:
        """The parts along the first axis. Each uses only the pieces that overlap it: there may be thousands."""
        size = prod(self.shape[1:])
        reaching: list[list[Piece]] = [[] for _ in range(self.shape[0])]
        for piece in self.pieces:
            for index in range(piece.at // size, (piece.end - 1) // size + 1):
                reaching[index].append(piece)
        for index, pieces in enumerate(reaching):
            yield View(self.shape, tuple(pieces))[index]

    def window(self, begin: int, end: int) -> tuple[Piece, ...]:
        """The pieces of the linear elements `begin` to `end`, with offsets relative to `begin`."""
        flat = View((self.numel,), self.pieces)
        return flat[begin:end].pieces

    def in_memory(self, size: int, strides: Sequence[int], offset: int) -> View:
        """The same elements at `strides` (from `offset`) of a flat memory of `size` elements."""
        return self._placed((size,), [0] * len(self.shape), self.shape, strides, offset)

    def _placed(
        self,
        shape: Sequence[int],
        low: Sequence[int],
        size: Sequence[int],
        strides: Sequence[int],
        offset: int = 0,
    ) -> View:
        """Place the box of `size` at `low` at `strides` (from `offset`) of a new tensor of `shape`."""
        old = row_major(self.shape)
        first = sum(at * step for at, step in zip(low, old, strict=True))
        if not prod(size):
            return View(tuple(shape), ())
        box = _merged_axes(zip(size, old, strides, strict=True))
        pieces = []
        for piece in self.pieces:
            run = _Run(piece.at, piece.start, _flipped(piece.axes))
            for start, at, axes in _meet(run, _Run(first, offset, box)):
                pieces.append(Piece(piece.source, start, at, _tidy(axes)))
        return View(tuple(shape), tuple(pieces))

    def through(self, below: Callable[[Hashable], View]) -> View:
        """Compose this view with those of its sources: replace each source by the view `below(source)`."""
        pieces = []
        for piece in self.pieces:
            upper = piece.swapped(None)  # ordered by the space that is now shared
            run = _Run(upper.at, upper.start, _flipped(upper.axes))
            end = piece.source_end
            for under in below(piece.source).pieces:
                if under.at >= end or under.end <= piece.start:
                    continue
                for at, start, axes in _meet(run, _Run(under.at, under.start, _flipped(under.axes))):
                    pieces.append(Piece(under.source, start, at, _tidy(_flipped(axes))))
        return View(self.shape, tuple(pieces))

    def renamed(self, name: Callable[[Hashable], Hashable]) -> View:
        """The same view with renamed sources."""
        return View(self.shape, tuple(piece._replace(source=name(piece.source)) for piece in self.pieces))


def concat(views: Sequence[View], axis: int = 0) -> View:
    """Join views along an axis; all other axes must be equal."""
    first = views[0]
    axis %= len(first.shape)
    total = sum(view.shape[axis] for view in views)
    shape = (*first.shape[:axis], total, *first.shape[axis + 1 :])
    strides = row_major(shape)
    pieces: list[Piece] = []
    begin = 0
    for view in views:
        if view.shape[:axis] + view.shape[axis + 1 :] != first.shape[:axis] + first.shape[axis + 1 :]:
            raise ValueError(f"cannot join {list(view.shape)} to {list(first.shape)} along axis {axis}")
        whole = [0] * len(shape)
        pieces.extend(view._placed(shape, whole, view.shape, strides, begin * strides[axis]).pieces)
        begin += view.shape[axis]
    return View(shape, tuple(pieces))


def assemble(shape: Sequence[int], boxes: Iterable[tuple[Sequence[int], View]]) -> View:
    """A tensor of `shape` from parts at given offsets in it."""
    strides = row_major(shape)
    pieces: list[Piece] = []
    for low, part in boxes:
        offset = sum(at * step for at, step in zip(low, strides, strict=True))
        pieces.extend(part._placed(shape, [0] * len(low), part.shape, strides, offset).pieces)
    return View(tuple(shape), tuple(pieces))


def overlaps(view: View) -> tuple[Piece, Piece] | None:
    """Two pieces that cover the same element of the view, or None."""
    ordered = sorted(view.pieces, key=lambda piece: piece.at)
    open_pieces: list[Piece] = []
    for piece in ordered:
        open_pieces = [other for other in open_pieces if other.end > piece.at]
        run = _Run(piece.at, 0, _flipped(piece.axes))
        for other in open_pieces:
            if next(_meet(run, _Run(other.at, 0, _flipped(other.axes))), None) is not None:
                return other, piece
        open_pieces.append(piece)
    return None


def covered(view: View) -> int:
    """The number of elements that pieces cover, provided that none `overlaps`."""
    return sum(piece.numel for piece in view.pieces)
