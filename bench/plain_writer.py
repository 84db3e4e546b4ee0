"""`python -m bench.plain_writer SOURCE OUTPUT`: how fast this disk takes the bytes of SOURCE, converted by nobody.

Four threads read 4 MiB at a time from the files of SOURCE and write them past the page cache to four files in OUTPUT,
whose space is allocated first. At the end the files are synced, as those of a conversion.
"""

from __future__ import annotations

import mmap
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

STEP, FILES = 4 << 20, 4


def write(parts: list[tuple[Path, int]], path: Path) -> None:
    """Write `parts`, each of `STEP` bytes from an offset of a file, one after another."""
    buffer = mmap.mmap(-1, STEP)  # direct writes need memory that begins at a page
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o666)
    os.posix_fallocate(descriptor, 0, len(parts) * STEP)
    sources: dict[Path, int] = {}
    for number, (source, offset) in enumerate(parts):
        if source not in sources:
            sources[source] = os.open(source, os.O_RDONLY)
        os.preadv(sources[source], [buffer], offset)
        os.pwrite(descriptor, buffer, number * STEP)
    os.fsync(descriptor)
    for each in (descriptor, *sources.values()):
        os.close(each)


def main() -> None:
    """Write the files of the command line; the last bytes of each file, less than a step, are left out."""
    source, output = map(Path, sys.argv[1:])
    output.mkdir()
    files = [path for path in source.rglob("*") if path.is_file()]
    parts = [(path, at) for path in files for at in range(0, path.stat().st_size - STEP + 1, STEP)]
    count = -(-len(parts) // FILES)
    shares = [parts[at : at + count] for at in range(0, len(parts), count)]
    with ThreadPoolExecutor(FILES) as threads:
        list(threads.map(write, shares, [output / str(number) for number in range(len(shares))]))


if __name__ == "__main__":
    main()
