"""The surfaces of all releases of a package; each file is parsed once, and each release is cached after reading."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path

from tools.api_history.archive import sources
from tools.api_history.index import Index, Release
from tools.api_history.packages import module_of
from tools.api_history.surface import Surface, surface_of

FORMAT = 2
"""The version of the cache; changing it makes all releases be read again."""


@dataclass
class Collected:
    """One release: the surfaces of its modules, and which of them are packages."""

    version: str
    date: str
    surfaces: dict[str, Surface]
    packages: set[str]


def collect(
    index: Index,
    releases: list[Release],
    cache: Path,
    pool: Executor,
    say: Callable[[str], None],
) -> list[Collected]:
    """Read the releases of one package that are not cached; return all of them, the oldest first."""
    known: dict[str, Surface | None] = {}
    found = []
    for release in releases:
        path = kept_at(cache, release)
        if not path.is_file():
            say(f"{release.package} {release.version}: {release.size >> 10} KiB")
            files, new = _read(index, release, known, pool)
            path.parent.mkdir(parents=True, exist_ok=True)
            part = path.with_suffix(".part")
            part.write_bytes(gzip.compress(json.dumps({"files": files, "new": new}).encode(), 6))
            part.rename(path)
        content = json.loads(gzip.decompress(path.read_bytes()))
        known.update(content["new"])
        found.append(_of(release, content["files"], known))
    return found


def kept_at(cache: Path, release: Release) -> Path:
    """The cache file with the surfaces of a release."""
    return cache / f"v{FORMAT}" / release.package / f"{release.version}.json.gz"


def _of(release: Release, files: list[str], known: dict[str, Surface | None]) -> Collected:
    surfaces: dict[str, Surface] = {}
    packages: set[str] = set()
    for key in files:
        path = key.rpartition(" ")[0]
        module = module_of(release.package, path)
        surface = known.get(key)
        if module is None or surface is None:
            continue
        if path.rsplit("/", 1)[-1].startswith("__init__.py"):
            packages.add(module)
        surfaces[module] = _joined(surfaces[module], surface) if module in surfaces else surface
    return Collected(str(release.version), release.date, surfaces, packages)


def _joined(one: Surface, other: Surface) -> Surface:
    """The union of a module and its stub."""
    both = {**one, **other}
    for key in ("names", "stars", "renames", "constants"):
        if key in one and key in other:
            both[key] = [*one[key], *(each for each in other[key] if each not in one[key])]
    for key in ("imports", "functions", "classes", "keys"):
        if key in one and key in other:
            both[key] = {**other[key], **one[key]}
    return both


def _read(
    index: Index, release: Release, known: dict[str, Surface | None], pool: Executor
) -> tuple[list[str], dict[str, Surface | None]]:
    files: list[str] = []
    waiting = []

    def wanted(path: str, digest: str) -> bool:
        if module_of(release.package, path) is None:
            return False
        files.append(f"{path} {digest}")
        return files[-1] not in known

    for path, digest, content in sources(index.session, release, wanted):
        if content is not None:
            module, is_package = str(module_of(release.package, path)), "/__init__.py" in path
            waiting.append((f"{path} {digest}", pool.submit(surface_of, content, module, is_package)))
    return files, {key: future.result() for key, future in waiting}
