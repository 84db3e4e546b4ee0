"""The package megatron-fsdp by itself: a transformers model that it shards, in a folder of torch's DCP.

    python -m tests.genuine.megatron_fsdp_alone MODEL OUT [INITIAL]

in the environment "megatron-fsdp". Two ranks load the Hugging Face folder MODEL in bfloat16, replace its weights by
those of INITIAL, a folder of torch's DCP with the names of transformers, and save as the package's documentation says.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from tests.genuine.mcore import cpu_patches
from tests.genuine.megatron_fsdp import Cpu
from tests.genuine.ranks import on_ranks

RANKS = 2
PREFIX = "module."


def save(rank: int, source: Path, out: Path, initial: Path | None) -> None:
    """What each rank does."""
    sys.modules["megatron"] = None  # type: ignore[assignment]  # whose older copy of the package it would use
    cpu_patches._replace_cuda_runtime()
    cpu_patches._redirect_devices()
    cuda: Any = torch.cuda
    cuda.current_device = lambda: Cpu("cpu")
    from megatron_fsdp import fully_shard_model
    from torch.distributed.device_mesh import init_device_mesh
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    sharded = fully_shard_model(
        module=model,
        device_mesh=init_device_mesh("cpu", (RANKS, 1), mesh_dim_names=("dp", "tp")),
        dp_shard_dim="dp",
        tp_dim="tp",
        fsdp_unit_modules=[type(model.model.layers[0])],
        device=torch.device("cpu"),
    )
    state = sharded.state_dict()
    if initial:
        dcp.load(
            {"model": {name.removeprefix(PREFIX): part for name, part in state.items()}},
            checkpoint_id=initial,
        )
        sharded.load_state_dict(state, strict=False)
    dcp.save({"model": sharded.state_dict()}, checkpoint_id=out)


if __name__ == "__main__":
    model, target, *begin = map(Path, sys.argv[1:])
    on_ranks(RANKS, save, model, target, *(begin or [None]))
