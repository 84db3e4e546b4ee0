"""The releases of a package, those in which something exists, and which to install in place of one that lacks it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace

from packaging.version import Version

LONG_LIVED = 8
"""Releases for which a name existed that is gone: who lacks it has a newer release, not one from before all these."""
FEW_NEWEST = 3
"""Newest releases that alone lack a name: who lacks it may as well have one from before it was added."""
EARLY_SHARE = 0.2
"""The share of the known releases that may lack what a package always has."""
Span = frozenset[int]
"""Indices of releases."""
NOWHERE: Span = frozenset()


class Releases:
    """The known releases of a package, oldest first."""

    def __init__(self, versions: Sequence[str]) -> None:
        self.versions = list(versions)
        self.last = len(self.versions) - 1
        self._parsed = [Version(each) for each in self.versions]

    def place(self, version: Version) -> tuple[int, bool]:
        """The index of the last release not newer than a version, -1 if all are newer; and whether it is the same."""
        plain = Version(version.public)
        at = bisect_right(self._parsed, plain) - 1
        return at, at >= 0 and self._parsed[at] == plain

    def around(self, version: Version) -> Span:
        """The release of a version, or those before and after it."""
        before, exact = self.place(version)
        return Span({before} if exact else {before, min(before + 1, self.last)})

    def after(self, at: int) -> str | None:
        """The release after the one at an index."""
        return self.versions[at + 1] if at < self.last else None

    def is_patch(self, at: int) -> bool:
        """Whether a release has the same minor version as the one before it."""
        return at > 0 and _minor(self.versions[at]) == _minor(self.versions[at - 1])


def _minor(version: str) -> list[str]:
    return version.split(".")[:2]


@dataclass(frozen=True)
class Presence:
    """The releases in which something exists, among those that have what it belongs to."""

    releases: Releases
    there: Span
    among: Span

    @property
    def is_everywhere(self) -> bool:
        """Whether every release has it, of the past years at least."""
        last = self.releases.last
        first = min(self.there, default=last)
        return len(self.there) == last + 1 - first and first < last * EARLY_SHARE

    def at(self, version: Version) -> bool | None:
        """Whether it exists in a version; None if the releases around it differ, or lack what it belongs to."""
        around = self.releases.around(version)
        if not around <= self.among or 0 < len(around & self.there) < len(around):
            return None
        return around <= self.there

    def bounds(self, version: Version | None) -> Bounds | None:
        """The releases that have it, relative to one that does not; None if the table does not show them.

        Without a version: only if all that lack it are older, or all newer, or if it exists between two releases.
        """
        if not self.there or (version and self.at(version)):
            return None
        if version is None:
            return None if self.there >= self.among else self._around(min(self.there), max(self.there))
        before, _ = self.releases.place(version)
        later = [at for at in self.there if at > before]
        earlier = [at for at in self.there if at <= before]
        if later:
            again = self.releases.versions[max(earlier)] if earlier else None
            return replace(self._since(min(later)), again=again)
        until = self.releases.after(max(self.there))
        if until is None or Version(until) > version:
            until = str(version)  # a release between two known ones
        return Bounds(None, until, self.releases.versions[max(self.there)])

    def _around(self, first: int, last: int) -> Bounds | None:
        if any(first <= at <= last for at in self.among - self.there):
            return None  # it was added and removed more than once
        until = self.releases.after(last) if max(self.among) > last else None
        is_recent = until is None or last - first < LONG_LIVED or max(self.among) - last <= FEW_NEWEST
        oldest = self.releases.versions[first] if min(self.among) < first else None
        bounds = Bounds(oldest, until, self.releases.versions[last], self.releases.is_patch(first))
        return bounds if is_recent else replace(bounds, since=None, first=oldest)

    def _since(self, first: int) -> Bounds:
        last = first
        while last + 1 in self.there:
            last += 1
        versions, is_patch = self.releases.versions, self.releases.is_patch(first)
        return Bounds(versions[first], self.releases.after(last), versions[last], is_patch)


@dataclass(frozen=True)
class Bounds:
    """The first release that has something after one that lacks it, the next that lacks it, the last that has it."""

    since: str | None
    until: str | None
    last: str
    is_patch: bool = False
    again: str | None = None
    """The last release that had it before it was missing for a while."""
    first: str | None = None
    """The first release that has it, if older ones that lack it are hardly installed anywhere."""

    @property
    def since_text(self) -> str:
        """`since` as far as it is known: 0.8 for 0.8.5, if 0.8.0 lacks it and 0.8.1 is not in the table."""
        since = self.since or ""
        return ".".join(_minor(since)) if self.is_patch else since

    @property
    def specifier(self) -> str:
        """A specifier for pip, by PEP 440. What a patch release removed may be missing in those before it."""
        ends_inside = self.until is None or _minor(self.until) == _minor(self.last)
        newest = f"<={self.last}" if ends_inside else f"<{self.until}"
        oldest = self.since or self.first
        parts = [f">={oldest}"] * bool(oldest) + [newest] * bool(self.until or not self.since)
        return ",".join(parts)
