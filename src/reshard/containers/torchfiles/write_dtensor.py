"""Write `DTensor`s: one rank's rows of a tensor, on a mesh of one axis, as FSDP2 has them in its state dict.

A mesh is pickled as one of the `MeshPickling` has it, since a release of torch loads only its own form. Process groups
are not pickled; torch finds them by their names, and that of all ranks is "0". Sources: those of `dtensor`, and files
that torch 2.6, 2.10, 2.13 and 2.15 wrote.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import Any

from reshard.algebra.dtypes import BY_NAME
from reshard.containers.torchfiles.dtensor import Mesh, MeshPickling
from reshard.containers.torchfiles.pickles import Global, Reduce, SharedObject
from reshard.containers.torchfiles.write import NewTensor

MESH_RANKS = "the ranks of the mesh"
"""The key of the tensor with the ranks of a mesh."""

_TENSOR = "torch.distributed.tensor"
_DTENSOR = Global(_TENSOR, "DTensor")
_GROUP = "0"


@dataclass(frozen=True)
class RankWriter:
    """Makes the DTensors in the file of one rank. `like` has the name of the axis, the device, and who pickled it."""

    like: Mesh
    rank: int
    world: int
    _mesh: SharedObject = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(
            self, "_mesh", SharedObject(_new("torch.distributed.device_mesh", "DeviceMesh", self._state()))
        )

    @property
    def ranks(self) -> bytes:
        """The content of the tensor `MESH_RANKS`."""
        return struct.pack(f"<{self.world}i", *range(self.world))

    def rows(self, shape: tuple[int, ...]) -> range:
        """This rank's rows of a tensor, cut as torch.chunk does: the last ranks may have fewer, or none."""
        step = -(-shape[0] // self.world)
        return range(min(self.rank * step, shape[0]), min((self.rank + 1) * step, shape[0]))

    def tensor(self, local: NewTensor, shape: tuple[int, ...]) -> Reduce:
        """The DTensor of `shape` of which this rank has the rows in `local`."""
        strides = NewTensor(None, local.dtype, shape).strides
        layout = Reduce(Global("torch.serialization", "_get_layout"), ("torch.strided",))
        device = Reduce(Global("torch", "device"), ("cpu",))
        wrapper = (_DTENSOR, local.dtype, shape, strides, 0, layout, device, False)
        size = Reduce(Global("torch", "Size"), (shape,))
        meta = Reduce(
            Global(f"{_TENSOR}._dtensor_spec", "TensorMeta"), (size, strides, local.dtype), new=True
        )
        spec = {
            "mesh": self._mesh,
            "placements": (_new(f"{_TENSOR}.placement_types", "Shard", {"dim": 0}),),
            "tensor_meta": meta,
            "_hash": None,
        }
        if self.like.pickled is not MeshPickling.AS_TENSOR:
            order = Reduce(Global(f"{_TENSOR}._dtensor_spec", "ShardOrderEntry"), (0, (0,)), new=True)
            spec |= {"shard_order": (order,), "use_strided_shard_as_shard_order": False}
        state = {"_local_tensor": local, "_spec": _new(f"{_TENSOR}._dtensor_spec", "DTensorSpec", spec)}
        rebuild = Global("torch._utils", "_rebuild_wrapper_subclass")
        return Reduce(
            Global("torch._tensor", "_rebuild_from_type_v2"), (rebuild, _DTENSOR, wrapper, (None, state))
        )

    def _state(self) -> dict[str, Any]:
        """The attributes of the mesh, as the release of torch has them."""
        every = tuple(range(self.world))
        ranks, names = NewTensor(MESH_RANKS, BY_NAME["int32"], (self.world,)), self.like.names
        common = {"_thread_id": None, "_dim_group_names": [_GROUP], "_coordinate_on_dim": [self.rank]}
        if self.like.pickled is MeshPickling.AS_TENSOR:
            return {
                "device_type": self.like.device,
                "mesh": ranks,
                "mesh_dim_names": names,
                "_flatten_mesh_list": every,
                "_dim_group_infos": [(f"ptd:{_GROUP}", list(every), _GROUP)],
                **common,
            }
        return {
            "_device_type": self.like.device,
            "_layout": _new("torch.distributed._mesh_layout", "_MeshLayout", self._layout()),
            "_rank_map": ranks,
            "_mesh_dim_names": names,
            "_root_mesh": None,
            "_flatten_rank_map": every,
            "_flatten_mapping": {},
            "_rank": self.rank,
            "_preserve_rank_order": False,  # since torch 2.15; earlier ones ignore it
            **common,
            "_coordinate_on_dim": (self.rank,),
        }

    def _layout(self) -> dict[str, Any]:
        shape: dict[str, tuple[int, ...]] = {"shape": (self.world,), "stride": (1,)}
        if self.like.pickled is MeshPickling.AS_SHAPE:
            return shape
        if self.world == 1:  # torch leaves out sizes of 1
            shape = {"shape": (), "stride": ()}
        return {"axes": (_new("torch.distributed._mesh_layout", "_FlatLayout", shape),)}


def _new(module: str, name: str, state: dict[str, Any]) -> Reduce:
    return Reduce(Global(module, name), (), state, new=True)
