"""Ranks meet, and what all of them know after each has said it. Every rank must call these; one alone knows it."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any


def join(backend: str, timeout: timedelta, device: Any = None) -> None:
    """Join the other ranks, where the launcher's environment says that they meet.

    torchrun keeps its store when it starts ranks again (torch 2.13, `_create_c10d_store`): what an attempt has written
    there, such as the addresses of its ranks, is not for the next.
    """
    import torch.distributed as dist
    from torch.distributed.rendezvous import rendezvous

    store, rank, size = next(rendezvous("env://", timeout=timeout))
    store = dist.PrefixStore(f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=size, timeout=timeout, device_id=device
    )


def highest(*here: int) -> tuple[int, ...]:
    """The highest value on any rank, of each number."""
    import torch
    import torch.distributed as dist

    if not dist.is_initialized():
        return here
    device = torch.cuda.current_device() if dist.get_backend() == "nccl" else "cpu"
    told = torch.tensor(here, dtype=torch.int64, device=device)
    dist.all_reduce(told, op=dist.ReduceOp.MAX)
    return tuple(int(each) for each in told.tolist())


def anywhere(here: bool) -> bool:
    """Whether something holds on any rank."""
    return bool(highest(int(here))[0])


def everyone(mine: Any) -> list[tuple[int, Any]]:
    """What each rank has, by rank."""
    import torch.distributed as dist

    if not dist.is_initialized():
        return [(0, mine)]
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, mine)
    return list(enumerate(told))


def meet() -> None:
    """Wait for the other ranks."""
    highest(0)
