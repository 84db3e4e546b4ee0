"""Hangs: the collectives that ranks waited for when their watchdog ended them, and hangs that people describe."""

from __future__ import annotations

import re

from reshard.diagnosis.finding import Finding, Place, Text
from reshard.diagnosis.lastwords import describes_hang
from reshard.diagnosis.log import Log, Traceback
from reshard.diagnosis.reading import clipped
from reshard.diagnosis.rules import told
from reshard.diagnosis.words import words

_WORK = re.compile(
    r"Rank (?P<rank>\d+)\] Watchdog caught collective operation timeout: WorkNCCL\(SeqNum=(?P<seq>\d+), "
    r"OpType=(?P<op>\w+)(?:, NumelIn=(?P<numel>\d+))?"
)


_WATCHED = re.compile(r"watchdog(?: thread)? got stuck for|[Hh]eart[bB]eat ?[mM]onitor timed out")
"""What torch reports if a process hangs outside of a collective."""


def compared(log: Log) -> list[Text]:
    """What SeqNum, OpType and NumelIn of the ranks show in comparison; empty if fewer than two ranks have them."""
    works: dict[int, tuple[int, str, str]] = {}  # NumelIn is "" if the log does not have it
    for match in _WORK.finditer(log.text):
        works.setdefault(int(match["rank"]), (int(match["seq"]), match["op"], match["numel"] or ""))
    if len(works) < 2:
        return []
    numbers = sorted({seq for seq, _, _ in works.values()})
    if len(numbers) > 1:
        late = ", ".join(str(rank) for rank in sorted(works) if works[rank][0] == numbers[0])
        return [words("ranks-behind", first=numbers[0], last=numbers[-1], late=late)]
    kinds = sorted({work[1:] for work in works.values()})
    if len(kinds) > 1:
        shown = "; ".join(f"{_shown(*kind)}: rank {_ranks(works, kind)}" for kind in kinds)
        sizes = "-sizes" * (len({op for op, _ in kinds}) == 1)
        return [words(f"ranks-diverged{sizes}", number=numbers[0], shown=shown)]
    return [words("ranks-alike", number=numbers[0], shown=_shown(*kinds[0]), count=len(works))]


def described(root: Traceback, log: Log) -> Finding | None:
    """The finding for a hang in somebody's own words; None if there is a log of it, or an exception."""
    watched = _WATCHED.search(root.said)
    if root.exception or not (watched or describes_hang(log.lines)):
        return None
    reason = _reason(log)
    first = words(f"{reason}-way") if reason else None
    values = {
        "why": words(reason or "hang-unknown"),
        "first": Text(f"{first.en}\n", f"{first.zh}\n") if first else Text.same(""),
    }
    place = Place(log.name, root.last, clipped(root.said, 300))
    return told("hang-described", [place], values, certainty="likely" if watched or reason else "possible")


_REASONS = (
    (
        "hang-build",
        re.compile(r"as PyTorch extensions root|Loading extension module|[Dd]etected CUDA files"),
    ),
    (
        "hang-data",
        re.compile(
            r"(?<!\w)(?:[Tt]okeniz(?:er|ing)|Map|Filter|Converting format|Packing|Grouping)(?!\w)"
            r"[^\n%:]{0,60}: {1,3}\d{1,2}%"
        ),
    ),
)
"""What the last lines of a log show about a hang."""
_OF_ONE_RANK = re.compile(r"is_(?:local_)?main_process|is_world_process_zero|\brank\b(?:\(\))? ?== ?0\b")
_PEER = re.compile(r"\bvia P2P/")
_BEGAN = re.compile(r"SeqNum=(?:[4-9]|\d\d)|'loss':|\bstep \d|(?<!\d)\d{1,9}/\d{1,9} \[\d+:\d\d")


def way(log: Log) -> Text | None:
    """What to do first about a timeout, if the log shows what a rank was doing."""
    reason = _reason(log)
    return words(f"{reason}-way") if reason else None


def _reason(log: Log) -> str:
    """The name of what a rank was doing when a run hung; "" if the log does not show it."""
    ends = [line.text for line in log.lines if line.text.strip()]
    for name, pattern in _REASONS:
        if any(map(pattern.search, ends[-MOST_LINES:])):
            return name
    if _OF_ONE_RANK.search(log.text):
        return "hang-rank"
    if _PEER.search(log.text) and not _BEGAN.search(log.text):
        return "hang-peer"
    return ""


MOST_LINES = 12
"""Lines at the end of a log that show what the run was doing."""


def _shown(operation: str, elements: str) -> str:
    return f"{operation} × {elements}" if elements else operation


def _ranks(works: dict[int, tuple[int, str, str]], kind: tuple[str, str]) -> str:
    return ", ".join(str(rank) for rank in sorted(works) if works[rank][1:] == kind)
