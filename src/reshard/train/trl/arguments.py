"""TRL's arguments of a run: its options, and what the plan adds to them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from reshard.train.run import Run
from reshard.train.trl import parallelism
from reshard.train.trl.config_fields import LORA, MODEL, config_class


def arguments_of(run: Run, options: Mapping[str, Any]) -> Any:
    """SFTConfig, DPOConfig or GRPOConfig. What says what TRL takes anyway is left out, so that nothing warns of it."""
    own = {name: value for name, value in options.items() if name not in (*LORA, *MODEL)}
    stated = _stated(run, own)
    stated.pop("assistant_only_loss", None)  # TRL gets labels
    if run.method == "grpo" and stated.get("generation_batch_size"):
        stated["generation_batch_size"] = int(stated["generation_batch_size"]) * run.layout.tp
    arguments = config_class(run.method)(
        **stated,
        output_dir=str(run.output),
        model_init_kwargs=_of_reference(run, options),
        **parallelism.arguments(run, options),
    )
    if policy := parallelism.precision(run, options):
        arguments.fsdp_plugin_args["mixed_precision_policy"] = policy
    if run.method == "grpo":
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


def _of_reference(run: Run, options: Mapping[str, Any]) -> dict[str, Any]:
    """What TRL loads a reference model with. Where there is none, only what can be written as JSON by trackers."""
    given = model_arguments(run, options)
    if not parallelism.has_reference(run, options):
        given.pop("distributed_config", None)
    return given


def model_arguments(run: Run, options: Mapping[str, Any]) -> dict[str, Any]:
    """What from_pretrained is given: never a device map, always a dtype."""
    return {
        **(options.get("model_init_kwargs") or {}),
        "device_map": None,
        "dtype": options["dtype"],
        "attn_implementation": options["attn_implementation"],
        **parallelism.loading(run),
    }
