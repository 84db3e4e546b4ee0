"""Formats of other tools that are declared by a table: their files, their tensor names, and how ranks cut tensors.

Each module declares which files a checkpoint has, how ranks cut its tensors, and what the Hub calls them: either as
`Renaming`s, which `formats/apply_renamings.py` applies, or as a dialect of families.
"""

from __future__ import annotations

from reshard.formats.contract import Format
from reshard.formats.tables import deepseek, litgpt, meta, mistral, nanotron, paddle, vllm

FORMATS: tuple[Format, ...] = (
    mistral.FORMAT,
    meta.FORMAT,
    litgpt.FORMAT,
    nanotron.FORMAT,
    deepseek.FORMAT,
    paddle.FORMAT,
    vllm.FORMAT,
)

__all__ = ["FORMATS"]
