"""Checkpoints of Megatron-Core: `torch_dist.py`, `zarr.py` and `legacy.py`, with the same names and shards.

Those of Megatron-FSDP have the names of modules in a folder of torch's DCP: `fsdp_dtensor.py`.
"""

from __future__ import annotations

from pathlib import Path

from reshard.algebra.layout import AXES
from reshard.folders import iterations
from reshard.folders.iterations import Iteration
from reshard.formats.checkpoint import Checkpoint
from reshard.formats.contract import (
    CheckpointKind,
    Format,
    Naming,
    Ranks,
    StoredDtypes,
    Target,
)
from reshard.formats.megatron import (
    fsdp_dtensor,
    fsdp_dtensor_writing,
    legacy,
    nemo_ranks,
    torch_dist,
    zarr,
)
from reshard.formats.megatron.megatron_request import fit
from reshard.formats.optimizer import MASTER_STATE, MOMENTS, MOMENTUM
from reshard.transfer.source_files import Sources


def _open(path: Path, sources: Sources, iteration: Iteration | None = None) -> Checkpoint:
    """Open an iteration of a run, in whichever of the formats it is: a run may have changed formats."""
    step, _ = iterations.choose(path, iteration)
    opened = next((opened for detect, opened in _READERS if detect(step)), torch_dist.open_checkpoint)
    return opened(path, sources, iteration)


_READERS = (
    (torch_dist.detect, torch_dist.open_checkpoint),
    (zarr.detect, zarr.open_checkpoint),
    (legacy.detect, legacy.open_checkpoint),
)


def _is_of_torch(path: Path) -> bool:
    """Whether torch's DCP alone saved the iterations: names of files do not tell Megatron-FSDP from torch_dcp."""
    common = ("common.pt", "metadata.json")
    folders = iterations.iteration_folders(path)
    return torch_dist.detect(path) and not any(
        (folder / name).is_file() for folder in folders for name in common
    )


NAMES = Naming(("mcore",))
_OF_RUN = (
    *("latest_checkpointed_iteration.txt", "latest_wandb_artifact_path.txt"),
    *("train_state.pt", "latest_train_state.pt", "run_config.yaml"),
)
"""Files next to the weights in both formats, and next to all iterations."""

TORCH_DIST = Format(
    torch_dist.NAME,
    "Megatron-Core distributed checkpoint (torch_dist)",
    torch_dist.detect,
    _open,
    Target(
        torch_dist.TorchDistWriting,
        NAMES,
        Ranks(AXES),
        holds=frozenset({CheckpointKind.MODEL, CheckpointKind.ADAPTER}),
        states=(*MOMENTS, MOMENTUM, MASTER_STATE),
        fit=fit,
    ),
    aliases=("mcore", "megatron-core", "torch-dist"),
    parts=(*_OF_RUN, "metadata.json", ".metadata", "*.distcp", "common.pt"),
    files=(".metadata", "metadata.json", "common.pt", iterations.TRACKER),
    seen={"Megatron": r"iter_\d{7}|mp_rank_\d\d(?:_\d{3})?/model_optim|latest_checkpointed_iteration"},
    judged=("megatron-core", "Megatron-Bridge", "NeMo"),
)
ZARR = Format(
    zarr.NAME,
    "Megatron-Core distributed checkpoint in zarr, which older versions and NeMo saved",
    zarr.detect,
    _open,
    aliases=("zarr",),
    instead=torch_dist.NAME,
    parts=(*_OF_RUN, "metadata.json", "common.pt", ".zarray"),
    judged=("megatron-core",),
)
LEGACY = Format(
    legacy.NAME,
    "Megatron legacy checkpoint, a file for each rank (mp_rank_*)",
    legacy.detect,
    legacy.open_checkpoint,
    Target(legacy.LegacyWriting, NAMES, Ranks(AXES), fit=fit),
    aliases=("legacy", "mcore-legacy"),
    parts=(*_OF_RUN, "distrib_optim.pt", "model_optim_rng.pt"),
    judged=("megatron-core",),
)
NEMO = Format(
    nemo_ranks.NAME,
    "NeMo 1's files of ranks, in a .nemo archive or unpacked (model_weights.ckpt); not tested: mcore_gpt false",
    nemo_ranks.detect,
    nemo_ranks.open_checkpoint,
    instead=torch_dist.NAME,
    parts=("model_config.yaml",),
    seen={"NeMo": r"\.nemo$"},
    judged=("NeMo",),
)
FSDP_DTENSOR = Format(
    fsdp_dtensor.NAME,
    "Megatron-FSDP checkpoint (fsdp_dtensor)",
    _is_of_torch,
    _open,
    Target(
        fsdp_dtensor_writing.FsdpDtensorWriting,
        NAMES,
        Ranks(AXES),
        StoredDtypes("float32"),
        states=MOMENTS,
        fit=fsdp_dtensor_writing.fit,
    ),
    aliases=("fsdp-dtensor", "mfsdp"),
    parts=(*_OF_RUN, ".metadata", "*.distcp"),
    files=(".metadata", iterations.TRACKER),
    judged=("megatron-core", "megatron-fsdp"),
)
