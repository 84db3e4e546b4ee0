"""MLX folders, as mlx-lm and mlx-vlm write them: safetensors under MLX's own names, plain or quantized."""

from __future__ import annotations

from reshard.formats import huggingface
from reshard.formats.contract import Format
from reshard.formats.mlx import adapter, folder, write

FORMAT = Format(
    folder.NAME,
    "MLX folder for Apple silicon, plain or affine; mxfp4, nvfp4, mxfp8 and mlx-vlm's towers are read",
    folder.detect,
    folder.open_checkpoint,
    write.TARGET,
    aliases=("mlx-lm",),
    parts=huggingface.FORMAT.parts,
    files=huggingface.FORMAT.files,
    judged=("mlx-lm", "mlx-vlm"),
)

ADAPTER = adapter.FORMAT

__all__ = ["ADAPTER", "FORMAT"]
