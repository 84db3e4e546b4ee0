"""DeepSpeed config and TrainingArguments contradict each other."""

# needs: deepspeed, trl
# environment: DS_ACCELERATOR=cpu RANK=0 LOCAL_RANK=0 WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=0

from small import CURED, arguments, dataset, load
from transformers import Trainer

if CURED:
    sizes = {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"}
    rate = "auto"
else:
    sizes = {"train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 4}
    rate = 1e-3
optimizer = {"type": "AdamW", "params": {"lr": rate, "torch_adam": True}}
deepspeed = {**sizes, "optimizer": optimizer, "zero_optimization": {"stage": 2}}
args = arguments(deepspeed=deepspeed, learning_rate=1e-5)
Trainer(model=load(), args=args, train_dataset=dataset()).train()
