"""TRL's arguments for a run: its options, and those of the plan, for accelerate, DeepSpeed and transformers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from reshard.base.errors import ReshardError
from reshard.training import rewards
from reshard.training.methods import is_rewarded
from reshard.training.run import Run
from reshard.training.trl import quantized, rank_device
from reshard.training.trl.batches import plan_instead
from reshard.training.trl.config_fields import ADDED_OPTIONS, LORA_OPTIONS, MODEL_CONFIG_OPTIONS
from reshard.training.trl.trl_methods import TRL_METHODS

NOT_OF_TRAINER = (*LORA_OPTIONS, *MODEL_CONFIG_OPTIONS, *ADDED_OPTIONS)
"""Options that are not fields of a trainer's config."""


def arguments_of(run: Run, options: Mapping[str, Any]) -> Any:
    """The config of the method's trainer. Options equal to TRL's defaults are left out, to avoid warnings."""
    own = {name: value for name, value in options.items() if name not in NOT_OF_TRAINER}
    stated = _stated(run, own)
    stated.pop("assistant_only_loss", None)  # TRL gets labels
    if is_rewarded(run.method) and stated.get("generation_batch_size"):
        stated["generation_batch_size"] = int(stated["generation_batch_size"]) * run.layout.tp
    if run.reward and (weights := rewards.weights(run.reward)):
        stated["reward_weights"] = weights
    arguments = TRL_METHODS[run.method].config_class()(
        **stated,
        output_dir=str(run.output),
        # TRL loads a reference model with them; the model is loaded already.
        model_init_kwargs=model_arguments(run, options) if has_reference(run, options) else None,
        **_of_plan(run, options),
    )
    if policy := _policy(run, options):
        arguments.fsdp_plugin_args["mixed_precision_policy"] = policy
    if is_rewarded(run.method):
        # TRL counts tensor-parallel ranks as if each had its own prompts, and would skip some prompts and repeat
        # others.
        arguments.generation_batch_size //= run.layout.tp
    return arguments


def _stated(run: Run, own: Mapping[str, Any]) -> dict[str, Any]:
    from dataclasses import MISSING, fields

    usual = {
        field.name: field.default
        for field in fields(TRL_METHODS[run.method].config_class())
        if field.default is not MISSING
    }
    skipped = ("output_dir", "model_init_kwargs", "fsdp", "fsdp_config", "deepspeed")
    return {name: value for name, value in own.items() if name not in skipped and value != usual.get(name)}


def model_arguments(run: Run, options: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of from_pretrained: never a device map, always a dtype."""
    return {
        **(options.get("model_init_kwargs") or {}),
        "device_map": None,
        "dtype": options["dtype"],
        "attn_implementation": options["attn_implementation"],
        **_loading(run),
        **quantized.loading(options),
    }


def _of_plan(run: Run, options: Mapping[str, Any]) -> dict[str, Any]:
    """The plan's arguments for TrainingArguments."""
    kind = run.parallel
    if kind == "fsdp2":
        return {"fsdp": True, "fsdp_config": _fsdp(run, options)}
    if kind in ("zero2", "zero3"):
        return {"deepspeed": _zero(int(kind[-1]))}
    return {}


def _fsdp(run: Run, options: Mapping[str, Any]) -> dict[str, Any]:
    """accelerate's FSDP2, which wraps the layers that the model names in `_no_split_modules`.

    The first rank of a node reads the weights and broadcasts them, so that the host holds the model once. Not with a
    second model: only the trained one is broadcast, and a reference or teacher would stay empty on other ranks.
    """
    alone = not has_reference(run, options) and not TRL_METHODS[run.method].teacher
    return {
        "version": 2,
        "cpu_ram_efficient_loading": alone,
        "state_dict_type": "SHARDED_STATE_DICT",
    }


def _policy(run: Run, options: Mapping[str, Any]) -> Any:
    """FSDP2's policy for 16-bit computation; None if nothing is computed in 16 bits.

    accelerate 1.15 also rounds the model's outputs to 16 bits: log-probabilities, of which losses are sums.
    """
    dtype = half_dtype(options)
    if run.parallel != "fsdp2" or dtype is None:
        return None
    return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype)


def half_dtype(options: Mapping[str, Any]) -> torch.dtype | None:
    """The 16-bit dtype in which a run computes; None if it computes in 32 bits."""
    if options["bf16"]:
        return torch.bfloat16
    return torch.float16 if options["fp16"] else None


def has_reference(run: Run, options: Mapping[str, Any]) -> bool:
    """Whether TRL keeps a second model: with LoRA, the base is the reference."""
    return not run.lora and TRL_METHODS[run.method].reference(options)


def _zero(stage: int) -> dict[str, Any]:
    """DeepSpeed's config, in which transformers fills in the "auto" values."""
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


def _loading(run: Run) -> Mapping[str, Any]:
    """The plan's arguments for from_pretrained."""
    if run.parallel != "tp":
        return {}
    try:
        from transformers.distributed import DistributedConfig
    except ImportError:
        raise ReshardError(
            "transformers-without-tp",
            "this version of transformers cannot train with tensor parallelism",
            found="--parallel tp",
            remedy=f"pip install -U transformers (5.23 is known to work), or {plan_instead(run)}",
        ) from None
    config = DistributedConfig(
        tp_size=run.layout.tp,
        fsdp_size=max(run.layout.replicas(rank_device.world_size()), 1),
        ep_size=max(run.layout.ep, 1),
    )
    return {"distributed_config": config}
