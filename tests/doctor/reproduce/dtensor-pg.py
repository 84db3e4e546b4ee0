"""A pickled DTensor checkpoint opened without its process group."""

# processes: 2

import torch
import torch.distributed as dist
from small import CURED, join, load, rank, shard

join()
torch.save(shard(load()).state_dict(), f"out/rank{rank}.pt")
dist.barrier()
dist.destroy_process_group()
weight = torch.load(f"out/rank{rank}.pt", weights_only=True)["lm_head.weight"]
if CURED:
    shards = [torch.load(f"out/rank{each}.pt")["lm_head.weight"]._local_tensor for each in range(2)]
    assert torch.equal(torch.cat(shards), load().lm_head.weight)
else:
    weight.full_tensor()
