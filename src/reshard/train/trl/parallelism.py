"""A spread in the words of the frameworks: accelerate's FSDP2, DeepSpeed's config, transformers' DistributedConfig."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from reshard.errors import ReshardError
from reshard.train.run import Run


def arguments(run: Run) -> dict[str, Any]:
    """What TrainingArguments is told of the plan."""
    kind = run.spread.kind
    if kind == "fsdp2":
        return {"fsdp": True, "fsdp_config": fsdp(run)}
    if kind in ("zero2", "zero3"):
        return {"deepspeed": zero(int(kind[-1]))}
    return {}


def fsdp(run: Run) -> dict[str, Any]:
    """accelerate's FSDP2, by the layers that the model names in `_no_split_modules`.

    Every rank loads the weights: with cpu_ram_efficient_loading the first one alone would, and TRL's reference model
    would stay empty on the others, since only the trained model is sent to them.
    """
    return {"version": 2, "cpu_ram_efficient_loading": False, "state_dict_type": "SHARDED_STATE_DICT"}


def zero(stage: int) -> dict[str, Any]:
    """DeepSpeed's config, of which transformers fills in what is "auto". Raises ReshardError without DeepSpeed."""
    if find_spec("deepspeed") is None:
        raise ReshardError(
            "DeepSpeed is not installed",
            found=f"--parallel zero{stage}",
            remedy="pip install deepspeed, or use --parallel fsdp2",
        )
    sizes = {"stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": "auto"}
    return {
        "zero_optimization": {
            "stage": stage,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "reduce_bucket_size": "auto",
            **(sizes if stage == 3 else {}),
        },
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto"},
        "gradient_clipping": "auto",
        "gradient_accumulation_steps": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "train_batch_size": "auto",
    }


def loading(run: Run) -> Mapping[str, Any]:
    """What from_pretrained is told of the plan."""
    if run.spread.kind != "tp":
        return {}
    from transformers.distributed import DistributedConfig

    return {"distributed_config": DistributedConfig(tp_size=run.spread.tp, ep_size=max(run.spread.ep, 1))}
