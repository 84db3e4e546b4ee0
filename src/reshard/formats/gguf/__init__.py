"""GGUF, the files of llama.cpp: metadata with config and tokenizer, and tensors under its own names."""

from __future__ import annotations

from reshard.formats.contract import Format
from reshard.formats.gguf import folder, write

FORMAT = Format(
    folder.NAME,
    "a file of llama.cpp, which Ollama and LM Studio load too; split files are read",
    folder.detect,
    folder.open_checkpoint,
    write.TARGET,
    aliases=("llama.cpp", "llama-cpp"),
    seen={"GGUF": r"(?i:\.gguf$|[-_]gguf\b)"},
    judged=("llama.cpp",),
)

__all__ = ["FORMAT"]
