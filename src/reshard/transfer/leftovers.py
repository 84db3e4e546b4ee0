"""What interrupted runs left next to a destination: list it, repair it, remove it."""

from __future__ import annotations

import os
import shlex
import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from reshard.base.errors import ReshardError, listed
from reshard.base.later_imports import imported_later
from reshard.transfer.run_files import (
    ASIDE,
    JOURNAL,
    OUTPUT,
    REPLACED,
    is_locked,
    locked,
    move_aside,
    partials,
)

with imported_later(__name__):
    from reshard.transfer.journal import JournalContent, read_journal


def journal_of(folder: Path) -> JournalContent | None:
    """The journal of a run that can be continued: its output has not been published.

    None if there is none. Raises OSError if the system does not allow reading it: it may still exist.
    """
    if not (folder / OUTPUT).is_dir() or (folder / REPLACED).exists():
        return None
    journal = read_journal(folder / JOURNAL)
    return journal if journal.identity else None


def recover(target: Path) -> None:
    """Repair what killed runs left next to `target`.

    What may belong to an active run is left alone, and what can be continued is kept.
    """
    target = Path(os.path.realpath(target))
    if not (partials(target) or move_aside(target)):
        return
    with suppress(ReshardError, OSError), locked(target) as has_locks:
        for staging in partials(target) if has_locks else ():
            _finish(staging, target)
        replaced = move_aside(target)
        if replaced and not (target.exists() and (not target.is_dir() or any(target.iterdir()))):
            replaced[0].rename(target)  # this also replaces an empty folder
        for leftover in partials(target) if has_locks else ():
            if not journal_of(leftover):
                shutil.rmtree(leftover, ignore_errors=True)


def _finish(staging: Path, target: Path) -> None:
    """Move the old folder to that of a run which was killed just before it would have done that itself."""
    if not (staging / ASIDE).is_file() or (staging / OUTPUT).exists() or not target.exists():
        return
    name = (staging / ASIDE).read_text()
    for old in move_aside(target):
        if old.name == name:
            old.rename(staging / REPLACED)


@dataclass(frozen=True)
class SetAside:
    """The old folder of a destination that a run replaced, and could neither put back nor remove.

    `put_back` and `remove` are shell commands; both are empty while a run is active, which does it itself.
    """

    folder: Path
    put_back: str
    remove: str

    def as_dict(self) -> dict[str, str]:
        """For `--json`."""
        return {"folder": str(self.folder), "put_back": self.put_back, "remove": self.remove}


def set_aside(target: Path) -> list[SetAside]:
    """The old folders next to a destination, the latest first."""
    target = Path(os.path.realpath(target))
    live, place = is_locked(target), shlex.quote(str(target))
    folders = []
    for folder in move_aside(target):
        name = shlex.quote(str(folder))
        away = f"mv {place} {shlex.quote(f'{target}.new')} && " if target.exists() else ""
        commands = ("", "") if live else (f"{away}mv {name} {place}", f"rm -r {name}")
        folders.append(SetAside(folder, *commands))
    return folders


@dataclass(frozen=True)
class Unfinished:
    """The remains of an interrupted run, or the work of an active one.

    `nbytes` of `total` are written (None if it cannot be continued), `modified` is the time of the last progress in
    seconds, `command` continues it from any folder, `live` says whether a run is active.
    """

    folder: Path
    nbytes: int | None
    total: int | None
    modified: float
    command: str
    live: bool

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "folder": str(self.folder),
            "written": self.nbytes,
            "bytes": self.total,
            "modified": datetime.fromtimestamp(self.modified).astimezone().isoformat(timespec="seconds"),
            "command": self.command,
            "live": self.live,
        }


def unfinished(target: Path) -> list[Unfinished]:
    """The unfinished conversions next to a destination."""
    target = Path(os.path.realpath(target))
    runs = []
    live = is_locked(target)
    for folder in partials(target):
        try:
            journal = journal_of(folder)
        except OSError:
            journal = None
        facts = journal.facts if journal else {}
        total = facts.get("bytes")
        with suppress(FileNotFoundError):  # it is being removed right now
            runs.append(
                Unfinished(
                    folder,
                    journal.nbytes if journal else None,
                    total if isinstance(total, int) else None,
                    (folder / JOURNAL if journal else folder).stat().st_mtime,
                    _anywhere(facts),
                    live,
                )
            )
    return runs


def continuing_facts(command: str, nbytes: int) -> dict[str, Any]:
    """The facts of a journal: the command that continues a run, its folder ("" if removed), and the total bytes."""
    folder = ""
    with suppress(OSError):
        folder = str(Path.cwd())
    return {"command": command, "folder": folder, "bytes": nbytes}


def _anywhere(facts: Mapping[str, Any]) -> str:
    """The command of a journal, to run from any folder: it may contain relative paths."""
    command, folder = str(facts.get("command", "")), str(facts.get("folder", ""))
    with suppress(OSError):  # this folder was removed
        if command and folder and folder != str(Path.cwd()):
            return f"cd {shlex.quote(folder)} && {command}"
    return command


def remove_unfinished(target: Path, age: float) -> list[Unfinished]:
    """Remove and return the unfinished conversions without progress for `age` seconds.

    Raises ReshardError if a run is writing to `target`, or if the file system has no locks to tell.
    """
    target = Path(os.path.realpath(target))
    if not unfinished(target):
        return []
    with locked(target) as has_locks:
        old = [each for each in unfinished(target) if each.modified <= time.time() - age]
        if old and not has_locks:
            raise ReshardError(
                "locks-unsupported",
                "this file system has no locks, so it is unknown whether a run is still writing",
                file=str(target.parent),
                found=listed([str(each.folder) for each in old]),
                remedy="make sure that no run is writing there, and remove these folders yourself",
            )
        for each in old:
            shutil.rmtree(each.folder, ignore_errors=True)
    return old


def reusable(target: Path) -> int:
    """Disk space of unfinished conversions in bytes, which the next run reuses or frees."""
    target = Path(os.path.realpath(target))
    folders = [folder for folder in partials(target) if journal_of(folder)]
    files = (path for folder in folders for path in folder.rglob("*") if path.is_file())
    return sum(path.lstat().st_blocks * 512 for path in files)
