"""Adapters as `mlx_lm.lora` leaves them: adapters.safetensors and adapter_config.json, read under PEFT's names.

    model.layers.0.self_attn.q_proj.lora_a              [in, r]        PEFT's lora_A is its transpose
    model.layers.0.self_attn.q_proj.lora_b              [r, out]       and lora_B that of this
    model.layers.0.self_attn.q_proj.m                   [out]          DoRA's magnitudes
    model.layers.0.mlp.switch_mlp.gate_proj.lora_a      [E, r, in]     all experts, as in PEFT
    model.layers.0.mlp.switch_mlp.gate_proj.lora_b      [E, out, r]

Source: `tuner/lora.py`, `tuner/dora.py` and `tuner/utils.py` of mlx-lm 0.32.2.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from reshard.algebra.tensors import Tensor
from reshard.base.errors import Problem, raise_all
from reshard.base.merged_problems import one_for_all
from reshard.families.dialect import HUB
from reshard.families.dialects import mlx
from reshard.folders import iterations
from reshard.folders.iterations import Iteration
from reshard.folders.json_objects import read_object
from reshard.formats import apply_renamings, huggingface
from reshard.formats.checkpoint import Checkpoint, ModelDescription
from reshard.formats.detection import MLX_ADAPTER, MLX_ADAPTER_FILE
from reshard.formats.peft import ADAPTER_CONFIG
from reshard.transfer.source_files import Sources

_PART = re.compile(r"(?P<module>.+)\.(?P<part>lora_a|lora_b|m)")
_IN_PEFT = {"lora_a": "lora_A.weight", "lora_b": "lora_B.weight", "m": "lora_magnitude_vector"}
_OUTSIDE = re.compile(r"(?:^|\.)(?:embed_tokens|wte|language_model)(?:\.|$)")
_SWITCH = ".switch_mlp."


def open_checkpoint(path: Path, sources: Sources, iteration: Iteration | None = None) -> Checkpoint:
    """Open an adapter. Raises ReshardError if it is damaged, and for changes that are no low-rank pairs of linears."""
    iterations.refuse(path, iteration, "an adapter")
    file = path if path.is_file() else path / MLX_ADAPTER_FILE
    tensors = huggingface.read_weights(file, sources)
    config = file.parent / ADAPTER_CONFIG
    kind = read_object(config, sources).get("fine_tune_type", "lora") if config.is_file() else "lora"
    raise_all(
        one_for_all(
            [
                _unsupported(name, each, str(kind))
                for name, each in tensors.items()
                if not _is_pair(name, each)
            ],
            tensors,
            str(file),
        )
    )
    return Checkpoint(
        path=path,
        format=MLX_ADAPTER,
        dialect=HUB,
        tensors=dict(_in_peft(tensors)),
        description=ModelDescription(file.parent),
        variant=f"adapter of mlx-lm, {kind}",
    )


def _is_pair(name: str, tensor: Tensor) -> bool:
    """Whether it is a part of a pair of a linear, or of the experts that MLX stacks for every mixture."""
    match = _PART.fullmatch(name)
    if match is None or _OUTSIDE.search(match["module"]):
        return False
    stacked = _SWITCH in name
    return len(tensor.shape) == (1 if match["part"] == "m" else 3 if stacked else 2)


def _in_peft(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    for part, of_peft in _IN_PEFT.items():
        weights = {
            f"{name.removesuffix(part)}weight": tensor
            if _SWITCH in name or part == "m"
            else Tensor(tensor.dtype, tensor.view.permute(1, 0))
            for name, tensor in tensors.items()
            if name.endswith(f".{part}")
        }
        for name, tensor in apply_renamings.on_hub(weights, mlx.SWITCH_RULES, {}).items():
            yield f"{name.removesuffix('weight')}{of_peft}", tensor


def _unsupported(name: str, tensor: Tensor, kind: str) -> Problem:
    return Problem(
        "mlx-adapter-unsupported",
        "reshard does not read this part of an adapter of mlx-lm",
        tensor=name,
        file=tensor.file,
        rule="pairs lora_a and lora_b of linears, and of experts in switch_mlp, with or without DoRA's magnitudes",
        found=f"{list(tensor.shape)}, fine_tune_type {kind}",
        remedy="fuse it where MLX runs, with mlx_lm.fuse, and convert the result",
    )
