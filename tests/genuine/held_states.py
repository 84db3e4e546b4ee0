"""What a distributed optimizer holds for each parameter, saved parameter by parameter, whatever its buffers are.

The judge of what is read from buffers: megatron-core 0.16.1 itself saves other values as `fully_reshardable` if a
bucket ends with padding and another follows.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

STATES = ("param", "exp_avg", "exp_avg_sq")


def save_held_states(folder: Path, chunks: list[Any], optimizer: Any) -> None:
    """Write `optimizer.state.<state>.<key of the weight>` to the new folder `folder`; collective."""
    import torch
    from megatron.core import dist_checkpointing
    from megatron.core import parallel_state as ps
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
    from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories

    metadata = {"dp_cp_group": ps.get_data_parallel_group(with_context_parallel=True)}
    held = {}
    for link in getattr(optimizer, "chained_optimizers", [optimizer]):
        held.update(_whole_states(link))
    found: dict[str, Any] = {}
    for chunk in chunks:
        model, _ = extract_sharded_tensors_and_factories(chunk.sharded_state_dict(metadata=metadata))
        for base in nested_values(model):
            for state, tensor in held.get(id(base.data), {}).items():
                changed = {
                    "key": f"optimizer.state.{state}.{base.key}",
                    "data": tensor.reshape(base.data.shape),
                }
                if not isinstance(base, ShardedTensorFactory):
                    changed["dtype"] = tensor.dtype
                found[f"{len(found)}"] = replace(base, **changed)
    if torch.distributed.get_rank() == 0:
        folder.mkdir(parents=True)
    torch.distributed.barrier()
    dist_checkpointing.save(found, str(folder))


def _whole_states(link: Any) -> dict[int, dict[str, Any]]:
    """The complete states of each parameter of a rank, by its id, gathered from the data-parallel ranks."""
    import torch

    parameters = [
        parameter for buffer in link.buffers for parameter in buffer.param_index_map
    ]  # the same on all data-parallel ranks
    number = {id(parameter): index for index, parameter in enumerate(parameters)}
    own: list[tuple[int, int, int, dict[str, Any]]] = []
    for ranges in link.gbuf_ranges:
        for buckets in ranges.values():
            for bucket in buckets:
                for parameter, found in bucket["param_map"].items():
                    tensors = link._get_main_param_and_optimizer_states(parameter)
                    states = {state: tensors[state].detach().clone() for state in STATES}
                    own.append((number[id(parameter)], found["param"].start, found["param"].end, states))
    gathered: list[Any] = [None] * link.data_parallel_group.size()
    torch.distributed.all_gather_object(gathered, own, group=link.data_parallel_group)
    whole = {
        id(each): {state: torch.full((each.numel(),), float("nan")) for state in STATES}
        for each in parameters
    }
    for index, begin, end, states in (piece for part in gathered for piece in part):
        for state, tensor in states.items():
            whole[id(parameters[index])][state][begin:end] = tensor
    return whole
