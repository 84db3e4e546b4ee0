"""Checkpoints of training engines, with tensors larger than the memory of their conversions.

The layout is that of the engines' own files (`tests/data`, judged in `tests/test_deepspeed.py` and
`tests/test_fsdp_ranks.py`); here only sizes matter.
"""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.memory.models import LLAMA

WORLD = 2
CONFIG = {**LLAMA, "intermediate_size": 16384, "vocab_size": 16384}
"""A layer whose MLP projections have 64 MiB each in float32, and an embedding of the same size."""

SHAPES: dict[str, tuple[int, ...]] = {
    "model.embed_tokens.weight": (16384, 1024),
    "model.layers.0.self_attn.q_proj.weight": (1024, 1024),
    "model.layers.0.self_attn.k_proj.weight": (256, 1024),
    "model.layers.0.self_attn.v_proj.weight": (256, 1024),
    "model.layers.0.self_attn.o_proj.weight": (1024, 1024),
    "model.layers.0.mlp.gate_proj.weight": (16384, 1024),
    "model.layers.0.mlp.up_proj.weight": (16384, 1024),
    "model.layers.0.mlp.down_proj.weight": (1024, 16384),
    "model.layers.0.input_layernorm.weight": (1024,),
    "model.layers.0.post_attention_layernorm.weight": (1024,),
    "model.norm.weight": (1024,),
}
KINDS = ("fp32", "exp_avg", "exp_avg_sq")
Weights = dict[str, torch.Tensor]


def _weights(kind: str) -> Weights:
    """Numbers between 0.5 and 1.5, not exact in bfloat16, different for each kind."""
    generator = torch.Generator().manual_seed(KINDS.index(kind))
    return {name: 0.5 + torch.rand(shape, generator=generator) for name, shape in SHAPES.items()}


def zero1(folder: Path) -> Path:
    """ZeRO 1 in bfloat16."""
    return _zero12(folder, 1)


def zero2(folder: Path) -> Path:
    """ZeRO 2 in bfloat16."""
    return _zero12(folder, 2)


def _zero12(folder: Path, stage: int) -> Path:
    """All parameters are one vector, of which each rank has a half."""
    states = {kind: _weights(kind) for kind in KINDS}
    module = {name: weight.to(torch.bfloat16) for name, weight in states["fp32"].items()}
    vectors = {
        kind: torch.cat([each.reshape(-1) for each in weights.values()]).chunk(WORLD)
        for kind, weights in states.items()
    }
    step = _step(folder)
    torch.save(_model(module, stage), step / "mp_rank_00_model_states.pt")
    for rank in range(WORLD):
        mine = {kind: parts[rank].clone() for kind, parts in vectors.items()}
        optimizer = {
            "zero_stage": stage,
            "partition_count": [WORLD],
            "single_partition_of_fp32_groups": [mine.pop("fp32")],
            "base_optimizer_state": {"state": {0: {"step": 10, **mine}}, "param_groups": [{"lr": 1e-3}]},
        }
        name = f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        torch.save({"optimizer_state_dict": optimizer}, step / name)
    return folder


def zero3(folder: Path) -> Path:
    """ZeRO 3 in bfloat16: each rank has half of each parameter, and they are gathered when they are read."""
    states = {kind: _weights(kind) for kind in KINDS}
    step = _step(folder)
    for rank in range(WORLD):
        mine = {
            kind: torch.cat([each.reshape(-1).chunk(WORLD)[rank] for each in weights.values()])
            for kind, weights in states.items()
        }
        optimizer = {
            "zero_stage": 3,
            "partition_count": WORLD,
            "fp32_flat_groups": [mine.pop("fp32")],
            "optimizer_state_dict": {"state": {0: {"step": 10, **mine}}, "param_groups": [{"lr": 1e-3}]},
        }
        module = {name: torch.empty(0, dtype=torch.bfloat16) for name in SHAPES}
        name = f"zero_pp_rank_{rank}_mp_rank_00"
        torch.save(_model(module, 3), step / f"{name}_model_states.pt")
        torch.save({"optimizer_state_dict": optimizer}, step / f"{name}_optim_states.pt")
    return folder


def _step(folder: Path) -> Path:
    step = folder / "global_step10"
    step.mkdir(parents=True)
    (folder / "latest").write_text(step.name)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return step


def _model(module: Weights, stage: int) -> dict[str, Any]:
    assert all(prod(shape) % WORLD == 0 for shape in SHAPES.values())
    return {
        "module": module,
        "param_shapes": [{name: torch.Size(shape) for name, shape in SHAPES.items()}],
        "shared_params": {"lm_head.weight": "model.embed_tokens.weight"},
        "ds_config": {"zero_optimization": {"stage": stage}},
        "dp_world_size": WORLD,
        "global_steps": 10,
        "skipped_steps": 0,
    }


def fsdp(folder: Path) -> Path:
    """A file for each rank of FSDP2, with its rows of each tensor, as verl saves them. Torch fakes the other ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    weights = _weights("fp32")
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    for rank in range(WORLD):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=WORLD)
        try:
            mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("fsdp",))
            mine = {
                name: DTensor.from_local(weight.chunk(WORLD)[rank].clone(), mesh, [Shard(0)])
                for name, weight in weights.items()
            }
            torch.save(mine, folder / f"model_world_size_{WORLD}_rank_{rank}.pt")
        finally:
            dist.destroy_process_group()
    return folder


def plain(folder: Path) -> Path:
    """The same weights as a Hugging Face folder."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, "torch_dtype": "float32"}))
    save_file(_weights("fp32"), folder / "model.safetensors")
    return folder
