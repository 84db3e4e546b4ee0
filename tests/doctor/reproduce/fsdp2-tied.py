"""Tied embedding and head are sharded in two FSDP2 groups."""

# processes: 2

from small import CURED, join, load, tokens, world_size
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

join()
model = load("models/qwen3-tied")
mesh = init_device_mesh("cpu", (world_size,))
if not CURED:
    fully_shard(model.model.embed_tokens, mesh=mesh)
    fully_shard(model.lm_head, mesh=mesh)
for layer in model.model.layers:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
model(input_ids=tokens(), labels=tokens()).loss.backward()
