"""What people see in runs that do not fail, in their own words or in the metrics."""

from __future__ import annotations

import re

import pytest

from reshard.diagnosis.logs import diagnose_text
from tests.doctor.test_classes import first

SYMPTOMS = {
    "After training my adapter_model.bin is only 443 bytes.": ("adapter-state-emptied", "old_state_dict"),
    "checkpoint-500 has global_step500 but no adapter_model.safetensors, how do I load the LoRA?": (
        "adapter-not-in-checkpoint",
        "--to peft",
    ),
    "训练完成后输出目录里没有adapter_config.json": ("adapter-not-in-checkpoint", "--to peft"),
    "I trained with QLoRA (4bit); after merge_and_unload the output repeats itself.": (
        "merged-into-quantized",
        "--merge",
    ),
    "合并 lora 之后的模型回答乱码，不合并是正常的": ("merged-differs", "--merge"),
    "The merged model gives different answers than base + adapter.": (
        "merged-differs",
        "apply_chat_template",
    ),
    "Qwen2.5-7B GPTQ on V100 outputs !!!!!!!!!!!!!!!!!!!!": ("output-exclamation", "bfloat16"),
    "模型一直输出感叹号": ("output-exclamation", "bfloat16"),
    "Fine-tuned Llama 2 does not stop generating until max_new_tokens.": (
        "generation-never-ends",
        "pad_token",
    ),
    "微调后的模型停不下来": ("generation-never-ends", "eos_token"),
    "My LoRA fine-tuned model gives the same output as the base model.": ("tuned-model-unchanged", "lora_B"),
    "lora 微调后和原模型一样": ("tuned-model-unchanged", "lora_B"),
    "After fine-tuning, the model outputs gibberish.": ("tuned-output-broken", "add_generation_prompt"),
    "微调之后模型一直重复": ("tuned-output-broken", "add_generation_prompt"),
    "GRPO training loss is 0.0 for the first steps, is that right?": ("grpo-loss-zero", "reward_std"),
    "Training loss is always 0.0 with LoRA on V100": ("loss-zero", "labels"),
    "训练时loss一直是0": ("loss-zero", "labels"),
    "My loss does not decrease at all after 3 epochs": ("loss-not-falling", "requires_grad"),
    "loss 不下降，一直在 2.3 左右": ("loss-not-falling", "requires_grad"),
    "The saved pytorch_model.bin is only 700 KB after zero3 training": ("saved-too-small", "reshard inspect"),
    "Saved model is twice the size of the original, 28 GB instead of 14 GB": (
        "saved-too-large",
        "--dtype bfloat16",
    ),
    "When I resume from checkpoint-1000 the training starts from scratch": (
        "resume-starts-over",
        "resume_from_checkpoint",
    ),
    "Qwen3-30B-A3B with deepspeed zero3 hangs after some steps": (
        "zero3-experts-hang",
        "set_z3_leaf_modules",
    ),
    "DDP training hangs on 2 x RTX 4090 at the first step, single GPU works": (
        "hang-peer-to-peer",
        "NCCL_P2P_DISABLE",
    ),
    "stuck at step 0 forever, 2x RTX 3090, accelerate launch": ("hang-peer-to-peer", "NCCL_P2P_DISABLE"),
    "The training loss is above 11 from the start": ("loss-of-random-weights", "output_loading_info"),
    "{'loss': 11.76, 'grad_norm': 38.2, 'epoch': 0.01}\n" * 3: (
        "loss-of-random-weights",
        "output_loading_info",
    ),
    "GRPO reward stays at 0 for all steps, loss 0": ("rewards-alike", "log_completions"),
    "{'eval_loss': nan, 'eval_runtime': 10.4, 'epoch': 3.0}": ("eval-loss-nan", "max_length"),
    "Why is my model 27GB when the original llama-2-7b is 13GB?": ("saved-too-large", "--dtype bfloat16"),
    "My merged model has 12 GB, but the base has 14 GB": ("saved-too-small", "reshard inspect"),
    "loss is 8 times larger with gradient_accumulation_steps=8": (
        "loss-times-accumulation",
        "transformers>=4.50",
    ),
    "Training finishes immediately after resume_from_checkpoint": (
        "resume-already-done",
        "num_train_epochs=6",
    ),
    "vLLM with my fine-tuned model returns empty strings": ("output-empty", "add_generation_prompt"),
    "GPU memory keeps increasing during training": ("memory-grows", "expandable_segments"),
    "训练时显存越来越大": ("memory-grows", "expandable_segments"),
    "Training on 2 GPUs is slower than on 1 GPU": ("slower-on-more-gpus", "gradient_accumulation_steps"),
    "Some weights of Qwen2ForSequenceClassification were not initialized from the model checkpoint at ./merged and are "
    "newly initialized: ['score.weight']": ("head-not-saved", "AutoModelForSequenceClassification"),
    "WARNING: tokenization mismatch: 55 vs. 54. (ignored)": ("labels-mismatch-template", "use_fast=False"),
    "{'loss': 0.0, 'grad_norm': 0.0, 'learning_rate': 1e-05, 'epoch': 0.1}\n" * 3: ("loss-zero", "labels"),
    "{'loss': 1.934, 'grad_norm': 0.0, 'learning_rate': 1e-05, 'epoch': 0.1}\n" * 3: (
        "gradients-zero",
        "enable_input_require_grads",
    ),
    "{'loss': 0.0, 'grad_norm': 0.0, 'reward': 0.0, 'reward_std': 0.0, 'epoch': 0.1}\n" * 3: (
        "rewards-alike",
        "log_completions",
    ),
    "Some weights of BertForSequenceClassification were not initialized from the model checkpoint at bert-base-uncased"
    " and are newly initialized: ['classifier.bias', 'classifier.weight']": (
        "head-is-new",
        "modules_to_save",
    ),
    "Some weights of LlamaForCausalLM were not initialized from the model checkpoint at ./llama and are newly "
    "initialized: ['model.layers.0.self_attn.rotary_emb.inv_freq', 'model.layers.1.self_attn.rotary_emb.inv_freq']": (
        "weights-recomputed",
        "Nothing has to be done",
    ),
}


@pytest.mark.parametrize("text", SYMPTOMS, ids=lambda text: text[:60])
def test_a_description_is_recognized(text: str) -> None:
    code, cure = SYMPTOMS[text]
    found = first(text)
    assert found.code == code
    assert found.certainty != "sure"
    assert cure in found.remedy.en
    for told in (found.message, found.rule, found.remedy):
        assert not re.search(r"\{[a-z]+\}", told.en + told.zh)


@pytest.mark.parametrize(
    "text",
    [
        "{'loss': 0.012, 'grad_norm': 0.41, 'learning_rate': 1e-05, 'epoch': 0.1}\n" * 3,
        "{'loss': 0.0, 'grad_norm': 0.02, 'reward': 0.4, 'reward_std': 0.2, 'epoch': 0.1}\n" * 3,
        "step 10 loss = 0.05\nstep 20 loss = 0.01",
        "Training loss is 0.03 after one epoch.",
        "{'loss': 11.2, 'grad_norm': 3.1}\n{'loss': 8.4, 'grad_norm': 2.7}\n",
        "{'eval_loss': 0.71, 'eval_runtime': 10.4, 'epoch': 3.0}",
        "Saving model checkpoint to out/checkpoint-500",
        "Merging adapter into the base model\nSaved merged model to out",
        "{'loss': 0.0, 'grad_norm': 0.0}\n{'loss': 0.7, 'grad_norm': 0.3}\n",
    ],
)
def test_a_run_that_goes_well_shows_nothing(text: str) -> None:
    assert diagnose_text("run.log", text) == []


def test_an_exception_is_no_description() -> None:
    text = "ValueError: the loss does not decrease, it repeats: adapter_model.bin is only 443 bytes"
    assert first(text).code not in ("loss-not-falling", "adapter-state-emptied")
