"""A training of two ranks that does what its arguments say, one after the other: gloo.py step:20 pause:1.5 …"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

if os.environ.get("ANNOUNCED"):
    import reshard.guard  # noqa: F401
if os.environ.get("NEVER_IMPORTS") == os.environ["RANK"]:
    time.sleep(1000)  # as from a file server that does not answer

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

STEP = 0.02


class Slow(Dataset):  # type: ignore[type-arg]
    """Records that never come."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        time.sleep(1000)
        return index


def compute(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        torch.ones(64, 64) @ torch.ones(64, 64)


def all_ranks() -> None:
    dist.all_reduce(torch.ones(1))


def on_rank_0(action: Callable[[], None]) -> None:
    if dist.get_rank() == 0:
        action()
    dist.barrier()


def pause_in_data(seconds: float) -> None:
    if dist.get_rank() == 1:
        time.sleep(seconds)


def save(seconds: float) -> None:
    path, end = Path(os.environ["SCRATCH"]) / "saved", time.monotonic() + seconds
    while time.monotonic() < end:
        path.write_bytes(bytes(1 << 20))
        time.sleep(0.02)


def record_flight(seconds: float) -> None:
    """Write what torch's flight recorder has recorded a little later, as it does for NCCL after a timeout."""
    from torch._C._distributed_c10d import _dump_fr_trace

    time.sleep(seconds)
    (Path(os.environ["SCRATCH"]) / f"trace_{dist.get_rank()}").write_bytes(_dump_fr_trace())


def main() -> None:
    dist.init_process_group("gloo")
    bar = tqdm(total=100_000, mininterval=0, disable=dist.get_rank() > 0)
    for word in sys.argv[1:]:
        kind, _, amount = word.partition(":")
        value = float(amount or 0)
        if kind == "step":
            for _ in range(int(value)):
                compute(STEP)
                all_ranks()
                bar.update()
        elif kind == "compute":  # a first step, or an evaluation without a bar
            compute(value)
            all_ranks()
        elif kind == "accumulate":
            for _ in range(4):
                compute(value / 4)
            all_ranks()
            bar.update()
        elif kind == "map":
            on_rank_0(lambda: compute(value))  # noqa: B023
        elif kind == "save":
            on_rank_0(lambda: save(value))  # noqa: B023
        elif kind == "pause":
            pause_in_data(value)
            all_ranks()
        elif kind == "loader":
            if dist.get_rank() == 1:
                next(iter(DataLoader(Slow(), num_workers=1)))
            all_ranks()
        elif kind == "deadlock":
            dist.barrier() if dist.get_rank() else dist.recv(torch.ones(1), src=1)
        elif kind == "record":
            threading.Thread(target=record_flight, args=(value,), daemon=True).start()
    bar.close()
    dist.destroy_process_group()


main()
