"""One kind of checkpoint that was given for another, by the paths in the message of code that loads folders."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache

from reshard.runs.checks import rules
from reshard.runs.checks.finding import Finding
from reshard.runs.checks.phrases import phrase_text
from reshard.runs.doctor.text.log import Log, Traceback

_OTHERS = {
    "original Llama": (r"(?:^|/)(?:consolidated\.\d\d\.pth|params\.json)$", "artefact-convert"),
    "Lightning": (r"\.ckpt$", "artefact-lightning"),
}
"""Kinds that are not among the formats: the pattern of their paths, and the phrase for what to do."""


@cache
def _kinds() -> dict[str, tuple[re.Pattern[str], str]]:
    """All kinds by name."""
    from reshard.formats import FORMATS, peft

    ways = dict.fromkeys(peft.FORMAT.seen, "artefact-adapter")
    ours = {
        name: (pattern, ways.get(name, "artefact-convert"))
        for each in (peft.FORMAT, *FORMATS.values())
        for name, pattern in each.seen.items()
    }
    return {name: (re.compile(pattern), way) for name, (pattern, way) in {**ours, **_OTHERS}.items()}


_LOADS_FOLDERS = re.compile(
    r"(?:transformers|tokenizers|huggingface_hub|peft|vllm|sglang|trl|llamafactory|unsloth)/.*"
    r" (?:\w*from_pretrained|cached_files?|\w*get_config(?:_dict)?|validate_repo_id|_inner_fn|load_adapter"
    r"|get_peft_model_state_dict|_get_checkpoint_shard_files|find_adapter_config_file)\b"
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


def of_kind(root: Traceback, log: Log) -> Finding | None:
    """The finding if a checkpoint was passed to code for another kind; None otherwise."""
    if not _SAYS_SO.search(root.error_text) and not any(map(_LOADS_FOLDERS.search, root.frames)):
        return None
    wants_adapter = any("/peft/" in frame for frame in root.frames)
    for path in _paths(root.error_text.replace("\\", "/")):
        for kind, (pattern, way) in _kinds().items():
            if pattern.search(path) and not (wants_adapter and way == "artefact-adapter"):
                values = {"path": path, "kind": kind, "way_out": phrase_text(way, path=path)}
                return rules.finding("artefact-mixed-up", values=values)
    return None


def _paths(message: str) -> Iterator[str]:
    """Paths that a message quotes, or names after "in"."""
    for match in _QUOTED.finditer(message):
        if _PATH.fullmatch(path := re.sub(r"^[A-Za-z]:/", "/", (match[1] or match[2]).strip())):
            yield path
