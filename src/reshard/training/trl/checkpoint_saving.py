"""Self-contained checkpoints: weights, config, tokenizer, template, adapter config, and the record of the run.

The record is written last, when all ranks are done: a folder without it is incomplete.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterable, Iterator
from copy import copy
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.tensor import DTensor, Shard
from torch.utils._pytree import tree_map, tree_map_only

from reshard.base.plain_json import put
from reshard.folders.companions import CONFIG, find_companions, read_object
from reshard.formats.contract import SHARD_SIZE
from reshard.guard.end.completeness import RUN_RECORD, note_files
from reshard.stores.hub import name_of
from reshard.training.run import Run, read_record
from reshard.training.trl import live_weights
from reshard.training.trl.rank_device import rank
from reshard.training.trl.trl_methods import TRL_METHODS
from reshard.transfer.source_files import Sources

OPTIMIZER_PREFIX = "optimizer_0"
MODEL, INDEX = "model.safetensors", "model.safetensors.index.json"
ADAPTER_FILE = "adapter_model.safetensors"


def write(run: Run, model: Any, tokenizer: Any, folder: Path) -> None:
    """Write the weights of a model, and all other files except the record. All ranks must call it."""
    if rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        for stale in (*folder.glob("*.safetensors*"), folder / RUN_RECORD):
            stale.unlink(missing_ok=True)
    is_adapter = live_weights.is_adapter(model)
    _save(
        live_weights.tensors_of(model),
        folder,
        *((ADAPTER_FILE, math.inf) if is_adapter else (MODEL, SHARD_SIZE)),
    )
    if rank() == 0:
        _beside(run, model, tokenizer, folder)


def _save(tensors: Iterable[tuple[str, Any]], folder: Path, name: str, most: float) -> None:
    """Write one file, or shards of at most `most` bytes and their index. Without tensors, write nothing."""
    parts: list[list[str]] = []
    for shard in _shards(tensors, most):
        file = folder / f"part-{len(parts)}.safetensors"
        save_file(shard, file, metadata={"format": "pt"})
        file.chmod(folder.stat().st_mode & 0o666)  # safetensors makes files readable by their owner only
        parts.append(list(shard))
        shard.clear()  # before the next one is gathered
    count, places = len(parts), dict[str, str]()
    for number, names in enumerate(parts):
        final = f"model-{number + 1:05}-of-{count:05}.safetensors" if count > 1 else name
        (folder / f"part-{number}.safetensors").rename(folder / final)
        places |= dict.fromkeys(names, final)
    if count > 1:
        size = sum((folder / each).stat().st_size for each in set(places.values()))
        put(folder / INDEX, {"metadata": {"total_size": size}, "weight_map": dict(sorted(places.items()))})


def _shards(tensors: Iterable[tuple[str, Any]], most: float) -> Iterator[dict[str, Any]]:
    shard: dict[str, Any] = {}
    size = 0
    for name, tensor in tensors:
        if shard and size + tensor.nbytes > most:
            yield shard
            shard, size = {}, 0
        shard[name] = tensor
        size += tensor.nbytes
    if shard:
        yield shard


def _beside(run: Run, model: Any, tokenizer: Any, folder: Path) -> None:
    """Copy the files of the base, so that its readers read the checkpoint too; save a changed tokenizer."""
    companions = find_companions(Sources(), run.model)
    for name, path in companions.files.items():
        if name != CONFIG:
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(path, folder / name)
    if run.options.get("chat_template_path") or run.options.get("eos_token"):  # they change the tokenizer
        tokenizer.save_pretrained(folder)
        model.generation_config.save_pretrained(folder)
    content = dict(read_object(run.model / CONFIG, Sources()))
    content["use_cache"] = True
    if live_weights.is_adapter(
        model
    ):  # for inference: PEFT would write the mode in which the adapter is trained
        config = copy(model.peft_config[model.active_adapter])
        config.inference_mode, config.base_model_name_or_path = True, name_of(run.model)
        config.save_pretrained(str(folder))
    else:
        dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
        known = [name for name in ("dtype", "torch_dtype") if name in content] or ["torch_dtype"]
        content.update(dict.fromkeys(known, dtype))
        content.update(_of_classifier(model) if TRL_METHODS[run.method].classifies else {})
    put(folder / CONFIG, content)


def _of_classifier(model: Any) -> dict[str, Any]:
    """Config keys of a classifier that differ from its base, which had another head."""
    config = model.config
    return {
        "architectures": [type(model).__name__.removeprefix("FSDP")],  # FSDP2 derives a class
        "id2label": config.id2label,
        "label2id": config.label2id,
        "pad_token_id": config.get_text_config().pad_token_id,
    }


def complete(run: Run, folder: Path) -> None:
    """Write the record of the run into a checkpoint, which makes it complete."""
    note_files(folder)
    record = run.output / RUN_RECORD
    put(folder / RUN_RECORD, read_record(record) if record.is_file() else run.as_dict())


def save_optimizer(model: Any, optimizer: Any, folder: Path) -> None:
    """Write the state of an optimizer over sharded parameters, each rank its shard. All ranks must call it."""
    dcp.save(_straight(_state_of(model, optimizer)), checkpoint_id=folder / OPTIMIZER_PREFIX)


def load_optimizer(model: Any, optimizer: Any, folder: Path) -> None:
    """Read what `save_optimizer` wrote, on any number of ranks. All ranks must call it."""
    state = _state_of(model, optimizer)
    loaded = _straight(state)
    dcp.load(loaded, checkpoint_id=folder / OPTIMIZER_PREFIX)
    set_optimizer_state_dict(model, optimizer, _placed(loaded, state)["optimizer"])


def _state_of(model: Any, optimizer: Any) -> dict[str, Any]:
    return {"optimizer": get_optimizer_state_dict(model, optimizer)}


def _straight(state: Any) -> Any:
    """A state in which each rank has one contiguous shard of each tensor; those that have share their memory with it.

    Shards of packed layers (gate and up in one tensor) consist of two parts, which torch 2.13 writes as if they were
    one.
    """

    def straight(value: Any) -> Any:
        return value.redistribute(
            placements=[Shard(each.dim) if hasattr(each, "dim") else each for each in value.placements]
        )

    return tree_map_only(DTensor, straight, state)


def _placed(loaded: Any, like: Any) -> Any:
    """The inverse of `_straight`."""

    def placed(value: Any, other: Any) -> Any:
        return value.redistribute(placements=other.placements) if hasattr(other, "placements") else value

    return tree_map(placed, loaded, like)
