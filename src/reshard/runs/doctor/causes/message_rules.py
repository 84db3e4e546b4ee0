"""Failures that one message tells: its pattern, the rule, and the phrases for the texts are data (`messages.yaml`)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from reshard.base.data_files import read_data
from reshard.runs.checks import rules
from reshard.runs.checks.finding import Finding
from reshard.runs.checks.location import Location
from reshard.runs.checks.phrases import phrase_text
from reshard.runs.doctor.frame_packages import place_in_code, update_of
from reshard.runs.doctor.text.log import Log, Traceback


@dataclass(frozen=True)
class MessageRule:
    """A message by its `pattern`, and the rule `code` that explains it."""

    code: str
    pattern: str
    needs: str = ""
    unless: str = "(?!)"
    certainty: str = "likely"
    values: Mapping[str, str] = field(default_factory=dict)
    phrases: Mapping[str, str] = field(default_factory=dict)

    def match(self, message: str, log: Log) -> re.Match[str] | None:
        """The match of its message, if the log has what the rule needs besides."""
        match = re.search(self.pattern, message, re.ASCII)
        applies = match and re.search(self.needs, log.text) and not re.search(self.unless, log.text)
        return match if applies else None


@lru_cache(maxsize=1)
def message_rules() -> list[MessageRule]:
    """All of `messages.yaml`, in their order."""
    return [MessageRule(**each) for each in read_data(Path(__file__).with_name("messages.yaml"))]


def of_message(root: Traceback, log: Log) -> Finding | None:
    """The finding for the message of the first exception in a chain; None if no rule has it."""
    first = root.root
    matches = ((each, match) for each in message_rules() if (match := each.match(first.error_text, log)))
    rule, match = next(matches, (None, None))
    if rule is None or match is None:
        return None
    values: dict[str, object] = {
        "gpu": log.gpu or phrase_text("gpu-unnamed"),
        **match.groupdict(""),
        **rule.values,
    }
    values |= {name: phrase_text(phrase, **values) for name, phrase in rule.phrases.items()}
    values |= {"where": place_in_code(first), "update": update_of(first)}
    place = Location.of(log.name, first.last, first.error_text)
    return rules.finding(rule.code, [place], values, certainty=rule.certainty)
