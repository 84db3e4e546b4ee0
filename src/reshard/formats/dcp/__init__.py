"""torch.distributed.checkpoint: a folder of `.metadata` and `*.distcp`. Megatron's torch_dist uses the same files."""

from __future__ import annotations

from reshard.formats.contract import LIVE, MOMENTS, Format, Target
from reshard.formats.dcp.folder import NAME, detect, lay_out, notes, open_checkpoint

FORMAT = Format(
    NAME,
    "a folder of torch.distributed.checkpoint (.metadata and *.distcp)",
    detect,
    open_checkpoint,
    Target(lay_out, names=(LIVE,), states=MOMENTS, notes=notes),
    aliases=("torch-dcp", "torchtitan"),
    parts=(".metadata", "*.distcp"),
    files=(".metadata",),
    seen={"FSDP": r"pytorch_model_fsdp_\d|\.distcp$|__\d+_\d+\.distcp"},
    judged=("torch", "torchtitan", "OLMo-core"),
)
