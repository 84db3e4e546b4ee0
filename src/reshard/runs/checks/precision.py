"""What GPUs compute in."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from reshard.runs.checks import rules
from reshard.runs.checks.environment import Gpu
from reshard.runs.checks.finding import Finding
from reshard.runs.checks.location import Location

BFLOAT16_CAPABILITY = 8.0
"""The lowest compute capability with bfloat16, and with flash-attention 2: Ampere."""

_OLDER = re.compile(
    r"(?i)\b(?:[KM][468]0|P4|P40|P100|V100\w?|T4|GTX|TITAN|Quadro RTX|RTX 20\d\d|MI[256][05])\b"
)
"""Names of GPUs before Ampere: Kepler, Maxwell, Pascal, Volta and Turing; AMD's before CDNA."""
_NEWER = re.compile(
    r"(?i)\b(?:A(?:2|10G?|16|30|40|100|800|[456]000)|G?[BH]\d{2,3}|L(?:2|4|20|40)S?|RTX (?:[345]0\d\d|A\d{4})"
    r"|MI[1-3]\d\d\w?|910B\w?|Ada|Blackwell)\b"
)


def has_bfloat16(gpu: str) -> bool | None:
    """Whether a GPU computes in bfloat16, by its name; None if the name tells nothing."""
    if _NEWER.search(gpu):
        return True
    return False if _OLDER.search(gpu) else None


def without_bf16(gpus: Iterable[Gpu], place: Location | None = None) -> Iterator[Finding]:
    """The oldest of the GPUs, if it has neither bfloat16 nor flash-attention 2; `place` is what asks for them."""
    oldest = min(gpus, key=lambda gpu: gpu.capability, default=None)
    if oldest is not None and oldest.capability < BFLOAT16_CAPABILITY:
        here = Location("environment", None, f"{oldest.name}, compute_cap {oldest.capability}")
        values = {"name": oldest.name, "capability": oldest.capability}
        yield rules.finding("env-no-bf16", [place or here], values)
