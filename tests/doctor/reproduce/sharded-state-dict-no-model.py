"""SHARDED_STATE_DICT leaves no model in Hugging Face form."""

# processes: 2

from pathlib import Path

import fsdp_on_cpu  # noqa: F401
import torch.distributed as dist
from small import arguments, dataset, load
from transformers import Trainer

fsdp = {"version": 2, "state_dict_type": "SHARDED_STATE_DICT"}
args = arguments(fsdp=True, fsdp_config=fsdp, save_strategy="steps", save_steps=2)
trainer = Trainer(model=load(), args=args, train_dataset=dataset())
trainer.train()
trainer.save_model("out/final")
dist.barrier()
assert not Path("out/final").exists()
assert Path("out/checkpoint-2/pytorch_model_fsdp_0").is_dir()
assert not Path("out/checkpoint-2/config.json").exists()
