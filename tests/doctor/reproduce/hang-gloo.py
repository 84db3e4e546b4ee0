"""A rank waited for a collective that another rank never called (gloo)."""

# processes: 2

import torch
import torch.distributed as dist
from small import CURED, join, load, rank, shard
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

join(10)
model = shard(load())
options = StateDictOptions(full_state_dict=True, cpu_offload=True)
if CURED:
    state = get_model_state_dict(model, options=options)
    if rank == 0:
        torch.save(state, "out/model.pt")
elif rank == 0:
    torch.save(get_model_state_dict(model, options=options), "out/model.pt")
dist.barrier()
