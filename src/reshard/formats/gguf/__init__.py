"""GGUF, the files of llama.cpp: metadata with config and tokenizer, and tensors under its own names."""

from reshard.base.later_imports import imported_later
from reshard.formats import detection
from reshard.formats.contract import Format

with imported_later(__name__):
    from reshard.formats.gguf.folder import open_checkpoint
    from reshard.formats.gguf.write import TARGET

FORMAT = Format(
    detection.GGUF,
    "a file of llama.cpp, which Ollama and LM Studio load too; split files are read",
    detection.is_gguf,
    open_checkpoint,
    TARGET,
    aliases=("llama.cpp", "llama-cpp"),
    seen={"GGUF": r"(?i:\.gguf$|[-_]gguf\b)"},
    judged=("llama.cpp",),
)

__all__ = ["FORMAT"]
