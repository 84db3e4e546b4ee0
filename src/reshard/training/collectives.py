"""Collectives that join ranks and exchange values. Every rank must call them; a single rank returns its own values."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any


def join(backend: str, timeout: timedelta, device: Any = None) -> None:
    """Join the process group, at the address in the launcher's environment.

    torchrun keeps its store when it restarts ranks (torch 2.13, `_create_c10d_store`): what an earlier attempt wrote
    there, such as the addresses of its ranks, must not be read by the next.
    """
    import torch.distributed as dist
    from torch.distributed.rendezvous import rendezvous

    store, rank, size = next(rendezvous("env://", timeout=timeout))
    store = dist.PrefixStore(f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=size, timeout=timeout, device_id=device
    )


def highest(*here: int) -> tuple[int, ...]:
    """The highest value of each number over all ranks."""
    import torch
    import torch.distributed as dist

    if not dist.is_initialized():
        return here
    device = torch.cuda.current_device() if dist.get_backend() == "nccl" else "cpu"
    told = torch.tensor(here, dtype=torch.int64, device=device)
    dist.all_reduce(told, op=dist.ReduceOp.MAX)
    return tuple(int(each) for each in told.tolist())


def anywhere(here: bool) -> bool:
    """Whether the value is true on any rank."""
    return bool(highest(int(here))[0])


def everyone(mine: Any) -> list[tuple[int, Any]]:
    """The values of all ranks, with their ranks."""
    import torch.distributed as dist

    if not dist.is_initialized():
        return [(0, mine)]
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, mine)
    return list(enumerate(told))


def place() -> tuple[int, int]:
    """The number of this rank, and of all ranks."""
    import torch.distributed as dist

    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def meet() -> None:
    """Wait for the other ranks."""
    highest(0)
