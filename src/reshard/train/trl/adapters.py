"""The adapter of a run, made on the meta device: options that PEFT, TRL or the ranks would refuse, or ignore."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from reshard.errors import ReshardError
from reshard.train.trl.loading import adapter_config
from reshard.train.trl.methods import Way


def adapted(model: Any, options: Mapping[str, Any], way: Way) -> Any:
    """A model on the meta device with the adapter that the options describe. Raises ReshardError."""
    config = adapter_config(
        {name: list(value) if isinstance(value, tuple) else value for name, value in options.items()}
    )
    linears = _linears(model)
    found = _made(model, config, linears)
    _check_head(found, way, linears)
    return found


def _made(model: Any, config: Any, linears: list[str]) -> Any:
    import torch
    from peft import NoMatchingPeftModuleError, get_peft_model

    try:
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PEFT looks up names that transformers has changed
            return get_peft_model(model, config)
    except (ValueError, RuntimeError, AttributeError, KeyError, NotImplementedError) as error:
        unmatched = isinstance(error, NoMatchingPeftModuleError)
        raise ReshardError(
            "peft-cannot-adapt",
            "PEFT cannot adapt the model with these options",
            found=str(error).split("\n")[0],
            expected=_expected(linears) if unmatched else None,
            remedy="correct --lora_target_modules, --lora_target_parameters or --lora_modules_to_save",
        ) from None


def _expected(linears: list[str]) -> str:
    return f"--lora_target_modules: all-linear, or names of layers, as {', '.join(linears)}"


def _linears(model: Any) -> list[str]:
    """The last parts of the names of the linear layers that `all-linear` adapts: not the head."""
    from torch.nn import Linear

    head = model.get_output_embeddings()
    linear = [
        name for name, module in model.named_modules() if isinstance(module, Linear) and module is not head
    ]
    return list(dict.fromkeys(name.rsplit(".", 1)[-1] for name in linear))


def _check_head(model: Any, way: Way, linears: list[str]) -> None:
    """Raise ReshardError if a trainer that multiplies by the weight of the head would ignore the head's adapter."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    if way.whole_logits or not isinstance(model.get_output_embeddings(), BaseTunerLayer):
        return
    raise ReshardError(
        "adapter-of-head-ignored",
        f"{way.name} cannot train an adapter of the head",
        rule="TRL computes the logits from the head's own weight, tile by tile",
        expected=_expected(linears),
        found="the head in --lora_target_modules",
        remedy="leave it out",
    )
