"""Output to a store, which has no rename: each file is assembled locally, uploaded, and removed locally.

The files that make the others a checkpoint (an index, a tracker, a config) go last; until then `unfinished_marker.py`
marks the output as unfinished. The journal of the run records what was uploaded, with the state that the store reports.
So the same command continues, also on another machine if the sources are the same there.
"""

from __future__ import annotations

import errno
import os
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from secrets import token_hex
from threading import Event, Lock

from reshard.base.errors import ReshardError, listed
from reshard.base.later_imports import imported_later
from reshard.base.quantities import size
from reshard.stores import StorePath
from reshard.stores.bucket import Bucket, UploadStoppedError
from reshard.transfer.leftovers import Unfinished, remove_unfinished, unfinished
from reshard.transfer.run_files import JOURNAL, MARKER, MIN_RENEWAL_SECONDS, OUTPUT

with imported_later(__name__):
    from reshard.transfer.journal import Journal
    from reshard.transfer.staging import OnResume, may_pass, worked
    from reshard.transfer.unfinished_marker import DestinationClaim, busy, is_live, marker_in, own_name


SMALL_OBJECT_BYTES = 16 << 20
"""Objects of fewer bytes are removed before larger ones: what makes old files a checkpoint is small."""


def staging_folder(bucket: Bucket) -> Path:
    """The local folder where the files of a destination are assembled: TMPDIR selects another disk."""
    name = f"{bucket.url.rpartition('/')[2][:80]}-{sha256(bucket.url.encode()).hexdigest()[:12]}"
    return Path(tempfile.gettempdir()).resolve() / f"reshard-{os.getuid()}" / name


def upload_memory(sizes: Mapping[str, int], last: Collection[str], threads: int) -> int:
    """Most bytes stored locally at a time: a file per thread, and those that wait for the others."""
    largest = sorted((nbytes for name, nbytes in sizes.items() if name not in last), reverse=True)
    return sum(largest[:threads]) + sum(sizes[name] for name in last)


class Uploads:
    """The uploads of one run: `take` each complete file, then `finish`."""

    def __init__(
        self,
        bucket: Bucket,
        sizes: Mapping[str, int],
        last: Sequence[str],
        memory: int,
        journal: Journal,
        claim: DestinationClaim,
        on_bytes: Callable[[int], None],
        folder: Path,
    ) -> None:
        """What earlier runs uploaded, as the journal says, need not be in `folder`."""
        self._bucket, self._sizes, self._last, self._memory = bucket, sizes, last, memory
        self._journal, self._claim, self._on_bytes = journal, claim, on_bytes
        self.folder = folder
        files = journal.progress.files
        self._states = {name: each.elsewhere for name, each in files.items() if each.elsewhere is not None}
        """The state of each object that the store reported when it was uploaded."""
        claim.uploaded = sum(sizes[name] for name in self._states)
        self._lock = Lock()

    def take(self, name: str, stopped: Event) -> None:
        """Upload a file and remove it locally, unless it has to wait for the others."""
        if name not in self._last:
            self._upload(name, stopped)

    def finish(self) -> None:
        """Upload the rest in order, and check that all objects are as they were uploaded."""
        for name in self._last:
            if name not in self._states:
                self._upload(name, Event())
        self._bucket.forget()
        listing = self._bucket.listing()
        gone = [name for name in self._sizes if name not in listing]
        wrong = [
            name for name in self._sizes if name in listing and listing[name].identity != self._states[name]
        ]
        if gone or wrong:
            changes = [f"{name} is gone" for name in gone] + [
                f"{name} was written by something else" for name in wrong
            ]
            raise ReshardError(
                "output-changed",
                "the output was changed while it was written",
                file=self._bucket.url,
                rule="the uploaded files must stay as they were uploaded",
                found=listed(sorted(changes)),
                remedy="something else removes or writes objects there: stop it, then run the same command again",
            ) from OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    def _upload(self, name: str, stopped: Event) -> None:
        file = self.folder / name
        try:
            self._bucket.put(name, file, self._memory, self._on_bytes, stopped.is_set)
        except UploadStoppedError:
            return
        info = self._bucket.look(name)
        if info is None or info.size != self._sizes[name]:
            raise ReshardError(
                "upload-differs",
                "the store's object is not the one that was uploaded",
                file=f"{self._bucket.url}/{name}",
                expected=f"{self._sizes[name]:,} bytes",
                found=f"{info.size:,} bytes" if info else "nothing",
                remedy="run the same command again",
            ) from OSError(errno.EIO, os.strerror(errno.EIO))
        if written := self._journal.progress.files.get(name):
            self._journal.record(name, replace(written, elsewhere=info.identity))
        with self._lock:
            self._states[name] = info.identity
            self._claim.uploaded += info.size
        file.unlink()
        self._claim.renew(at_most_every=MIN_RENEWAL_SECONDS)


@contextmanager
def uploading(
    bucket: Bucket,
    sizes: Mapping[str, int],
    *,
    last: Sequence[str],
    old: Collection[str],
    keeps: Callable[[str], bool] = lambda name: False,
    memory: int,
    journal: Journal,
    on_bytes: Callable[[int], None],
    on_resume: OnResume,
) -> Iterator[Uploads]:
    """Files that become the objects `sizes` of a bucket if the block succeeds.

    They are written to `folder` and taken one by one; those in `last` go last, in order. Each thread that uploads
    may hold `memory` bytes of the data that it sends. The objects `old` are removed before the first file is
    uploaded, and those that it `keeps` stay. If the block fails for a reason that may pass, what was done is kept
    for the next block with the same journal; otherwise everything uploaded is removed. Raises ReshardError if
    another run is writing to the same place, and for what the store or the system refuses.
    """
    target = staging_folder(bucket)
    root = _own_folder(target.parent)
    claims: list[DestinationClaim] = []

    def prepare(staging: Path, has_locks: bool) -> dict[str, str]:
        claim = DestinationClaim(bucket, own_name(root) if has_locks else token_hex(8), sizes, journal)
        claims.append(claim)
        try:
            return _prepare(bucket, claim, staging, sizes, set(old), keeps, journal, on_resume)
        except BaseException:
            claim.drop()
            raise

    with worked(target, sizes, journal=journal, on_resume=on_resume, prepare=prepare) as staging:
        (claim,) = claims
        try:
            uploads = Uploads(bucket, sizes, last, memory, journal, claim, on_bytes, staging / OUTPUT)
            claim.renew()
            yield uploads
        except BaseException as error:
            kept = may_pass(error) and journal.progress.nbytes
            with suppress(ReshardError, OSError):  # the original error is more useful
                claim.leave(None if kept else list(sizes))
            raise
        claim.leave([])


def _prepare(
    bucket: Bucket,
    claim: DestinationClaim,
    staging: Path,
    sizes: Mapping[str, int],
    old: set[str],
    keeps: Callable[[str], bool],
    journal: Journal,
    on_resume: OnResume,
) -> dict[str, str]:
    """Take the destination, remove what must go, and return the state of the objects of this output that are there."""
    before, listing = marker_in(bucket), bucket.listing()
    if before and before.run != claim.run and is_live(before, listing.get(MARKER)):
        raise busy(bucket, before)
    identity = before.progress.identity if before else None
    continues = identity is not None and identity == journal.identity
    removable = old | (before.names if before else set())
    appeared = listing.keys() - removable - {MARKER}
    if foreign := sorted(name for name in appeared if not keeps(name)):
        raise ReshardError(
            "destination-objects-appeared",
            "objects appeared at the destination",
            file=bucket.url,
            rule="old shards or a stale index must not remain next to new ones",
            found=listed(foreign, 5),
            remedy="find out what wrote them, then run the same command again",
        )
    gone = (listing.keys() & removable) - {MARKER} - (sizes.keys() if continues else set())
    claim.old = sorted(gone)
    claim.take(before)
    if before:
        bucket.forget_parts(before.names)
    if before and not continues and before.uploaded:
        why = (
            journal.identity.why_not(identity) if journal.identity and identity else "nothing can continue it"
        )
        on_resume(
            f"starting over: {size(before.uploaded)} of an unfinished run are removed, because {why}", 0
        )
    bucket.remove([name for name in gone if listing[name].size < SMALL_OBJECT_BYTES])
    bucket.remove([name for name in gone if listing[name].size >= SMALL_OBJECT_BYTES])
    if not continues:
        return {}
    if before and not (staging / JOURNAL).exists():
        (staging / JOURNAL).write_text(before.journal)
    return {name: each.identity for name, each in listing.items()}


def unfinished_at(target: Path) -> list[Unfinished]:
    """The unfinished conversions to a destination, on a disk or in a store."""
    if not isinstance(target, StorePath):
        return unfinished(target)
    bucket = _bucket(target)
    left = marker_in(bucket) if bucket else None
    if bucket is None or left is None:
        return []
    info = bucket.look(MARKER)
    modified = info.modified / 1e9 if info else time.time()
    return [
        Unfinished(target, left.progress.nbytes, left.total, modified, left.anywhere, is_live(left, info))
    ]


def finished_at(target: StorePath) -> str | None:
    """The state of all objects of an output in a store; None while it is unfinished, or if it cannot be read."""
    with suppress(ReshardError):
        bucket = Bucket(target)
        listing = bucket.listing()
        return None if MARKER in listing else " ".join(sorted(each.identity for each in listing.values()))
    return None


def remove_unfinished_at(target: Path, age: float) -> list[Unfinished]:
    """Remove and return the unfinished conversions without progress for `age` seconds.

    Raises ReshardError if a run is writing to `target`.
    """
    if not isinstance(target, StorePath):
        return remove_unfinished(target, age)
    runs = unfinished_at(target)
    if any(each.live for each in runs):
        bucket = Bucket(target)
        raise busy(bucket, marker_in(bucket))
    old = [each for each in runs if each.modified <= time.time() - age]
    if old:
        bucket = Bucket(target)
        left = marker_in(bucket)
        listing = bucket.listing()
        bucket.forget_parts(left.names if left else ())
        bucket.remove(sorted((left.names if left else set()) & listing.keys() - {MARKER}))
        bucket.remove([MARKER])
    return old


def _bucket(target: StorePath) -> Bucket | None:
    """The bucket at the address of a destination; None if it cannot be written to."""
    try:
        return Bucket(target)
    except ReshardError:
        return None


def _own_folder(path: Path) -> Path:
    """A folder that belongs to this user alone. Raises ReshardError if it belongs to another user."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = path.lstat()
    if status.st_uid != os.getuid() or not path.is_dir() or path.is_symlink():
        raise ReshardError(
            "upload-folder-not-ours",
            "the folder for uploads belongs to another user",
            file=str(path),
            remedy="set TMPDIR to one of your own folders",
        )
    return path
