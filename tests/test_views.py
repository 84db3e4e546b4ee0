"""The index algebra compared with numpy: a view supports the same sequences of operations."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reshard.algebra.views import Piece, View, assemble, concat, covered, overlaps


def gather(view: View, sources: dict[object, np.ndarray], fill: int = -1) -> np.ndarray:
    """Evaluate a view element by element, the slow and obvious way."""
    flat = np.full(view.numel, fill, dtype=np.int64)
    for piece in view.pieces:
        source = sources[piece.source].ravel()
        for index in np.ndindex(*[n for n, _, _ in piece.axes]):
            start = piece.start + sum(i * axis[1] for i, axis in zip(index, piece.axes, strict=True))
            at = piece.at + sum(i * axis[2] for i, axis in zip(index, piece.axes, strict=True))
            assert flat[at] == fill, "two pieces write one element"
            flat[at] = source[start]
    return flat.reshape(view.shape)


def factors(n: int) -> list[tuple[int, ...]]:
    return [(n,)] + [(a, n // a) for a in range(2, n) if n % a == 0]


@st.composite
def operations(draw: st.DrawFn) -> tuple[View, np.ndarray, np.ndarray]:
    """A random chain of view operations on one source, and numpy's result for the same chain."""
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    source = np.arange(int(np.prod(shape)), dtype=np.int64).reshape(shape)
    view, array = View.of("s", *shape), source
    for _ in range(draw(st.integers(1, 6))):
        if not array.size:
            break
        kind = draw(st.sampled_from(["slice", "permute", "split", "merge", "flatten", "concat"]))
        rank = array.ndim
        if kind == "slice":
            index = []
            for extent in array.shape:
                low = draw(st.integers(0, extent - 1))
                index.append(slice(low, draw(st.integers(low + 1, extent))))
            view, array = view[tuple(index)], array[tuple(index)]
        elif kind == "permute":
            order = draw(st.permutations(range(rank)))
            view, array = view.permute(*order), array.transpose(order)
        elif kind == "split" and rank < 6:
            axis = draw(st.integers(0, rank - 1))
            sizes = draw(st.sampled_from(factors(array.shape[axis])))
            view = view.split(axis, *sizes)
            array = array.reshape(*array.shape[:axis], *sizes, *array.shape[axis + 1 :])
        elif kind == "merge" and rank > 1:
            axis = draw(st.integers(0, rank - 2))
            view = view.merge(axis)
            array = array.reshape(*array.shape[:axis], -1, *array.shape[axis + 2 :])
        elif kind == "flatten":
            view, array = view.reshape(array.size), array.reshape(-1)
        elif kind == "concat" and array.shape[0] > 1:
            axis = draw(st.integers(0, rank - 1))
            cut = draw(st.integers(0, array.shape[axis]))
            here = (slice(None),) * axis
            parts = [(*here, slice(cut, None)), (*here, slice(0, cut))]
            view = concat([view[part] for part in parts], axis)
            array = np.concatenate([array[part] for part in parts], axis)
    return view, array, source


@settings(max_examples=400, deadline=None)
@given(operations())
def test_any_chain_of_operations_agrees_with_numpy(case: tuple[View, np.ndarray, np.ndarray]) -> None:
    view, array, source = case
    assert view.shape == array.shape
    assert np.array_equal(gather(view, {"s": source}), array)
    assert covered(view) == view.numel
    assert overlaps(view) is None


@settings(max_examples=200, deadline=None)
@given(operations(), st.data())
def test_a_view_of_a_view_is_the_composed_view(case, data) -> None:
    below, array, source = case
    if not array.size:
        return
    above = View.of("b", *array.shape)
    order = data.draw(st.permutations(range(array.ndim)))
    index = tuple(slice(data.draw(st.integers(0, n - 1)), None) for n in array.shape)
    above = above[index].permute(*order)
    expected = array[index].transpose(order)
    assert np.array_equal(gather(above.through(lambda _: below), {"s": source}), expected)


@settings(max_examples=200, deadline=None)
@given(operations())
def test_a_view_inverts(case) -> None:
    view, array, source = case
    back = View(source.shape, tuple(piece.swapped("v") for piece in view.pieces))
    result = gather(back, {"v": array})
    used = result != -1
    assert used.sum() == array.size
    assert np.array_equal(result[used], source[used])


@settings(max_examples=100, deadline=None)
@given(operations())
def test_a_view_unstacks_along_its_first_axis(case) -> None:
    view, array, source = case
    parts = list(view.unstacked())
    assert len(parts) == len(array)
    for part, expected in zip(parts, array, strict=True):
        assert part.shape == expected.shape
        assert np.array_equal(gather(part, {"s": source}), expected)


@settings(max_examples=100, deadline=None)
@given(operations(), st.data())
def test_windows_tile_a_view(case, data) -> None:
    view, array, source = case
    if not array.size:
        return
    cut = data.draw(st.integers(0, array.size))
    for begin, end in ((0, cut), (cut, array.size)):
        part = View((end - begin,), view.window(begin, end))
        assert np.array_equal(gather(part, {"s": source}), array.ravel()[begin:end])


def test_query_key_value_of_a_fused_projection() -> None:
    groups, per_group, head, hidden = 3, 2, 4, 5
    rows = groups * (per_group + 2) * head
    fused = np.arange(rows * hidden).reshape(rows, hidden)
    qkv = View.of("qkv", rows, hidden).split(0, groups, per_group + 2, head)
    q = qkv[:, :-2].reshape(groups * per_group * head, hidden)
    four = fused.reshape(groups, per_group + 2, head, hidden)
    assert np.array_equal(gather(q, {"qkv": fused}), four[:, :-2].reshape(-1, hidden))
    assert len(q.pieces) == 1, "a strided view stays one piece"
    k = qkv[:, -2].reshape(groups * head, hidden)
    assert np.array_equal(gather(k, {"qkv": fused}), four[:, -2].reshape(-1, hidden))


def test_boxes_assemble_and_gaps_and_overlaps_are_seen() -> None:
    left, right = View.of("l", 4, 3), View.of("r", 4, 2)
    whole = assemble((4, 5), [((0, 0), left), ((0, 3), right)])
    sources = {"l": np.arange(12).reshape(4, 3), "r": np.arange(8).reshape(4, 2) + 100}
    assert np.array_equal(gather(whole, sources), np.concatenate([sources["l"], sources["r"]], 1))
    assert covered(assemble((4, 6), [((0, 0), left), ((0, 4), right)])) == 20
    assert overlaps(assemble((4, 5), [((0, 0), left), ((0, 2), right)])) is not None
    assert overlaps(whole) is None


def test_strided_sources() -> None:
    transposed = View.of("t", 3, 4, strides=(1, 3))
    source = np.arange(12)
    assert np.array_equal(gather(transposed, {"t": source}), source.reshape(4, 3).T)
    assert View.of("x", 2, 0).pieces == ()
    assert View.of("x", 1, 1).pieces == (Piece("x", 0, 0, ()),)


def test_misuse_is_refused() -> None:
    view = View.of("x", 4, 3)
    with pytest.raises(ValueError, match="reshape"):
        view.reshape(5)
    with pytest.raises(ValueError, match="join"):
        concat([view, View.of("y", 4, 2)], 0)
    with pytest.raises(ValueError, match="step"):
        view[::2]
    with pytest.raises(IndexError):
        view[4]
