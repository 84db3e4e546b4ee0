"""The optimizer in a folder of torch.distributed.checkpoint, under the names of `get_optimizer_state_dict`.

    state.<name>.{exp_avg,exp_avg_sq,step}    tensors; `step` is a scalar
    param_groups.<group>.lr …                 objects; a group is a number, or the name of each of its parameters

Groups named by parameter are those of `StateDictOptions(flatten_optimizer_state_dict=True)`, which any optimizer loads,
whatever its groups; reshard writes these. Source: `distributed/checkpoint/state_dict.py` of torch 2.4 to 2.13.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from reshard.algebra.dtypes import BY_NAME
from reshard.base.errors import UNUSABLE
from reshard.containers.dcp_metadata import DcpChunk, DcpMetadata, DcpTensor
from reshard.containers.torchfiles.read import ChunkReader, read_torch_file, scalar
from reshard.containers.torchfiles.write import NewTensor, image_bytes, layout_torch_file
from reshard.formats.optimizer import Adam, settings_of
from reshard.transfer.plan import Planned
from reshard.transfer.source_files import Sources

OPTIMIZER_KEY = "optimizer"
_FLOAT32 = BY_NAME["float32"]
_STEP = re.compile(r"(?:.*?\.)?state\..+\.step")
_SETTING = re.compile(r"(?:.*?\.)?param_groups\.(?:.+)\.(lr|betas|eps|weight_decay)")
_DEFAULTS = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
_FLAGS = {
    "amsgrad": False,
    "maximize": False,
    "foreach": None,
    "capturable": False,
    "differentiable": False,
    "fused": None,
    "decoupled_weight_decay": True,
}
"""Other settings in the groups of torch's AdamW that other engines do not have, with their defaults."""


def read_optimizer(metadata: DcpMetadata, sources: Sources) -> Adam | None:
    """The step, and the first settings found; None if the folder has no optimizer that counts its steps."""
    steps = [tensor for key, tensor in metadata.tensors.items() if _STEP.fullmatch(key) and tensor.chunks]
    if not steps:
        return None
    settings: dict[str, Any] = {}
    for key, chunk in metadata.objects.items():
        match = _SETTING.fullmatch(key)
        if match and match[1] not in settings:
            settings[match[1]] = read_torch_file(chunk.file, sources, chunk.offset, chunk.length)
    return Adam(_value(steps[0], sources), settings_of(settings))


def _value(tensor: DcpTensor, sources: Sources) -> int | None:
    chunk, reader = tensor.chunks[0], ChunkReader(sources)
    try:
        stored = reader.read(chunk.file, chunk.offset, chunk.length, tensor.dtype, chunk.sizes)
        return int(scalar(stored))
    except UNUSABLE:  # not a single number
        return None
    finally:
        reader.close()


@dataclass(frozen=True)
class DcpOptimizer:
    """An optimizer to write: Adam's `states` by kind and name, and its settings."""

    states: Mapping[str, Mapping[str, Planned]] = field(default_factory=dict)
    adam: Adam = field(default_factory=Adam)

    def tensors(self) -> Iterator[tuple[str, Planned]]:
        """Each state with its key below `OPTIMIZER_KEY`."""
        for kind, planned in self.states.items():
            for name, tensor in planned.items():
                yield f"state.{name}.{kind}", tensor

    def names(self) -> list[str]:
        """The names of tensors with states."""
        return list(dict.fromkeys(name for planned in self.states.values() for name in planned))

    def step(self) -> bytes:
        """A torch.save file with the step, a scalar in float32."""
        image = layout_torch_file(NewTensor("step", _FLOAT32, ()))
        return image_bytes(image, {"step": struct.pack("<f", self.adam.step or 0)})

    def settings(self) -> dict[str, bytes]:
        """The settings of every parameter, each as a torch.save file."""
        known = {**_DEFAULTS, **self.adam.settings, **_FLAGS}
        return {key: image_bytes(layout_torch_file(value)) for key, value in known.items()}

    def without_decay(self) -> bytes:
        """The weight decay of biases and norms, which trainers exempt: zero."""
        return image_bytes(layout_torch_file(0.0))


def step_tensor(chunk: DcpChunk) -> DcpTensor:
    """A scalar that is stored in `chunk`."""
    return DcpTensor(_FLOAT32, (), [chunk])
