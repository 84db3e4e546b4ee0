"""FSDP2 parameters never left the meta device."""

# processes: 2

import torch
from small import CURED, MODEL, join, load, shard, tokens
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from transformers import AutoConfig, AutoModelForCausalLM

join()
with torch.device("meta"):
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(MODEL))
shard(model)
if CURED:
    model.to_empty(device="cpu")
    set_model_state_dict(model, load().state_dict(), options=StateDictOptions(full_state_dict=True))
model(input_ids=tokens())
