"""torch.distributed.checkpoint: a folder of `.metadata` and `*.distcp`. Megatron's torch_dist uses the same files."""

from __future__ import annotations

from reshard.formats.contract import LIVE, Format, Naming, Target
from reshard.formats.dcp.folder import NAME, DcpWriting, detect, open_checkpoint
from reshard.formats.optimizer import MOMENTS

FORMAT = Format(
    NAME,
    "a folder of torch.distributed.checkpoint (.metadata and *.distcp)",
    detect,
    open_checkpoint,
    Target(DcpWriting, Naming((LIVE,)), states=MOMENTS),
    aliases=("torch-dcp", "torchtitan"),
    parts=(".metadata", "*.distcp"),
    files=(".metadata",),
    seen={"FSDP": r"pytorch_model_fsdp_\d|\.distcp$|__\d+_\d+\.distcp"},
    judged=("torch", "torchtitan", "OLMo-core"),
)
