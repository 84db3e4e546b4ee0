"""FSDP with one file per rank, as verl and accelerate save it."""

from __future__ import annotations

from reshard.formats.contract import LIVE, Format, Naming, Ranks, Target
from reshard.formats.fsdp_ranks.folder import NAME, detect, open_checkpoint
from reshard.formats.fsdp_ranks.write import HUB_FOLDER, RanksWriting, fit
from reshard.formats.optimizer import MOMENTS

FORMAT = Format(
    NAME,
    "FSDP state dicts, a file for each rank (model_world_size_*_rank_*.pt, pytorch_model_fsdp*.bin)",
    detect,
    open_checkpoint,
    Target(
        RanksWriting,
        Naming((LIVE,)),
        Ranks(data_parallel=True),
        states=MOMENTS,
        beside=HUB_FOLDER,
        fit=fit,
    ),
    aliases=("fsdp", "fsdp1", "fsdp2"),
    parts=(
        *("optim_world_size_*_rank_*.pt", "extra_state_world_size_*_rank_*.pt"),
        *("fsdp_config.json", "data.pt"),
    ),
    seen={"verl": r"global_step_\d+/(?:actor|critic)|model_world_size_\d+_rank_\d+"},
    judged=("torch", "accelerate", "verl"),
)
