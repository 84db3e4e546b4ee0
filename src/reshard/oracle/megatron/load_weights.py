"""Load the weights of a checkpoint into model chunks strictly, with megatron-core's own loading."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reshard.base.errors import ReshardError
from reshard.oracle.megatron.gpt_model import is_local
from reshard.oracle.megatron.te_names import legacy_to_local, stored_name
from reshard.oracle.megatron.unpickle import inert_pickle

# Entries other than weights: fp8 state of TransformerEngine, optimizer, random states, data iterators.
_NOT_WEIGHTS = re.compile(r"(_extra_state(/.*)?$)|^(optimizer\.|rng_state|rerun_state_machine|chained_)")


@dataclass(frozen=True)
class Mismatch:
    """Weights that the model has and the checkpoint lacks (`missing`), and the reverse (`unexpected`).

    `other` are keys of either that are no weights, such as extra states.
    """

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    other: tuple[str, ...] = ()

    @classmethod
    def of(cls, missing: Iterable[str], unexpected: Iterable[str]) -> Mismatch:
        """The keys that a strict load reports."""
        lacking, beyond = {*missing}, {*unexpected}
        other = {key for key in lacking | beyond if _NOT_WEIGHTS.search(key)}
        return cls(*(tuple(sorted(keys)) for keys in (lacking - other, beyond - other, other)))

    @classmethod
    def union(cls, mismatches: Collection[Mismatch]) -> Mismatch:
        """The combined results of all ranks."""
        return cls.of(
            (key for each in mismatches for key in (*each.missing, *each.other)),
            (key for each in mismatches for key in each.unexpected),
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
        raise _unloadable(
            folder, "a folder with common.pt", f"none, which megatron-core {__version__} does not read"
        ) from error


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


def load_weights(chunks: list[Any], folder: Path) -> Mismatch:
    """Fill `chunks` from an iteration folder of either format; collective over all ranks."""
    return _load_torch_dist(chunks, folder) if is_torch_dist(folder) else _load_legacy(chunks, folder)


def model_key(chunks: list[Any], index: int) -> str:
    """`model`, or `model0`, `model1` … if a rank has several chunks."""
    return "model" if len(chunks) == 1 else f"model{index}"


def _load_torch_dist(chunks: list[Any], folder: Path) -> Mismatch:
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.validation import StrictHandling

    wanted = wanted_states(chunks, stored_keys(folder))
    # dist_checkpointing calls keys "missing" that the model does not request: the opposite of load_state_dict.
    loaded, unexpected, missing = dist_checkpointing.load(
        wanted, str(folder), strict=StrictHandling.RETURN_ALL
    )
    # Missing keys of a state are those of the whole load.
    left = [
        key
        for index, chunk in enumerate(chunks)
        for key in chunk.load_state_dict(loaded[model_key(chunks, index)], strict=False).unexpected_keys
    ]
    return Mismatch.of(missing, [*unexpected, *left])


def stored_keys(folder: Path) -> frozenset[str]:
    """All keys of a torch_dist checkpoint, tensors and pickled objects."""
    from torch.distributed.checkpoint import FileSystemReader

    return frozenset(FileSystemReader(str(folder)).read_metadata().state_dict_metadata)


def wanted_states(chunks: list[Any], keys: frozenset[str]) -> dict[str, Any]:
    """The sharded states that the chunks request from a checkpoint with `keys`, under the names that it uses."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    style = key_style(keys)
    states = {
        model_key(chunks, index): chunk.sharded_state_dict(metadata=style)
        for index, chunk in enumerate(chunks)
    }
    for tensor in nested_values(states) if is_local(chunks[0].config) else ():
        if isinstance(tensor, ShardedTensor):
            tensor.key = stored_name(tensor.key, keys)
    return states


def key_style(keys: frozenset[str]) -> dict[str, Any]:
    """The metadata that makes `sharded_state_dict` use the key names of the checkpoint."""
    from megatron.core import parallel_state as ps

    return {
        "dp_cp_group": ps.get_data_parallel_group(with_context_parallel=True),
        "non_homogeneous_layers": any(re.match(r"decoder\.layers\.\d+\.", key) for key in keys),
        "singleton_local_shards": any(key.endswith(("linear_fc1.weight_w", "fc1.weight_v")) for key in keys),
        "chained_optim_avoid_prefix": True,
    }


def rank_folder(folder: Path) -> Path:
    """This rank's `mp_rank_*` folder: its pipeline and expert numbers appear only if those sizes exceed 1."""
    from megatron.core import parallel_state as ps

    name = f"mp_rank_{ps.get_tensor_model_parallel_rank():02d}"
    if ps.get_pipeline_model_parallel_world_size() > 1:
        name += f"_{ps.get_pipeline_model_parallel_rank():03d}"
    if ps.get_expert_model_parallel_world_size() > 1:
        name += f"_{ps.get_expert_model_parallel_rank():03d}"
    return folder / name


def _load_legacy(chunks: list[Any], folder: Path) -> Mismatch:
    import torch

    file = rank_folder(folder) / "model_optim_rng.pt"
    stored = torch.load(file, map_location="cpu", weights_only=False, pickle_module=inert_pickle)
    mismatches = []
    for index, chunk in enumerate(chunks):
        state = stored[model_key(chunks, index)]
        if is_local(chunk.config):
            state = legacy_to_local(chunk, state)
        result = chunk.load_state_dict(state, strict=False)
        mismatches.append(Mismatch.of(result.missing_keys, result.unexpected_keys))
    return Mismatch.union(mismatches)
