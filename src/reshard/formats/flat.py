"""Flat parameters of FSDP1: LOCAL_STATE_DICT records the position of each tensor, but not its shape.

FSDP1 concatenates the parameters of a module, pads the result and cuts it evenly; each rank's state dict has its shard
as the ShardedTensor `_flat_param`. With `use_orig_params=True` it also has, under the name of every parameter, a view
of the rank's elements of it: one-dimensional, in the storage of that shard, or empty. Sources: torch 2.13
`distributed/fsdp/_flat_param.py` and `_state_dict_utils.py` (`_local_post_state_dict_hook`), and files that it wrote.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod

from reshard.algebra.dtypes import dtype
from reshard.algebra.storage import Storage, StoredTensor
from reshard.algebra.tensors import Tensor
from reshard.algebra.views import View
from reshard.base.errors import Problem, ReshardError, one_for_all
from reshard.containers.torchfiles.dtensor import Box, Part
from reshard.families.binding import Binding
from reshard.families.live import Live
from reshard.formats import fused
from reshard.formats.checkpoint import Checkpoint
from reshard.transfer.plan import Planned

KIND = "flat"
SAVE_SHARDED = (
    "load it in the training script and save it with fsdp_state_dict_type: SHARDED_STATE_DICT "
    "(or FULL_STATE_DICT)"
)


class FlatShards:
    """The shards of flat parameters in the file of one rank."""

    def __init__(self, shards: Mapping[str, Part]) -> None:
        self._any = bool(shards)
        self._at: dict[
            Storage, tuple[str, int]
        ] = {}  # the flat parameter, and the offset of the storage in it
        for name, part in shards.items():
            for box in part.boxes:
                (piece,) = box.view.pieces
                self._at[piece.source.storage] = (name, box.offsets[0] - piece.start)  # type: ignore[attr-defined]

    def part(self, stored: StoredTensor) -> Part | None:
        """The part of a flattened tensor that a plain tensor is a view of, with its position; None if it is no view."""
        if not self._any or len(stored.shape) != 1:
            return None
        if not stored.numel:
            return Part(KIND, stored.dtype, (0,), "", ())
        if stored.storage not in self._at:
            return None  # a buffer, or a parameter that FSDP ignores
        name, begin = self._at[stored.storage]
        box = Box((begin + stored.start,), Tensor.stored(stored).view)
        return Part(KIND, stored.dtype, stored.shape, spread_of(name), (box,))


def spread_of(flat: str) -> str:
    """A description of how ranks share the tensors in a flat parameter."""
    return f"views of {flat}"


def joined(pairs: Sequence[tuple[str, Part]]) -> list[tuple[str, Part]]:
    """The parts of one flattened tensor, with positions relative to the tensor instead of the flat parameter."""
    parts = [part for _, part in pairs if part.kind == KIND]
    boxes = [box for part in parts for box in part.boxes]
    begin = min((box.offsets[0] for box in boxes), default=0)
    end = max((box.offsets[0] + box.view.numel for box in boxes), default=0)
    spread = next((part.spread for part in parts if part.boxes), "")

    def placed(part: Part) -> Part:
        moved = tuple(Box((box.offsets[0] - begin,), box.view) for box in part.boxes)
        return part._replace(shape=(end - begin,), spread=part.spread or spread, boxes=moved)

    return [(file, placed(part) if part.kind == KIND else part) for file, part in pairs]


# ------------------------------------------------------------------------------------- shapes


def declared_shapes(binding: Binding, live: Live | None) -> dict[str, tuple[int, ...]]:
    """The shapes of a family's tensors, by their names on the Hub and in the live model."""
    hub = {name: bound.shape for name, bound in {**binding.copies, **binding.hf}.items()}
    any_type = dtype("float32")
    planned = [Planned(name, any_type, bound.shape, _nothing) for name, bound in binding.hf.items()]
    return hub | {tensor.name: tensor.shape for tensor in fused.live_tensors(planned, live)}


def _nothing() -> View:
    return View((0,), ())


def shaped(checkpoint: Checkpoint, shapes: Mapping[str, tuple[int, ...]]) -> Checkpoint:
    """The checkpoint with its flattened tensors reshaped. Raises ReshardError naming all whose sizes do not match."""
    problems = []
    tensors = dict(checkpoint.tensors)
    for name, tensor in checkpoint.tensors.items():
        shape = shapes.get(name)
        if shape is None or len(tensor.shape) != 1:
            continue
        if prod(shape) == tensor.view.numel:
            tensors[name] = Tensor(tensor.dtype, tensor.view.reshape(*shape))
        else:
            problems.append(_misfit(name, tensor, shape))
    if problems:
        raise ReshardError(one_for_all(problems, checkpoint.tensors, str(checkpoint.path)))
    return replace(checkpoint, tensors=tensors, flat=False)


def _misfit(name: str, tensor: Tensor, shape: tuple[int, ...]) -> Problem:
    return Problem(
        "flat-tensor-size-differs",
        "a flattened tensor does not have as many elements as the config says",
        tensor=name,
        file=tensor.file,
        rule="LOCAL_STATE_DICT stores no shapes, so they are computed from the config",
        expected=f"{prod(shape)} elements, {list(shape)}",
        found=f"{tensor.view.numel} elements",
        remedy="pass the config that belongs to these weights: --base DIR",
    )


def shapes_needed(checkpoint: Checkpoint, model_type: str | None, families: Sequence[str]) -> ReshardError:
    """The error for a checkpoint whose shapes are unknown."""
    no_config = "pass the Hugging Face folder that training started from (--base DIR)"
    undeclared = "if the model has the same architecture, pass --family NAME"
    return ReshardError(
        "flat-parameters-without-shapes",
        "the parameters are flat, and their shapes are unknown",
        file=str(checkpoint.path),
        rule="LOCAL_STATE_DICT stores no shapes, so they are computed from the config",
        expected=f"a config.json with a model_type of {', '.join(families)}",
        found=f"model_type {model_type}" if model_type else "no config.json that says which model this is",
        remedy=f"{undeclared if model_type else no_config}; or {SAVE_SHARDED}",
    )
