"""Typical hand-written trainers, for `bench.training`: `python -m bench.plain trl|megatron MODEL DATA OUT OPTIONS`."""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any


def main(engine: str, model: str, data: str, output: str, options: str) -> None:
    """Train, and write a row of metrics after each step."""
    os.environ.setdefault("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))
    Path(output).mkdir(parents=True, exist_ok=True)
    {"trl": _trl, "megatron": _megatron}[engine](model, data, Path(output), json.loads(options))


def _tell(output: Path) -> None:
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    with (output / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"event": "step", "time": time.time(), "memory": memory}) + "\n")


def _trl(model: str, data: str, output: Path, options: dict[str, Any]) -> None:
    from datasets import load_dataset
    from transformers import TrainerCallback
    from trl import SFTConfig, SFTTrainer

    class Tell(TrainerCallback):  # type: ignore[misc]
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **given: Any) -> None:
            if logs and "loss" in logs and state.is_world_process_zero:
                _tell(output)

    settings = {"report_to": "none", "logging_steps": 1, "bf16": False, "disable_tqdm": True}
    settings["model_init_kwargs"] = {"dtype": "float32", "attn_implementation": "sdpa"}
    SFTTrainer(
        model,
        args=SFTConfig(str(output / "checkpoints"), **settings, **options),
        train_dataset=load_dataset("json", data_files=data, split="train", cache_dir=str(output)),
        callbacks=[Tell()],
    ).train()


def _megatron(model: str, data: str, output: Path, options: dict[str, Any]) -> None:
    """Forward, backward and a step of megatron-core, on one rank, over prepared tokens."""
    import torch
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from reshard.algebra.layout import Layout
    from reshard.engines.megatron import cpu_patches, process_groups
    from reshard.engines.megatron.gpt_model import build_model
    from reshard.formats import open_checkpoint
    from reshard.model.resolve import resolve

    cpu_patches.enable()
    os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    process_groups.initialize(Layout(), seed=1)
    resolved = resolve(open_checkpoint(Path(model))).declared
    args = {**resolved.args, "padded_vocab_size": resolved.dims.vocab}
    (chunk,) = build_model(
        args,
        Layout(),
        training=True,
        settings={"calculate_per_token_loss": True, "use_cpu_initialization": True},
    )
    config = chunk.config
    wrapped = DistributedDataParallel(
        config,
        DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True),
        chunk,
    )
    optimizer = get_megatron_optimizer(
        OptimizerConfig(optimizer="adam", lr=1e-5, use_distributed_optimizer=True), [wrapped]
    )
    config.finalize_model_grads_func, config.grad_scale_func = finalize_model_grads, optimizer.scale_loss
    length, batch = options["seq_length"], options["micro_batch_size"]
    schedule = get_forward_backward_func()
    tokens = torch.randint(0, 256, (options["train_iters"], batch, length + 1))
    positions = torch.arange(length)[None].expand(batch, -1)
    mask = torch.ones(length, length, dtype=torch.bool).triu(1)[None, None]

    def forward(rows: Any, module: Any) -> Any:
        row = next(rows)
        losses = module(row[:, :-1], positions, mask, labels=row[:, 1:])
        return losses, lambda found: (found.sum(), torch.tensor(found.numel()), {"loss": found.mean().item()})

    for row in tokens:
        wrapped.zero_grad_buffer()
        optimizer.zero_grad()
        schedule(
            forward_step_func=forward,
            data_iterator=iter([row]),
            model=wrapped,
            num_microbatches=1,
            seq_length=length,
            micro_batch_size=batch,
            forward_only=False,
        )
        optimizer.step()
        _tell(output)


if __name__ == "__main__":
    main(*sys.argv[1:])
