"""`reshard.json`: how an output was made, and a digest of each file to check it later."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from threading import Event
from typing import Any, NamedTuple

import numpy as np
from xxhash import xxh3_128_hexdigest

from reshard.base.errors import Problem, ReshardError
from reshard.base.plain_json import json_of, to_json
from reshard.base.quantities import size
from reshard.folders.companion_names import FILES_KEY, RECORD
from reshard.folders.json_objects import read_object
from reshard.formats.not_found import nothing_there
from reshard.formats.options import ConversionOptions
from reshard.records.checkpoint_files import foreign_in, stays
from reshard.transfer.digests import DIGEST_NAME, UNKNOWN_DIGEST, digest_of
from reshard.transfer.journal import Journal
from reshard.transfer.ledger import ByteRanges, Passed
from reshard.transfer.plan import OutputFile, Plan
from reshard.transfer.run_state import RunTotals
from reshard.transfer.source_files import Sources
from reshard.transfer.threads import taken, together

RECORD_KEY = "record"
"""The key of the XXH3-128 of the record itself, computed with zeros in its place."""


def recorded(
    plan: Plan, digests: Mapping[str, str], facts: Mapping[str, Any], passed: Passed | None = None
) -> bytes:
    """The content of `reshard.json`; its length does not depend on `digests`. `passed` is that of `RunTotals`."""
    files = {
        file.path: {"bytes": file.size, "digest": digests.get(file.path, UNKNOWN_DIGEST)}
        for file in sorted(plan.files, key=lambda file: file.path)
        if file.path != RECORD
    }
    content = {**plan.facts, **facts, "numpy": np.__version__, "sources": plan.sources.as_list(passed)}
    unsigned = to_json({**content, "digest": DIGEST_NAME, FILES_KEY: files, RECORD_KEY: UNKNOWN_DIGEST})
    return _with_own(unsigned, UNKNOWN_DIGEST, xxh3_128_hexdigest(unsigned))


def _with_own(content: bytes, before: str, after: str) -> bytes:
    """A record with its own digest, which comes last, replaced."""
    head, _, tail = content.rpartition(before.encode())
    return head + after.encode() + tail


def _is_own(content: bytes) -> bool:
    """Whether a record is unchanged since it was written."""
    own = json_of(content).get(RECORD_KEY)
    return isinstance(own, str) and xxh3_128_hexdigest(_with_own(content, own, UNKNOWN_DIGEST)) == own


def with_record(plan: Plan, facts: Mapping[str, Any]) -> Plan:
    """The plan with a record that has placeholders for the digests, which `recorded` fills."""
    # Most sources are read completely.
    whole = {path: ByteRanges([(0, size, 0)]) for path, size in plan.sources.sizes().items()}
    record = OutputFile.of_bytes(RECORD, recorded(plan, {}, facts, whole if facts["checksums"] else None))
    return replace(plan, files=[*without_record(plan).files, record])


def without_record(plan: Plan) -> Plan:
    """The plan of all files that are written before the record."""
    return replace(plan, files=[file for file in plan.files if file.path != RECORD])


def write_record(
    plan: Plan, folder: Path, report: RunTotals, facts: Mapping[str, Any], journal: Journal
) -> int:
    """Write `reshard.json` after all other files, and sync it to disk. Returns its size in bytes."""
    content = recorded(plan, report.digests, facts, report.passed)
    (folder / RECORD).write_bytes(content)
    journal.sync(folder / RECORD)
    return len(content)


def is_written(folder: Path, plan: Plan, digest: str) -> bool:
    """Whether a folder has the files of a plan, with their sizes, and a record with the plan's `digest`."""
    try:
        recorded = read_object(folder / RECORD, Sources()).get("plan")
        sizes = {file.path: (folder / file.path).stat().st_size for file in plan.files if file.path != RECORD}
    except (OSError, ReshardError):
        return False
    return recorded == digest and sizes == {
        file.path: file.size for file in plan.files if file.path != RECORD
    }


def read_back(folder: Path, digests: Mapping[str, str], workers: int) -> None:
    """Raise ReshardError naming each file for which the disk returns different bytes from those written."""
    on_disk = digests_of(folder, list(digests), workers)
    if wrong := [name for name, digest in digests.items() if on_disk[name] != digest]:
        raise ReshardError(
            Problem(
                "output-bytes-differ",
                "the disk returns different bytes from those written",
                file=str(folder / name),
                rule="the output is read back and compared (--verify)",
                remedy="the disk, its controller or the memory is faulty: write to another disk",
            )
            for name in wrong
        )


def check_unchanged(folder: Path, workers: int) -> None:
    """Raise ReshardError naming each file of an output that has changed since it was written, before its upload."""
    if faults := check_record(folder, workers).faults:
        raise ReshardError(
            Problem(
                "upload-changed-before",
                "a file has changed since it was written, and is not uploaded",
                file=str(folder / fault.file),
                rule="an output that is already complete is compared with its reshard.json before it is uploaded",
                found=fault.message,
                remedy="convert again, with --overwrite",
            )
            for fault in faults
        )


class FileFault(NamedTuple):
    """A file that differs from what was written."""

    file: str
    message: str


@dataclass(frozen=True)
class Integrity:
    """The result of checking an output against its `reshard.json`. It is true if there are no `faults`.

    `files` is the number of files that were read, `nbytes` their size.
    """

    files: int
    nbytes: int
    faults: list[FileFault]

    def __bool__(self) -> bool:
        """The same as `equal`."""
        return self.equal

    def __repr__(self) -> str:
        return f"<Integrity: {self.files:,} files, {size(self.nbytes)}, {len(self.faults):,} faults>"

    @property
    def equal(self) -> bool:
        """Whether all files are unchanged."""
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
    """Compare the files of a folder with its own `reshard.json`. Raises ReshardError if that has no digests."""
    files = read_record(folder)[FILES_KEY]
    written = {name: (entry["bytes"], entry["digest"]) for name, entry in files.items()}
    foreign = [name for name in foreign_in(folder) if not stays(name)]
    faults = [FileFault(name, "is not part of the output") for name in foreign]
    if not _is_own(Sources().read(folder / RECORD)):
        faults.append(FileFault(RECORD, "was modified after it was written"))
    whole = []
    for name, (length, _) in written.items():
        path = folder / name
        if not path.is_file():
            faults.append(FileFault(name, "is missing"))
        elif (actual := path.stat().st_size) != length:
            faults.append(FileFault(name, f"has {actual:,} bytes and not {length:,}"))
        else:
            whole.append(name)
    nbytes = sum(written[name][0] for name in whole)
    on_total(nbytes)
    digests = digests_of(folder, whole, workers, on_bytes)
    names = {digest: name for name, (_, digest) in written.items()}
    for name, digest in digests.items():
        if digest != written[name][1]:
            other = names.get(digest)
            faults.append(FileFault(name, f"has the content of {other}" if other else "has changed bytes"))
    return Integrity(len(whole), nbytes, sorted(faults))


def digests_of(
    folder: Path, names: list[str], workers: int, on_bytes: Callable[[int], None] = lambda count: None
) -> dict[str, str]:
    """The digests of files on disk. Raises ReshardError if one cannot be read."""
    waiting = deque(names)

    def work(index: int, stopped: Event) -> dict[str, str]:
        return {name: _digest_on_disk(folder / name, stopped, on_bytes) for name in taken(waiting, stopped)}

    return {name: digest for part in together(work, workers) for name, digest in part.items()}


def _digest_on_disk(path: Path, stopped: Event, on_bytes: Callable[[int], None]) -> str:
    try:
        return digest_of(path, stopped.is_set, on_bytes)
    except OSError as error:
        raise ReshardError(
            "record-file-unreadable",
            "a file cannot be read",
            file=str(path),
            found=error.strerror or str(error),
            remedy="check the disk or file server, then run the same command again",
        ) from error


def read_record(folder: Path) -> dict[str, Any]:
    """The content of `reshard.json`. Raises ReshardError if it is missing, or if this version cannot read it."""
    if not folder.exists():
        raise nothing_there(folder)
    if folder.is_file():
        raise ReshardError(
            "record-of-single-file",
            "a single file has no record with digests",
            file=str(folder),
            rule=f"{RECORD} is in the folder that `reshard convert` writes; a file alone, such as out.gguf, gets none",
            remedy="compare its weights (reshard verify SRC FILE), pass the folder with its record, or convert again "
            "into a folder",
        )
    path = folder / RECORD
    record = read_object(path, Sources()) if path.is_file() else {}
    files = record.get(FILES_KEY)
    if not isinstance(files, dict) or not files or not all(map(_is_file, files.items())):
        raise ReshardError(
            "digest-record-missing",
            "no record with digests found",
            file=str(folder),
            expected=f"{RECORD}, as `reshard convert` writes it",
            remedy="compare the weights (reshard verify SRC DST, the output last), or convert again",
        )
    if record.get("digest") != DIGEST_NAME:
        raise ReshardError(
            "digest-kind-unknown",
            "unknown kind of digest",
            file=str(path),
            expected=DIGEST_NAME,
            found=f"{record.get('digest')}, written by reshard {record.get('reshard')}",
            remedy="check the folder with the version of reshard that wrote it, or with a newer one",
        )
    return record


def read_unmodified(folder: Path) -> dict[str, Any]:
    """The same. Raises ReshardError also if the record was modified after it was written."""
    record = read_record(folder)
    if not _is_own(Sources().read(folder / RECORD)):
        raise ReshardError(
            "record-modified",
            f"{RECORD} was modified after it was written, and cannot be used",
            file=str(folder / RECORD),
            rule="a proof needs the options and sources of the conversion, as they were written",
            remedy="put the original back, compare the weights (reshard verify SRC DST), or convert again",
        )
    return record


def options_of(record: Mapping[str, Any], folder: Path) -> ConversionOptions:
    """The options that a folder was written with. Raises ReshardError if its record does not contain them."""
    try:
        return ConversionOptions.of_dict(record["options"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ReshardError(
            "record-without-plan",
            "the record does not contain the options of the conversion",
            file=str(folder / RECORD),
            expected="options, as this version of reshard writes them",
            found=f"written by reshard {record.get('reshard')}",
            remedy="use the version of reshard that wrote it, or convert again",
        ) from error


def _is_file(item: tuple[str, Any]) -> bool:
    name, entry = item
    kinds = isinstance(entry, dict) and (type(entry.get("bytes")), type(entry.get("digest"))) == (int, str)
    return kinds and not _leaves(name)


def _leaves(name: str) -> bool:
    return PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts
