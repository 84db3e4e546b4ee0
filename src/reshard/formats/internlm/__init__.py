"""Checkpoints of InternEvo, a file for each rank."""

from reshard.base.later_imports import imported_later
from reshard.formats import detection
from reshard.formats.contract import Format, Naming, Ranks, Target

with imported_later(__name__):
    from reshard.formats.internlm.folder import open_checkpoint
    from reshard.formats.internlm.write import InternlmWriting, fit

FORMAT = Format(
    detection.INTERNLM,
    "InternEvo checkpoint, a file for each rank (model_tp*_pp*.pt)",
    detection.is_internlm,
    open_checkpoint,
    Target(InternlmWriting, Naming(("internlm2", "internlm")), Ranks(("tp", "pp", "vpp")), fit=fit),
    aliases=("internevo",),
    parts=(
        *("optimizer_tp*.pt", "optimizer_wp*.pt", "gating_*.pt", "context.pt", "sampler.pt"),
        "schedulder.pt",  # as InternEvo spells it
    ),
    seen={"InternEvo": r"model_tp\d+_pp\d+\.pt|model_config\.pt"},
    judged=("InternEvo",),
)
