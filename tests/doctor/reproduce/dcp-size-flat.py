"""A flat shard of FSDP stands where a whole tensor was saved."""

# processes: 2

import torch
import torch.distributed.checkpoint as dcp
from small import CURED, join, load
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel

join()
whole = load()
dcp.save({"model": whole.state_dict()}, checkpoint_id="out/dcp")
sharded = FullyShardedDataParallel(load(), use_orig_params=True, device_id=torch.device("cpu"))
with torch.no_grad():
    flat = {name.replace("_fsdp_wrapped_module.", ""): value for name, value in sharded.named_parameters()}
    dcp.load({"model": get_model_state_dict(sharded) if CURED else flat}, checkpoint_id="out/dcp")
