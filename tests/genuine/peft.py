"""Adapters that the real PEFT wrote on models of the real transformers, and their merged models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, PreTrainedModel

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load(folder: Path, dtype: str = "float32") -> PreTrainedModel:
    """The model of a Hugging Face folder."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[dtype])


def wrapped(
    base: Path, dtype: str = "float32", *, seed: int = 1, tokens: int = 0, **settings: Any
) -> PeftModel:
    """A model with an adapter whose tensors all differ from their initial values, where lora_B would be zero.

    `tokens` is the vocabulary to which the model is resized first.
    """
    model = load(base, dtype)
    if tokens:
        model.resize_token_embeddings(tokens)
    model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **settings))
    randomise(model, seed)
    return model


def randomise(model: PeftModel, seed: int = 1) -> None:
    """Give all trained tensors of an adapter distinct values; DoRA's magnitudes move away from PEFT's initial ones."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_" in name or "modules_to_save" in name:
            noise = 0.2 * torch.randn(parameter.shape, generator=generator)
            parameter.data = (parameter.data.float() + noise).to(parameter.dtype)


def make_adapter(base: Path, out: Path, dtype: str = "float32", **settings: Any) -> Path:
    """Save an adapter of `base` to `out`, with `LoraConfig` settings."""
    wrapped(base, dtype, **settings).save_pretrained(out)
    return out


def merged_by_peft(base: Path, adapter: Path, out: Path, dtype: str = "float32") -> Path:
    """The folder of a saved adapter merged by PEFT."""
    model = PeftModel.from_pretrained(load(base, dtype), adapter)
    model.merge_and_unload().save_pretrained(out)
    return out


def logits(model: Any) -> torch.Tensor:
    """The logits of a model for some tokens."""
    tokens = torch.arange(24).reshape(2, 12) * 11 % 250
    with torch.no_grad():
        found: torch.Tensor = model.eval()(tokens).logits
    return found
