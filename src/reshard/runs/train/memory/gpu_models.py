"""GPUs by name, with their memory according to NVIDIA's data sheets."""

from __future__ import annotations

import re
from dataclasses import dataclass

from reshard.base.errors import ReshardError
from reshard.base.quantities import GIB
from reshard.base.suggest import did_you_mean

GPU_GIB = {
    "B200": 180,
    "H200": 141,
    "H100": 80,
    "H100-NVL": 94,
    "A100": 80,
    "A100-40GB": 40,
    "L40S": 45,
    "A6000": 48,
    "A10": 22.5,
    "L4": 22.5,
    "5090": 32,
    "4090": 24,
    "3090": 24,
    "V100": 32,
    "V100-16GB": 16,
    "T4": 15,
}
"""Memory in GiB as the driver reports it, roughly: cards with ECC in GDDR memory use a sixteenth of it for that."""


@dataclass(frozen=True)
class PlannedGpus:
    """Equal GPUs of one node, here or elsewhere. `bytes` is the memory of each."""

    name: str
    count: int
    bytes: int

    def __str__(self) -> str:
        """For example `8 × H100`."""
        return f"{self.count} × {self.name}"


def gpus_named(text: str) -> PlannedGpus:
    """The GPUs of `--gpus H100:8` or `80GB:8`. Raises ReshardError."""
    name, colon, number = text.rpartition(":")
    name, number = (name, number) if colon else (number, "1")
    size = re.fullmatch(r"(\d+(?:\.\d+)?)\s*GI?B", name, re.IGNORECASE)
    known = {each.lower(): gib for each, gib in GPU_GIB.items()}
    gib = float(size[1]) if size else known.get(name.lower())
    if gib is None or not number.isdecimal() or not int(number):
        raise ReshardError(
            "planned-gpu-unknown",
            "--gpus does not name GPUs",
            expected=f"NAME:NUMBER with one of {', '.join(GPU_GIB)}, or the memory of each, as in 80GB:8",
            found=text,
            remedy=did_you_mean(name, GPU_GIB, "pass their memory, for example --gpus 80GB:8"),
        )
    return PlannedGpus(name, int(number), int(gib * GIB))
