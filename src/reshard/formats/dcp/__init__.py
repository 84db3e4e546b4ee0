"""torch.distributed.checkpoint: a folder of `.metadata` and `*.distcp`. Megatron's torch_dist uses the same files."""

from reshard.base.later_imports import imported_later
from reshard.formats import detection
from reshard.formats.contract import LIVE, Format, Naming, Target
from reshard.formats.optimizer import MOMENTS

with imported_later(__name__):
    from reshard.formats.dcp.folder import DcpWriting, open_checkpoint

FORMAT = Format(
    detection.DCP,
    "a folder of torch.distributed.checkpoint (.metadata and *.distcp)",
    detection.is_dcp,
    open_checkpoint,
    Target(DcpWriting, Naming((LIVE,)), states=MOMENTS),
    aliases=("torch-dcp", "torchtitan"),
    parts=(".metadata", "*.distcp"),
    files=(".metadata",),
    seen={"FSDP": r"pytorch_model_fsdp_\d|\.distcp$|__\d+_\d+\.distcp"},
    judged=("torch", "torchtitan", "OLMo-core"),
)
