"""TRL's arguments of a run: its options, and what the plan adds to them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from reshard.train.methods import is_rewarded
from reshard.train.run import Run
from reshard.train.trl import parallelism, quantized, reward
from reshard.train.trl.config_fields import ADDED, LORA, MODEL, config_class

BESIDE = (*LORA, *MODEL, *ADDED)
"""Options that no config of a trainer has."""


def arguments_of(run: Run, options: Mapping[str, Any]) -> Any:
    """SFTConfig, DPOConfig or GRPOConfig. What says what TRL takes anyway is left out, so that nothing warns of it."""
    own = {name: value for name, value in options.items() if name not in BESIDE}
    stated = _stated(run, own)
    stated.pop("assistant_only_loss", None)  # TRL gets labels
    if is_rewarded(run.method) and stated.get("generation_batch_size"):
        stated["generation_batch_size"] = int(stated["generation_batch_size"]) * run.layout.tp
    if run.reward and (weights := reward.weights(run.reward)):
        stated["reward_weights"] = weights
    arguments = config_class(run.method)(
        **stated,
        output_dir=str(run.output),
        model_init_kwargs=_of_reference(run, options),
        **parallelism.arguments(run, options),
    )
    if policy := parallelism.precision(run, options):
        arguments.fsdp_plugin_args["mixed_precision_policy"] = policy
    if is_rewarded(run.method):
        # TRL counts tensor parallel ranks as if each saw other prompts, and would skip some and repeat others.
        arguments.generation_batch_size //= run.layout.tp
    return arguments


def _stated(run: Run, own: Mapping[str, Any]) -> dict[str, Any]:
    from dataclasses import MISSING, fields

    usual = {
        field.name: field.default
        for field in fields(config_class(run.method))
        if field.default is not MISSING
    }
    skipped = ("output_dir", "model_init_kwargs", "fsdp", "fsdp_config", "deepspeed")
    return {
        name: value
        for name, value in own.items()
        if name not in skipped and value is not None and not (name in usual and usual[name] == value)
    }


def _of_reference(run: Run, options: Mapping[str, Any]) -> dict[str, Any] | None:
    """What TRL loads a reference model with; nothing where there is none, for the model is loaded already."""
    return model_arguments(run, options) if parallelism.has_reference(run, options) else None


def model_arguments(run: Run, options: Mapping[str, Any]) -> dict[str, Any]:
    """What from_pretrained is given: never a device map, always a dtype."""
    return {
        **(options.get("model_init_kwargs") or {}),
        "device_map": None,
        "dtype": options["dtype"],
        "attn_implementation": options["attn_implementation"],
        **parallelism.loading(run),
        **quantized.loading(options),
    }
