"""Checkpoints that megatron-core wrote in zarr, and the same model in torch_dist, by the same ranks.

megatron-core saved in zarr until 0.15, with the packages zarr 2 and tensorstore, which have an environment here. Those
in `tests/data/megatron_zarr` are without optimizers; make them again with

    python -m tests.genuine.make_zarr tests/data/megatron_zarr
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from tests.environments import python
from tests.genuine import megatron
from tests.genuine.megatron import REPOSITORY, VARIANTS, Genuine, Variant, mcore_site

MEGATRON = "0.12.3"
FORMATS: tuple[megatron.MegatronFormat, ...] = ("torch_dist", "zarr")
KEPT = ("qwen2-tp2-pp2",)
"""Those in `tests/data`."""


def variant(name: str, *, optimizer: bool) -> Variant:
    """The variant of that name, saved in both formats."""
    known = VARIANTS[name]
    return replace(known, formats=FORMATS, save={**known.save, "optimizer": optimizer})


def existing(name: str, out: Path) -> Genuine:
    """What `make` saved under `out/name`."""
    known = VARIANTS[name]
    return Genuine(name, {format: out / name / format for format in FORMATS}, known.args, known.layout)


def make(name: str, out: Path, version: str = MEGATRON, *, optimizer: bool = True) -> Genuine:
    """Make a variant under `out/name`, in both formats."""
    paths = [mcore_site(version), REPOSITORY / "src", REPOSITORY]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "OMP_NUM_THREADS": "1"}
    command = [python("zarr"), "-m", "tests.genuine.make_zarr", str(out), name, *["optimizer"] * optimizer]
    done = subprocess.run(
        command, env=environment, cwd=REPOSITORY, capture_output=True, text=True, timeout=300
    )
    if done.returncode:
        raise RuntimeError(f"making {name} in zarr with megatron-core {version}:\n{done.stderr}")
    return existing(name, out)


def _make_here(name: str, out: Path, *, optimizer: bool) -> None:
    if VARIANTS[name].spec == "te":
        from tests.genuine import fake_te

        fake_te.install()
    megatron.ALL[name] = variant(name, optimizer=optimizer)
    megatron._make_here(name, out)


if __name__ == "__main__":
    match sys.argv[1:]:
        case [out]:
            for each in KEPT:
                make(each, Path(out), optimizer=False)
        case [out, name, *options]:
            _make_here(name, Path(out), optimizer=bool(options))
