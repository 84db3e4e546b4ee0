"""Logs of many ranks, taken apart: streams without colours and prefixes, tracebacks, and what else they tell.

Launchers put something before each line, and ranks talk at once. A line belongs to the stream that its prefix names;
within a stream a traceback is whole again. Prefixes: torchrun's `[rank0]:` and `[default0]:`, `3: ` of `srun -l`,
`[1,0]<stderr>:` of MPI, `(WorkerDict pid=7)` of Ray, `worker-1: ` of DeepSpeed, `trainer-0  | ` of Docker Compose, and
the times and stream names of Kubernetes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from reshard.doctor.thinning import thinned

_ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07]*\x07|\x1b[@-_]")
_TIME = re.compile(
    r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?(?: (?:stdout|stderr) [FP])?\s+"
)
_LABEL = re.compile(
    r"""(?:
      \[(?:rank|default|trainer|worker)[-_ ]?(?P<torchrun>\d+)\]:\ ?   # torchrun, torch's own excepthook
    | \[\w+\d+\|(?P<redirect>\d+)\]:\ ?
    | (?P<srun>\d{1,5}):\ (?=\S|\ |$)                                   # srun --label
    | \[\d+,(?P<mpi>\d+)\]<std(?:err|out)>:\ ?
    | \((?P<ray>[\w.]+(?:\.\w+\(\))?\ pid=\d+(?:,\ ip=[\d.]+)?)\)\ ?
    | (?P<host>(?:worker|node|pod|rank|trainer|gpu)[\w.-]*\d+)(?:\s+\||:)\ ?
    | \[(?P<pod>pod/[\w./-]+)\]\ ?
    )""",
    re.VERBOSE,
)


class Line(NamedTuple):
    """One line of a log: `number` counts from 1, `stream` is what its prefix names ("" without one)."""

    number: int
    stream: str
    text: str


@dataclass
class Traceback:
    """A Python traceback as one stream printed it. `before` is the one that it says came before.

    Lines `first` to `end`: the exception stands in line `last`, and its message goes on to `end`.
    """

    stream: str
    first: int
    last: int
    end: int
    exception: str
    message: str
    frames: list[str] = field(default_factory=list)
    before: Traceback | None = None

    @property
    def root(self) -> Traceback:
        """The first of a chain."""
        return self.before.root if self.before else self


@dataclass
class Log:
    """A log taken apart. `versions` and `facts` are what it tells of packages and of the launch."""

    name: str
    lines: list[Line]
    tracebacks: list[Traceback]
    versions: dict[str, str]
    facts: dict[str, str]

    @property
    def text(self) -> str:
        """Stream by stream, so that what one rank said stands together."""
        return "\n".join(line.text for line in self.ordered)

    @property
    def ordered(self) -> list[Line]:
        """Lines by stream, streams by their first line."""
        streams: dict[str, list[Line]] = {}
        for line in self.lines:
            streams.setdefault(line.stream, []).append(line)
        return [line for stream in streams.values() for line in stream]


def read_log(name: str, content: str | Iterable[str]) -> Log:
    """Take a log apart: its text, or its lines as they come. Of a long one, lines that only repeat are left out."""
    raw = content.split("\n") if isinstance(content, str) else content
    lines = [Line(*each) for each in thinned(map(_parted, raw))]
    streams: dict[str, list[Line]] = {}
    for line in lines:
        streams.setdefault(line.stream, []).append(line)
    tracebacks = [found for stream in streams.values() for found in _tracebacks(stream)]
    text = "\n".join(line.text for line in lines)
    return Log(name, lines, sorted(tracebacks, key=lambda t: t.first), _versions(text), _facts(text))


def _parted(raw: str) -> tuple[str, str]:
    """The stream that a line belongs to, and its text without colours and prefixes."""
    text = _ANSI.sub("", raw) if "\x1b" in raw else raw
    text = text.rstrip()
    if "\r" in text:
        text = text.split("\r")[-1]  # a progress bar rewrites its line
    return _unprefixed(text)


def _unprefixed(text: str) -> tuple[str, str]:
    """What a line's prefixes name, and the line without them."""
    labels: list[str] = []
    while True:
        if (match := _TIME.match(text)) and match.end() < len(text):
            text = text[match.end() :]
        elif len(labels) < 3 and (match := _LABEL.match(text)):
            labels.append(next(value for value in match.groups() if value is not None))
            text = text[match.end() :]
        else:
            return "/".join(labels), text


_START = "Traceback (most recent call last):"
_FRAME = re.compile(r'\s*File "([^"]+)", line (\d+), in (.+)')
_RAISED = re.compile(r"\s*((?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*)(?:: (.*)|:?$)")
_LINKS = (
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
)
MESSAGE_LINES = 12
"""Lines of an exception's message that are kept: some print a whole table."""


def _tracebacks(lines: list[Line]) -> Iterator[Traceback]:
    """The tracebacks of one stream; those that others are chained to stand inside these."""
    before: Traceback | None = None
    at = 0
    while at < len(lines):
        if not lines[at].text.strip().startswith(_START):
            at += 1
            continue
        found, at = _traceback(lines, at)
        if found is None:
            continue
        found.before = before
        linked = next(
            (i for i in range(at, min(at + 3, len(lines))) if lines[i].text.strip() in _LINKS), None
        )
        if linked is None:
            yield found
            before = None
        else:
            before, at = found, linked + 1


def _traceback(lines: list[Line], at: int) -> tuple[Traceback | None, int]:
    """The traceback that begins at a line, if its exception is there, and where it ends."""
    indent = len(lines[at].text) - len(lines[at].text.lstrip())
    frames: list[str] = []
    start = at
    at += 1
    while at < len(lines):
        text = lines[at].text
        if frame := _FRAME.match(text):
            frames.append(f"{frame[1]}:{frame[2]} {frame[3]}")
        elif text.strip() and len(text) - len(text.lstrip()) <= indent and (raised := _RAISED.match(text)):
            message = [raised[2] or ""]
            end = at + 1
            while end < len(lines) and end - at < MESSAGE_LINES and _goes_on(lines[end].text):
                message.append(lines[end].text)
                end += 1
            found = Traceback(
                lines[start].stream,
                lines[start].number,
                lines[at].number,
                lines[end - 1].number,
                raised[1],
                "\n".join(message).strip(),
                frames,
            )
            return found, end
        elif text.strip().startswith(_START):
            return None, at
        at += 1
    return None, at


def _goes_on(text: str) -> bool:
    """Whether a line after an exception still belongs to its message."""
    return bool(text.strip()) and not text.strip().startswith((_START, *_LINKS)) and not _LOGGED.match(text)


_LOGGED = re.compile(
    r"\[?(?:DEBUG|INFO|WARN(?:ING)?|ERROR|CRITICAL|[EWI]\d{4})\b|\[\d{4}-|={20,}|-{20,}|\s*\d+%\|"
)

PACKAGES = (
    *("torch", "transformers", "accelerate", "trl", "peft", "deepspeed", "safetensors", "tokenizers"),
    *("megatron-core", "transformer-engine", "flash-attn", "vllm", "verl", "ms-swift", "datasets", "numpy"),
)
_ALIASES = {
    "pytorch": "torch",
    "megatron_core": "megatron-core",
    "flash_attn": "flash-attn",
    "swift": "ms-swift",
}
_VERSION = re.compile(
    r"(?<![\w.-])(?P<name>" + "|".join([*PACKAGES, *_ALIASES]).replace("-", "[-_]") + r")[\"'`]?(?: info)?"
    r"(?:[ _]?version)?[\"'`]?(?:\s*[:=]+\s*(?:version=)?|\s+|-)[\"']?v?"
    r"(?P<version>\d+\.\d+(?:\.\d+)?(?:\.?(?:dev|rc|post)\d+)?)",
    re.IGNORECASE,
)


def _versions(text: str) -> dict[str, str]:
    """Versions of packages that the log tells, the first of each."""
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
    "gpu": re.compile(r"\b(V100|T4|P100|A100|A800|H100|H800|H20|H200|B200|L40S?|RTX \d{4}|910B)\b"),
}


def _facts(text: str) -> dict[str, str]:
    return {name: match[1] for name, pattern in _FACTS.items() if (match := pattern.search(text))}
