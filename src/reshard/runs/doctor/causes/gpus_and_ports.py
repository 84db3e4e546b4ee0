"""Failures of processes that share a machine: fewer GPUs than processes, one local rank for all, a port in use."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from reshard.base.languages import Text
from reshard.runs.checks import rules
from reshard.runs.checks.finding import Finding
from reshard.runs.checks.phrases import phrase_text, sentence
from reshard.runs.doctor.causes.out_of_memory import lines_near
from reshard.runs.doctor.text.log import Log, Traceback

_GPUS = tuple(
    re.compile(pattern)
    for pattern in (
        r"World size \((?P<asked>\d+)\) is larger than the number of available GPUs \((?P<there>\d+)\)",
        r"Total available GPUs (?P<there>\d+)\S* is less than total desired GPUs (?P<asked>\d+)",
        r"requested gpus?: (?P<asked>\[[\d, ]+\])\s+But your machine only has: (?P<there>\[[\d, ]*\])",
        r"(?:requires|needs|requested|[Ee]xpected) (?P<asked>\d+) (?:GPUs?|devices?),? (?:but|and) (?:only|found|got"
        r"|there (?:is|are)(?: only)?)(?: found)? (?P<there>\d+)",
        r"device=(?:\\x0)?(?P<last>\d{1,3}), num_gpus=(?:\\x0)?(?P<there>\d{1,3})",
    )
)
"""Messages with the number of GPUs that were asked for, or the last one's, and the number that there are."""
_ORDINAL = re.compile(r"invalid device ordinal")
_PORT = re.compile(
    r"port: (?P<named>\d+), .{0,80}EADDRINUSE|(?:[Pp]ort |:)(?P<port>\d{2,5})\b[^\n]{0,60}(?:already in use|in use by)"
    r"|EADDRINUSE|[Aa]ddress already in use"
)
GPU_COUNT_FLAG = (
    r"(?<![\w-])(?:--?[\w.-]{{0,40}}(?:nproc|num[_-]?proc|gpus|tensor|tp|np|devices|tasks)[\w.-]{{0,40}}[ =]{{1,4}}"
    r"|NPROC_PER_NODE=){}\b"
)
"""The flag of a launcher or engine that sets a number."""


def of_devices(root: Traceback, log: Log) -> Finding | None:
    """The finding that a process got no GPU, or not its port."""
    kind, values = _request(root.error_text)
    if not kind:
        kind, values = _request(lines_near(root, log))
    if not kind:
        return None
    texts = {**values, "told": sentence(list(_details(kind, values, root, log)))}
    finding = rules.finding(f"short-{kind}", values=texts)
    first = typed_rank(root, log)
    return replace(finding, remedy=Text.lines([first, finding.remedy])) if first else finding


def _request(message: str) -> tuple[str, dict[str, object]]:
    """What a message says was asked for, with its numbers; "" for messages about something else."""
    if match := next(filter(None, (pattern.search(message) for pattern in _GPUS)), None):
        requested, there = _counts(match)
        return "gpus", {"asked": requested, "there": there}
    if port := _PORT.search(message):
        return "port", {"port": port["named"] or port["port"] or "MASTER_PORT"}
    return ("ordinal" if _ORDINAL.search(message) else ""), {}


def _details(kind: str, values: Mapping[str, object], root: Traceback, log: Log) -> Iterator[Text]:
    """The numbers, the flag that set them, and the first rank without a GPU."""
    flag = re.search(GPU_COUNT_FLAG.format(values["asked"]), log.text) if kind == "gpus" else None
    if kind == "gpus":
        yield phrase_text("short-gpus-counted", **values)
    if flag:
        yield phrase_text("short-typed", typed=flag[0])
    if kind == "ordinal" and (first := min(_ranks_that_say(root.error_text, log), default=0)):
        yield phrase_text("ordinal-first", first=first)


def _counts(match: re.Match[str]) -> tuple[int, int]:
    """How many GPUs were asked for, and how many there are: numbers, lists, or the number of the last one."""
    texts = {name: text for name, text in match.groupdict().items() if text}
    if "last" in texts:
        return int(texts["last"]) + 1, int(texts["there"])
    requested, there = (
        len(re.findall(r"\d+", texts[name])) if texts[name].startswith("[") else int(texts[name])
        for name in ("asked", "there")
    )
    return requested, there


def _ranks_that_say(message: str, log: Log) -> Iterator[int]:
    return (each.rank for each in log.tracebacks if each.error_text == message and each.rank is not None)


_TAKEN = re.compile(r"EADDRINUSE|[Aa]ddress already in use|invalid device ordinal|Duplicate GPU detected")
"""What processes say that all take the same rank: one port for all of them, one GPU."""
_LAUNCHED = re.compile(
    r"\b(?:torchrun|torch\.distributed\.(?:run|launch)|accelerate[ -]launch)\s(?P<command>(?:[^\n]|(?<=\\)\n){0,2000})"
)
_ONE_RANK = re.compile(r"(?<!\S)--local[-_]rank[ =]\d{1,4}(?!\S)")
"""The same rank for every process, if it stands behind the script in a launcher's command."""


def typed_rank(root: Traceback, log: Log) -> Text | None:
    """What to do first if the command line gives all processes the same local rank."""
    commands = _LAUNCHED.finditer(log.text) if _TAKEN.search(root.error_text) else ()
    typed = (_ONE_RANK.search(each["command"].partition(".py")[2]) for each in commands)
    option = next(filter(None, typed), None)
    return phrase_text("local-rank-typed-way", typed=option[0]) if option else None
