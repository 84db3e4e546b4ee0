"""`reshard.json`: what the output was made of and what it is, and a digest of each file, to check it against later."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from threading import Event
from typing import Any, NamedTuple

import numpy as np

from reshard.errors import ReshardError
from reshard.formats.companions import read_object
from reshard.formats.contents import FILES, RECORD, foreign_in
from reshard.plain import to_json
from reshard.transfer.digests import NAME, NONE, digest_of
from reshard.transfer.plan import OutputFile, Plan
from reshard.transfer.threads import together


def recorded(plan: Plan, digests: Mapping[str, str], facts: Mapping[str, Any]) -> bytes:
    """The content of `reshard.json`, as long without `digests` as it is with them."""
    files = {
        file.path: {"bytes": file.size, "digest": digests.get(file.path, NONE)}
        for file in sorted(plan.files, key=lambda file: file.path)
        if file.path != RECORD
    }
    content = {**plan.facts, **facts, "numpy": np.__version__, "sources": plan.sources.as_list()}
    return to_json({**content, "digest": NAME, FILES: files})


def with_record(plan: Plan, facts: Mapping[str, Any]) -> Plan:
    """The plan with a record that has a place for the digests, which `recorded` fills."""
    files = [file for file in plan.files if file.path != RECORD]
    return replace(plan, files=[*files, OutputFile.of_bytes(RECORD, recorded(plan, {}, facts))])


class Fault(NamedTuple):
    """A file that is not as it was written."""

    file: str
    message: str


@dataclass(frozen=True)
class Integrity:
    """Whether a folder is what was written. `files` of `nbytes` bytes were read."""

    files: int
    nbytes: int
    faults: list[Fault]

    def __bool__(self) -> bool:
        return self.equal

    @property
    def equal(self) -> bool:
        return not self.faults

    def as_dict(self) -> dict[str, Any]:
        """The content of `verify DST --json`."""
        faults = [fault._asdict() for fault in self.faults]
        return {"equal": self.equal, "files": self.files, "bytes": self.nbytes, "faults": faults}


def check_record(
    folder: Path,
    workers: int,
    on_total: Callable[[int], None] = lambda total: None,
    on_bytes: Callable[[int], None] = lambda count: None,
) -> Integrity:
    """Compare what lies in a folder with its own `reshard.json`. Raises ReshardError if that has no digests."""
    written = _written(folder)
    faults = [Fault(name, "was not written with the others") for name in foreign_in(folder)]
    whole = []
    for name, (size, _) in written.items():
        path = folder / name
        if not path.is_file():
            faults.append(Fault(name, "is missing"))
        elif (found := path.stat().st_size) != size:
            faults.append(Fault(name, f"has {found:,} bytes and not {size:,}"))
        else:
            whole.append(name)
    nbytes = sum(written[name][0] for name in whole)
    on_total(nbytes)
    digests = digests_of(folder, whole, workers, on_bytes)
    names = {digest: name for name, (_, digest) in written.items()}
    for name, digest in digests.items():
        if digest != written[name][1]:
            other = names.get(digest)
            faults.append(
                Fault(name, f"has the content of {other}" if other else "has other bytes than were written")
            )
    return Integrity(len(whole), nbytes, sorted(faults))


def digests_of(
    folder: Path, names: list[str], workers: int, on_bytes: Callable[[int], None] = lambda count: None
) -> dict[str, str]:
    """The digests of files as they lie on the disk. Raises ReshardError if one cannot be read."""
    waiting = deque(names)

    def work(index: int, stopped: Event) -> dict[str, str]:
        found = {}
        while not stopped.is_set():
            try:
                name = waiting.popleft()
            except IndexError:
                break
            try:
                found[name] = digest_of(folder / name, on_bytes, stopped.is_set)
            except OSError as error:
                raise ReshardError(
                    "a file cannot be read",
                    file=str(folder / name),
                    found=error.strerror or str(error),
                    remedy="check the disk or the file server that holds it, then run the same command again",
                ) from error
        return found

    return {name: digest for part in together(work, workers) for name, digest in part.items()}


def _written(folder: Path) -> dict[str, tuple[int, str]]:
    """Size and digest of each file, by its path. Raises ReshardError if there is no record of them."""
    path = folder / RECORD
    if path.is_file():
        files = read_object(path).get(FILES)
        if isinstance(files, dict):
            try:
                found = {str(name): (int(each["bytes"]), str(each["digest"])) for name, each in files.items()}
            except (KeyError, TypeError, ValueError):
                found = {}
            if found and not any(_leaves(name) for name in found):
                return found
    raise ReshardError(
        "there is no record of digests here",
        file=str(folder),
        expected=f"{RECORD}, as `reshard convert` writes it",
        remedy="name the checkpoint that it was made from, too: reshard verify SRC DST",
    )


def _leaves(name: str) -> bool:
    return PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts
