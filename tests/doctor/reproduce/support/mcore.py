"""Small megatron-core models on a CPU."""

import os

import torch.distributed as dist

from reshard.algebra.layout import Layout
from tests.genuine.mcore.cpu_patches import enable
from tests.genuine.mcore.models import build_config, build_model, initialize
from tests.genuine.megatron import QWEN2, QWEN3, QWEN3_MOE

__all__ = ["QWEN2", "QWEN3", "QWEN3_MOE", "build", "config", "enable", "start"]


def start(tp=1):
    """Make Megatron's process groups, of one process unless torchrun started more."""
    enable()
    alone = {} if "RANK" in os.environ else {"rank": 0, "world_size": 1, "store": dist.HashStore()}
    dist.init_process_group("gloo", **alone)
    initialize(Layout(tp=tp), seed=1)


def build(args, spec="local"):
    (chunk,) = build_model(args, Layout(), spec=spec)
    return chunk


def config(args, tp=1):
    return build_config(args, Layout(tp=tp))
