"""Checkpoints of Megatron-Core: `torch_dist.py`, `zarr.py` and `legacy.py`, with the same names and shards.

Those of Megatron-FSDP have the names of modules in a folder of torch's DCP: `fsdp_dtensor.py`.
"""

from __future__ import annotations

from pathlib import Path

from reshard.algebra.layout import AXES
from reshard.base.later_imports import imported_later
from reshard.folders import iterations
from reshard.folders.iterations import Iteration
from reshard.formats import detection
from reshard.formats.checkpoint import Checkpoint
from reshard.formats.contract import CheckpointKind, Format, Naming, Ranks, StoredDtypes, Target
from reshard.formats.optimizer import MASTER_STATE, MOMENTS, MOMENTUM
from reshard.transfer.source_files import Sources

with imported_later(__name__):
    from reshard.formats.megatron.fsdp_dtensor_writing import FsdpDtensorWriting
    from reshard.formats.megatron.fsdp_dtensor_writing import fit as fit_fsdp_dtensor
    from reshard.formats.megatron.legacy import LegacyWriting
    from reshard.formats.megatron.legacy import open_checkpoint as open_legacy
    from reshard.formats.megatron.megatron_request import fit
    from reshard.formats.megatron.nemo_ranks import open_checkpoint as open_nemo
    from reshard.formats.megatron.torch_dist import TorchDistWriting
    from reshard.formats.megatron.torch_dist import open_checkpoint as open_torch_dist
    from reshard.formats.megatron.zarr import open_checkpoint as open_zarr


def _open(path: Path, sources: Sources, iteration: Iteration | None = None) -> Checkpoint:
    """Open an iteration of a run, in whichever of the formats it is: a run may have changed formats."""
    step, _ = iterations.choose(path, iteration)
    opened = next((opened for detect, opened in _READERS if detect(step)), open_torch_dist)
    return opened(path, sources, iteration)


_READERS = (
    (detection.is_torch_dist, open_torch_dist),
    (detection.is_zarr, open_zarr),
    (detection.is_legacy, open_legacy),
)
NAMES = Naming(("mcore",))
_OF_RUN = (
    *("latest_checkpointed_iteration.txt", "latest_wandb_artifact_path.txt"),
    *("train_state.pt", "latest_train_state.pt", "run_config.yaml"),
)
"""Files next to the weights in both formats, and next to all iterations."""

TORCH_DIST = Format(
    detection.TORCH_DIST,
    "Megatron-Core distributed checkpoint (torch_dist)",
    detection.is_torch_dist,
    _open,
    Target(
        TorchDistWriting,
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
    detection.ZARR,
    "Megatron-Core distributed checkpoint in zarr, which older versions and NeMo saved",
    detection.is_zarr,
    _open,
    aliases=("zarr",),
    instead=detection.TORCH_DIST,
    parts=(*_OF_RUN, "metadata.json", "common.pt", ".zarray"),
    judged=("megatron-core",),
)
LEGACY = Format(
    detection.LEGACY,
    "Megatron legacy checkpoint, a file for each rank (mp_rank_*)",
    detection.is_legacy,
    open_legacy,
    Target(LegacyWriting, NAMES, Ranks(AXES), fit=fit),
    aliases=("legacy", "mcore-legacy"),
    parts=(*_OF_RUN, "distrib_optim.pt", "model_optim_rng.pt"),
    judged=("megatron-core",),
)
NEMO = Format(
    detection.NEMO,
    "NeMo 1's files of ranks, in a .nemo archive or unpacked (model_weights.ckpt); not tested: mcore_gpt false",
    detection.is_nemo,
    open_nemo,
    instead=detection.TORCH_DIST,
    parts=("model_config.yaml",),
    seen={"NeMo": r"\.nemo$"},
    judged=("NeMo",),
)
FSDP_DTENSOR = Format(
    detection.FSDP_DTENSOR,
    "Megatron-FSDP checkpoint (fsdp_dtensor)",
    detection.is_fsdp_dtensor,
    _open,
    Target(
        FsdpDtensorWriting,
        NAMES,
        Ranks(AXES),
        StoredDtypes("float32"),
        states=MOMENTS,
        fit=fit_fsdp_dtensor,
    ),
    aliases=("fsdp-dtensor", "mfsdp"),
    parts=(*_OF_RUN, ".metadata", "*.distcp"),
    files=(".metadata", iterations.TRACKER),
    judged=("megatron-core", "megatron-fsdp"),
)
