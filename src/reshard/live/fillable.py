"""Whether the tensors of a module can be filled in place: if not, filling would seem to work and change nothing."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any

from reshard.base.errors import Problem

if TYPE_CHECKING:
    import torch

FSDP1_CLASS = "FullyShardedDataParallel"
GATHERED_EXAMPLE = "with deepspeed.zero.GatheredParameters(list(module.parameters()), modifier_rank=0):"


def is_module(value: Any) -> bool:
    """Whether a value is a torch module; a class of modules is none, and nothing is one before torch is imported."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.nn.Module)


def sharded_otherwise(module: torch.nn.Module, file: str) -> Iterator[Problem]:
    """A problem for each way of sharding in which a rank's part of a tensor is not a DTensor."""
    if any(FSDP1_CLASS in (kind.__name__ for kind in type(each).__mro__) for each in module.modules()):
        yield Problem(
            "live-module-in-fsdp1",
            "a module is sharded by FullyShardedDataParallel (FSDP1)",
            file=file,
            rule="its state_dict has copies of the tensors, not those that it computes with",
            remedy="shard it with fully_shard (FSDP2), or fill it before you wrap it",
        )
    if any(_is_partitioned(each) for each in module.parameters()):
        yield Problem(
            "live-module-in-zero3",
            "a module is partitioned by DeepSpeed ZeRO-3",
            file=file,
            rule="its parameters have no elements while they are not gathered",
            remedy=f"fill it on all ranks in the block `{GATHERED_EXAMPLE}`, before deepspeed.initialize",
        )


def not_in_place(
    module: torch.nn.Module, tensors: Collection[tuple[str, torch.Tensor]], file: str
) -> Iterator[Problem]:
    """A problem for each tensor of a module's `state_dict` whose memory is not, or not alone, that of the module."""
    own = dict(module.named_parameters(remove_duplicate=False))
    ids = {id(each) for each in (*own.values(), *module.buffers())}
    saved = {id(each) for _, each in tensors}
    for name, tensor in tensors:
        if id(tensor) not in ids:
            yield Problem(
                "live-tensor-is-a-copy",
                "the state_dict of the module returns a copy of a tensor, so that it cannot be filled",
                tensor=name,
                file=file,
                rule="weights are copied into the memory of the parameters and buffers themselves",
                remedy="fill the module before it is wrapped or quantized, or remove the hook of its state_dict",
            )
        elif _is_partial(tensor):
            yield Problem(
                "live-tensor-is-partial",
                "a DTensor of partial sums cannot be filled",
                tensor=name,
                file=file,
                found=str(getattr(tensor, "placements", None)),
                remedy="redistribute it to Shard or Replicate first",
            )
        elif _overlaps(tensor):
            yield Problem(
                "live-tensor-overlaps",
                "several elements of a tensor are at the same place in memory",
                tensor=name,
                file=file,
                found=f"strides {list(tensor.stride())} of shape {list(tensor.shape)}",
                remedy="make it a tensor of its own: .clone()",
            )
    for name, tensor in own.items():
        if id(tensor) not in saved:
            yield Problem(
                "live-parameter-not-in-state-dict",
                "the state_dict of the module lacks a parameter, which would keep the values that it has",
                tensor=name,
                file=file,
                remedy="remove the hook of its state_dict that leaves it out",
            )


def _is_partitioned(parameter: torch.Tensor) -> bool:
    """Whether DeepSpeed has taken the elements of a parameter, which has them in `ds_tensor` in parts."""
    return hasattr(parameter, "ds_tensor") and parameter.numel() != getattr(parameter, "ds_numel", 0)


def _is_partial(tensor: torch.Tensor) -> bool:
    return any(each.is_partial() for each in getattr(tensor, "placements", ()))


def _overlaps(tensor: torch.Tensor) -> bool:
    strided = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.numel() > 0 and any(size > 1 and stride == 0 for size, stride in strided)
