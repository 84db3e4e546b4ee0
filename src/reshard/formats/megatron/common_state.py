"""What an iteration of Megatron-Core records besides weights: arguments, the iteration, schedules, parameter groups.

    common.pt                  torch_dist of megatron-core before 0.19: one dict
    common_state/shard_0_1     torch_dist of megatron-core 0.19: a list of that dict, an object in the `.distcp` files
    args, iteration …          torch_dcp and fsdp_dtensor, which torch's DCP saves: an object for each entry

torch_dcp (`--use-torch-fsdp2`) has neither stages nor tensor parallelism, and the names of a rank of legacy files below
`model.`. Sources: `dist_checkpointing/serialization.py` of megatron-core, `training/checkpointing.py` of Megatron-LM.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from reshard.algebra.storage import StoredTensor
from reshard.base.errors import ReshardError
from reshard.containers.dcp_metadata import DcpChunk, DcpMetadata, DcpTensor, read_metadata
from reshard.containers.torchfiles.read import read_torch_file
from reshard.formats.detection import COMMON_FILE
from reshard.formats.unique_names import under_new_names
from reshard.transfer.source_files import Sources

_OBJECT = "common_state/shard_0_1"
_ENTRIES = ("args", "checkpoint_version", "iteration")
OBJECTS_READ = frozenset({_OBJECT, *_ENTRIES})
"""Objects that `read_common` reads; the others are dropped."""

ReadChunk = Callable[[DcpTensor, DcpChunk], StoredTensor]
"""Finds the elements of a chunk of a tensor in its file."""

Reading = Callable[[Mapping[str, DcpTensor]], AbstractContextManager[ReadChunk]]
"""Opens what is needed to read the chunks of these tensors."""

_NEST = "model."
_EXPERT = re.compile(
    r"(.*\.mlp\.experts)\.(?:local_experts\.(\d+)\.(.+)|(linear_fc[12]\.(?:weight|bias))(\d+)(_[wv])?)"
)


def read_common(folder: Path, sources: Sources, metadata: DcpMetadata | None = None) -> dict[str, Any]:
    """What the iteration in `folder` records besides weights. `metadata` is its `.metadata`, if that has been read.

    Raises ReshardError if it is missing, or if the format is one that reshard does not read.
    """
    if (folder / COMMON_FILE).is_file():
        return _dict(read_torch_file(folder / COMMON_FILE, sources))
    objects = (metadata or read_metadata(folder / ".metadata", sources)).objects
    if chunk := objects.get(_OBJECT):
        content = object_in(chunk, sources)
        return _dict(content[0] if isinstance(content, list) and content else content)
    if is_torch_dcp(objects):
        return {name: object_in(objects[name], sources) for name in _ENTRIES if name in objects}
    raise ReshardError(
        "torch-dist-file-missing",
        "a file of the checkpoint is missing",
        file=str(folder / COMMON_FILE),
        rule="Megatron's arguments are in common.pt, or in an object of the chunk files (megatron-core 0.19)",
        found="neither",
        remedy="copy the iteration folder again",
    )


def is_torch_dcp(objects: Mapping[str, DcpChunk]) -> bool:
    """Whether torch's DCP saved an iteration with these objects: the entries of Megatron-LM's state dict.

    Megatron-Bridge saves no `args`.
    """
    return "args" in objects or "checkpoint_version" in objects


def respelled(tensors: Mapping[str, DcpTensor]) -> dict[str, DcpTensor]:
    """The tensors of torch_dcp under the keys that torch_dist has for them, if it does not stack layers."""
    return under_new_names(
        (key, with_expert_before_module(key.removeprefix(_NEST)), tensor) for key, tensor in tensors.items()
    )


def with_expert_before_module(name: str) -> str:
    """The name of a module's tensor as torch_dist spells it: with the number of its expert before the module."""
    if expert := _EXPERT.fullmatch(name):
        inner = expert[3] or f"{expert[4]}{expert[6] or ''}"
        return f"{expert[1]}.experts.{expert[2] or expert[5]}.{inner}"
    return name


def object_in(chunk: DcpChunk, sources: Sources) -> Any:
    """An object that a chunk has as a file of torch."""
    return read_torch_file(chunk.file, sources, chunk.offset, chunk.length)


def _dict(content: Any) -> dict[str, Any]:
    return content if isinstance(content, dict) else {}
