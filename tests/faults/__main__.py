"""Inject faults into conversions and print the outcomes.

python -m tests.faults                               a sample of everything
python -m tests.faults --runs 200 "quantized"        more of one conversion
python -m tests.faults --all "replaced"              each fault at each call
python -m tests.faults --list
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter, defaultdict
from contextlib import nullcontext
from pathlib import Path

from tests.faults import sample, stores
from tests.faults.roads import ROADS, scene
from tests.faults.run import Scene
from tests.faults.sample import what


def main() -> int:
    """The exit status tells whether all requirements held."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__.split("\n")[0])
    parser.add_argument("roads", nargs="*", metavar="ROAD", help="all by default")
    parser.add_argument("--runs", type=int, default=40, help="of each conversion; 40 by default")
    parser.add_argument("--all", action="store_true", help="each fault at each call, which takes long")
    parser.add_argument("--seed", type=int, default=1, help="of the sample")
    parser.add_argument("--workers", type=int, default=1, help="threads of a conversion; 1 by default")
    parser.add_argument("--list", action="store_true", help="list the conversions")
    given = parser.parse_args()
    every_road = [*ROADS, *stores.ROADS]
    if given.list:
        print("\n".join(every_road))
        return 0
    if unknown := set(given.roads) - set(every_road):
        parser.error(f"no such conversion: {', '.join(sorted(unknown))}; --list names all")
    table: dict[str, Counter[str]] = defaultdict(Counter)
    wrong: list[str] = []
    for name in given.roads or every_road:
        begin = time.monotonic()
        with (
            tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder,
            stores.server() if name in stores.ROADS else nullcontext() as server,
        ):
            stage: Scene | stores.Remote
            if server:
                stage = stores.remote(name, Path(folder), server, given.workers)
                calls, choose = stage.requests, stores
            else:
                stage = scene(ROADS[name], Path(folder), given.workers)
                calls, choose = stage.calls, sample
            chosen = choose.every(calls) if given.all else choose.sampled(calls, given.runs, given.seed)
            faults = list(chosen)
            for fault in faults:
                try:
                    outcome = stage.strike(fault, given.seed)
                except AssertionError as error:
                    outcome = "WRONG"
                    wrong.append(f"{name}: {error}")
                    print(wrong[-1], file=sys.stderr, flush=True)
                table[what(fault) + (" (store)" if server else "")][outcome] += 1
        seconds = time.monotonic() - begin
        print(f"{name}: {len(calls)} calls, {len(faults)} runs in {seconds:.0f} s", flush=True)
    outcomes = sorted({outcome for row in table.values() for outcome in row})
    print(f"\n{'fault':<22}{'runs':>7}" + "".join(f"{outcome:>21}" for outcome in outcomes))
    for kind, row in sorted(table.items()):
        print(f"{kind:<22}{row.total():>7}" + "".join(f"{row[outcome]:>21}" for outcome in outcomes))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
