"""Diagnose a log: what the catalogue knows of it, or the first failure and what comes near."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from reshard.doctor.collectives import compared
from reshard.doctor.entries import Entry, catalogue
from reshard.doctor.failures import CUT_OFF, EXIT, asks, is_launchers
from reshard.doctor.finding import Finding, Place, Text
from reshard.doctor.kinds import BY_KIND, filled_in, told_of
from reshard.doctor.log import Log, Traceback, read_log
from reshard.doctor.match import Match, first_sign, match_log
from reshard.doctor.reading import clipped, encoding_of, lines_of
from reshard.doctor.rules import told
from reshard.doctor.upstream import search_of
from reshard.doctor.words import words
from reshard.errors import ReshardError
from reshard.shown import shown_lines

STDIN = "-"
UNKNOWN = "unknown-failure"
UNKNOWN_THAT_ASKS = "unknown-failure-that-asks"
WORKER_UNSEEN = "worker-traceback-missing"
LARGEST = 64 << 20
"""Bytes that are reasonable to hold as one text; a file is read line by line, however long it is."""
BEGIN = 4096
"""Bytes that show what a file is."""


def diagnose_log(target: str, on_bytes: Callable[[int], None] | None = None) -> list[Finding]:
    """The findings of one log, the first cause first. `target` is a path, or "-" for standard input.

    `on_bytes` is told of bytes as they are read. Raises ReshardError if there is nothing that can be read.
    """
    try:
        with nullcontext(sys.stdin.buffer) if target == STDIN else Path(target).open("rb") as file:
            begin = file.read(BEGIN)
            if target == STDIN and (not begin or encoding_of(begin) is None):
                raise ReshardError(
                    "standard input is no text" if begin else "standard input is empty",
                    expected="the log of a run",
                    remedy="pipe both streams of the run: COMMAND 2>&1 | reshard doctor -",
                )
            return diagnose_text(target, lines_of(file, begin, on_bytes or (lambda count: None)))
    except OSError as error:
        raise ReshardError("a log cannot be read", file=target, found=error.strerror) from None


def diagnose_text(name: str, content: str | Iterable[str]) -> list[Finding]:
    """The findings of a log that is at hand, as text or as its lines; `name` is what it is called."""
    log = read_log(name, content)
    matches = match_log(log, catalogue().values())
    symptoms = tuple(match.entry.id for match in matches if match.entry.kind == "symptom")
    causes = [match for match in matches if match.entry.kind != "symptom"]
    root = first_sign(log)
    if root is not None and all(match.entry.kind in WARNINGS for match in causes):
        if is_launchers(root):
            if symptoms and not causes:
                return [_finding(match, log, ()) for match in matches]
            return [_unseen(root, log), *(_finding(match, log, ()) for match in causes)]
        return [_unknown(root, log, symptoms), *(_finding(match, log, ()) for match in causes)]
    if causes:
        return [_finding(match, log, symptoms if match is causes[0] else ()) for match in causes]
    return [_finding(match, log, ()) for match in matches]


LONGEST_SAID = 2000
"""Characters of a message that are shown as the cause."""
SHOWN = 300
"""Characters of a line that are shown: some messages list every model there is."""
WARNINGS = ("warning", "silent")
"""Kinds of entries that no run dies of."""


def _finding(match: Match, log: Log, also: tuple[str, ...]) -> Finding:
    entry = match.entry
    return Finding(
        id=entry.id,
        title=entry.title,
        cause=entry.cause,
        cure=_cure(match, log),
        certainty=match.certainty,
        severity="warning" if entry.kind in WARNINGS else "error",
        places=(Place(log.name, match.line.number, clipped(match.line.text.strip(), SHOWN)),),
        evidence=(*match.evidence, *_told_by(match, log)),
        sources=entry.sources,
        also=(*match.also, *also),
    )


def _told_by(match: Match, log: Log) -> list[Text]:
    """What an entry's own look at the log adds to its evidence."""
    if match.entry.id == "hang-nccl":
        return compared(log)
    root = first_sign(log)
    return told_of(root, log) if match.entry.id in BY_KIND and root else []


def _cure(match: Match, log: Log) -> Text:
    root = first_sign(log)
    return filled_in(match.entry.cure, root, log) if match.entry.id in BY_KIND and root else match.entry.cure


def _unseen(root: Traceback, log: Log) -> Finding:
    """A log that has the launcher's word only that a worker failed."""
    last = (root.message if root.exception == EXIT else root.said).split("\n")[0]
    who = log.facts.get("first rank to die", "?")
    return told(
        WORKER_UNSEEN, [Place(log.name, root.last, clipped(last, SHOWN))], {"who": who}, certainty="likely"
    )


def _unknown(root: Traceback, log: Log, symptoms: tuple[str, ...]) -> Finding:
    """A failure that no entry explains: said to be unknown, with its traceback and what comes nearest."""
    near = nearest(root.said, catalogue().values())
    first = root.root
    said = words("cut-off") if first.exception == CUT_OFF else Text.same(_quoted(first.said))
    frames = [f"  {frame}" for frame in first.frames[-6:]]
    quoted = Text("\n".join([*frames, said.en]), "\n".join([*frames, said.zh]))
    last = (root.message if root.exception == CUT_OFF else root.said).split("\n")[0]
    place = Place(log.name, root.last, clipped(last, SHOWN))
    asked = clipped(asks(root.message), LONGEST_SAID)
    values: dict[str, object] = {"who": root.stream or "?", "shown": quoted, "asked": asked}
    values["near"] = ", ".join(near) or "–"
    known = None if first.exception in (CUT_OFF, EXIT) else search_of(first)
    upstream = words("search-upstream", name=known[0], url=known[1]) if known else Text.same("")
    values["upstream"] = Text(*(f"{text}\n" if text else "" for text in (upstream.en, upstream.zh)))
    found = told(UNKNOWN_THAT_ASKS if asked else UNKNOWN, [place], values, certainty="possible")
    return replace(found, id=UNKNOWN, also=symptoms)


def _quoted(said: str) -> str:
    """What a log says, set in as frames are, so that no line is taken for one of ours."""
    return "\n".join(f"  {line}" for line in clipped(shown_lines(said), LONGEST_SAID).split("\n"))


_WORD = re.compile(r"[A-Za-z_][A-Za-z_.]{2,}")


def nearest(text: str, entries: Iterable[Entry], count: int = 3) -> list[str]:
    """The ids of entries whose excerpts share most words with a text; rare words count most."""
    known = {entry.id: set(_WORD.findall(entry.excerpt.lower())) for entry in entries}
    asked = set(_WORD.findall(text.lower()))
    common = {word: sum(word in each for each in known.values()) for word in asked}

    def score(identifier: str) -> float:
        return sum(1 / common[word] for word in asked & known[identifier])

    ranked = sorted(known, key=score, reverse=True)
    return [identifier for identifier in ranked[:count] if score(identifier) > 0.5]
