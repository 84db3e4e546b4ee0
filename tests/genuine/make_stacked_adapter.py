"""Run where an earlier PEFT is: save an adapter of stacked experts, and the model that it merges it into.

`make_stacked_adapter.py BASE OUT PARAMETER …`: the folders `adapter` and `reference` below OUT.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, PreTrainedModel


def make(base: str, out: Path, parameters: list[str]) -> None:
    def load() -> PreTrainedModel:
        return AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)

    model = get_peft_model(
        load(), LoraConfig(r=4, lora_alpha=6, target_modules=[], target_parameters=parameters)
    )
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = 0.2 * torch.randn(parameter.shape, generator=generator)
    model.save_pretrained(out / "adapter")
    PeftModel.from_pretrained(load(), out / "adapter").merge_and_unload().save_pretrained(out / "reference")


if __name__ == "__main__":
    make(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
