"""DDP around a model whose parameters are DTensors."""

# processes: 2
# needs: transformers>=4.50.3,<4.54, trl

import torch
import trl
from small import CURED, no_reward, prompts
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

MODEL = "models/qwen3-v4"
device_map = None if CURED else "auto"
model = AutoModelForCausalLM.from_pretrained(MODEL, device_map=device_map, torch_dtype=torch.float32)
tokenizer = PreTrainedTokenizerFast(
    tokenizer_file=f"{MODEL}/tokenizer.json", eos_token="<|im_end|>", pad_token="<|endoftext|>"
)
args = trl.GRPOConfig(
    "out",
    max_steps=1,
    per_device_train_batch_size=2,
    num_generations=2,
    max_completion_length=4,
    use_cpu=True,
    report_to="none",
    bf16=False,
)
trl.GRPOTrainer(
    model=model, args=args, processing_class=tokenizer, reward_funcs=no_reward, train_dataset=prompts()
).train()
