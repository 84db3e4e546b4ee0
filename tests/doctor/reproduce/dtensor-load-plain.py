"""load_state_dict of a plain state dict into an FSDP2 model."""

# processes: 2

from small import CURED, join, load, shard
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

join()
model = shard(load())
state = load().state_dict()
if CURED:
    set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True))
else:
    model.load_state_dict(state)
