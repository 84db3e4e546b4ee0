"""DTensors given to safetensors, save_pretrained or peft."""

# processes: 2

from safetensors.torch import save_file
from small import CURED, join, load, rank, shard
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

join()
model = shard(load())
full = StateDictOptions(full_state_dict=True, cpu_offload=True)
state = get_model_state_dict(model, options=full) if CURED else model.state_dict()
if rank == 0 or not CURED:
    save_file(dict(state), f"out/rank{rank}.safetensors")
