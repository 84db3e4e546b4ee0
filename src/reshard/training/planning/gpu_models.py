"""GPUs by name, and machines with them that are not at hand.

Numbers are from NVIDIA's data sheets: memory, dense bfloat16 products (float16 before Ampere) accumulated in float32,
and the bandwidth of NVLink or PCIe in one direction.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from reshard.base.errors import GIB, ReshardError
from reshard.base.suggest import did_you_mean
from reshard.checks.environment import Environment, Gpu, look_around


@dataclass(frozen=True)
class GpuModel:
    """A GPU model: `memory` in GiB, `tflops` of dense 16-bit products, `link` in GB/s to its neighbours.

    Cards with `ecc` in GDDR memory use a sixteenth of it for ECC, and the driver reports the rest.
    """

    name: str
    capability: float
    memory: float
    tflops: float
    link: float
    ecc: bool = False

    @property
    def bytes(self) -> int:
        """Bytes that the driver reports, roughly."""
        return int(self.memory * GIB * (15 / 16 if self.ecc else 1))


GPU_MODELS = (
    GpuModel("B200", 10.0, 180, 2250, 900),
    GpuModel("H200", 9.0, 141, 989, 450),
    GpuModel("H100", 9.0, 80, 989, 450),
    GpuModel("H100-NVL", 9.0, 94, 835, 300),
    GpuModel("H100-PCIe", 9.0, 80, 756, 64),
    GpuModel("A100-80GB", 8.0, 80, 312, 300),
    GpuModel("A100-40GB", 8.0, 40, 312, 300),
    GpuModel("L40S", 8.9, 48, 362, 32, ecc=True),
    GpuModel("A6000", 8.6, 48, 155, 32),
    GpuModel("6000-Ada", 8.9, 48, 364, 32),
    GpuModel("A10", 8.6, 24, 125, 32, ecc=True),
    GpuModel("L4", 8.9, 24, 121, 32, ecc=True),
    GpuModel("5090", 12.0, 32, 209, 64),
    GpuModel("4090", 8.9, 24, 165, 32),
    GpuModel("3090", 8.6, 24, 71, 32),
    GpuModel("V100-32GB", 7.0, 32, 125, 150),
    GpuModel("V100-16GB", 7.0, 16, 125, 150),
    GpuModel("T4", 7.5, 16, 65, 16, ecc=True),
)
UNKNOWN_GPU = GpuModel("", 8.0, 0, 312, 300)
"""Speeds that are assumed if only a GPU's memory is known: those of an A100."""


@dataclass(frozen=True)
class PlannedMachine:
    """Nodes with equal GPUs for which a run is planned."""

    card: GpuModel
    count: int
    nodes: int = 1

    def __str__(self) -> str:
        """For example `2 nodes with 8 × H100`, or `8 × GPU of 80 GiB`."""
        what = self.card.name or f"GPU of {self.card.memory:g} GiB"
        return f"{self.nodes} nodes with " * (self.nodes > 1) + f"{self.count} × {what}"

    def environment(self) -> Environment:
        """A node of the machine: with this machine's package versions, and no launcher."""
        versions = {name: version.partition("+")[0] for name, version in look_around().versions.items()}
        gpu = Gpu(self.card.name or "GPU", self.card.capability, self.card.bytes)
        return Environment(versions, [gpu] * self.count, None, {})


def machine_of(gpus: str, memory: str | None, nodes: int) -> PlannedMachine:
    """The machine of `--gpus 8` with `--gpu-memory 80GB`, or of `--gpus H100:8`. Raises ReshardError."""
    name, colon, number = gpus.rpartition(":")
    if not colon and (not number.isdecimal() or _plain(number) in _known()):  # a name alone is one GPU
        name, number = number, "1"
    if not number.isdecimal() or not int(number):
        raise ReshardError(
            "planned-gpus-unclear",
            "--gpus has no number of GPUs",
            expected="a number, or NAME:NUMBER",
            found=gpus,
            remedy="--gpus 8 --gpu-memory 80GB, or --gpus H100:8",
        )
    if memory is None and not name:
        raise ReshardError(
            "planned-gpu-memory-missing",
            "the memory of the GPUs is unknown",
            found=f"--gpus {gpus}",
            expected="--gpu-memory SIZE, or the name of the GPUs",
            remedy=f"add --gpu-memory 80GB, or pass --gpus NAME:{number} with one of {_names()}",
        )
    card = card_of(name) if name else UNKNOWN_GPU
    if memory is not None:
        card = GpuModel(card.name, card.capability, _gib(memory), card.tflops, card.link)
    return PlannedMachine(card, int(number), nodes)


def machine_asked(
    gpus: str | None, memory: str | None, nodes: int, *, dry_run: bool
) -> PlannedMachine | None:
    """The machine that a dry run is planned for, if not this one. Raises ReshardError for an incomplete request."""
    if gpus is None and memory is None:
        return None
    if not dry_run or gpus is None:
        raise ReshardError(
            "planning-flags-incomplete",
            "only a dry run can be for GPUs that are not here" if gpus else "--gpus is missing",
            found=f"--gpus {gpus}" if gpus else f"--gpu-memory {memory}",
            remedy="add --dry-run and leave out --slurm, or leave out --gpus"
            if gpus
            else "add --gpus N, for N GPUs per node",
        )
    return machine_of(gpus, memory, nodes)


def card_of(name: str) -> GpuModel:
    """The card with a name, which may be written as in `nvidia-smi`. Raises ReshardError if it is unknown."""
    given, known = _plain(name), _known()
    if given in known:
        return known[given]
    raise ReshardError(
        "planned-gpu-unknown",
        "no such GPU in the table",
        expected=_names(),
        found=name,
        remedy=did_you_mean(
            name, [card.name for card in GPU_MODELS], "name its memory: --gpus NUMBER --gpu-memory SIZE"
        ),
    )


def _known() -> dict[str, GpuModel]:
    """Cards by plain names; the usual memory size of those that come with two."""
    found = {_plain(card.name): card for card in GPU_MODELS}
    return {**found, "A100": found["A10080"], "V100": found["V10032"]}


_PREFIXES = ("NVIDIA", "GEFORCE", "RTX", "TESLA")
_SUFFIXES = ("GB", "GENERATION", "HBM3", "HBM3E", "SXM", "SXM2", "SXM4", "SXM5")


def _plain(name: str) -> str:
    """A plain name, A10080 for `NVIDIA A100-SXM4-80GB`: without maker, socket and separators."""
    words = [word for word in re.split(r"[\s_-]+", name.upper()) if word not in (*_PREFIXES, *_SUFFIXES)]
    plain = "".join(re.sub(r"^RTX|GB$", "", word) for word in words)
    return re.sub(r"^(H100|H200|B200)(80|141|180)$", r"\1", plain)


def _names() -> str:
    return ", ".join(card.name for card in GPU_MODELS)


_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:GI?B?)?", re.IGNORECASE)


def _gib(text: str) -> float:
    """A size as makers and drivers write it: 80GB, 80GiB and 80 all mean 80 GiB."""
    found = _SIZE.fullmatch(text.strip())
    if found is None or float(found[1]) <= 0:
        raise ReshardError(
            "planned-gpu-memory-unclear",
            "--gpu-memory is not a size",
            expected="memory of one GPU, for example 80GB",
            found=text,
            remedy="use the number in the data sheet",
        )
    return float(found[1])


_PLANNED: ContextVar[Environment | None] = ContextVar("planned", default=None)


@contextmanager
def planned_for(environment: Environment) -> Iterator[None]:
    """A context in which plans are made as if on a node like this one."""
    token = _PLANNED.set(environment)
    try:
        yield
    finally:
        _PLANNED.reset(token)


def is_planned() -> bool:
    """Whether plans are being made for another machine."""
    return _PLANNED.get() is not None


def has_gpu() -> bool:
    """Whether a run has a GPU: on the machine that it is planned for, or on this one."""
    planned = _PLANNED.get()
    return bool(planned.gpus if planned else gpu_count())


def gpu_count() -> int:
    """The number of visible GPUs of this machine: according to torch if it is imported, else to the driver.

    torch is imported for GPUs that are not NVIDIA's. It makes no CUDA context, so this process uses no memory there.
    """
    if "torch" not in sys.modules and not Path("/dev/kfd").exists():
        here = _around()
        return 0 if here.cuda == "" else len(replace(here, variables=os.environ).visible)
    import torch

    return int(torch.cuda.device_count())


def capability() -> float | None:
    """The lowest compute capability of a run's GPUs; None without GPUs."""
    return (_PLANNED.get() or _around()).capability


_around = cache(look_around)
