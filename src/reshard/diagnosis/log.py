"""Parse logs of many ranks: streams without colours and prefixes, tracebacks, versions and facts.

Launchers add a prefix to each line, and the lines of ranks interleave. A line belongs to the stream that its prefix
names; within a stream a traceback is contiguous again.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from reshard.diagnosis.failures import progress
from reshard.diagnosis.prefixes import START
from reshard.diagnosis.reading import shortened
from reshard.diagnosis.thinning import thinned
from reshard.diagnosis.tracebacks import Line, Traceback, frame_of, tracebacks

__all__ = ["Line", "Log", "Traceback", "read_log"]


@dataclass
class Log:
    """A parsed log. `versions` are those of packages, `facts` are about the launch."""

    name: str
    lines: list[Line]
    tracebacks: list[Traceback]
    versions: dict[str, str]
    facts: dict[str, str]

    @property
    def text(self) -> str:
        """The text, stream by stream, so that the lines of a rank are contiguous."""
        return "\n".join(line.text for line in self.ordered)

    @property
    def ordered(self) -> list[Line]:
        """Lines by stream, streams by their first line."""
        streams: dict[str, list[Line]] = {}
        for line in self.lines:
            streams.setdefault(line.stream, []).append(line)
        return [line for stream in streams.values() for line in stream]

    @cached_property
    def progress(self) -> dict[str, int]:
        """The number of the last line in each stream that shows that its process continued."""
        return progress(self._own)

    @cached_property
    def measured(self) -> dict[str, int]:
        """The same, of lines with metrics only."""
        return progress(self._own, measured=True)

    @cached_property
    def _own(self) -> list[Line]:
        """The lines without those, indented, that continue an exception's message: it may quote a step and its loss."""
        quoted = {(each.stream, at) for each in self.tracebacks for at in range(each.last + 1, each.end + 1)}
        return [
            each
            for each in self.lines
            if not (each.text[:1].isspace() and (each.stream, each.number) in quoted)
        ]


def read_log(name: str, content: str | Iterable[str]) -> Log:
    """Parse a log, given as text, or as an iterable of lines.

    Repeated lines of a long log are dropped, and the middle of a long line.
    """
    raw = content.split("\n") if isinstance(content, str) else content
    lines = [line for each in thinned(map(shortened, raw)) for line in _unescaped(Line(*each))]
    lines = _begun_elsewhere(lines)
    streams: dict[str, list[Line]] = {}
    for line in lines:
        streams.setdefault(line.stream, []).append(line)
    found = [each for stream in streams.values() for each in tracebacks(stream)]
    text = "\n".join(line.text for line in lines)
    return Log(name, lines, sorted(found, key=lambda t: t.first), _versions(text), _facts(text))


_ERROR = re.compile(r"\s*(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception): ")


def _begun_elsewhere(lines: list[Line]) -> list[Line]:
    """Assign a first line that was pasted without its prefix to the stream that continues it.

    That is an exception (with its traceback) directly before the first line that has a prefix.
    """
    first = next((at for at, line in enumerate(lines) if line.stream), 0)
    if not first or not _ERROR.match(lines[first - 1].text):
        return lines
    if START in lines[first].text or _ERROR.match(lines[first].text) or frame_of(lines[first].text):
        return lines
    begin = max((at for at in range(first) if START in lines[at].text), default=first - 1)
    stream = lines[first].stream
    return [*lines[:begin], *(line._replace(stream=stream) for line in lines[begin:first]), *lines[first:]]


_ESCAPED_FRAME = re.compile(rf'File \\+"[^"]+\\", line \d+|{re.escape(START)}:\\+n {{1,4}}File "')


def _unescaped(line: Line) -> list[Line]:
    """The lines inside a line of JSON, or of Python's bytes, that contains a traceback: torchelastic's error files."""
    if not _ESCAPED_FRAME.search(line.text):
        return [line]
    parts = re.split(r'(?<!\\)\\+n|(?<!\\)(?="[,}\]])', line.text)
    return [line._replace(text=shortened(re.sub(r"(?<!\\)\\+(?=[\"'])", "", part))) for part in parts]


PACKAGES = (
    *("torch", "transformers", "accelerate", "trl", "peft", "deepspeed", "safetensors", "tokenizers"),
    *("megatron-core", "transformer-engine", "flash-attn", "vllm", "verl", "ms-swift", "datasets", "numpy"),
    *("triton", "bitsandbytes", "xformers", "huggingface-hub", "llamafactory", "axolotl"),
    *("pytorch-lightning", "lightning", "colossalai"),
)
_ALIASES = {
    "pytorch": "torch",
    "pytorch_lightning": "pytorch-lightning",
    "megatron_core": "megatron-core",
    "flash_attn": "flash-attn",
    "swift": "ms-swift",
    "huggingface_hub": "huggingface-hub",
    "ms_swift": "ms-swift",
}
_VERSION = re.compile(
    r"(?<![\w.-])(?P<name>" + "|".join([*PACKAGES, *_ALIASES]).replace("-", "[-_]") + r")[\"'`]?(?: info)?"
    r"(?:[ _]?version)?[\"'`]?(?:\s*[:=]+\s*(?:version=)?|\s+|-)[\"']?v?"
    r"(?P<version>\d+\.\d+(?:\.\d+)?(?:\.?(?:dev|rc|post)\d+)?)",
    re.IGNORECASE,
)


def _versions(text: str) -> dict[str, str]:
    """Versions of packages in the log, the first of each."""
    found: dict[str, str] = {}
    for match in _VERSION.finditer(text):
        name = match["name"].lower()
        found.setdefault(_ALIASES.get(name, name.replace("_", "-")), match["version"])
    return found


_FACTS = {
    "launcher": re.compile(
        r"\b(torchrun|accelerate launch|deepspeed(?= --)|srun|torch\.distributed\.(?:run|launch))\b"
    ),
    "world size": re.compile(
        r"\b(?:WORLD_SIZE|world[ _]size|num_processes|nproc[_-]per[_-]node)\b\D{0,4}(\d+)"
    ),
    "first rank to die": re.compile(
        r"Root Cause \(first observed failure\):(?:\n.*?){1,8}?rank\s*:\s*(\d+)", re.MULTILINE
    ),
    "gpu": re.compile(
        r"\b([Vv]100|T4|P40|P100|[Aa]100|A[1348]0|A800|[Hh]100|H800|H20|H200|B200|L40S?|[RG]TX \d{4}|910B)\b"
    ),
}


def _facts(text: str) -> dict[str, str]:
    return {name: match[1] for name, pattern in _FACTS.items() if (match := pattern.search(text))}
