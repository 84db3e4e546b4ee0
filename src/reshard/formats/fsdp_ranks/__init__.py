"""FSDP with one file per rank, as verl and accelerate save it."""

from reshard.base.later_imports import imported_later
from reshard.formats import detection
from reshard.formats.contract import LIVE, Format, Naming, Ranks, Target
from reshard.formats.optimizer import MOMENTS

with imported_later(__name__):
    from reshard.formats.fsdp_ranks.folder import open_checkpoint
    from reshard.formats.fsdp_ranks.write import RanksWriting, fit

FORMAT = Format(
    detection.FSDP_RANKS,
    "FSDP state dicts, a file for each rank (model_world_size_*_rank_*.pt, pytorch_model_fsdp*.bin)",
    detection.is_fsdp_ranks,
    open_checkpoint,
    Target(
        RanksWriting,
        Naming((LIVE,)),
        Ranks(data_parallel=True),
        states=MOMENTS,
        beside="huggingface",
        fit=fit,
    ),
    aliases=("fsdp", "fsdp1", "fsdp2", "verl"),
    parts=(
        *("optim_world_size_*_rank_*.pt", "extra_state_world_size_*_rank_*.pt"),
        *("fsdp_config.json", "data.pt"),
    ),
    seen={"verl": r"global_step_\d+/(?:actor|critic)|model_world_size_\d+_rank_\d+"},
    judged=("torch", "accelerate", "verl"),
)
