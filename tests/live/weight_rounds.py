"""What ranks of megatron-core do for `test_weight_source.py`."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import get_ident
from typing import Any

import torch
from megatron.core import parallel_state
from safetensors.torch import save_file
from torch import distributed

import reshard
from reshard.algebra.layout import Layout
from reshard.live.weight_source import WeightSource
from tests.genuine.mcore import models
from tests.genuine.mcore.models import build_model

BUCKET = 50_000
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


def one_round(out: Path, base: Path, chunks: list[Any], step: int) -> None:
    """Save what a round yields on this rank, and check its order, its bytes and its memory."""
    source = SOURCES.get(out)
    if source is None:
        source = SOURCES[out] = reshard.weight_source(chunks, base=base, bucket=BUCKET)
    metadata, got, sizes, counted = source.metadata(), {}, [], Counted()
    with counted.counting():
        for name, tensor in source:
            assert (name, tensor.dtype, tuple(tensor.shape)) == metadata[len(sizes)]
            got[name] = tensor.clone()
            sizes.append(tensor.nbytes)
            del tensor
    assert counted.now == 0 and len(got) == len(sizes) == len(metadata)
    largest = max(BUCKET, *sizes)
    assert max(sizes) < counted.most <= largest + max(counted.buffers)
    total = torch.tensor(counted.sent)
    distributed.all_reduce(total)
    assert int(total) == sum(sizes)
    rank = distributed.get_rank()
    save_file(got, out / f"step-{step}-rank-{rank}.safetensors", {"sent": str(counted.sent)})


def refused(case: str, base: Path, args: dict[str, Any], layout: Layout) -> list[tuple[str, str | None]]:
    """The code and what was found, of each problem that this rank raises if something is wrong on the last one."""
    models.initialize(layout, seed=0)
    is_last = distributed.get_rank() == layout.world_size - 1
    given = {**args, **WRONG_ARGUMENTS.get(case, {})} if is_last else args
    chunks: list[Any] = build_model(given, layout)
    if is_last:
        chunks, base = made_wrong(case, chunks, base)
    try:
        source = reshard.weight_source(chunks, base=base, bucket="1MiB")
        if case == "changed" and is_last:
            chunks[0].bfloat16()
        for _ in source:
            pass
    except reshard.ReshardError as error:
        return [(problem.code, problem.found) for problem in error.problems]
    return []


WRONG_ARGUMENTS = {"width": {"ffn_hidden_size": 32}, "layers": {"num_layers": 6}}


def made_wrong(case: str, chunks: list[Any], base: Path) -> tuple[list[Any], Path]:
    """The arguments of `weight_source` on the rank that differs."""
    config = chunks[0].config
    if case == "module":
        return [torch.nn.Linear(2, 2)], base
    if case == "groups":
        parallel_state.destroy_model_parallel()
    if case == "meta":
        chunks[0].to("meta")
    if case == "heads":
        config.num_query_groups *= 2
    if case == "norms":
        config.layernorm_zero_centered_gamma = True
    return chunks, base / case if case in ("config", "family") else base
