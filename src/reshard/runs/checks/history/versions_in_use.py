"""The versions of packages that a script or a config uses: those that are installed."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TypedDict

from packaging.version import InvalidVersion, Version

from reshard.base.languages import Text
from reshard.runs.checks.history.api_table import ApiTable
from reshard.runs.checks.phrases import phrase_text


class Proof(TypedDict):
    """What a finding says of its certainty."""

    certainty: str
    evidence: list[Text]


@dataclass(frozen=True)
class Versions:
    """`installed` are the packages of the Python that runs a script; None if that is this one."""

    installed: Mapping[str, str] | None = None

    def of(self, package: str) -> Version | None:
        """The version of a package, None if it is not installed."""
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
