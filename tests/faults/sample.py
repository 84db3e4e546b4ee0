"""Pairs of faults and calls: all of them, or a sample that has each function and each kind in it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from random import Random

from tests.faults.calls import CHANGES, READS, WRITES, Call, Fault

ERRORS = ("EIO", "ESTALE", "EACCES", "ENOENT", "EMFILE", "EINVAL", "ENOMEM")
"""Errors of any call: a failing disk, a lost file server, permissions, files that disappear, and limits."""
FULL = ("ENOSPC", "EDQUOT")
IMMOVABLE = ("EPERM", "EXDEV", "EBUSY")
"""Errors of a rename: a file system without it, a folder in an image's lower layer, a mount point."""
KILLS = ("kill before", "kill after", "power")
EVERYWHERE = (Fault("short"), Fault("delay"))
"""Short reads and writes; and each call delayed, so that threads change their order."""


def of_call(name: str, at: int) -> Iterator[Fault]:
    """All faults of one call."""
    for kind in ERRORS:
        yield Fault(kind, name, at)
    for kind in ("EIO", "ESTALE"):
        yield Fault(kind, name, at, on=True)
    if name == "flock":
        yield Fault("EAGAIN", name, at)
        yield Fault("ENOTSUP", name, at)
    if name in (*READS, *WRITES):
        yield Fault("short", name, at)
    if name == "rename":
        for kind in IMMOVABLE:
            yield Fault(kind, name, at)
            yield Fault(kind, name, at, on=True)
    if name in CHANGES or name == "open":
        for kind in FULL:
            yield Fault(kind, name, at)
            yield Fault(kind, name, at, on=True)
        yield Fault("EIO", name, at, late=True)
    for kind in KILLS if name in (*CHANGES, "open", "flock") else KILLS[:1]:
        yield Fault(kind, name, at)


def every(calls: Sequence[Call]) -> Iterator[Fault]:
    """Each fault at each call."""
    yield from EVERYWHERE
    for name, number in sorted(Counter(call.name for call in calls).items()):
        for at in range(number):
            yield from of_call(name, at)


def sampled(calls: Sequence[Call], runs: int, seed: int) -> list[Fault]:
    """A sample of `count` faults. Functions take turns, so that the one rename is hit as often as the many reads."""
    random = Random(seed)
    faults = list(EVERYWHERE)
    waiting = {
        name: [fault for at in range(number) for fault in of_call(name, at)]
        for name, number in sorted(Counter(call.name for call in calls).items())
    }
    for each in waiting.values():
        random.shuffle(each)
    while len(faults) < runs and any(waiting.values()):
        faults += [each.pop() for each in waiting.values() if each]
    return faults[:runs]


def what(fault: Fault) -> str:
    """The kind of a fault, for a table."""
    return fault.kind + (" and on" if fault.on else "") + (" after it was done" if fault.late else "")
