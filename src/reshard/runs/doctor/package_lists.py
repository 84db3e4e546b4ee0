"""Diagnose the output of `pip freeze`, `pip list`, `uv pip list` and `conda list`: only versions, of any machine."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from packaging.utils import canonicalize_name

from reshard.runs.checks.environment import Environment
from reshard.runs.checks.finding import Finding
from reshard.runs.checks.machine_checks import check_machine

LEAST_PACKAGES = 3
"""Minimum number of packages in a list."""
MAX_OTHER_SHARE = 0.1
"""Maximum share of lines in a list that name no package: headings, editable installs."""

_PACKAGE = re.compile(
    r"(?P<name>[A-Za-z][\w.-]*)(?:\[[\w,-]+\])?(?:\s*===?\s*|\s+)v?(?P<version>\d[\w.+!-]*)(?:\s+[\w./:@+~-]+){0,2}\s*$"
)
_FAILURE = re.compile(r"\s*(?:[\w.]{0,100}(?:Error|Exception): |Traceback \(most recent call last\))")
_OTHER = re.compile(r"\s*(?:#.*|-e\s.*|-+(?:\s+-+)*|Package\s+Version.*|[\w.-]+\s+@\s+\S+)?\s*")


def versions_in(lines: Iterable[str]) -> dict[str, str]:
    """Versions by package, if the lines are a list of packages without a failure among them; else {}."""
    versions: dict[str, str] = {}
    other = 0
    for line in lines:
        if _FAILURE.match(line):
            return {}
        if package := package_in(line):
            versions[package[0]] = package[1]
        elif not _OTHER.fullmatch(line):
            other += 1
    return versions if len(versions) >= LEAST_PACKAGES and other <= MAX_OTHER_SHARE * len(versions) else {}


def package_in(line: str) -> tuple[str, str] | None:
    """The package and the version in a line of a list."""
    match = _PACKAGE.match(line.rstrip())
    return (canonicalize_name(match["name"]), match["version"]) if match else None


def diagnose_freeze(name: str, versions: dict[str, str]) -> list[Finding]:
    """Findings about versions alone, as on a machine about which nothing else is known."""
    nowhere = Environment(versions, gpus=[], driver=None, variables={}, home=Path(os.devnull))
    return [
        replace(finding, places=tuple(replace(place, target=name) for place in finding.places))
        for finding in check_machine(nowhere)
    ]
