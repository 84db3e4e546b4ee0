"""Flat parameters of FSDP1: LOCAL_STATE_DICT records the position of each tensor, but not its shape.

FSDP1 concatenates the parameters of a module, pads the result and cuts it evenly; each rank's state dict has its shard
as the ShardedTensor `_flat_param`. With `use_orig_params=True` it also has, under the name of every parameter, a view
of the rank's elements of it: one-dimensional, in the storage of that shard, or empty. Sources: torch 2.13
`distributed/fsdp/_flat_param.py` and `_state_dict_utils.py` (`_local_post_state_dict_hook`), and files that it wrote.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from reshard.algebra.storage import Storage, StoredTensor
from reshard.algebra.tensors import Tensor
from reshard.containers.torchfiles.dtensor import PlacedBlock, RankPart

KIND = "flat"
SAVE_SHARDED = (
    "load it in the training script and save it with fsdp_state_dict_type: SHARDED_STATE_DICT "
    "(or FULL_STATE_DICT)"
)


class FlatParameterShards:
    """The shards of flat parameters in the file of one rank."""

    def __init__(self, shards: Mapping[str, RankPart]) -> None:
        self._any = bool(shards)
        self._at: dict[
            Storage, tuple[str, int]
        ] = {}  # the flat parameter, and the offset of the storage in it
        for name, part in shards.items():
            for box in part.boxes:
                (piece,) = box.view.pieces
                self._at[piece.source.storage] = (name, box.offsets[0] - piece.start)  # type: ignore[attr-defined]

    def part(self, stored: StoredTensor) -> RankPart | None:
        """The part of a flattened tensor that a plain tensor is a view of, with its position; None if it is no view."""
        if not self._any or len(stored.shape) != 1:
            return None
        if not stored.numel:
            return RankPart(KIND, stored.dtype, (0,), "", ())
        if stored.storage not in self._at:
            return None  # a buffer, or a parameter that FSDP ignores
        name, begin = self._at[stored.storage]
        box = PlacedBlock((begin + stored.start,), Tensor.stored(stored).view)
        return RankPart(KIND, stored.dtype, stored.shape, spread_of(name), (box,))


def spread_of(flat: str) -> str:
    """A description of how ranks share the tensors in a flat parameter."""
    return f"views of {flat}"


def joined(pairs: Sequence[tuple[str, RankPart]]) -> list[tuple[str, RankPart]]:
    """The parts of one flattened tensor, with positions relative to the tensor instead of the flat parameter."""
    parts = [part for _, part in pairs if part.kind == KIND]
    boxes = [box for part in parts for box in part.boxes]
    begin = min((box.offsets[0] for box in boxes), default=0)
    end = max((box.offsets[0] + box.view.numel for box in boxes), default=0)
    spread = next((part.spread for part in parts if part.boxes), "")

    def placed(part: RankPart) -> RankPart:
        moved = tuple(PlacedBlock((box.offsets[0] - begin,), box.view) for box in part.boxes)
        return part._replace(shape=(end - begin,), spread=part.spread or spread, boxes=moved)

    return [(file, placed(part) if part.kind == KIND else part) for file, part in pairs]
