"""TRL's arguments for a run: its options, and those that the plan adds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from reshard.training import rewards
from reshard.training.methods import is_rewarded
from reshard.training.run import Run
from reshard.training.trl import parallelism, quantized
from reshard.training.trl.config_fields import ADDED, LORA, MODEL
from reshard.training.trl.methods import WAYS

BESIDE = (*LORA, *MODEL, *ADDED)
"""Options that are not fields of a trainer's config."""


def arguments_of(run: Run, options: Mapping[str, Any]) -> Any:
    """The config of the method's trainer. Options equal to TRL's defaults are left out, to avoid warnings."""
    own = {name: value for name, value in options.items() if name not in BESIDE}
    stated = _stated(run, own)
    stated.pop("assistant_only_loss", None)  # TRL gets labels
    if is_rewarded(run.method) and stated.get("generation_batch_size"):
        stated["generation_batch_size"] = int(stated["generation_batch_size"]) * run.layout.tp
    if run.reward and (weights := rewards.weights(run.reward)):
        stated["reward_weights"] = weights
    arguments = WAYS[run.method].config_class()(
        **stated,
        output_dir=str(run.output),
        model_init_kwargs=_of_reference(run, options),
        **parallelism.arguments(run, options),
    )
    if policy := parallelism.precision(run, options):
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
        for field in fields(WAYS[run.method].config_class())
        if field.default is not MISSING
    }
    skipped = ("output_dir", "model_init_kwargs", "fsdp", "fsdp_config", "deepspeed")
    return {name: value for name, value in own.items() if name not in skipped and value != usual.get(name)}


def _of_reference(run: Run, options: Mapping[str, Any]) -> dict[str, Any] | None:
    """Arguments with which TRL loads a reference model; None if there is none, since the model is loaded already."""
    return model_arguments(run, options) if parallelism.has_reference(run, options) else None


def model_arguments(run: Run, options: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of from_pretrained: never a device map, always a dtype."""
    return {
        **(options.get("model_init_kwargs") or {}),
        "device_map": None,
        "dtype": options["dtype"],
        "attn_implementation": options["attn_implementation"],
        **parallelism.loading(run),
        **quantized.loading(options),
    }
