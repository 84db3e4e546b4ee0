"""Run in the environment "deepspeed": fill a model that ZeRO-3 has partitioned, before and while it is gathered."""

from __future__ import annotations

import os
import sys
from socket import socket

import deepspeed
import torch
import torch._dynamo  # cannot be imported in zero.Init, which replaces functions of torch
from transformers import AutoConfig, AutoModelForCausalLM

import reshard
from reshard.live.pretrained import without_initializing


def main(folder: str) -> None:
    with socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    os.environ["DS_ACCELERATOR"] = "cpu"
    deepspeed.init_distributed("gloo")
    stage = {"stage": 3, "stage3_param_persistence_threshold": 0}
    settings = {"train_batch_size": 1, "zero_optimization": stage}
    with deepspeed.zero.Init(config_dict_or_path=settings), without_initializing():
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    try:
        reshard.load_into(model, folder)
    except reshard.ReshardError as error:
        print("refused:", [problem.code for problem in error.problems])
    with deepspeed.zero.GatheredParameters(list(model.parameters()), modifier_rank=0):
        reshard.load_into(model, folder)
    expected = dict(reshard.stream(folder, framework="torch"))
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        found = model.state_dict()
        print("gathered:", all(torch.equal(found[name], tensor) for name, tensor in expected.items()))


if __name__ == "__main__":
    main(sys.argv[1])
