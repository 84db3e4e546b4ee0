"""GGUF, the files of llama.cpp: metadata with config and tokenizer, and tensors under its own names."""

from __future__ import annotations

from reshard.formats.gguf import folder, write
from reshard.formats.target import Format

FORMAT = Format(
    folder.NAME,
    "files of llama.cpp, also read by Ollama and LM Studio; types that the package gguf computes",
    folder.detect,
    folder.open_checkpoint,
    write.TARGET,
    aliases=("llama.cpp", "llama-cpp"),
    seen={"llama.cpp": r"\.gguf\b"},
)

__all__ = ["FORMAT"]
