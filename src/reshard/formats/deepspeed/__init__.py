"""Checkpoints of DeepSpeed: ZeRO 0 to 3, and the universal format."""

from reshard.base.later_imports import imported_later
from reshard.formats import detection
from reshard.formats.contract import LIVE, Format, Naming, StoredDtypes, Target
from reshard.formats.optimizer import MOMENTS

with imported_later(__name__):
    from reshard.formats.deepspeed.folder import open_checkpoint
    from reshard.formats.deepspeed.universal import UniversalWriting

FORMAT = Format(
    detection.DEEPSPEED,
    "DeepSpeed checkpoint: ZeRO 0 to 3, or universal",
    detection.is_deepspeed,
    open_checkpoint,
    Target(UniversalWriting, Naming((LIVE,)), dtypes=StoredDtypes("float32"), states=MOMENTS),
    aliases=("ds", "zero"),
    parts=(
        *("latest", "latest_universal"),
        *("*_model_states.pt", "*_optim_states.pt", "exp_avg*.pt", "step.pt"),
    ),
    seen={
        "DeepSpeed": r"global_step\d+(?:/?$|/(?:mp_rank|zero_pp|bf16_zero))|_optim_states\.pt|zero_pp_rank"
    },
    judged=("DeepSpeed",),
)
