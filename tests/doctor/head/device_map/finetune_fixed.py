"""LoRA on Qwen-14B-Chat, several V100s: torchrun --nproc_per_node 2 finetune.py"""

import torch
import transformers
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

MODEL = "models/Qwen-14B-Chat"


def train():
    training_args = TrainingArguments(
        output_dir="out/qwen-lora",
        per_device_train_batch_size=2,
        max_steps=2,
        gradient_checkpointing=True,
        use_cpu=True,
        report_to="none",
    )
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = AutoModelForCausalLM.from_pretrained(
        MODEL,
        trust_remote_code=True,
        device_map=None,
    )
    model = get_peft_model(
        model, LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    )
    model.enable_input_require_grads()
    texts = [tokenizer(f"What is {n} plus 1? The answer is {n + 1}.")["input_ids"][:16] for n in range(16)]
    rows = [{"input_ids": ids, "labels": ids} for ids in texts]
    collator = transformers.DataCollatorForSeq2Seq(tokenizer)
    Trainer(model=model, args=training_args, train_dataset=rows, data_collator=collator).train()
    print("finished", torch.__version__)


if __name__ == "__main__":
    train()
