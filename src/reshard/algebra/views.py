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


def _span(axes: Sequence[Axis]) -> int:
    """The extent of a run in the shared space, which is the middle entry of its axes."""
    reach = 1
    for count, mid, _ in axes:
        reach += (count - 1) * mid
    return reach


def _meet(
    a: int, a_axes: tuple[Axis, ...], x: int, b: int, b_axes: tuple[Axis, ...], y: int, done: tuple[Axis, ...]
) -> Iterator[tuple[int, int, tuple[Axis, ...]]]:
    """Yield the intersection of two strided runs, as (x, y, axes of (count, x stride, y stride)).

    Run A covers `a + Σ i·mid` of a shared linear space and maps to `x + Σ i·out` elsewhere; run B
    likewise with `b` and `y`. Axes are (count, mid stride, out stride), nested, outermost first. The run
    whose outermost step is longer is walked cell by cell; the other one is cut so that it takes the same
    steps, until both step together and only the distance between them matters.
    """
    reach_a, reach_b = _span(a_axes), _span(b_axes)
    if a + reach_a <= b or b + reach_b <= a:
        return
    if not a_axes and not b_axes:
        yield x, y, done
        return
    if not a_axes or (b_axes and b_axes[0][1] > a_axes[0][1]):
        for y_, x_, axes in _meet(b, b_axes, y, a, a_axes, x, tuple((n, s, t) for n, t, s in done)):
            yield x_, y_, tuple((n, s, t) for n, t, s in axes)
        return

    n, step, x_step = a_axes[0]
    a_inner = a_axes[1:]
    if b_axes and b_axes[0][1] == step:
        m, _, y_step = b_axes[0]
        b_inner = b_axes[1:]
        gap = b - a
        # A's cell i meets B's cell j only if i - j is one of at most two adjacent numbers.
        first = (gap - _span(a_inner)) // step + 1
        last = -((-gap - _span(b_inner)) // step) - 1
        for ahead in range(first, last + 1):
            j = max(0, -ahead)
            count = min(m, n - ahead) - j
            if count <= 0:
                continue
            i = j + ahead
            together = (*done, (count, x_step, y_step)) if count > 1 else done
            yield from _meet(
                a + i * step, a_inner, x + i * x_step, b + j * step, b_inner, y + j * y_step, together
            )
        return

    cells = 0
    if b_axes and step % b_axes[0][1] == 0:
        m, b_step, y_step = b_axes[0]
        per_cell = step // b_step
        head = min(m, -((b - a) // b_step) % per_cell)
        cells, tail = divmod(m - head, per_cell)
    if cells < 2:
        first = max(0, (b - a - _span(a_inner)) // step + 1)
        last = min(n - 1, (b + reach_b - 1 - a) // step)
        for i in range(first, last + 1):
            yield from _meet(a + i * step, a_inner, x + i * x_step, b, b_axes, y, done)
        return
    for j, axes in (
        (0, ((head, b_step, y_step),)),
        (head, ((cells, step, per_cell * y_step), (per_cell, b_step, y_step))),
        (m - tail, ((tail, b_step, y_step),)),
    ):
        if axes[0][0]:
            cut = tuple(axis for axis in axes if axis[0] > 1) + b_axes[1:]
            yield from _meet(a, a_axes, x, b + j * b_step, cut, y + j * y_step, done)


def _merged(axes: Iterable[Axis]) -> tuple[Axis, ...]:
    """Drop axes of one element, and merge adjacent axes that form one axis."""
    merged: list[Axis] = []
    for axis in axes:
        if axis[0] == 1:
            continue
        if merged:
            (n, s, t), (m, s_, t_) = merged[-1], axis
            if s == m * s_ and t == m * t_:
                merged[-1] = (n * m, s_, t_)
                continue
        merged.append(axis)
    return tuple(merged)


@lru_cache(maxsize=4096)  # the layers of a model repeat the same few shapes
def _whole(shape: tuple[int, ...], strides: tuple[int, ...] | None) -> tuple[Axis, ...] | None:
    """The axes of a complete tensor; None if it is empty."""
    mine = row_major(shape)
    return _merged(zip(shape, strides or mine, mine, strict=True)) if prod(shape) else None


def _tidy(axes: Iterable[Axis]) -> tuple[Axis, ...]:
    """The axes of a piece: by falling target stride, merged."""
    return _merged(sorted(axes, key=_by_target))


@dataclass(frozen=True, slots=True)
class View:
    """A tensor of `shape` whose elements come from `pieces`. Elements that no piece covers are gaps."""

    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @staticmethod
    def of(source: Hashable, *shape: int, start: int = 0, strides: Sequence[int] | None = None) -> View:
        """All of `source` as a tensor of `shape`, from `start`, contiguous unless `strides` are given."""
        axes = _whole(shape, tuple(strides) if strides else None)
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
        box = _merged(zip(size, old, strides, strict=True))
        pieces = []
        for piece in self.pieces:
            run = tuple((n, target, source) for n, source, target in piece.axes)
            for start, at, axes in _meet(piece.at, run, piece.start, first, box, offset, ()):
                pieces.append(Piece(piece.source, start, at, _tidy(axes)))
        return View(tuple(shape), tuple(pieces))

    def through(self, below: Callable[[Hashable], View]) -> View:
        """Compose this view with those of its sources: replace each source by the view `below(source)`."""
        pieces = []
        for piece in self.pieces:
            upper = piece.swapped(None)  # ordered by the space that is now shared
            run = tuple((n, target, source) for n, source, target in upper.axes)
            end = piece.source_end
            for under in below(piece.source).pieces:
                if under.at >= end or under.end <= piece.start:
                    continue
                low = tuple((n, target, source) for n, source, target in under.axes)
                for at, start, axes in _meet(piece.start, run, piece.at, under.at, low, under.start, ()):
                    turned = _tidy((n, source, target) for n, target, source in axes)
                    pieces.append(Piece(under.source, start, at, turned))
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
        run = tuple((n, target, source) for n, source, target in piece.axes)
        for other in open_pieces:
            their = tuple((n, target, source) for n, source, target in other.axes)
            if next(_meet(piece.at, run, 0, other.at, their, 0, ()), None) is not None:
                return other, piece
        open_pieces.append(piece)
    return None


def covered(view: View) -> int:
    """The number of elements that pieces cover, provided that none `overlaps`."""
    return sum(piece.numel for piece in view.pieces)
