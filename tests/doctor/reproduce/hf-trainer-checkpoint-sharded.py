"""A sharded checkpoint (FSDP, DeepSpeed) is opened as a Hugging Face folder."""

import shutil

import torch.distributed.checkpoint as dcp
from small import load

dcp.save({"model": load().state_dict()}, checkpoint_id="out/checkpoint-500/pytorch_model_fsdp_0")
shutil.copy("models/qwen3/config.json", "out/checkpoint-500/")
load("out/checkpoint-500")
