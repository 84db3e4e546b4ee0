"""Sharded tensors of torch: one rank's part of a `DTensor` or a `ShardedTensor`, and its position.

A `DTensor` is a local tensor, a mesh of ranks with this rank's coordinate in it, and one placement for each axis of the
mesh. Placements apply from left to right; each cuts what the previous ones left to this rank, like `torch.chunk`: all
pieces have the same length except the last ones, which may be shorter or empty. A `ShardedTensor`, which FSDP1 makes
without a mesh, records the offsets of its shards. Storages are padded, so the size of a local tensor counts.

Sources: `torch/distributed/tensor/{_api,_dtensor_spec,_utils,placement_types}.py`, `device_mesh.py`, `_mesh_layout.py`
and `_shard/sharded_tensor/api.py` below `torch/distributed` of torch 2.4 to 2.13; files that torch 2.6, 2.10 and 2.13
wrote.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import Enum
from functools import lru_cache
from itertools import product
from math import prod
from typing import Any, NamedTuple

from reshard.algebra.dtypes import DType
from reshard.algebra.storage import StoredTensor
from reshard.algebra.tensors import Tensor
from reshard.algebra.views import View
from reshard.base.errors import UNUSABLE, Problem, ReshardError, type_and_message
from reshard.containers.torchfiles.pickles import Opaque
from reshard.containers.torchfiles.untrusted import element_type, shape_of, sizes, text

MAX_RANKS = 1 << 16
"""More ranks than any run has; a pickle could contain any number."""

_SAVE_AGAIN = "save the checkpoint again, with torch.distributed.checkpoint or as a full state dict"

Intervals = list[tuple[int, int]]
"""Ranges of one axis, as pairs of begin and end."""


class PlacedBlock(NamedTuple):
    """A contiguous block of the complete tensor, at `offsets`."""

    offsets: tuple[int, ...]
    view: View


class RankPart(NamedTuple):
    """One rank's part of a tensor of `shape`.

    `spread` describes how ranks share the tensor, and is equal on all of them. `rank` is the one that wrote the file,
    if the tensor records it, and `ranks` are those with files of the same checkpoint.
    """

    kind: str
    dtype: DType
    shape: tuple[int, ...]
    spread: str
    boxes: tuple[PlacedBlock, ...]
    rank: int | None = None
    ranks: frozenset[int] = frozenset()


class MeshPickling(Enum):
    """The releases of torch that pickle a mesh alike: another one cannot load it."""

    AS_TENSOR = "torch 2.6 to 2.9"
    AS_SHAPE = "torch 2.10 to 2.12"
    AS_AXES = "torch 2.13"


class Mesh(NamedTuple):
    """A mesh as one rank sees it. `device` is the type of its devices, and `pickled` tells who pickled it."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    coordinate: tuple[int, ...]
    rank: int | None
    ranks: frozenset[int]
    device: str = "cuda"
    pickled: MeshPickling = MeshPickling.AS_AXES

    def __str__(self) -> str:
        return " × ".join(f"{name} {size}" for name, size in zip(self.names, self.shape, strict=True))


class Placement(NamedTuple):
    """`Shard`, `Replicate` or `_StridedShard`; a `_StridedShard` cuts each of `factor` existing pieces."""

    kind: str
    axis: int = 0
    factor: int = 1

    def __str__(self) -> str:
        arguments = {"Shard": f"({self.axis})", "_StridedShard": f"({self.axis}, split_factor={self.factor})"}
        return self.kind + arguments.get(self.kind, "")


class Spread(NamedTuple):
    """How the ranks of a mesh share a tensor: one placement for each axis of the mesh.

    The axes cut from left to right, unless `ordered` has them in another order. `_StridedShard` is another way to
    express that order. torch 2.10 records both, 2.13 the one that applies.
    """

    placements: tuple[Placement, ...]
    mesh: Mesh
    ordered: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{', '.join(map(str, self.placements))} on a mesh of {self.mesh}"

    def part(self, name: str, dtype: DType, shape: tuple[int, ...], local: Any, file: str) -> RankPart:
        """The part of a tensor of `shape` that a rank has as `local`. Raises ReshardError if they do not fit."""
        placements, mesh = self.placements, self.mesh
        _check_placements(name, placements, file)
        if len(placements) != len(mesh.shape):
            raise ValueError(f"{len(placements)} placements on a mesh of {len(mesh.shape)} axes")
        axes = _owned(shape, placements, mesh, self._order())
        _check_local(name, local, dtype, axes, str(self), file)
        boxes = tuple(_boxes(Tensor.stored(local).view, axes)) if local.numel else ()
        return RankPart("DTensor", dtype, shape, str(self), boxes, mesh.rank, mesh.ranks)

    def _order(self) -> list[int]:
        """The mesh axes in the order in which they cut."""
        axes = range(len(self.placements))
        if any(placement.kind == "_StridedShard" for placement in self.placements):
            return list(axes)
        return [*self.ordered, *(axis for axis in axes if axis not in self.ordered)]


def is_sharded(value: Any) -> bool:
    """Whether a value of a state dict is a `DTensor` or a `ShardedTensor`."""
    return _class_of(value) in ("DTensor", "ShardedTensor")


class RankPartReader:
    """Reads the sharded tensors of one file."""

    def __init__(self, file: str) -> None:
        self._file = file
        self._meshes: dict[int, Mesh] = {}  # by the id() of the pickled mesh, which tensors share

    def read(self, name: str, value: Any) -> RankPart:
        """The file's part of the tensor `name`. Raises ReshardError if it is damaged or unusable."""
        kind = _class_of(value)
        try:
            return self._dtensor(name, value) if kind == "DTensor" else _sharded_tensor(value)
        except UNUSABLE as error:
            raise ReshardError(
                "torch-tensor-unreadable",
                f"a {kind} cannot be read",
                tensor=name,
                file=self._file,
                expected="what torch 2.4 to 2.13 writes",
                found=type_and_message(error),
                remedy=f"copy the file again; if another version of torch wrote it, {_SAVE_AGAIN}",
            ) from None

    def _dtensor(self, name: str, value: Opaque) -> RankPart:
        _, dtype, shape, *_ = value.args[2]
        state = _attributes(value.args[3])
        spec = _attributes(state["_spec"])
        ordered = [axis for entry in spec.get("shard_order") or () for axis in sizes(entry.args[1])]
        spread = Spread(tuple(map(_placement, spec["placements"])), self._mesh(spec["mesh"]), tuple(ordered))
        return spread.part(name, element_type(dtype), shape_of(shape), state["_local_tensor"], self._file)

    @property
    def meshes(self) -> Sequence[Mesh]:
        """The meshes of the tensors that were read."""
        return [*self._meshes.values()]

    def _mesh(self, value: Any) -> Mesh:
        if id(value) not in self._meshes:
            self._meshes[id(value)] = _read_mesh(_attributes(value))
        return self._meshes[id(value)]


def plain_part(stored: StoredTensor) -> RankPart:
    """A plain tensor, of which each rank has its own."""
    boxes = (PlacedBlock((0,) * len(stored.shape), Tensor.stored(stored).view),) if stored.numel else ()
    return RankPart("plain", stored.dtype, stored.shape, "a plain tensor", boxes)


def _class_of(value: Any) -> str:
    if isinstance(value, Opaque) and value.name == "_rebuild_from_type_v2" and len(value.args) == 4:
        kind = value.args[1]
        if isinstance(kind, type) and issubclass(kind, Opaque):
            return kind.name
    return ""


def _attributes(value: Any) -> dict[str, Any]:
    """The attributes of an object; a class with slots has two dicts of them."""
    state = value.state if isinstance(value, Opaque) else value
    parts = state if isinstance(state, tuple) else (state,)
    return {key: item for part in parts if part is not None for key, item in part.items()}


def _read_mesh(state: dict[str, Any]) -> Mesh:
    """A `DeviceMesh`: a tensor of ranks until torch 2.9, then a layout over a list of ranks."""
    stored, pickled = state.get("mesh", state.get("_mesh")), MeshPickling.AS_TENSOR
    if isinstance(stored, StoredTensor):
        shape = stored.shape
    else:
        layout = _attributes(state["_layout"])
        pickled = MeshPickling.AS_AXES if "axes" in layout else MeshPickling.AS_SHAPE
        shape = _shape_of_layout(layout)
    coordinate = state["_coordinate_on_dim"]
    if coordinate is None:
        raise ValueError("the rank that wrote the file is not part of the mesh")
    coordinate = sizes(coordinate)
    if len(coordinate) != len(shape) or any(at >= size for at, size in zip(coordinate, shape, strict=True)):
        raise ValueError(f"coordinate {coordinate} in a mesh of {shape}")
    names = state.get("mesh_dim_names", state.get("_mesh_dim_names")) or [
        f"axis{i}" for i in range(len(shape))
    ]
    ranks = sizes(state.get("_flatten_rank_map", state.get("_flatten_mesh_list")) or ())
    recorded_rank = state.get("_rank")
    rank = None if recorded_rank is None else sizes((recorded_rank,))[0]
    if rank is None and len(ranks) == prod(shape):
        rank = ranks[_number(coordinate, shape)]
    device = text(state.get("device_type", state.get("_device_type", "cuda")))
    return Mesh(tuple(map(text, names)), shape, coordinate, rank, frozenset(ranks), device, pickled)


def _number(coordinate: Sequence[int], shape: Sequence[int]) -> int:
    number = 0
    for at, size in zip(coordinate, shape, strict=True):
        number = number * size + at
    return number


def _shape_of_layout(layout: dict[str, Any]) -> tuple[int, ...]:
    """The sizes of a `_MeshLayout`; for an axis that was flattened from others, it is a tuple of their sizes."""
    if "axes" in layout:
        return tuple(prod(sizes(_attributes(axis)["shape"])) for axis in layout["axes"])
    shape = layout["shape"] if isinstance(layout["shape"], tuple) else (layout["shape"],)
    return tuple(prod(sizes(size)) if isinstance(size, tuple) else sizes((size,))[0] for size in shape)


def _placement(value: Opaque) -> Placement:
    state = _attributes(value)
    axis, factor = sizes((state.get("dim", 0), state.get("split_factor", 1)))
    if not 0 < factor <= MAX_RANKS:
        raise ValueError(f"a split_factor of {factor}")
    if value.name in ("Shard", "_StridedShard") and "dim" not in state:
        raise KeyError("dim")
    return Placement(value.name, axis, factor)


def _check_placements(name: str, placements: Sequence[Placement], file: str) -> None:
    for placement in placements:
        if placement.kind not in ("Shard", "_StridedShard", "Replicate"):
            partial = "Partial" in placement.kind
            raise ReshardError(
                "tensor-partial-sum" if partial else "placement-unknown",
                "a tensor is a partial sum that was not reduced" if partial else "unknown placement",
                tensor=name,
                file=file,
                rule="each element of a DTensor is stored on some rank",
                expected="Shard, _StridedShard or Replicate",
                found=placement.kind,
                remedy="redistribute the tensor to Replicate() or Shard(0) before it is saved",
            )


def _check_local(
    name: str, local: Any, dtype: DType, axes: Sequence[Intervals], spread: str, file: str
) -> None:
    """Raise ReshardError if the local tensor does not match its placement; an empty one may have lost its shape."""
    expected = tuple(sum(end - begin for begin, end in axis) for axis in axes)
    stored = f"{local.dtype} {list(local.shape)}" if isinstance(local, StoredTensor) else type(local).__name__
    if isinstance(local, StoredTensor):
        fits = local.shape == expected or local.numel == prod(expected) == 0
        if fits and local.dtype == dtype:
            if prod(map(len, axes)) > MAX_RANKS:
                raise ValueError("a shard with more pieces than there are ranks")
            return
    raise ReshardError(
        "shard-contradicts-placement",
        "a rank's shard does not match its placement",
        tensor=name,
        file=file,
        rule=spread,
        expected=f"{dtype} {list(expected)}",
        found=stored,
        remedy=f"it was changed after it was sharded, or saved while it was gathered: {_SAVE_AGAIN}",
    )


def _owned(
    shape: Sequence[int], placements: Sequence[Placement], mesh: Mesh, order: Sequence[int]
) -> list[Intervals]:
    """This rank's ranges of each axis of a tensor of `shape`."""
    axes: list[Intervals] = [[(0, size)] for size in shape]
    for at in order:
        placement = placements[at]
        if placement.kind != "Replicate":
            axis = axes[placement.axis]
            axes[placement.axis] = _cut_intervals(axis, placement.factor, mesh.shape[at], mesh.coordinate[at])
    return axes


def _cut_intervals(axis: Intervals, factor: int, parts: int, index: int) -> Intervals:
    """This rank's ranges of an axis, after each of `factor` pieces of it is cut into `parts`."""
    pieces = (_chunk(_chunk(axis, factor, piece), parts, index) for piece in range(factor))
    merged: Intervals = []
    for begin, end in (interval for piece in pieces for interval in piece):
        is_adjacent = bool(merged) and merged[-1][1] == begin
        merged.append((merged.pop()[0] if is_adjacent else begin, end))
    return merged


def _chunk(axis: Intervals, parts: int, index: int) -> Intervals:
    """Piece `index` of an axis, cut like `torch.chunk`."""
    step = -(-sum(end - begin for begin, end in axis) // parts)
    low, high = step * index, step * (index + 1)
    intervals, at = [], 0
    for begin, end in axis:
        first, last = max(begin, begin + low - at), min(end, begin + high - at)
        if first < last:
            intervals.append((first, last))
        at += end - begin
    return intervals


def _boxes(local: View, axes: Sequence[Intervals]) -> Iterator[PlacedBlock]:
    """The boxes that make up a local tensor: one for each combination of ranges."""
    if all(len(axis) == 1 for axis in axes):
        yield PlacedBlock(tuple(axis[0][0] for axis in axes), local)
        return
    placed = []
    for axis in axes:
        starts, at = [], 0
        for begin, end in axis:
            starts.append((begin, at, end - begin))
            at += end - begin
        placed.append(starts)
    for choice in product(*placed):
        yield PlacedBlock(
            tuple(begin for begin, _, _ in choice),
            local.box([at for _, at, _ in choice], [size for _, _, size in choice]),
        )


def _sharded_tensor(value: Opaque) -> RankPart:
    shards, metadata, group, *_ = value.args[3]
    whole = _attributes(metadata)
    dtype, shape = element_type(whole["tensor_properties"].state[0]), shape_of(whole["size"])
    boxes = []
    for shard in map(_attributes, shards):
        place = _attributes(shard["metadata"])
        offsets, size = shape_of(place["shard_offsets"]), shape_of(place["shard_sizes"])
        tensor = shard["tensor"]
        if (tensor.dtype, tensor.shape) != (dtype, size) or len(offsets) != len(shape):
            raise ValueError(f"{tensor.dtype} {list(tensor.shape)} where {dtype} {list(size)} is announced")
        if any(at + length > end for at, length, end in zip(offsets, size, shape, strict=True)):
            raise ValueError(f"a shard at {offsets} reaches outside of {shape}")
        if tensor.numel:
            boxes.append(PlacedBlock(offsets, Tensor.stored(tensor).view))
    state = _attributes(group)
    rank, world = sizes((state["global_rank"], state["global_world_size"]))
    return RankPart(
        "ShardedTensor",
        dtype,
        shape,
        f"{len(whole['shards_metadata'])} shards",
        tuple(boxes),
        rank,
        _ranks(world),
    )


@lru_cache
def _ranks(world: int) -> frozenset[int]:
    if world > MAX_RANKS:
        raise ValueError(f"a world of {world} ranks")
    return frozenset(range(world))


def disagreement(name: str, parts: Sequence[tuple[str, RankPart]]) -> Problem | None:
    """The problem if files disagree about a tensor that they share; `parts` are pairs of file and part."""
    first_file, first = parts[0]
    for file, part in parts[1:]:
        ours, theirs = (f"{p.dtype} {list(p.shape)}, {p.spread}" for p in (first, part))
        if ours != theirs:
            plain = first.kind == part.kind == "plain"
            return Problem(
                "plain-shards-differ" if plain else "ranks-disagree-on-tensor",
                "two ranks disagree about a tensor",
                tensor=name,
                file=file,
                rule="all ranks have parts of one tensor, on one mesh",
                expected=f"{ours}, as in {first_file}",
                found=theirs,
                remedy="plain shards do not record their position: save the DTensors, without to_local()"
                if plain
                else "the files belong to different runs or steps: copy all files of one step",
            )
    return None
