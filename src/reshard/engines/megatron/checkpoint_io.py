"""Load a checkpoint into model chunks strictly, and save one as Megatron-LM's `save_checkpoint` does."""

from __future__ import annotations

import argparse
import pickle
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from reshard.algebra.layout import Layout
from reshard.base.errors import ReshardError
from reshard.engines.megatron import te_names
from reshard.engines.megatron.process_groups import supported
from reshard.engines.megatron.unpickle import inert_pickle

MegatronFormat = Literal["torch_dist", "zarr", "torch"]
"""What `--ckpt-format` names; megatron-core wrote zarr until 0.15."""

_SHARDING_BEFORE_0_15 = {
    "dp_reshardable": "dp_zero_gather_scatter",
    "fully_reshardable": "fully_sharded_model_space",
}

# Entries other than weights: fp8 state of TransformerEngine, optimizer, random states, data iterators.
_NOT_WEIGHTS = re.compile(r"(_extra_state(/.*)?$)|^(optimizer\.|rng_state|rerun_state_machine|chained_)")


@dataclass(frozen=True)
class Mismatch:
    """The differences that a strict load found.

    `missing`: weights that the model has and the checkpoint lacks; `unexpected`: the reverse;
    `other`: keys on either side that are not weights (`_extra_state`, optimizer, random states).
    """

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    other: tuple[str, ...] = ()

    @classmethod
    def of(cls, missing: Any, unexpected: Any) -> Mismatch:
        """Sort keys into weights and others."""
        other = {key for key in {*missing, *unexpected} if _NOT_WEIGHTS.search(key)}
        return cls(
            tuple(sorted(set(missing) - other)), tuple(sorted(set(unexpected) - other)), tuple(sorted(other))
        )

    @classmethod
    def union(cls, mismatches: list[Mismatch]) -> Mismatch:
        """The combined results of all ranks."""
        return cls(
            *(
                tuple(sorted({key for one in mismatches for key in getattr(one, kind)}))
                for kind in ("missing", "unexpected", "other")
            )
        )


def is_torch_dist(folder: Path) -> bool:
    """Whether an iteration folder is in torch_dist format, rather than `mp_rank_*`."""
    return (folder / ".metadata").is_file()


def refuse_unloadable(folder: Path) -> None:
    """Raise ReshardError if the installed megatron-core does not read what an iteration folder has besides weights.

    That is in `common.pt`, which every version reads, or else in the chunk files, which older ones do not read.
    """
    from megatron.core import __version__, dist_checkpointing

    if any(folder.glob("*/.zarray")):
        raise _unloadable(folder, "torch_dist", f"zarr, which megatron-core {__version__} does not read")
    if not is_torch_dist(folder) or (folder / "common.pt").is_file():
        return
    try:
        dist_checkpointing.load_common_state_dict(str(folder))
    except Exception as error:  # 0.16 raises an AttributeError
        found = f"none, which megatron-core {__version__} does not read"
        raise _unloadable(folder, "a folder with common.pt", found) from error


def _unloadable(folder: Path, expected: str, found: str) -> ReshardError:
    return ReshardError(
        "megatron-core-cannot-load",
        "the installed megatron-core cannot load this checkpoint",
        file=str(folder),
        expected=expected,
        found=found,
        remedy="leave out --logits: the weights are compared all the same; or convert it with reshard convert "
        "--to megatron, which writes torch_dist with common.pt, and compare the output",
    )


def rank_folder(folder: Path) -> Path:
    """This rank's `mp_rank_*` folder: its pipeline and expert numbers appear only if those sizes exceed 1."""
    from megatron.core import parallel_state as ps

    name = f"mp_rank_{ps.get_tensor_model_parallel_rank():02d}"
    if ps.get_pipeline_model_parallel_world_size() > 1:
        name += f"_{ps.get_pipeline_model_parallel_rank():03d}"
    if ps.get_expert_model_parallel_world_size() > 1:
        name += f"_{ps.get_expert_model_parallel_rank():03d}"
    return folder / name


def model_key(chunks: list[Any], index: int) -> str:
    """`model`, or `model0`, `model1` … if a rank has several chunks."""
    return "model" if len(chunks) == 1 else f"model{index}"


def load_weights(chunks: list[Any], folder: Path) -> Mismatch:
    """Fill `chunks` from an iteration folder of either format; collective over all ranks."""
    return _load_torch_dist(chunks, folder) if is_torch_dist(folder) else _load_legacy(chunks, folder)


def _load_torch_dist(chunks: list[Any], folder: Path) -> Mismatch:
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.validation import StrictHandling

    keys = stored_keys(folder)
    wanted = _wanted(chunks, _key_style(keys), every)
    if not te_names.are_asked_for(chunks):
        te_names.follow_checkpoint(wanted, keys)
    # dist_checkpointing calls keys "missing" that the model does not request: the opposite of load_state_dict.
    loaded, unexpected, missing = dist_checkpointing.load(
        wanted, str(folder), strict=StrictHandling.RETURN_ALL
    )
    left = [_fill(chunk, loaded[model_key(chunks, index)]) for index, chunk in enumerate(chunks)]
    return Mismatch.union([Mismatch.of(missing, unexpected), *left])


def stored_keys(folder: Path) -> frozenset[str]:
    """All keys of a torch_dist checkpoint, tensors and pickled objects."""
    from torch.distributed.checkpoint import FileSystemReader

    return frozenset(FileSystemReader(str(folder)).read_metadata().state_dict_metadata)


def _key_style(keys: frozenset[str]) -> dict[str, Any]:
    """The metadata that makes `sharded_state_dict` use the key names of the checkpoint."""
    from megatron.core import parallel_state as ps

    return {
        "dp_cp_group": ps.get_data_parallel_group(with_context_parallel=True),
        "non_homogeneous_layers": any(re.match(r"decoder\.layers\.\d+\.", key) for key in keys),
        "singleton_local_shards": any(key.endswith(("linear_fc1.weight_w", "fc1.weight_v")) for key in keys),
        "chained_optim_avoid_prefix": True,
    }


def _fill(chunk: Any, state: dict[str, Any]) -> Mismatch:
    """Load the weights that were read; missing keys are already in the report of `dist_checkpointing.load`."""
    result = chunk.load_state_dict(state, strict=False)
    return Mismatch.of((), result.unexpected_keys)


NameFilter = Callable[[str], bool]
"""Whether a key of a model's state is stored in the checkpoint."""


def every(key: str) -> bool:
    """Select all keys."""
    return True


def _wanted(chunks: list[Any], metadata: dict[str, Any], only: NameFilter) -> dict[str, Any]:
    """The sharded state that the chunks request from a checkpoint."""
    return {
        model_key(chunks, index): _chosen(chunk.sharded_state_dict(metadata=metadata), only)
        for index, chunk in enumerate(chunks)
    }


def _chosen(state: dict[str, Any], only: NameFilter) -> dict[str, Any]:
    return {key: value for key, value in state.items() if only(key)}


def load_run(
    chunks: list[Any],
    folder: Path,
    optimizer: Any,
    scheduler: Any,
    *,
    only: NameFilter = every,
    random_states: Layout | None = None,
) -> Mismatch:
    """Fill weights, optimizer and scheduler from torch_dist, as `load_checkpoint` of Megatron-LM does; collective.

    Problems with the optimizer also count as missing or unexpected. `only` selects the stored weights. Random
    states are loaded if their layout at saving time is passed.
    """
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.validation import StrictHandling

    keys = stored_keys(folder)
    metadata = {**dist_checkpointing.load_content_metadata(str(folder)), **_key_style(keys)}
    wanted: dict[str, Any] = _wanted(chunks, metadata, only)
    te_names.follow_checkpoint(wanted, keys)
    if optimizer.config.use_distributed_optimizer:
        _begin_states(optimizer)
    wanted["optimizer"] = optimizer.sharded_state_dict(wanted, is_loading=True, metadata=metadata)
    if random_states:
        wanted["rng_state"] = _sharded_random_state(random_states)
    loaded, unexpected, missing = dist_checkpointing.load(
        wanted, str(folder), strict=StrictHandling.RETURN_ALL
    )
    left = [_fill(chunk, loaded[model_key(chunks, index)]) for index, chunk in enumerate(chunks)]
    optimizer.load_state_dict(_for_links(loaded["optimizer"], len(optimizer.chained_optimizers)))
    if optimizer.config.use_distributed_optimizer:
        _separate_steps(optimizer)
    scheduler.load_state_dict(loaded["opt_param_scheduler"])
    if random_states:
        _set_random_state(loaded["rng_state"][0])
    states = [tuple(key for key in found if "optimizer." in key) for found in (missing, unexpected)]
    return Mismatch.union([Mismatch.of(missing, unexpected), Mismatch(*states), *left])


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


def _begin_states(optimizer: Any) -> None:
    """Add what torch's Adam, which counts steps per tensor, lacks compared to Transformer Engine's.

    It has no states before its first step, although megatron-core asks for their step, and megatron-core looks for the
    step among the tensors that it loads.
    """
    import torch

    for link in optimizer.chained_optimizers:
        if not _is_torchs(link.optimizer):
            continue
        for group in link.optimizer.param_groups:
            for parameter in group["params"]:
                moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
                link.optimizer.state[parameter] = {"step": torch.tensor(0.0), **moments}
        link._set_main_param_and_optimizer_states = partial(
            _set_states, link, link._set_main_param_and_optimizer_states
        )


def _separate_steps(optimizer: Any) -> None:
    """Give each tensor a step of its own: megatron-core shares one between all, and torch's Adam increments each."""
    for link in optimizer.chained_optimizers:
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


def _load_legacy(chunks: list[Any], folder: Path) -> Mismatch:
    import torch

    file = rank_folder(folder) / "model_optim_rng.pt"
    stored = torch.load(file, map_location="cpu", weights_only=False, pickle_module=inert_pickle)
    found = []
    for index, chunk in enumerate(chunks):
        state = stored[model_key(chunks, index)]
        if not te_names.are_asked_for(chunks):
            state = te_names.legacy_to_local(chunk, state)
        result = chunk.load_state_dict(state, strict=False)
        found.append(Mismatch.of(result.missing_keys, result.unexpected_keys))
    return Mismatch.union(found)


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
        write_torch_dist(folder, state, chunks, layout, optimizer, scheduler, options)
    else:
        _save_legacy(folder, state, chunks, optimizer, scheduler)
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        tracker = "release" if options.release else str(iteration)
        (out / "latest_checkpointed_iteration.txt").write_text(tracker)
    torch.distributed.barrier()
    return folder


def write_torch_dist(
    folder: Path,
    state: dict[str, Any],
    chunks: list[Any],
    layout: Layout,
    optimizer: Any,
    scheduler: Any,
    options: SaveOptions,
    only: NameFilter = every,
) -> None:
    """Write `state` and the rest of the run to the existing iteration folder `folder`; collective."""
    from megatron.core import dist_checkpointing
    from megatron.core import parallel_state as ps
    from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
    from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper

    group = ps.get_data_parallel_group(with_context_parallel=True)
    content = _content_metadata(optimizer, options)
    metadata = {**content, "dp_cp_group": group}
    for index, chunk in enumerate(chunks):
        state[model_key(chunks, index)] = _chosen(chunk.sharded_state_dict(metadata=metadata), only)
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
    if getattr(getattr(optimizer, "config", None), "use_distributed_optimizer", False):
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


def _set_random_state(state: dict[str, Any]) -> None:
    import numpy as np
    import torch
    from megatron.core import tensor_parallel

    random.setstate(state["random_rng_state"])
    np.random.set_state(state["np_rng_state"])
    torch.set_rng_state(state["torch_rng_state"])
    torch.cuda.set_rng_state(state["cuda_rng_state"])
    tensor_parallel.get_cuda_rng_tracker().set_states(state["rng_tracker_states"])


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
