"""A program that a shell does not find: one of a package, of CUDA or of the system."""

from __future__ import annotations

import re

from reshard.base.languages import Text
from reshard.runs.checks import rules
from reshard.runs.checks.finding import Finding
from reshard.runs.checks.phrases import phrase_text
from reshard.runs.doctor.text.log import Log, Traceback

_NOT_FOUND = re.compile(
    r"(?P<bash>[\w.+/-]{1,100}): [Cc]ommand not found(?!: )|[Cc]ommand not found: (?P<zsh>[\w.+/-]{1,100})"
    r"|sh: \d+: (?P<sh>[\w.+/-]{1,100}): not found|execve\(\): (?P<srun>[\w.+/-]{1,100}): No such file"
    r"|(?P<git>git: 'lfs') is not a git command"
)
_PACKAGES = {
    "accelerate": "accelerate",
    "deepspeed": "deepspeed",
    "hf": "huggingface_hub",
    "huggingface-cli": "huggingface_hub",
    "llamafactory-cli": "llamafactory",
    "ninja": "ninja",
    "swift": "ms-swift",
    "trl": "trl",
    "vllm": "vllm",
}
"""What pip installs for a program."""
_WAYS = {
    "torchrun": "program-torchrun",
    "nvcc": "program-of-cuda",
    "git-lfs": "program-of-lfs",
}


def of_program(root: Traceback, log: Log) -> Finding | None:
    """The finding for a failure in which a shell says that a program is not there."""
    match = _NOT_FOUND.search(root.error_text)
    if match is None:
        return None
    program = "git-lfs" if match["git"] else next(name for name in match.groups() if name)
    values = {"program": program, "way": _way(program)}
    return rules.finding("command-not-found", values=values)


def _way(program: str) -> Text:
    name = program.rpartition("/")[2]
    if name in _PACKAGES:
        return phrase_text("program-of-package", package=_PACKAGES[name])
    return phrase_text(_WAYS.get(name, "program-of-system"))
