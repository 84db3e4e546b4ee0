"""The versions that a script or a config uses: pinned next to it, else installed here."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypedDict

from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import InvalidVersion, Version

from reshard.base.languages import Text
from reshard.runs.checks.history.api_table import ApiTable
from reshard.runs.checks.phrases import phrase_text

_INLINE = re.compile(r"^# /// script\s*$(.*?)^# ///\s*$", re.MULTILINE | re.DOTALL)
"""The metadata of a script (PEP 723)."""
_QUOTED = re.compile(r"[\"']([A-Za-z][\w.-]*\s*==\s*[\w.]+)[\"']")


class Proof(TypedDict):
    """What a finding says of its certainty."""

    certainty: str
    evidence: list[Text]


@dataclass(frozen=True)
class Versions:
    """`pinned` versions by name, with what pins them; other packages are as installed.

    `installed` are the packages of the Python that runs the script; None if that is this one.
    """

    pinned: dict[str, tuple[Version, str]] = field(default_factory=dict)
    installed: Mapping[str, str] | None = None

    @staticmethod
    def for_file(path: str, text: str = "", installed: Mapping[str, str] | None = None) -> Versions:
        """For a script: its own metadata, then `requirements*.txt` in its folder. Only `==` pins."""
        if installed is not None:
            return Versions({}, installed)
        versions: dict[str, tuple[Version, str]] = {}
        for block in _INLINE.findall(text):
            for name, version in _pins(_QUOTED.findall(block)):
                versions.setdefault(name, (version, path))
        for file in sorted(Path(path).parent.glob("requirements*.txt")):
            with suppress(OSError, UnicodeDecodeError):
                lines = file.read_text(encoding="utf-8").splitlines()
                for name, version in _pins(line.partition("#")[0].strip() for line in lines):
                    versions.setdefault(name, (version, str(file)))
        return Versions(versions)

    def of(self, package: str) -> Version | None:
        """The version of a package, None if it is neither pinned nor installed."""
        if package in self.pinned:
            return self.pinned[package][0]
        here = installed_version(package) if self.installed is None else self.installed.get(package)
        with suppress(InvalidVersion):
            return Version(here) if here else None
        return None

    def assumed(self, own: ApiTable) -> Version:
        """The version of a table's package; if unknown, the newest in the table."""
        return self.of(own.package) or Version(own.versions[-1])

    def proof(self, own: ApiTable, since: str | None) -> Proof:
        """How certain it is that something is missing, and the evidence; `since` is the release that lacks it."""
        certainty, evidence = self._certainty(own, since)
        return {"certainty": certainty, "evidence": [evidence, read_from(own)]}

    def _certainty(self, own: ApiTable, since: str | None) -> tuple[str, Text]:
        package, version = own.package, self.of(own.package)
        if version is None:
            return "likely", phrase_text("holds-from", name=package, version=since or own.versions[-1])
        if package in self.pinned:
            return "sure", phrase_text(
                "pinned-to", name=package, version=version, file=self.pinned[package][1]
            )
        return "sure", phrase_text("installed-here", name=package, version=version)


def read_from(own: ApiTable) -> Text:
    """The releases from which a table was made, and when."""
    first, last = own.versions[0], own.versions[-1]
    return phrase_text("history-read", package=own.package, first=first, last=last, date=own.date)


def installed_version(package: str) -> str | None:
    """The version of a package in this interpreter's environment."""
    from importlib.metadata import PackageNotFoundError, version  # imports half of the standard library

    with suppress(PackageNotFoundError):
        return version(package)
    return None


def _pins(lines: Iterator[str] | list[str]) -> Iterator[tuple[str, Version]]:
    for line in lines:
        with suppress(InvalidRequirement, InvalidVersion):
            needs = Requirement(line)
            exact = [each.version for each in needs.specifier if each.operator == "=="]
            if exact and "*" not in exact[0]:
                yield needs.name.lower().replace("_", "-"), Version(exact[0])
