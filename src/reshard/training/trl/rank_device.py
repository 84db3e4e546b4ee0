"""The device of a rank, which is set before anything else, and its process group."""

from __future__ import annotations

import functools
import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from reshard.training.collectives import join, place


def start(options: dict[str, Any], *, deepspeed: bool = False) -> None:
    """Set this rank's device and join the process group, if there is one.

    Nothing may allocate on a GPU before this call, or every rank would make a context on the first GPU.
    """
    local = int(os.environ.get("LOCAL_RANK", "0"))
    gpu = torch.cuda.is_available() and not options["use_cpu"]
    if gpu:
        torch.cuda.set_device(local)
    if "WORLD_SIZE" not in os.environ or dist.is_initialized():
        return
    device = torch.device("cuda", local) if gpu else None
    timeout = timedelta(seconds=int(options["ddp_timeout"]))
    backend = "nccl" if gpu else "gloo"
    join(backend, timeout, device)
    if deepspeed:  # otherwise ZeRO-3 loads the model as if there were one rank
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


def allow_cpu() -> None:
    """Let accelerate run FSDP2 and tensor parallelism on a CPU, with gloo. Calling it again changes nothing.

    accelerate 1.15 treats ranks without a GPU as MULTI_CPU: it then silently ignores an FSDP plugin and trains with
    DDP, and refuses a ParallelismConfig. Both work once they are allowed.
    """
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    if getattr(AcceleratorState.__init__, "of_reshard", False):
        return
    AcceleratorState.__init__ = _with_fsdp(AcceleratorState.__init__)
    Accelerator.multi_device = property(_with_tensor_parallelism(Accelerator.multi_device.fget))


def _with_fsdp(plain: Any) -> Any:
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    @functools.wraps(plain)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        plain(self, *args, **kwargs)
        plugin = kwargs.get("fsdp_plugin")
        if plugin is None or self.distributed_type != DistributedType.MULTI_CPU:
            return
        if self._mixed_precision != "no":
            plugin.set_mixed_precision(self._mixed_precision)
        self.fsdp_plugin = plugin
        self.distributed_type = DistributedType.FSDP
        PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    init.of_reshard = True  # type: ignore[attr-defined]
    return init


def _with_tensor_parallelism(plain: Any) -> Any:
    from accelerate.utils import DistributedType

    def multi_device(self: Any) -> bool:
        config = getattr(self.state, "parallelism_config", None) if hasattr(self, "state") else None
        spread = config is not None and config.total_size > 1
        return bool(plain(self)) or (spread and self.state.distributed_type == DistributedType.MULTI_CPU)

    return multi_device
