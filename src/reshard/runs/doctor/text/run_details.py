"""What a log mentions of its run: versions of packages, the command line, the ranks that its launcher names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from reshard.runs.doctor.text.tracebacks import LogLine

LOGGED_PACKAGES = (
    *("torch", "transformers", "accelerate", "trl", "peft", "deepspeed", "safetensors", "tokenizers"),
    *("megatron-core", "transformer-engine", "flash-attn", "vllm", "verl", "ms-swift", "datasets", "numpy"),
    *("triton", "bitsandbytes", "xformers", "huggingface-hub", "llamafactory", "axolotl"),
)
_ALIASES = {"pytorch": "torch", "swift": "ms-swift"}
_VERSION = re.compile(
    r"(?<![\w.-])(?P<name>"
    + "|".join([*LOGGED_PACKAGES, *_ALIASES]).replace("-", "[-_]")
    + r")[\"'`]?(?: info)?"
    r"(?:[ _]?version)?[\"'`]?(?:\s*[:=]+\s*(?:version=)?|\s+|-)[\"']?v?"
    r"(?P<version>\d+\.\d+(?:\.\d+)?(?:\.?(?:dev|rc|post)\d+)?)",
    re.IGNORECASE,
)


def versions_in(text: str) -> Iterator[tuple[str, str]]:
    """The packages that a line names with a version."""
    for match in _VERSION.finditer(text):
        name = match["name"].lower().replace("_", "-")
        yield _ALIASES.get(name, name), match["version"]


_COMMAND = re.compile(
    r"(?:^|[$!+;] ?|(?<=\S)# ?|\bcmd = |\bsh: `)(?P<command>(?:[A-Z_]{1,40}=\S{1,80} {1,4}){0,4}(?:[\w./-]{1,200}/)?"
    r"(?:torchrun|accelerate[ -]launch|deepspeed|srun|mpirun|python[\d.]{0,4}|llamafactory-cli|swift)\s"
    r"(?=.{0,400}(?:\.py|\.ya?ml|-m |--\w|\\$)).*)"
)
"""At the beginning of a line, after a prompt, or as DeepSpeed (`cmd = `) and ms-swift (`run sh: `) print it."""


def command_in(lines: Sequence[LogLine]) -> LogLine | None:
    """The first command line that starts a run, with the lines that continue it after a backslash."""
    at = next((at for at, line in enumerate(lines) if _COMMAND.search(line.text)), None)
    if at is None:
        return None
    end = at
    while lines[end].text.endswith("\\") and end + 1 < len(lines):
        end += 1
    command = " ".join(line.text.rstrip("\\").strip() for line in lines[at : end + 1])
    match = _COMMAND.search(command)
    return lines[at]._replace(text=match["command"].rstrip("`") if match else command)


FIRST_FAILURE_TITLE = "Root Cause (first observed failure)"
"""Torchrun's, above the rank that it saw fail first."""
_RANK_ROW = re.compile(r"\s*rank\s*: (?P<rank>\d+)")
ABSENT_RANKS = re.compile(
    r"\bRanks? (?P<ranks>\d+(?:, \d+)*) failed to pass monitoredBarrier|\b(?P<came>\d+)/(?P<of>\d+) clients joined"
)
STATED_WORLD_SIZE = re.compile(r"\b(?:WORLD_SIZE|[Ww]orld[ _][Ss]ize)['\"]?\s{0,2}[=:]\s{0,2}(?P<size>\d+)")
_WORLD_SIZES = (
    STATED_WORLD_SIZE,
    re.compile(r"\bnranks (?P<size>\d+)"),
    re.compile(r"\b(?:WORLD_SIZE|world[ _]size|num_processes|nproc[_-]per[_-]node)\b\D{0,4}(?P<size>\d+)"),
)
"""The more certain ones first."""
MAX_WORLD_SIZE = 4096
"""Maximum number of ranks: a larger number is not a world size."""


def first_to_die_in(lines: Iterable[LogLine]) -> tuple[int, LogLine] | None:
    """The rank that torchrun reports as the first to fail, and the line that names it."""
    rest = iter(lines)
    if not any(FIRST_FAILURE_TITLE in line.text for line in rest):
        return None
    rows = ((line, match) for line in rest if (match := _RANK_ROW.match(line.text)))
    return next(((int(match["rank"]), line) for line, match in rows), None)


def world_size_in(text: str) -> int:
    """The number of ranks that a text names; 0 if it names none."""
    match = next(filter(None, (pattern.search(text) for pattern in _WORLD_SIZES)), None)
    size = int(match["size"]) if match else 0
    return size if size <= MAX_WORLD_SIZE else 0


_GPU = re.compile(
    r"\b([Vv]100|T4|P40|P100|[Aa]100|A[1348]0|A800|[Hh]100|H800|H20|H200|B200|L40S?|[RG]TX \d{4}|910B)\b"
)


def gpu_in(text: str) -> str | None:
    """The first GPU that a log names."""
    match = _GPU.search(text)
    return match[1] if match else None
