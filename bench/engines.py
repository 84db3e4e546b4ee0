"""The 1.3 GB model as other engines save it: `torchrun --nproc-per-node 2 -m bench.engines NAME MODEL DST`.

Each is the engine's own writer, run on a CPU under gloo, without a training step: only reading is measured.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any


def _model(source: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)


def _sharded(source: Path) -> Any:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    model, mesh = _model(source), init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def dcp(source: Path, target: Path) -> None:
    """The checkpoint that accelerate and Trainer save under FSDP2 with SHARDED_STATE_DICT."""
    import torch.distributed.checkpoint as checkpoint

    checkpoint.save({"model": _sharded(source).state_dict()}, checkpoint_id=target / "pytorch_model_fsdp_0")


def verl(source: Path, target: Path) -> None:
    """The checkpoint that verl's FSDPCheckpointManager saves: one state dict of DTensors per rank."""
    import shutil

    import torch
    import torch.distributed as dist

    state = _sharded(source).state_dict()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    (target / "huggingface").mkdir(parents=True, exist_ok=True)
    torch.save(state, target / f"model_world_size_{ranks}_rank_{rank}.pt")
    if rank == 0:
        shutil.copy(source / "config.json", target / "huggingface")
        (target / "fsdp_config.json").write_text(f'{{"FSDP_version": 2, "world_size": {ranks}}}')


def _deepspeed(source: Path, target: Path, stage: int) -> None:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed
    import torch

    deepspeed.init_distributed("gloo")
    model = _model(source)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
        },
    )
    engine.save_checkpoint(target, tag="global_step1")


def zero2(source: Path, target: Path) -> None:
    """DeepSpeed ZeRO stage 2."""
    _deepspeed(source, target, 2)


def zero3(source: Path, target: Path) -> None:
    """DeepSpeed ZeRO stage 3."""
    _deepspeed(source, target, 3)


def peft(source: Path, target: Path) -> None:
    """A LoRA adapter of rank 16 on all linear layers, from one process."""
    import torch
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(
        _model(source), LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    )
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.02)
    model.save_pretrained(target)


if __name__ == "__main__":
    name, src, dst = sys.argv[1:]
    globals()[name](Path(src), Path(dst))
