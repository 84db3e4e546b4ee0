"""Save model chunks as Megatron-LM's `save_checkpoint` does, and load a run with its optimizer."""

from __future__ import annotations

import argparse
import pickle
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from reshard.algebra.layout import Layout
from reshard.oracle.megatron.load_weights import (
    Mismatch,
    key_style,
    model_key,
    rank_folder,
    stored_keys,
    wanted_states,
)
from reshard.oracle.megatron.process_groups import supported

MegatronFormat = Literal["torch_dist", "zarr", "torch"]
"""What `--ckpt-format` names; megatron-core wrote zarr until 0.15."""

_SHARDING_BEFORE_0_15 = {
    "dp_reshardable": "dp_zero_gather_scatter",
    "fully_reshardable": "fully_sharded_model_space",
}


def load_run(
    chunks: list[Any],
    folder: Path,
    optimizer: Any,
    scheduler: Any,
) -> None:
    """Fill weights, optimizer and scheduler from torch_dist, as `load_checkpoint` of Megatron-LM does; collective.

    Raises ValueError if a weight or a state is missing, or left over.
    """
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.validation import StrictHandling

    keys = stored_keys(folder)
    metadata = {**dist_checkpointing.load_content_metadata(str(folder)), **key_style(keys)}
    wanted = wanted_states(chunks, keys)
    distributed = _distributed(optimizer)
    _begin_states(distributed)
    wanted["optimizer"] = optimizer.sharded_state_dict(wanted, is_loading=True, metadata=metadata)
    loaded, unexpected, missing = dist_checkpointing.load(
        wanted, str(folder), strict=StrictHandling.RETURN_ALL
    )
    left = [
        key
        for index, chunk in enumerate(chunks)
        for key in chunk.load_state_dict(loaded[model_key(chunks, index)], strict=False).unexpected_keys
    ]
    optimizer.load_state_dict(_for_links(loaded["optimizer"], len(optimizer.chained_optimizers)))
    _separate_steps(distributed)
    scheduler.load_state_dict(loaded["opt_param_scheduler"])
    states = [[key for key in keys if "optimizer." in key] for keys in (missing, unexpected)]
    mismatch = Mismatch.of(missing, [*unexpected, *left])
    # Random states are for the same layout only; the state of MTP's attention is one that 0.16 has, and 0.19 has not.
    needless = ("rng_state", "transformer_layer.self_attention.core_attention._extra_state")
    other = [key for key in mismatch.other if not key.endswith(needless)]
    if mismatch.missing or mismatch.unexpected or other or any(states):
        raise ValueError(
            f"missing: {mismatch.missing, states[0]}; unexpected: {mismatch.unexpected, states[1]}; "
            f"other: {other}"
        )


def _for_links(state: dict[Any, Any], links: int) -> dict[Any, Any]:
    """The loaded state for a distributed optimizer of `links` chained optimizers, if another number was saved.

    Experts under expert parallelism have an optimizer of their own. Tensors were found by name in any case; groups,
    which contain only settings, are distinguished by whether they contain experts.
    """
    numbered = {key: value for key, value in state.items() if isinstance(key, int)}
    single = {key: value for key, value in state.items() if not isinstance(key, int)}
    if bool(numbered) == (links > 1) and not (numbered and single):
        return state
    if links == 1:
        groups = [group for link in numbered.values() for group in link["optimizer"]["param_groups"]]
        return {**numbered[0], **single, "optimizer": {"param_groups": groups}}
    dense = single["optimizer"]["param_groups"]
    groups = [*dense, *({**group, "is_expert_parallel": True} for group in dense)]
    return {key: {**single, **link, "optimizer": {"param_groups": groups}} for key, link in numbered.items()}


def _distributed(optimizer: Any) -> list[Any]:
    """The distributed optimizers in a chain; Muon's that works layer by layer is none."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    return [link for link in optimizer.chained_optimizers if isinstance(link, DistributedOptimizer)]


def _begin_states(links: Sequence[Any]) -> None:
    """Add what torch's Adam, which counts steps per tensor, lacks compared to Transformer Engine's.

    It has no states before its first step, although megatron-core asks for their step, and megatron-core looks for the
    step among the tensors that it loads.
    """
    import torch

    for link in links:
        if not _is_torchs(link.optimizer):
            continue
        for group in link.optimizer.param_groups:
            for parameter in group["params"]:
                moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
                link.optimizer.state[parameter] = {"step": torch.tensor(0.0), **moments}
        link._set_main_param_and_optimizer_states = partial(
            _set_states, link, link._set_main_param_and_optimizer_states
        )


def _separate_steps(links: Sequence[Any]) -> None:
    """Give each tensor a step of its own: megatron-core shares one between all, and torch's Adam increments each."""
    for link in links:
        if _is_torchs(link.optimizer):
            for state in link.optimizer.state.values():
                state["step"] = state["step"].clone()


def _is_torchs(optimizer: Any) -> bool:
    import torch

    return isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW)


def _set_states(link: Any, original: Callable[..., None], parameter: Any, tensors: dict[str, Any]) -> None:
    group, order = link.model_param_group_index_map[parameter]
    main = link.optimizer.param_groups[group]["params"][order]
    original(parameter, {"step": link.optimizer.state[main]["step"], **tensors})


@dataclass(frozen=True)
class SaveOptions:
    """Options for writing a checkpoint. The defaults are those of Megatron-LM, except for `per_layer` and `singleton`,
    which other frameworks built on megatron-core choose.
    """

    format: MegatronFormat = "torch_dist"
    release: bool = False
    optimizer: bool = True
    optimizer_sharding: str = "dp_reshardable"
    fully_parallel: bool = True
    per_layer: bool = False
    singleton: bool = False


def save_checkpoint(
    out: Path,
    iteration: int,
    chunks: list[Any],
    args: argparse.Namespace,
    layout: Layout,
    *,
    optimizer: Any = None,
    scheduler: Any = None,
    options: SaveOptions | None = None,
) -> Path:
    """Write `out/iter_NNNNNNN` (or `out/release`) and the tracker file; collective. Returns the folder.

    The content is that of `generate_state_dict` and `save_checkpoint` in Megatron-LM core_v0.16.1.
    """
    import torch

    options = options or SaveOptions()
    folder = out / ("release" if options.release else f"iter_{iteration:07d}")
    args.ckpt_format, args.iteration = options.format, iteration
    state: dict[str, Any] = {"args": args, "checkpoint_version": 3.0, "iteration": iteration}
    optimizer = optimizer if options.optimizer else None
    if torch.distributed.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
    torch.distributed.barrier()
    if options.format != "torch":
        _save_torch_dist(folder, state, chunks, layout, optimizer, scheduler, options)
    else:
        _save_legacy(folder, state, chunks, optimizer, scheduler)
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        tracker = "release" if options.release else str(iteration)
        (out / "latest_checkpointed_iteration.txt").write_text(tracker)
    torch.distributed.barrier()
    return folder


def _save_torch_dist(
    folder: Path,
    state: dict[str, Any],
    chunks: list[Any],
    layout: Layout,
    optimizer: Any,
    scheduler: Any,
    options: SaveOptions,
) -> None:
    from megatron.core import dist_checkpointing
    from megatron.core import parallel_state as ps
    from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
    from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper

    group = ps.get_data_parallel_group(with_context_parallel=True)
    content = _content_metadata(optimizer, options)
    metadata = {**content, "dp_cp_group": group}
    for index, chunk in enumerate(chunks):
        state[model_key(chunks, index)] = chunk.sharded_state_dict(metadata=metadata)
    if optimizer is not None:
        state["optimizer"] = _sharded_optimizer(optimizer, state, metadata)
        state["opt_param_scheduler"] = scheduler.state_dict()
    state["rng_state"] = _sharded_random_state(layout)
    state["num_floating_point_operations_so_far"] = 0.0
    strategy = get_default_save_sharded_strategy(options.format)
    if options.fully_parallel:
        strategy = FullyParallelSaveStrategyWrapper(strategy, group, False)
    dist_checkpointing.save(
        state,
        str(folder),
        strategy,
        validate_access_integrity=True,
        **supported(dist_checkpointing.save, content_metadata=content),
    )


def _content_metadata(optimizer: Any, options: SaveOptions) -> dict[str, Any]:
    """The `content_metadata` that 0.13 and later store; older versions apply it without storing it."""
    content: dict[str, Any] = {
        "singleton_local_shards": options.singleton,
        "chained_optim_avoid_prefix": True,
    }
    if options.per_layer:
        content["non_homogeneous_layers"] = True
    config = getattr(optimizer, "config", None)
    flags = ("use_distributed_optimizer", "use_layer_wise_distributed_optimizer")
    if any(getattr(config, flag, False) for flag in flags):
        content["distrib_optim_sharding_type"] = _sharding_type(options)
        if options.optimizer_sharding == "fully_reshardable":
            content["distrib_optim_fully_reshardable_mem_efficient"] = False
    return content


def _sharding_type(options: SaveOptions) -> str:
    """The kind of optimizer sharding, by its name in the installed version."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    if hasattr(DistributedOptimizer, f"sharded_param_state_{options.optimizer_sharding}"):
        return options.optimizer_sharding
    return _SHARDING_BEFORE_0_15[options.optimizer_sharding]


def _sharded_optimizer(optimizer: Any, state: dict[str, Any], metadata: dict[str, Any]) -> Any:
    """The optimizer's state. From 0.14 on, the metadata has the kind of sharding; before, an argument."""
    try:
        return optimizer.sharded_state_dict(state, metadata=metadata)
    except TypeError:
        if "distrib_optim_sharding_type" not in metadata:
            return optimizer.sharded_state_dict(state)
        return optimizer.sharded_state_dict(state, sharding_type=metadata["distrib_optim_sharding_type"])


def random_state() -> list[dict[str, Any]]:
    """The random states in Megatron-LM's format: one entry per data parallel rank, here one."""
    import numpy as np
    import torch
    from megatron.core import tensor_parallel

    return [
        {
            "random_rng_state": random.getstate(),
            "np_rng_state": np.random.get_state(),
            "torch_rng_state": torch.get_rng_state(),
            "cuda_rng_state": torch.cuda.get_rng_state(),
            "rng_tracker_states": tensor_parallel.get_cuda_rng_tracker().get_states(),
        }
    ]


def _sharded_random_state(layout: Layout) -> Any:
    """One object per (pipeline, tensor) rank; with expert parallelism, one per data parallel rank too."""
    from megatron.core import parallel_state as ps
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    pipeline, tensor = ps.get_pipeline_model_parallel_rank(), ps.get_tensor_model_parallel_rank()
    data = ps.get_data_parallel_rank(with_context_parallel=True)
    if layout.ep > 1:
        shape = (layout.pp, layout.tp, ps.get_data_parallel_world_size(with_context_parallel=True))
        return ShardedObject("rng_state", random_state(), shape, (pipeline, tensor, data), replica_id=0)
    return ShardedObject(
        "rng_state", random_state(), (layout.pp, layout.tp), (pipeline, tensor), replica_id=data
    )


def _save_legacy(
    folder: Path, state: dict[str, Any], chunks: list[Any], optimizer: Any, scheduler: Any
) -> None:
    import torch
    from megatron.core import parallel_state as ps

    target = rank_folder(folder)
    for index, chunk in enumerate(chunks):
        state[model_key(chunks, index)] = chunk.state_dict_for_save_checkpoint()
    if optimizer is not None:
        state["optimizer"] = optimizer.state_dict()
        state["opt_param_scheduler"] = scheduler.state_dict()
        if getattr(optimizer.config, "use_distributed_optimizer", False):
            target.mkdir(exist_ok=True)
            optimizer.save_parameter_state(str(target / "distrib_optim.pt"))
    state["rng_state"] = random_state()
    state["num_floating_point_operations_so_far"] = 0.0
    if ps.get_expert_data_parallel_rank() == 0:
        target.mkdir(exist_ok=True)
        torch.save(state, target / "model_optim_rng.pt", pickle_protocol=pickle.DEFAULT_PROTOCOL)
