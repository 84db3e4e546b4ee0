"""What tests of `reshard.weight_source` have in common: one round on each rank, and what is compared with it."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import get_ident
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import distributed

import reshard
from reshard.live.weight_source import WeightSource

BUCKET = 50_000
OF_TORCH = 64
"""Bytes of tensors that torch itself may make meanwhile."""
SOURCES: dict[Path, WeightSource] = {}
"""The source of this rank, made before the first step and used in all rounds."""


class Counted:
    """Bytes that `torch.empty` made and that are still there, their most, and the bytes that this rank broadcast.

    Only one thread is counted.
    """

    def __init__(self) -> None:
        self.now = self.most = self.sent = 0
        self.buffers: list[int] = []
        self._thread = get_ident()

    def _freed(self, nbytes: int) -> None:
        self.now -= nbytes

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count in this block."""
        empty, broadcast = torch.empty, distributed.broadcast

        def counted(*args: Any, **options: Any) -> Any:
            made = empty(*args, **options)
            if get_ident() != self._thread:
                return made
            self.now += made.nbytes
            self.most = max(self.most, self.now)
            weakref.finalize(made, self._freed, made.nbytes)
            return made

        def sending(tensor: torch.Tensor, source: int) -> None:
            self.sent += tensor.nbytes * (source == distributed.get_rank())
            self.buffers.append(tensor.nbytes)
            broadcast(tensor.view(torch.int8), source)  # gloo lets go of what it gets a moment later

        torch.empty, distributed.broadcast = counted, sending  # type: ignore[assignment]
        try:
            yield
        finally:
            torch.empty, distributed.broadcast = empty, broadcast


def one_round(out: Path, base: Path, module: Any, step: int) -> None:
    """Save what a round yields on this rank, and check its order, its bytes and its memory."""
    source = SOURCES.get(out)
    if source is None:
        source = SOURCES[out] = reshard.weight_source(module, base=base, bucket=BUCKET)
    metadata, got, sizes, counted = source.metadata(), {}, [], Counted()
    with counted.counting():
        for name, tensor in source:
            assert (name, tensor.dtype, tuple(tensor.shape)) == metadata[len(sizes)]
            got[name] = tensor.clone()
            sizes.append(tensor.nbytes)
            del tensor
    assert counted.now == 0 and len(got) == len(sizes) == len(metadata)
    largest = max(BUCKET, *sizes)
    assert max(sizes) < counted.most <= largest + max(counted.buffers) + OF_TORCH
    total = torch.tensor(counted.sent)
    distributed.all_reduce(total)
    assert int(total) == sum(sizes)
    rank = distributed.get_rank()
    save_file(got, out / f"step-{step}-rank-{rank}.safetensors", {"sent": str(counted.sent)})


def described(tensor: torch.Tensor) -> bytes:
    """Dtype, shape and bytes of a tensor."""
    raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return f"{tensor.dtype} {list(tensor.shape)} ".encode() + raw


def contents(path: Path) -> dict[str, bytes]:
    """Dtype, shape and bytes of each tensor in the files of a folder, or in a file."""
    found = {}
    for file in [path] if path.is_file() else path.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                tensor = opened.get_tensor(name)
                found[name] = described(tensor)
    return found
