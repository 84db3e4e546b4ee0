"""The precision of a run: what GPUs compute in, and what excludes each other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from reshard.checks.environment import Gpu
from reshard.checks.fact import Fact

BF16 = 8.0
"""The lowest compute capability with bfloat16, and with flash-attention 2: Ampere."""


def without_bf16(gpus: Iterable[Gpu], flash_attention: str | None = None) -> Iterator[Fact]:
    """The oldest of the GPUs, if it has neither bfloat16 nor flash-attention 2, of which a version may be installed."""
    oldest = min(gpus, key=lambda gpu: gpu.capability, default=None)
    if oldest is not None and oldest.capability < BF16:
        flash = f", flash-attn {flash_attention}" if flash_attention else ""
        shows = f"{oldest.name}, compute_cap {oldest.capability}{flash}"
        yield Fact("env-no-bf16", shows, {"name": oldest.name, "capability": oldest.capability})


def several(on: Sequence[str]) -> Iterator[Fact]:
    """Precisions that are switched on together, by the names of their options."""
    if len(on) > 1:
        yield Fact("config-two-precisions", ", ".join(on), {"first": on[0], "second": on[1]})
