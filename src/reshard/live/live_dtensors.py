"""The trainer that a torch module is on all ranks: of DTensors (FSDP2, tensor parallelism), or of plain tensors.

It is a checkpoint of torch.distributed.checkpoint whose chunks are in the memory of ranks: names, shapes and placements
are those of the state dict.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from reshard.adapters import checkpoint_kind
from reshard.algebra.dtypes import dtype
from reshard.algebra.storage import Storage, StoredTensor
from reshard.algebra.tensors import Replica
from reshard.algebra.views import row_major
from reshard.base.errors import Problem, raise_all
from reshard.containers.torchfiles.dtensor import Mesh, Placement, RankPart, Spread, plain_part
from reshard.exchange.trainer import Trainer, holders_of, storages_of
from reshard.families.dialect import HUB
from reshard.folders.json_objects import read_object
from reshard.formats.checkpoint import Checkpoint, ModelDescription
from reshard.formats.contract import CheckpointKind
from reshard.formats.detection import DCP
from reshard.formats.fsdp_ranks.tensor_parts import joined
from reshard.formats.options import ConversionOptions
from reshard.formats.state_dict_names import without_buffers
from reshard.live.fillable import sharded_otherwise
from reshard.live.live_trainer import (
    LiveTrainer,
    forms,
    not_plain,
    on_all_ranks,
    require_alike,
    trainer_rank,
)
from reshard.live.torch_modules import WRAPPER_PREFIX
from reshard.planning import planned_tensors
from reshard.transfer.source_files import Sources

if TYPE_CHECKING:
    import torch

    from reshard.live.packing import TensorKey

CHUNK = "model"
"""The name of the only chunk."""


class _Description(NamedTuple):
    """What a rank tells the others: its parts of all tensors, and the module's own config, if it is transformers'.

    `arguments` are the caller's, and the config of the base.
    """

    parts: Mapping[str, RankPart]
    recorded: Mapping[str, Any]
    arguments: Mapping[str, Any]

    @property
    def shared(self) -> tuple[Any, ...]:
        """What must be the same on all ranks."""
        spreads = {name: (each.dtype, each.shape, each.spread) for name, each in self.parts.items()}
        return spreads, self.arguments


def live_module(module: torch.nn.Module, base: Path, told: Mapping[str, Any]) -> LiveTrainer:
    """The trainer of which this module is the model on each rank; collective. `told` must be the same on all ranks.

    Raises ReshardError, the same one on all ranks.
    """
    described = on_all_ranks(lambda: _description(module, base, told))
    require_alike("of one model", [each.shared == described[0].shared for each in described])
    parts = {
        name: [(_path(rank), each.parts[name]) for rank, each in enumerate(described)]
        for name in described[0].parts
    }
    tensors, replicas = joined(parts)
    without_buffers(tensors)
    ranks = {_path(rank): [rank] for rank in range(len(described))}
    holders = holders_of(tensors.values(), replicas, ranks)
    keys = {
        piece.source.storage: (CHUNK, name)
        for name, pairs in reversed(parts.items())  # the first name of a tensor that has two
        for _, part in pairs
        for box in part.boxes
        for piece in box.view.pieces
    }
    description = ModelDescription(base, recorded=described[0].recorded)
    checkpoint = Checkpoint(path=base, format=DCP, dialect=HUB, tensors=tensors, description=description)
    raise_all(_adapted(checkpoint))
    hub = planned_tensors(checkpoint, ConversionOptions(base=base))
    raise_all(_untied(hub.replicas))
    memory = partial(_memory, module)
    return LiveTrainer(Trainer.of(hub.by_name, holders, len(ranks), keys), memory, forms(memory()))


def _adapted(checkpoint: Checkpoint) -> Iterator[Problem]:
    """A problem if a model has adapters: its weights would be sums."""
    if checkpoint_kind(checkpoint) is not CheckpointKind.MODEL:
        yield Problem(
            "weight-source-of-adapter",
            "the model of the trainer has adapters, which are not merged",
            tensor=next((name for name in checkpoint.tensors if ".lora_" in name), None),
            rule="elements are moved, and none is computed",
            remedy="merge them, for example with merge_and_unload() of PEFT",
        )


def _untied(replicas: Iterable[Replica]) -> Iterator[Problem]:
    """A problem for each tensor that is another one on the Hub, and not in the trainer."""
    for each in replicas:
        if storages_of(each.first.view) != storages_of(each.second.view):
            yield Problem(
                "weight-source-of-untied-model",
                "tensors are one by the config, and have elements of their own in the trainer",
                tensor=each.tensor,
                rule=each.rule,
                remedy="pass the folder of the model that is trained as base, or tie them in the trainer",
            )


def _description(module: torch.nn.Module, base: Path, told: Mapping[str, Any]) -> _Description:
    """What this rank tells the others. Raises ReshardError for what cannot be sent."""
    raise_all(sharded_otherwise(module, str(base)))
    tensors = _tensors(module)
    local = {name: _local(tensor) for name, tensor in tensors.items()}
    raise_all(not_plain(local))
    places = {id(tensor): number for number, tensor in enumerate(tensors.values())}
    parts = {
        name: _part(name, tensor, _place(local[name], places[id(tensor)])) for name, tensor in tensors.items()
    }
    config, recorded = read_object(base / "config.json", Sources()), _recorded_config(module)
    raise_all(_quantized(recorded))
    return _Description(parts, recorded, {**told, "config": config})


def _quantized(config: Mapping[str, Any]) -> Iterator[Problem]:
    """A problem if transformers has quantized a model."""
    if settings := config.get("quantization_config"):
        yield Problem(
            "weight-source-of-quantized-model",
            "the model of the trainer is quantized",
            found=f"quant_method {settings.get('quant_method')}",
            rule="elements are moved, and none is computed",
            remedy="load it with plain weights, or dequantize it: model.dequantize()",
        )


def _recorded_config(module: torch.nn.Module) -> dict[str, Any]:
    """The config of the model of transformers in a module, as it would be saved; empty if there is none."""
    configs = (getattr(each, "config", None) for each in module.modules())
    found = next((each for each in configs if hasattr(each, "to_json_string")), None)
    return dict(json.loads(found.to_json_string())) if found else {}


def _tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The tensors that a checkpoint of the module would contain; FSDP2 shards its parameters for that again."""
    import torch

    return {
        WRAPPER_PREFIX.sub("", name): value
        for name, value in module.state_dict(keep_vars=True).items()
        if torch.is_tensor(value) and not name.endswith("_extra_state")
    }


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a tensor in the memory of this rank."""
    local: Any = tensor.detach()
    return local.to_local() if hasattr(local, "device_mesh") else local


def _memory(module: torch.nn.Module) -> dict[TensorKey, torch.Tensor]:
    """This rank's tensors."""
    return {(CHUNK, name): _local(tensor) for name, tensor in _tensors(module).items()}


def _path(rank: int) -> str:
    """The path of the storages of a rank."""
    return f"rank {rank}"


def _place(local: torch.Tensor, number: int) -> StoredTensor:
    """The place of a tensor in the memory of this rank. Its offset is only a number."""
    storage, shape = Storage(_path(trainer_rank()), number, local.nbytes), tuple(local.shape)
    return StoredTensor(storage, dtype(str(local.dtype)), shape, row_major(shape))


def _part(name: str, tensor: Any, place: StoredTensor) -> RankPart:
    """This rank's part of a tensor."""
    if not hasattr(tensor, "device_mesh"):
        return plain_part(place)
    mesh, axes = tensor.device_mesh, max(1, tensor.ndim)
    names = tuple(mesh.mesh_dim_names or map(str, range(mesh.ndim)))
    placements = tuple(
        Placement(type(each).__name__, getattr(each, "dim", 0) % axes, getattr(each, "split_factor", 1))
        for each in tensor.placements
    )
    order = getattr(tensor._spec, "shard_order", None) or ()
    spread = Spread(
        placements,
        Mesh(names, tuple(mesh.shape), tuple(mesh.get_coordinate()), None, frozenset()),
        tuple(axis for entry in order for axis in entry.mesh_dims),
    )
    return spread.part(name, place.dtype, tuple(tensor.shape), place, place.storage.path)
