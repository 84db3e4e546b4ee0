"""Releases of a package in the index that pip is configured for, and the archive to read for each."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from urllib.parse import urljoin

from packaging.utils import (
    InvalidSdistFilename,
    InvalidWheelFilename,
    parse_sdist_filename,
    parse_wheel_filename,
)
from packaging.version import InvalidVersion, Version

JSON = "application/vnd.pypi.simple.v1+json"
"""PEP 691, with sizes and upload times (PEP 700)."""


@dataclass(frozen=True)
class Release:
    """One release: the URL of its archive, its size in bytes, and its date (`2024-05-31`)."""

    package: str
    version: Version
    filename: str
    url: str
    size: int
    date: str


class Index:
    """The index in pip's own configuration, with its credentials, certificates and proxy."""

    def __init__(self) -> None:
        from pip._internal.commands import create_command

        command: Any = create_command("download")
        options, _ = command.parse_args(["nothing"])
        self._stack = ExitStack()
        self._stack.enter_context(command.main_context())
        self.session: Any = command.get_default_session(options)
        finder = command._build_package_finder(options, self.session)
        self._urls = [url for url in finder.index_urls if url.startswith("http")]

    def close(self) -> None:
        self._stack.close()

    def releases(self, package: str, since: str) -> list[Release]:
        """The first and the last release of each minor version since a date, in version order.

        Includes the last release before that date, so that new names can be told from old ones. Raises LookupError if
        no index has the package.
        """
        found: dict[Version, list[tuple[int, dict[str, Any]]]] = {}
        for base in self._urls:
            url = f"{base.rstrip('/')}/{package}/"
            answer = self.session.get(url, headers={"Accept": JSON})
            if answer.status_code == 200 and JSON in answer.headers.get("content-type", ""):
                for each in answer.json()["files"]:
                    each["url"] = urljoin(answer.url, each["url"])
                    for version, rank in _ranked(each):
                        found.setdefault(version, []).append((rank, each))
        if not found:
            raise LookupError(f"no index of pip's configuration lists {package} with times of upload")
        every = []
        for version in sorted(found):
            best = min(found[version], key=lambda pair: (pair[0], pair[1]["size"]))[1]
            date = min(each["upload-time"] for _, each in found[version])[:10]
            datetime.fromisoformat(date)
            every.append(Release(package, version, best["filename"], best["url"], best["size"], date))
        return list(_chosen(every, since))


def _ranked(file: dict[str, Any]) -> Iterator[tuple[Version, int]]:
    """The version of a file, and its rank: a universal wheel, one for Linux, an sdist, any other wheel."""
    name = file["filename"]
    try:
        if name.endswith(".whl"):
            _, version, _, tags = parse_wheel_filename(name)
            platforms = {tag.platform for tag in tags}
            linux = any(re.match(r"(?:many)?linux.*x86_64", each) for each in platforms)
            rank = 0 if "any" in platforms else 1 if linux else 3
        else:
            (_, version), rank = parse_sdist_filename(name), 2
    except (InvalidWheelFilename, InvalidSdistFilename, InvalidVersion):
        return
    if not file.get("yanked") and not version.is_prerelease and version.local is None:
        yield version, rank


def _chosen(every: list[Release], since: str) -> Iterator[Release]:
    minors: dict[tuple[int, ...], list[Release]] = {}
    for release in every:
        minors.setdefault(release.version.release[: _digits(release)], []).append(release)
    groups = [minors[key] for key in sorted(minors)]
    young = [at for at, group in enumerate(groups) if group[-1].date >= since]
    for group in groups[max(0, young[0] - 1) :] if young else groups[-1:]:
        yield from dict.fromkeys((group[0], group[-1]))


def _digits(release: Release) -> int:
    """The number of components in a minor version: three for 0.0.35."""
    return 3 if release.version.release[:2] == (0, 0) else 2
