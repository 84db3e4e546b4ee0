"""One target in this process: `python -m tests.fuzz.worker TARGET SECONDS SEED OUT RESULT`."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from random import Random
from typing import Any

try:
    import atheris
except ImportError:
    atheris = None

LONGEST = 64 << 10
"""The largest input in bytes."""


def main() -> None:
    """Fuzz until the time is over, then write the failures."""
    name, seconds, seed, out, result = sys.argv[1:]
    if atheris:
        with atheris.instrument_imports(include=["reshard"]):
            from tests.fuzz.targets import TARGETS
    else:
        from tests.fuzz.targets import TARGETS
    from tests.fuzz.attempt import Attempts

    target = TARGETS[name]
    attempts = Attempts(target)
    begin = time.process_time()

    def take(data: bytes) -> None:
        attempts(data)
        if time.process_time() - begin > float(seconds):
            failures = attempts.keep(Path(out) / name)
            found = {"inputs": attempts.inputs, "seconds": time.process_time() - begin, "failures": failures}
            Path(result).write_text(json.dumps(found))
            sys.stderr.flush()
            attempts.end()
            os._exit(0)

    if atheris:
        _guided(take, target, attempts.seeds, int(seed), attempts.folder)
    random = Random(int(seed))
    while True:
        data = random.choice(attempts.seeds)
        for _ in range(random.choice((1, 1, 2, 4))):
            data = target.mutate(data, random)[:LONGEST]
        take(data)


def _guided(take: Any, target: Any, seeds: list[bytes], seed: int, folder: Path) -> None:
    """Let libFuzzer choose what to mutate; half of the mutations follow the grammar."""

    def mutated(data: bytes, most: int, number: int) -> bytes:
        random = Random(number)
        return target.mutate(data, random)[:most] if random.random() < 0.6 else atheris.Mutate(data, most)

    corpus = folder / "corpus"
    corpus.mkdir()
    for number, each in enumerate(seeds):
        (corpus / str(number)).write_bytes(each)
    options = (
        f"-max_len={LONGEST}",
        f"-seed={seed}",
        "-rss_limit_mb=0",
        "-timeout=3600",
        "-len_control=0",
        "-detect_leaks=0",
    )
    atheris.Setup(["fuzz", *options, str(corpus)], take, custom_mutator=mutated)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
