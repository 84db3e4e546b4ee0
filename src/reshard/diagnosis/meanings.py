"""Rules that are told by a message (`said` in `rules/`): it has one meaning, whatever the run does."""

from __future__ import annotations

import re
from functools import cache, lru_cache
from typing import Any

from reshard.diagnosis.finding import Text
from reshard.diagnosis.log import Log, Traceback
from reshard.diagnosis.rules import Told, rules


def of_message(said: str, log: Log) -> Told | None:
    """The first rule whose message a text contains, with the values in it."""
    for identifier, patterns in messages():
        match = next((hit for pattern in patterns if (hit := pattern.search(said))), None)
        if match and beside(identifier).search(log.text):
            given = {name: value for name, value in match.groupdict().items() if value}
            return identifier, {**defaults(identifier), **given}
    return None


def defaults(identifier: str) -> dict[str, object]:
    """The values for a rule's braces, if the message has none."""
    given: dict[str, Any] = rules()[identifier].get("defaults", {})
    return {name: Text(**value) if isinstance(value, dict) else value for name, value in given.items()}


@lru_cache(maxsize=1)
def messages() -> tuple[tuple[str, tuple[re.Pattern[str], ...]], ...]:
    """The rules that are told by messages, with these messages, in order."""
    told_by = ((name, rule["said"]) for name, rule in rules().items() if "said" in rule)
    return tuple((name, tuple(map(re.compile, patterns))) for name, patterns in told_by)


@lru_cache(maxsize=1)
def warnings() -> tuple[re.Pattern[str], ...]:
    """The messages of rules about what ends no run."""
    return tuple(each for name, own in messages() if rules()[name]["severity"] == "warning" for each in own)


@cache
def beside(identifier: str) -> re.Pattern[str]:
    """What a log has to contain besides the message of a rule."""
    return re.compile(rules()[identifier].get("beside", ""))


def is_over_history(failure: Traceback, log: Log) -> bool:
    """Whether a rule knows a message better than the history of releases: `over_history` in its file."""
    return any(
        pattern.search(failure.said) and beside(name).search(log.text)
        for name, patterns in messages()
        if rules()[name].get("over_history")
        for pattern in patterns
    )


def is_over(entries: frozenset[str], failure: Traceback, log: Log) -> bool:
    """Whether a rule that is `over` entries of the catalogue knows a message, too: better than they do."""
    return any(
        pattern.search(failure.said) and beside(name).search(log.text)
        for name, patterns in messages()
        if entries <= set(rules()[name].get("over", ()))
        for pattern in patterns
    )
