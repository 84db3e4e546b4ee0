"""A dtype in the config cannot be written as JSON."""

import torch
from small import CURED, MODEL
from transformers import AutoConfig

config = AutoConfig.from_pretrained(MODEL)
config.compute_dtype = "bfloat16" if CURED else torch.bfloat16
config.save_pretrained("out/saved")
