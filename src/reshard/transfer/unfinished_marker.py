"""The marker: an object that says that the checkpoint in a store is unfinished, and which run writes it.

It is created before the first file and removed after the last. It lists the files that the run writes, the command that
continues it, and what it has uploaded (its journal). An active run renews it, so that runs on other machines leave its
destination alone.
"""

from __future__ import annotations

import json
import secrets
import shlex
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Event, RLock, Thread

from reshard.base.errors import ReshardError
from reshard.base.plain_json import json_of
from reshard.stores.bucket import Bucket
from reshard.stores.file_info import FileInfo
from reshard.transfer.journal import Journal, JournalContent, parsed_journal
from reshard.transfer.run_files import MARKER
from reshard.version import __version__

ABOUT = "An unfinished conversion by reshard: as long as this object exists, the others are not a checkpoint."

RENEWAL_SECONDS = 60.0
"""Seconds after which an active run renews its marker."""

LOST_AFTER_SECONDS = 3 * RENEWAL_SECONDS
"""Seconds without a renewal after which a run on another machine is presumed dead."""


@dataclass(frozen=True)
class Marker:
    """`uploaded` of `total` bytes of the output are in the store; it has these `files` and replaces the `old` ones.

    `run` identifies the writer, on the machine `host`; `command` continues it in `folder`; `ended` means that no run is
    writing.
    """

    run: str
    host: str
    command: str
    folder: str
    total: int
    uploaded: int
    ended: bool
    files: list[str]
    old: list[str]
    journal: str

    @property
    def names(self) -> set[str]:
        """All objects that may be removed with the marker."""
        return {MARKER, *self.files, *self.old}

    @property
    def progress(self) -> JournalContent:
        """What the run has done, in the store or on its machine, as its journal says."""
        return parsed_journal(self.journal.encode(errors="replace").splitlines(keepends=True))

    @property
    def anywhere(self) -> str:
        """The command that continues the run, from any folder."""
        return f"cd {shlex.quote(self.folder)} && {self.command}" if self.folder else self.command

    def as_bytes(self) -> bytes:
        """The content of the object."""
        return json.dumps({"about": ABOUT, "reshard": __version__, **asdict(self)}, indent=1).encode()


def parsed_marker(content: bytes) -> Marker | None:
    """The marker in an object; None if it is not one of ours."""
    try:
        entry = json_of(content)
        marker = Marker(**{key: entry[key] for key in Marker.__dataclass_fields__})
        texts = (
            marker.run,
            marker.host,
            marker.command,
            marker.folder,
            marker.journal,
            *marker.files,
            *marker.old,
        )
        numbers = (marker.total, marker.uploaded)
    except (ValueError, KeyError, TypeError):
        return None
    is_ours = all(isinstance(each, str) for each in texts) and all(isinstance(each, int) for each in numbers)
    return marker if is_ours else None


def marker_in(bucket: Bucket) -> Marker | None:
    """The marker of a destination. Raises ReshardError if an object of its name is something else."""
    content = bucket.read(MARKER)
    if content is None:
        return None
    marker = parsed_marker(content)
    if marker is None:
        raise ReshardError(
            "marker-not-ours",
            "an object has the name of reshard's marker but other contents",
            file=f"{bucket.url}/{MARKER}",
            remedy="check what it is, and remove it if nobody needs it",
        )
    return marker


def is_live(marker: Marker, info: FileInfo | None) -> bool:
    """Whether the run that wrote a marker may still be active, as far as another machine can tell."""
    return not marker.ended and info is not None and time.time() - info.modified / 1e9 < LOST_AFTER_SECONDS


class DestinationClaim:
    """A run's hold on a destination, from its first marker to its last.

    `run` identifies the machine and its user. Whoever holds the lock of the destination there knows that no other run
    of this name is active.
    """

    def __init__(self, bucket: Bucket, run: str, sizes: Mapping[str, int], journal: Journal) -> None:
        self._bucket, self.run, self._sizes, self._journal = bucket, run, sizes, journal
        self._writing, self._ended = RLock(), Event()
        self._when = 0.0
        self._thread = Thread(target=self._keep, daemon=True)
        self._is_lost = False
        self.uploaded = 0
        self.old: list[str] = []

    def take(self, before: Marker | None) -> None:
        """Write the first marker, over the one of `before` if given. Raises ReshardError if another run was faster."""
        content = self._marker().as_bytes()
        if before is not None:
            self._bucket.write(MARKER, content)
        elif not self._bucket.create(MARKER, content):
            raise busy(self._bucket, marker_in(self._bucket))
        self.hold()
        self._when = time.monotonic()
        self._thread.start()

    def hold(self) -> None:
        """Raise ReshardError if another run has taken the destination."""
        marker = marker_in(self._bucket)
        if marker is None or marker.run != self.run:
            self._is_lost = True
        if self._is_lost:
            raise busy(self._bucket, marker)

    def renew(self, *, at_most_every: float = 0.0) -> None:
        """Write the progress of the run to the marker."""
        with self._writing:
            if self._is_lost or time.monotonic() - self._when >= at_most_every:
                self.hold()
                self._bucket.write(MARKER, self._marker().as_bytes())
                self._when = time.monotonic()

    def leave(self, names: Sequence[str] | None) -> None:
        """End the hold: remove the objects `names` and the marker; if None, keep the marker for the next run."""
        self.drop()
        if self._is_lost:
            return
        if names is None:
            self._bucket.write(MARKER, self._marker(ended=True).as_bytes())
            return
        listing = self._bucket.listing() if names else {}
        self._bucket.remove([name for name in names if name in listing])
        self._bucket.remove([MARKER])

    def drop(self) -> None:
        """Stop renewing the marker."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()

    def _marker(self, *, ended: bool = False) -> Marker:
        facts = {key: str(self._journal.facts.get(key, "")) for key in ("command", "folder")}
        return Marker(
            run=self.run,
            host=socket.gethostname(),
            total=sum(self._sizes.values()),
            uploaded=self.uploaded,
            ended=ended,
            files=sorted(self._sizes),
            old=self.old,
            journal=self._journal.text,
            **facts,
        )

    def _keep(self) -> None:
        while not self._ended.wait(RENEWAL_SECONDS):
            with suppress(
                ReshardError, OSError
            ):  # the network may recover; the run itself notices a lost hold
                self.renew()


def busy(bucket: Bucket, marker: Marker | None) -> ReshardError:
    """The error for a run that finds another one at its destination."""
    return ReshardError(
        "destination-in-use",
        "another run is writing to the destination",
        file=bucket.url,
        rule="only one run at a time may write to a destination",
        found=f"{MARKER} of a run on {marker.host}: {marker.command}" if marker else f"{MARKER} is gone",
        remedy=f"wait until it has ended; after one that was killed, "
        f""
        f"the same command works in {LOST_AFTER_SECONDS / 60:.0f} minutes",
    )


def own_name(root: Path) -> str:
    """The name of this user on this machine, for markers; stored in a folder, so that it survives a reboot."""
    path = root / "name"
    try:
        with open(path, "x") as file:
            file.write(secrets.token_hex(8))
    except FileExistsError:
        pass
    return path.read_text()
