"""Lines of the scripts, configs and commands given beside a log that set what its remedy is about."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from reshard.runs.checks.finding import Finding
from reshard.runs.checks.location import Location
from reshard.runs.doctor.remedy_spelling import RunTools, holes_in, names_of

_VALUE_ALONE = re.compile(r"unrecognized arguments?: (?P<value>(?!-)\S+)")
"""What argparse prints of a value behind a flag that takes none."""


def placed(finding: Finding, usage: RunTools) -> Finding:
    """A finding with the lines that set what its remedy names, and those of a value that a flag does not take."""
    names = {name for hole in holes_in(finding.remedy.en) for name in names_of(hole)}
    places = [*_settings(names, usage.texts), *_values(finding, usage.texts)]
    return replace(finding, places=tuple(dict.fromkeys((*finding.places, *places))))


def _settings(names: set[str], texts: Mapping[str, str]) -> Iterator[Location]:
    for target, text in texts.items():
        for number, line in enumerate(text.splitlines(), 1):
            if any(_sets(line, name) for name in names):
                yield Location.of(target, number, line)


def _sets(line: str, name: str) -> bool:
    """Whether a line gives a setting a value: in YAML, JSON, Python or on a command line."""
    key = re.escape(name)
    return bool(re.search(rf"(?<![\w.-])(?:--{key}\b|['\"]?{key}['\"]?\s{{0,8}}[:=])", line))


def _values(finding: Finding, texts: Mapping[str, str]) -> Iterator[Location]:
    match = next((hit for place in finding.places if (hit := _VALUE_ALONE.search(place.text))), None)
    for target, text in texts.items() if match else ():
        for number, line in enumerate(text.splitlines(), 1):
            if match and re.search(rf"--[\w-]+[ =]{re.escape(match['value'])}(?!\S)", line):
                yield Location.of(target, number, line)
