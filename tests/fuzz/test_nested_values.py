"""Each value of a genuine pickle replaced by one that takes years to hash, to compare or to print: refused at once.

Hashing does not listen to signals, so each parser runs in its own process, with a thread that ends it:

    python -m tests.fuzz.test_nested_values TARGET [MOST]
"""

from __future__ import annotations

import faulthandler
import pickletools
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.fuzz import mutate
from tests.fuzz.attempt import Attempts
from tests.fuzz.targets import TARGETS

LATE = 30
"""Seconds for one input, which takes some milliseconds; the machine may be busy."""
LEVELS = 60
MOST = 50
"""Inputs of each parser in `make test`. The slow tests run all of them, as the command above does without MOST."""
PICKLES = [
    name
    for name, target in TARGETS.items()
    if target.mutate is mutate.of_pickle and name not in ("pickle", "torch-file-as-torch")
]


BUILT = {
    "BINPERSID": b"0",
    "TUPLE1": b"0",
    "TUPLE2": b"00",
    "TUPLE3": b"000",
    "TUPLE": b"1",
    "REDUCE": b"00",
    "NEWOBJ": b"00",
}
"""Opcodes that make one value of others, and what removes these from the stack."""


def of_pairs(index: int) -> bytes:
    """A pair of a pair … of ones, each twice the same object."""
    return b"K\x01" + b"2\x86" * LEVELS


def of_lists(index: int) -> bytes:
    """The same of lists; `index` is free in the memo."""
    put, get = (code + index.to_bytes(4, "little") for code in (b"r", b"j"))
    return b"K\x01" + (put + b"0(" + get + get + b"l") * LEVELS


def nested(pickled: bytes) -> Iterator[tuple[str, bytes]]:
    """Copies of a pickle, in each of which one value is a nest; one for each kind of place, which is returned too."""
    opcodes = list(pickletools.genops(pickled))
    ends = [at for _, _, at in opcodes[1:]] + [len(pickled)]
    seen, before = set(), ["", "", ""]
    for (opcode, value, begin), end in zip(opcodes, ends, strict=True):
        assert begin is not None and end is not None
        is_pushed = opcode.stack_before == [] and len(opcode.stack_after) == 1 and "GET" not in opcode.name
        if is_pushed or opcode.name in BUILT:
            place = " ".join(before if is_pushed else [*before, opcode.name])
            if place not in seen and opcode.name != "MARK":
                seen.add(place)
                for nest in (of_pairs, of_lists):
                    yield (
                        f"{nest.__name__} after {place}",
                        pickled[:begin] + BUILT.get(opcode.name, b"") + nest(len(opcodes)) + pickled[end:],
                    )
        if "PUT" not in opcode.name and opcode.name != "MEMOIZE":
            said = value if isinstance(value, str) else opcode.name
            before = [*before[1:], re.sub(r"\d+|[a-z_]+\.(?=\w+\.)", "", said)]


def main() -> None:
    """Run the inputs of one target, with the place of the nest on the standard output before each."""
    name, most = sys.argv[1], int([*sys.argv, "0"][2])
    attempts = Attempts(TARGETS[name])
    inputs = {place: data for seed in attempts.seeds for place, data in nested(seed)}
    assert len(inputs) > 10, "seeds with few values"
    step = max(1, len(inputs) // most) if most else 1
    for place in list(inputs)[::step]:
        print(place, flush=True)
        faulthandler.dump_traceback_later(LATE, exit=True)
        if failure := attempts(inputs[place]):
            raise AssertionError(failure)
    attempts.end()


@pytest.mark.parametrize("most", [MOST, 0])
@pytest.mark.parametrize("name", PICKLES)
@pytest.mark.thorough
def test_a_value_that_takes_years_to_hash(name: str, most: int) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.fuzz.test_nested_values", name, str(most)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout.splitlines()[-1:]}\n{done.stderr[-4000:]}"


if __name__ == "__main__":
    main()
