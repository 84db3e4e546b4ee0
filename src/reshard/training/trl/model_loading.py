"""Tokenizer, model and adapter of a run: loaded from folders, without a device map and with an explicit dtype."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from reshard.base.errors import ReshardError
from reshard.training import tokenizer_check as tokenizers
from reshard.training.run import Run, config_of
from reshard.training.trl.live_weights import adapter_parameters
from reshard.training.trl.trainer_arguments import half_dtype, model_arguments
from reshard.training.trl.trl_methods import TRL_METHODS


def tokenizer_of(run: Run, options: Mapping[str, Any]) -> Any:
    """The tokenizer of a model, with a padding token. Raises ReshardError if it has more tokens than the model."""
    tokenizer = tokenizers.tokenizer_of(run, options)
    rows = config_of(run.model).get("vocab_size")
    highest = max(tokenizer.get_vocab().values(), default=0)
    if isinstance(rows, int) and highest >= rows:
        raise ReshardError(
            "tokenizer-exceeds-embedding",
            "the tokenizer has more tokens than the model",
            file=str(run.model),
            expected=f"token ids below {rows}, the vocab_size of config.json",
            found=str(highest),
            remedy="use the tokenizer that belongs to the model",
        )
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def model_of(run: Run, options: Mapping[str, Any], checkpoint: Path | None) -> Any:
    """The model to train: that of the run, or of the checkpoint from which it continues.

    An adapter's weights are loaded later, when TRL has made the adapter. Wherever the weights come from, the model
    names the base as its path: TRL loads the reference model from there.
    """
    from transformers import set_seed

    way = TRL_METHODS[run.method]
    if run.parallel == "fsdp2":
        # transformers checks this variable of `accelerate launch` as well as those that TrainingArguments has set.
        os.environ["ACCELERATE_USE_FSDP"] = "true"
    own = checkpoint is not None and not run.lora and not run.parallel.startswith("zero")
    folder = checkpoint if own else run.model
    given = model_arguments(run, options)
    if own:
        given["dtype"] = "auto"  # as saved: FSDP2 trains in float32 what was loaded in 16 bits
    set_seed(int(options["seed"]))  # as TRL does: missing weights are drawn, equally on all ranks
    model = way.model_class(run.model).from_pretrained(
        folder, trust_remote_code=bool(options["trust_remote_code"]), **way.model_arguments, **given
    )
    model.config._name_or_path = str(run.model)
    model.name_or_path = str(run.model)
    # accelerate refuses names of layers that are not there: Gemma 3 names those of a text tower, too.
    there = {type(module).__name__ for module in model.modules()}
    model._no_split_modules = [name for name in model._no_split_modules or () if name in there]
    return model


def teacher_of(run: Run, options: Mapping[str, Any], arguments: Any) -> Any:
    """The teacher: a path, which TRL loads with `arguments`; under FSDP2 a model, sharded layer by layer.

    TRL 1.16 would neither shard it under FSDP2 nor move it to the GPU, and would spread it over all visible GPUs if
    there is only one process.
    """
    folder = str(options[str(TRL_METHODS[run.method].teacher)])
    given = {**(arguments.teacher_model_init_kwargs or {}), "device_map": None}
    if run.parallel != "fsdp2":
        arguments.teacher_model_init_kwargs = given
        return folder
    arguments.teacher_model_init_kwargs = None  # TRL refuses them for a model
    return sharded(folder, options, {"dtype": None, **given})


def sharded(folder: str | Path, options: Mapping[str, Any], given: Mapping[str, Any]) -> Any:
    """A reference model or a teacher under FSDP2, sharded layer by layer.

    TRL 1.16 shards a reference as one group (`prepare_fsdp`): each forward pass would gather all of it on each rank.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, trust_remote_code=bool(options["trust_remote_code"]), **given
    )
    policy = MixedPrecisionPolicy(param_dtype=half_dtype(options))
    layers = set(model._no_split_modules or ())
    for module in [each for each in model.modules() if type(each).__name__ in layers]:
        fully_shard(module, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    return model


def mend_adapter(model: Any) -> None:
    """Give the adapter weights of tensor-parallel layers their full size: PEFT 0.21 makes row-parallel ones too small.

    `lora_A` of a row-parallel layer has the `in_features` of one rank's shard, too few for the forward pass of
    transformers; as ranks are seeded alike, each draws the same numbers, scaled for a layer of that size.
    """
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if not (".lora_A." in name and isinstance(weight, DTensor)):
            continue
        module.out_features, module.in_features = weight.shape
        whole = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
        torch.nn.init.kaiming_uniform_(whole, a=5**0.5)  # as PEFT draws them
        _put(weight, distribute_tensor(whole, weight.device_mesh, weight.placements))


def _put(target: Any, value: Any) -> None:
    with torch.no_grad():
        target.copy_(value)


def load_adapter(model: Any, checkpoint: Path) -> None:
    """Replace the new adapter by that of a checkpoint. Raises ReshardError if they differ in structure."""
    file = checkpoint / "adapter_model.safetensors"
    saved, own = load_file(file), adapter_parameters(model)
    unlike = [name for name in saved.keys() & own.keys() if saved[name].shape != own[name].shape]
    if unlike or saved.keys() != own.keys():
        raise ReshardError(
            "resumed-adapter-differs",
            "the adapter of the checkpoint does not match the options",
            tensor=", ".join(sorted(unlike or saved.keys() ^ own.keys())[:5]),
            file=str(file),
            found=f"{len(saved)} tensors in the checkpoint, {len(own)} in the model, {len(unlike)} of other shapes",
            remedy="resume with the LoRA options of the original run",
        )
    for name, target in own.items():
        value = saved[name].to(target.device, target.dtype)
        if isinstance(target, DTensor):
            value = distribute_tensor(value, target.device_mesh, target.placements)
        _put(target, value)
