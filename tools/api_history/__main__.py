"""Rebuild the API history: `python -m tools.api_history [PACKAGE …]`.

Reads the releases that the package index has and the cache lacks, and writes the data in which `reshard doctor` looks
up names. Sources are parsed, never imported. Needs pip, whose configuration names the index. With `--filter`, only
applies what `kept.py` leaves out now to the tables that are there, and reads no release.
"""

from __future__ import annotations

import argparse
import json
import lzma
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from datetime import date, timedelta
from pathlib import Path
from typing import Any

from reshard.runs.checks.history.api_table import PACKAGE_ROOTS, TABLES_FOLDER
from reshard.runs.checks.history.bloom_filters import FILTER_FILE
from tools.api_history.collect import collect, kept_at
from tools.api_history.having import bits_of
from tools.api_history.index import Index
from tools.api_history.kept import kept
from tools.api_history.table import table

EARLIER = dict.fromkeys(("accelerate", "peft", "transformers", "trl"), "2022-01-01")
"""Packages for whose early releases scripts and images are still in use."""
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "reshard" / "api_history"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.api_history", description=__doc__)
    parser.add_argument(
        "packages", nargs="*", metavar="PACKAGE", help=f"of {', '.join(PACKAGE_ROOTS)}; by default all"
    )
    parser.add_argument(
        "--since",
        help="read minor versions with a release from this day on; by default of three years, or more",
    )
    parser.add_argument("--cache", type=Path, default=CACHE, help="where surfaces of releases are kept")
    parser.add_argument("--out", type=Path, default=TABLES_FOLDER, help="the folder of the tables")
    parser.add_argument(
        "--cached", action="store_true", help="make the tables of releases that were read before"
    )
    parser.add_argument("--filter", action="store_true", help="make the tables smaller, and read no release")
    given = parser.parse_args()
    if unknown := sorted(set(given.packages) - PACKAGE_ROOTS.keys()):
        parser.error(f"no such package: {', '.join(unknown)}")
    packages = given.packages or list(PACKAGE_ROOTS)
    given.out.mkdir(parents=True, exist_ok=True)
    if given.filter:
        for package in packages:
            path = path_of(given.out, package)
            _write(path, _stored(path))
    else:
        since = given.since or (date.today() - timedelta(days=3 * 365)).isoformat()
        _read(packages, given, since)
    paths = {package: path_of(given.out, package) for package in PACKAGE_ROOTS}
    filters = {package: bits_of(_stored(path)) for package, path in paths.items() if path.is_file()}
    (given.out / FILTER_FILE).write_bytes(packed(filters))
    return 0


def _read(packages: list[str], given: argparse.Namespace, since: str) -> None:
    """Make tables of the releases since a day, or of more of them for packages in `EARLIER`."""
    index = Index()
    with ProcessPoolExecutor(2) as pool:
        for package in packages:
            earlier = since if given.since else EARLIER.get(package, since)
            releases = index.releases(package, earlier)
            if given.cached:
                releases = [each for each in releases if kept_at(given.cache, each).is_file()]
            found = collect(index, releases, given.cache, pool, lambda text: print(text, file=sys.stderr))
            content = {**table(package, found), "date": date.today().isoformat()}
            _write(path_of(given.out, package), content)
    index.close()


def path_of(folder: Path, package: str) -> Path:
    return folder / f"{package}.json.xz"


def _stored(path: Path) -> Any:
    return json.loads(lzma.decompress(path.read_bytes()))


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_bytes(packed(kept(content)))
    first, last = content["versions"][0], content["versions"][-1]
    print(f"{content['package']}: {first} to {last}, {path.stat().st_size >> 10} KiB")


def packed(content: dict[str, Any]) -> bytes:
    """The bytes of a table or of the filters, identical for identical content."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME)


if __name__ == "__main__":
    sys.exit(main())
