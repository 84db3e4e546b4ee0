"""MLX folders, as mlx-lm and mlx-vlm write them: safetensors under MLX's own names, plain or quantized."""

from reshard.base.later_imports import imported_later
from reshard.formats import detection, huggingface, safetensors_writers
from reshard.formats.contract import Format
from reshard.formats.peft import ADAPTER_CONFIG

with imported_later(__name__):
    from reshard.formats.mlx.adapter import open_checkpoint as open_adapter
    from reshard.formats.mlx.folder import open_checkpoint
    from reshard.formats.mlx.write import TARGET

FORMAT = Format(
    detection.MLX,
    "MLX folder for Apple silicon, plain or affine; mxfp4, nvfp4, mxfp8 and mlx-vlm's towers are read",
    lambda path: safetensors_writers.may_have(path, detection.MLX),
    open_checkpoint,
    TARGET,
    aliases=("mlx-lm",),
    parts=huggingface.FORMAT.parts,
    files=huggingface.FORMAT.files,
    judged=("mlx-lm", "mlx-vlm"),
)
ADAPTER = Format(
    detection.MLX_ADAPTER,
    "LoRA or DoRA adapter of mlx-lm: adapters.safetensors and adapter_config.json",
    detection.is_mlx_adapter,
    open_adapter,
    aliases=("mlx-lora",),
    files=(ADAPTER_CONFIG, detection.MLX_ADAPTER_FILE),
    judged=("mlx-lm",),
)

__all__ = ["ADAPTER", "FORMAT"]
