"""Run by torchrun: fill a sharded model from a checkpoint, and compare it with the one that transformers loads.

Arguments: the checkpoint, the Hugging Face folder of the same model, and how to shard it. Prints for each rank the
bytes that it read and those that it holds.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import AutoConfig, AutoModelForCausalLM

import reshard


def sharded(model: Any, how: str) -> Any:
    """The model over all ranks, by FSDP2, tensor parallelism, or both."""
    if how == "fsdp-tp":
        mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("fsdp", "tp"))
        tp, data = mesh["tp"], mesh["fsdp"]
    else:
        tp = data = init_device_mesh("cpu", (dist.get_world_size(),))
    if how in ("tp", "fsdp-tp"):
        columns = dict.fromkeys(("q_proj", "k_proj", "v_proj"), ColwiseParallel())
        plan = {f"self_attn.{name}": style for name, style in columns.items()}
        plan |= {"self_attn.o_proj": RowwiseParallel(), "mlp.down_proj": RowwiseParallel()}
        plan |= {"mlp.gate_proj": ColwiseParallel(), "mlp.up_proj": ColwiseParallel()}
        for layer in model.model.layers:
            parallelize_module(layer, tp, plan)
    if how == "fsdp1":
        return FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    if how == "partial":
        summed = DTensor.from_local(model.model.norm.weight.detach(), data, [Partial()])
        model.model.norm.weight = torch.nn.Parameter(summed)
    if how in ("fsdp", "fsdp-tp"):
        for layer in model.model.layers:
            fully_shard(layer, mesh=data)
        fully_shard(model, mesh=data)
    return model


def main(checkpoint: str, folder: str, how: str) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(1234 + dist.get_rank())
    model = sharded(AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)), how)
    try:
        loaded = reshard.load_into(model, checkpoint, verify=False)
    except reshard.ReshardError as error:
        print("refused:", [problem.code for problem in error.problems], flush=True)
        dist.barrier()
        os._exit(0)  # the threads of gloo sometimes abort an interpreter that exits
    held = sum(
        (each.to_local() if isinstance(each, DTensor) else each).nbytes
        for each in {id(each): each for each in model.parameters()}.values()
    )
    expected = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    for name, tensor in model.state_dict().items():
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        assert torch.equal(whole, expected[name]), name
    print(f"rank {dist.get_rank()}: read {loaded.read} for {loaded.nbytes}, holds {held}", flush=True)
    dist.barrier()
    os._exit(0)  # the threads of gloo sometimes abort an interpreter that exits


if __name__ == "__main__":
    main(*sys.argv[1:])
