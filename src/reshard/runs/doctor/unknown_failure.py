"""A failure that nothing explains: where it happened, what its message asks for, and entries that are like it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

from reshard.base.foreign_text import clipped, shown_lines
from reshard.base.languages import Text
from reshard.runs.checks.finding import UNKNOWN_FAILURE, Finding
from reshard.runs.checks.location import Location
from reshard.runs.checks.phrases import words
from reshard.runs.checks.rules import told
from reshard.runs.doctor.entries.catalogue_entry import CatalogueEntry, catalogue
from reshard.runs.doctor.text.first_failure import which_is_first
from reshard.runs.doctor.text.log import Log, Traceback
from reshard.runs.doctor.text.partial_failures import CUT_OFF_TRACEBACK, EXIT_STATUS, is_launchers
from reshard.runs.doctor.text.remedy_sentences import asks
from reshard.runs.doctor.upstream_search import issues_of, own_code

UNKNOWN_THAT_ASKS = "unknown-failure-that-asks"
WORKER_TRACEBACK_MISSING = "worker-traceback-missing"
MAX_MESSAGE = 2000
"""Maximum characters of a message that are shown as the cause."""


def last_line(root: Traceback, log: Log) -> Location:
    """The place of a failure, with the first line of its message."""
    said = (root.message if root.exception in (CUT_OFF_TRACEBACK, EXIT_STATUS) else root.said).split("\n")[0]
    return Location.of(log.name, root.last, said)


def of_unseen(root: Traceback, log: Log) -> Finding | None:
    """The finding for a log in which only the launcher reports that a worker failed."""
    if not is_launchers(root):
        return None
    who = log.first_to_die
    evidence = [] if who is None else [words("first-to-die", who=who)]
    return told(WORKER_TRACEBACK_MISSING, [last_line(root, log)], certainty="likely", evidence=evidence)


def of_unknown(root: Traceback, log: Log) -> Finding | None:
    """The finding for a failure that no entry explains: with its traceback and the nearest entries."""
    if is_launchers(root):
        return None
    near = nearest(root.said, catalogue().values())
    first = root.root
    said = words("cut-off") if first.exception == CUT_OFF_TRACEBACK else Text.same(_quoted(first.said))
    frames = [f"  {frame}" for frame in first.frames[-6:]]
    frames += [f"    {shown_lines(first.source)}"] if first.source else []
    place = last_line(root, log)
    asked = clipped(asks(root.message), MAX_MESSAGE)
    messages = [] if asked == first.message.strip() else [said]  # the remedy quotes it
    quoted = Text.lines([*map(Text.same, frames), *messages])
    values: dict[str, object] = {"shown": quoted, "asked": asked}
    values["near"] = words("near-entries", near=", ".join(near)) if near else Text.same("")
    known = None if first.exception in (CUT_OFF_TRACEBACK, EXIT_STATUS) else issues_of(first)
    upstream = words("search-upstream", name=known[0], url=known[1]) if known else Text.same("")
    if own := own_code(first):
        upstream = words("own-code", frame=own)
    values["upstream"] = Text(*(f"{text}\n" if text else "" for text in (upstream.en, upstream.zh)))
    rule = UNKNOWN_THAT_ASKS if asked else UNKNOWN_FAILURE
    found = told(rule, [place], values, certainty="possible", evidence=[which_is_first(root)])
    return replace(found, code=UNKNOWN_FAILURE)


def _quoted(said: str) -> str:
    """Text from a log, indented like frames, to distinguish it from the doctor's own lines."""
    return "\n".join(f"  {line}" for line in clipped(shown_lines(said), MAX_MESSAGE).split("\n"))


_WORD = re.compile(r"[A-Za-z_][A-Za-z_.]{2,}")
LEAST_WORDS = 5
"""Minimum words of a failure that are compared with entries: fewer occur in any message."""
LEAST_LIKENESS = 0.3
"""The share of a failure's words, weighted by rarity, that a near entry must contain."""


def nearest(text: str, entries: Iterable[CatalogueEntry], count: int = 3) -> list[str]:
    """The ids of entries whose excerpts share most words with a text; rare words count most."""
    known = {entry.id: set(_WORD.findall(entry.excerpt.lower())) for entry in entries}
    asked = set(_WORD.findall(text.lower()))
    if len(asked) < LEAST_WORDS:
        return []
    weight = {word: 1 / (1 + sum(word in each for each in known.values())) for word in asked}
    total = sum(weight.values())

    def share(identifier: str) -> float:
        return sum(weight[word] for word in asked & known[identifier]) / total

    ranked = sorted(known, key=share, reverse=True) if total else []
    return [identifier for identifier in ranked[:count] if share(identifier) >= LEAST_LIKENESS]
