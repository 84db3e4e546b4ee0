"""Checkpoints of one kind passed to code for another: by names in a message, a listing, a command line."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

from reshard.diagnosis.finding import Finding
from reshard.diagnosis.log import Log, Traceback
from reshard.diagnosis.rules import told_at
from reshard.diagnosis.words import words


class Kind(NamedTuple):
    """A kind of checkpoint, the pattern of its paths, and the phrase for what to do if a program wants another kind."""

    name: str
    pattern: re.Pattern[str]
    way_out: str


def _kind(name: str, pattern: str, way_out: str) -> Kind:
    return Kind(name, re.compile(pattern), f"artefact-{way_out}")


_OTHERS = (
    _kind("original Llama", r"(?:^|/)(?:consolidated\.\d\d\.pth|params\.json)$", "convert"),
    _kind("Lightning", r"\.ckpt$", "lightning"),
)
"""Those that are not among the formats."""


@cache
def _kinds() -> tuple[Kind, ...]:
    """All kinds: adapters, the other formats, and those of other tools."""
    from reshard.formats import FORMATS, peft

    others = [each for each in FORMATS.values() if each is not peft.FORMAT]
    ours = [_kind(name, pattern, "convert") for each in others for name, pattern in each.seen.items()]
    return (*(_kind(*each, "adapter") for each in peft.FORMAT.seen.items()), *ours, *_OTHERS)


_LOADS_FOLDERS = re.compile(
    r"(?:transformers|tokenizers|huggingface_hub|peft|vllm|sglang|trl|llamafactory|unsloth)/.*"
    r" (?:from_pretrained|_from_pretrained|cached_files?|get_config_dict|_get_config_dict|validate_repo_id|_inner_fn"
    r"|load_adapter|get_peft_model_state_dict|_get_checkpoint_shard_files|find_adapter_config_file|get_config)\b"
)
"""Functions that take a Hugging Face folder, by the frames of a traceback."""
_SAYS_SO = re.compile(
    r"OSError: (?:Error no file named|Can't load (?:\w+ ){1,3}for '|\S{1,300} does not appear to have a file)"
)
"""What they report, where the traceback is not shown."""
_PATH = re.compile(r"""(?<![\w/])(?:[~.]{0,2}/)?[\w.+=@-]+(?:/[\w.+=@-]+)*/?""")
_QUOTED = re.compile(
    r"""(?<!\w)['"`‘“]([^'"`’”\n]{2,300})['"`’”]|\bin (?:directory )?([^\s'"`]+?)\.?(?:\s|$)"""
)


def mixed_up(root: Traceback, log: Log) -> Finding | None:
    """The finding if a checkpoint was passed to code for another kind; None otherwise."""
    if not _SAYS_SO.search(root.said) and not any(_LOADS_FOLDERS.search(frame) for frame in root.frames):
        return None
    wants_adapter = any("/peft/" in frame for frame in root.frames)
    kinds = [kind for kind in _kinds() if not (wants_adapter and kind.name == "LoRA adapter")]
    for path in _paths(root.said.replace("\\", "/")):
        for kind in kinds:
            if kind.pattern.search(path):
                way_out = words(kind.way_out, path=path)
                values = {"path": path, "kind": kind.name, "way_out": way_out}
                return told_at(("artefact-mixed-up", values), log.name, root.last, root.said)
    return None


def _paths(said: str) -> Iterator[str]:
    """Paths that a message quotes, or names after "in"."""
    for match in _QUOTED.finditer(said):
        if _PATH.fullmatch(path := re.sub(r"^[A-Za-z]:/", "/", (match[1] or match[2]).strip())):
            yield path
