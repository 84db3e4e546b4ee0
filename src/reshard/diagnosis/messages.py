"""Entries by the beginning of their message, for logs that contain no more of it.

People paste a message that is truncated, wrapped by a terminal, or quoted in a sentence of their own, so a pattern that
needs its second half does not match. An entry's excerpt has the complete message. If a text ends inside it, its first
words identify the entry: likely, but never with certainty. If a text continues in other words, it is another message.
"""

from __future__ import annotations

import re
from functools import cache, lru_cache
from itertools import dropwhile, zip_longest

from reshard.diagnosis.entries import Entry, catalogue
from reshard.diagnosis.log import read_log

FEWEST, SHORTEST = 6, 30
"""Minimum words and letters of a message that must be there."""
MOST = 24
"""Maximum words of a message that are compared."""
SEARCHED = 60_000
"""Characters at the end of a log that are searched."""

_WORD = re.compile(r"(?<!\w)'[^'\s]*'|(?<!\w)\"[^\"\s]*\"|[A-Za-z_]\w*(?:'t\b)?|\d[\w.,]*|[/~][\w./-]+")
_GENERAL = re.compile(r"\[Errno \d+\]|No such file or directory|Permission denied|\(exitcode: ")
"""Messages of the system and of launchers that do not identify an entry: many failures have their words."""
_LITERAL = re.compile(r"[A-Za-z_]+(?:'t)?")
_END = re.compile(r"[”“」》]|[\u4e00-\u9fff]|\n\s*\n")
"""What ends a quotation: a quotation mark, a word in another script, an empty line."""


def begun(text: str) -> list[tuple[Entry, int]]:
    """The entries inside whose message a text ends, with the position; those of which it contains most."""
    offset = max(0, len(text) - SEARCHED)
    found = []
    for identifier, words in _messages().items():
        for hit in _opening(identifier).finditer(text, offset):
            if letters := _shown(words, text[hit.start() :]):
                found.append((letters, identifier, hit.start()))
                break
    most = max((letters for letters, _, _ in found), default=0)
    return [(catalogue()[identifier], at) for letters, identifier, at in found if letters == most]


def _shown(words: list[str], text: str) -> int:
    """How many letters of a message a text contains, if it ends inside it; else 0."""
    letters = known = end = 0
    for word, match in zip_longest(words, _WORD.finditer(text)):
        if match is None or (end and _END.search(text[end : match.start()])):
            break
        if (
            word is None
        ):  # it has the complete message: the entry's own patterns match it, unless it is wrapped
            return letters if "\n" in text[:end] else 0
        if _LITERAL.fullmatch(word):
            if match[0].lower() != word:
                if match.end() == len(text) and known and word.startswith(match[0].lower()):
                    letters += len(match[0])  # the text was cut in the middle of a word
                    break
                if "\n" in text[end : match.start()]:
                    break
                return 0
            known += 1
            letters += len(word)
        end = match.end()
    return letters if known >= FEWEST and letters >= SHORTEST else 0


@lru_cache(maxsize=1)
def _messages() -> dict[str, list[str]]:
    """The first words of each entry's message, in lower case."""
    found = {}
    for identifier, entry in catalogue().items():
        words = [word.lower() for word in _WORD.findall(_message(entry))]
        words = list(dropwhile(lambda word: not _LITERAL.fullmatch(word), words))[:MOST]
        literal = [word for word in words if _LITERAL.fullmatch(word)]
        if _GENERAL.search(_message(entry)):
            continue
        if entry.kind != "symptom" and len(literal) >= FEWEST and sum(map(len, literal)) >= SHORTEST:
            found[identifier] = words
    return found


@cache
def _opening(identifier: str) -> re.Pattern[str]:
    """A pattern that finds the first words of a message in a text."""
    first, second = _messages()[identifier][:2]
    follows = re.escape(second) if _LITERAL.fullmatch(second) else ""
    return re.compile(rf"\b{re.escape(first)}\b[^\w\n]{{1,4}}{follows}", re.IGNORECASE)


def _message(entry: Entry) -> str:
    """The line of an entry's excerpt in which its message begins, without the name of an exception."""
    lines = [line.text for line in read_log(entry.id, entry.excerpt).lines]
    hits = (line for pattern in entry.patterns for line in lines if pattern.search(line))
    return re.sub(r"^\W*(?:\w+\.)*\w*(?:Error|Exception|Warning|Exit)\W*:\s+", "", next(hits, ""))
