"""The device of a rank, which is set before anything else, and its process group."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

from reshard.training.collective import join, place


def start(options: dict[str, Any], *, deepspeed: bool = False) -> None:
    """Set this rank's device and join the process group, if there is one.

    Nothing may allocate on a GPU before this call, or every rank would make a context on the first GPU.
    """
    import torch
    import torch.distributed as dist

    local = int(os.environ.get("LOCAL_RANK", "0"))
    gpu = torch.cuda.is_available() and not options["use_cpu"]
    if gpu:
        torch.cuda.set_device(local)
    if "WORLD_SIZE" not in os.environ or dist.is_initialized():
        return
    device = torch.device("cuda", local) if gpu else None
    timeout = timedelta(seconds=int(options["ddp_timeout"]))
    join("nccl" if gpu else "gloo", timeout, device)
    if deepspeed:
        _tell_deepspeed("nccl" if gpu else "gloo")


def _tell_deepspeed(backend: str) -> None:
    """Make DeepSpeed use this process group; otherwise ZeRO-3 loads the model as if there were one rank."""
    from deepspeed.comm import init_distributed  # type: ignore[import-not-found]

    init_distributed(dist_backend=backend, auto_mpi_discovery=False)


def be_alone() -> None:
    """Make accelerate train a single rank without DDP, which would keep a second copy of the gradients in its buckets.

    accelerate wraps a model whenever a launcher has set LOCAL_RANK. Without that variable, transformers would replicate
    the model on all visible GPUs by DataParallel.
    """
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    for state in (PartialState, AcceleratorState):
        state._shared_state["distributed_type"] = DistributedType.NO


def world_size() -> int:
    """The number of ranks."""
    return place()[1]


def rank() -> int:
    """The index of this rank."""
    return place()[0]
