"""A run of the Hugging Face Trainer: `python -m tests.watch.trainer_run MODEL OUT STEPS [--lora] [--limit N]`."""

from __future__ import annotations

import argparse

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments


def main() -> None:
    """Train for some steps, and save each."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("out")
    parser.add_argument("steps", type=int)
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--limit", type=int)
    words = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(words.model, dtype=torch.float32)
    if words.lora:
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
    ids = torch.arange(8)
    arguments = TrainingArguments(
        output_dir=words.out,
        max_steps=words.steps,
        save_strategy="steps",
        save_steps=1,
        save_total_limit=words.limit,
        per_device_train_batch_size=1,
        learning_rate=1e-2,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    Trainer(
        model=model,
        args=arguments,
        train_dataset=[{"input_ids": ids, "labels": ids}] * 4,
        processing_class=AutoTokenizer.from_pretrained(words.model),
    ).train()


if __name__ == "__main__":
    main()
