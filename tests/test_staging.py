"""Output appears whole or not at all, and what stood in its place is never lost."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import subprocess
import sys
import time
from collections import namedtuple
from contextlib import suppress
from pathlib import Path

import pytest

from reshard.errors import Problem, ReshardError
from reshard.transfer import journal as journal_module
from reshard.transfer.beside import put_aside
from reshard.transfer.destination import space_problems, target_problems
from reshard.transfer.journal import ROOM, Identity, Journal
from reshard.transfer.leftovers import recover, remove_unfinished, set_aside, unfinished
from reshard.transfer.sink import allocate
from reshard.transfer.staging import staged
from tests.commandline import reshard as command

LEFT = "0123abcd"
"""What a run that was killed has in the names of what it left."""


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def write(target: Path, *files: str, overwrite: bool = False) -> None:
    with staged(target, {file: len(file) for file in files}, overwrite=overwrite) as folder:
        for file in files:
            (folder / file).parent.mkdir(exist_ok=True)
            (folder / file).write_text(file)


def found(target: Path, *sources: Path, foreign: list[str] | None = None) -> list[str]:
    """What is in the way of a conversion."""
    return [problem.message for problem in target_problems(sources, target, foreign=foreign)]


def test_the_target_appears_when_the_block_ends(tmp_path: Path) -> None:
    target = tmp_path / "new" / "dst"
    with staged(target, {"file": 0}, overwrite=False) as folder:
        (folder / "file").touch()
        assert folder.parent.parent == target.parent and not target.exists()
    assert names(target) == {"file"} and names(target.parent) == {"dst"}


def test_an_empty_target_is_taken(tmp_path: Path) -> None:
    (tmp_path / "dst").mkdir()
    write(tmp_path / "dst", "file")
    assert names(tmp_path / "dst") == {"file"} and names(tmp_path) == {"dst"}


@pytest.mark.parametrize(
    "error", [ReshardError(Problem("no", "no")), KeyboardInterrupt(), SystemExit(1), ValueError()]
)
def test_nothing_stays_when_the_block_fails(tmp_path: Path, error: BaseException) -> None:
    with (
        pytest.raises(type(error)),
        staged(tmp_path / "new" / "folders" / "dst", {}, overwrite=False) as folder,
    ):
        (folder / "deep").mkdir()
        (folder / "deep" / "file").touch()
        raise error
    assert names(tmp_path) == set()


def test_folders_that_others_use_meanwhile_stay(tmp_path: Path) -> None:
    with pytest.raises(ValueError), staged(tmp_path / "new" / "dst", {}, overwrite=False) as folder:
        (folder.parent.parent / "neighbour").touch()
        raise ValueError
    assert names(tmp_path / "new") == {"neighbour"}


def test_a_failure_leaves_the_old_folder(tmp_path: Path) -> None:
    write(tmp_path / "dst", "old")
    with pytest.raises(ValueError), staged(tmp_path / "dst", {}, overwrite=True):
        raise ValueError
    assert names(tmp_path) == {"dst"} and names(tmp_path / "dst") == {"old"}


def test_the_old_folder_is_replaced_as_a_whole(tmp_path: Path) -> None:
    write(tmp_path / "dst", "old", "both", "below/old")
    write(tmp_path / "dst", "new", "both", overwrite=True)
    assert names(tmp_path) == {"dst"} and names(tmp_path / "dst") == {"new", "both"}


def test_the_old_folder_comes_back_if_the_new_one_cannot_take_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "dst", "old")
    rename = Path.rename

    def fail_once(self: Path, target: Path) -> Path:
        if self.name == "output":
            raise OSError(5, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail_once)
    with pytest.raises(ReshardError, match="Input/output error"):
        write(tmp_path / "dst", "new", overwrite=True)
    assert names(tmp_path) == {"dst"} and names(tmp_path / "dst") == {"old"}


def test_ctrl_c_between_the_renames_brings_the_old_folder_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "dst", "old")
    rename = Path.rename

    def interrupted(self: Path, target: Path) -> Path:
        moved = rename(self, target)
        if ".replaced-" in target.name:
            raise KeyboardInterrupt
        return moved

    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "dst", "new", overwrite=True)
    assert names(tmp_path) == {"dst"} and names(tmp_path / "dst") == {"old"}


def test_ctrl_c_while_the_old_folder_is_removed_leaves_nothing_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "dst", "old")

    rmtree, pressed = shutil.rmtree, []

    def interrupted(folder: Path, **options: bool) -> None:
        pressed.append(folder)
        if len(pressed) < 4:
            raise KeyboardInterrupt
        rmtree(folder, **options)

    monkeypatch.setattr(shutil, "rmtree", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "dst", "new", overwrite=True)
    assert names(tmp_path) == {"dst"} and names(tmp_path / "dst") == {"new"}


def test_everything_is_durable_before_it_is_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[tuple[str, bool]] = []
    fsync, target = os.fsync, tmp_path / "dst"

    def record(descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        synced.append((path.name.partition("-")[0], target.exists()))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    write(target, "deep/file")
    assert synced == [("output", False), ("deep", False), (tmp_path.name.partition("-")[0], True)]


def test_a_link_to_a_folder_stays_a_link(tmp_path: Path) -> None:
    write(tmp_path / "disk" / "real", "old")
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "real")
    write(tmp_path / "link", "new", overwrite=True)
    assert (tmp_path / "link").is_symlink() and names(tmp_path / "disk" / "real") == {"new"}
    assert names(tmp_path) == {"disk", "link"} and names(tmp_path / "disk") == {"real"}


def test_leftovers_of_killed_runs_are_swept(tmp_path: Path) -> None:
    stays = {
        f".other.partial-{LEFT}",
        ".dst.partial-copy",
        ".dst.backup-1",
        f".dst.partial-{LEFT}0",
        ".dst.partial-7",
    }
    for name in (*stays, f".dst.partial-{LEFT}"):
        (tmp_path / name / "release").mkdir(parents=True)
    recover(tmp_path / "dst")
    assert names(tmp_path) == stays
    recover(tmp_path / "dst")


def test_a_run_that_was_killed_between_its_renames_is_put_right(tmp_path: Path) -> None:
    """The old checkpoint had been moved aside and the new one was not in place yet."""
    write(tmp_path / "dst", "old")
    (tmp_path / "dst").rename(tmp_path / f".dst.replaced-{LEFT}")
    recover(tmp_path / "dst")
    assert names(tmp_path) == {"dst"} and names(tmp_path / "dst") == {"old"}


def test_an_old_folder_that_something_else_replaced_is_never_removed(tmp_path: Path) -> None:
    """It may be the only copy. A later run has a name of its own for what it moves aside."""
    write(tmp_path / f".dst.replaced-{LEFT}", "precious")
    write(tmp_path / "dst", "other")
    recover(tmp_path / "dst")
    write(tmp_path / "dst", "new", overwrite=True)
    assert names(tmp_path) == {"dst", f".dst.replaced-{LEFT}"} and names(tmp_path / "dst") == {"new"}
    assert put_aside(tmp_path / "dst") == [tmp_path / f".dst.replaced-{LEFT}"]
    shutil.rmtree(tmp_path / "dst")
    recover(tmp_path / "dst")
    assert names(tmp_path) == {"dst"} and names(tmp_path / "dst") == {"precious"}


@pytest.mark.parametrize("refused", [errno.EPERM, errno.EXDEV, errno.EBUSY])
@pytest.mark.parametrize(
    ("first", "said", "left"),
    [
        ("dst", "the output cannot take the place of the old folder", {"dst"}),
        ("output", "nor the old folder put back there", set()),
        (".dst.replaced-", "the folder that it replaced cannot be removed", {"dst"}),
    ],
)
def test_where_nothing_can_be_renamed_the_old_folder_stays_and_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: int, first: str, said: str, left: set[str]
) -> None:
    """From the first rename on that is about `first`."""
    write(tmp_path / "dst", "old")
    rename, begun = Path.rename, []

    def fail(self: Path, target: Path) -> Path:
        if begun or self.name.startswith(first):
            begun.append(self)
            raise OSError(refused, os.strerror(refused), str(self))
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(ReshardError, match=said) as caught:
        write(tmp_path / "dst", "new", overwrite=True)
    monkeypatch.undo()
    old = put_aside(tmp_path / "dst")
    assert names(tmp_path) == left | {path.name for path in old}
    assert sum(names(folder) == {"old"} for folder in (*old, *tmp_path.glob("dst"))) == 1
    assert os.strerror(refused) in str(caught.value.problems[0].found)
    assert all(str(path) in str(caught.value.problems[0].remedy) for path in old)
    write(tmp_path / "dst", "new", overwrite=True)
    assert names(tmp_path / "dst") == {"new"}


def test_a_file_system_without_renames_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Path, target: Path) -> Path:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), str(self))

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(ReshardError, match="the output cannot be renamed") as caught:
        write(tmp_path / "dst", "new")
    assert caught.value.problems[0].found == os.strerror(errno.EPERM) and names(tmp_path) == set()


def test_what_a_killed_run_had_set_aside_is_listed_with_what_puts_it_back(tmp_path: Path) -> None:
    target = tmp_path / "my dst"
    write(target, "old")
    target.rename(tmp_path / f".my dst.replaced-{LEFT}")
    shown = command("inspect", target)
    assert shown.code == 1 and "what was here before a run replaced it" in shown.out
    (listed,) = json.loads(command("inspect", target, "--json").out)["set_aside"]
    (old,) = set_aside(target)
    assert listed == old.as_dict() and old.put_back in shown.out and old.remove in shown.out
    write(target, "other")
    (old,) = set_aside(target)  # what stands there now is kept, too
    subprocess.run(old.put_back, shell=True, check=True)
    assert names(target) == {"old"} and names(tmp_path / "my dst.new") == {"other"}
    target.rename(tmp_path / f".my dst.replaced-{LEFT}")
    subprocess.run(old.remove, shell=True, check=True)
    assert set_aside(target) == [] and names(tmp_path) == {"my dst.new"}


def test_what_a_run_that_lives_has_set_aside_is_left_to_it(tmp_path: Path) -> None:
    with staged(tmp_path / "dst", {}, overwrite=False):
        (tmp_path / f".dst.replaced-{LEFT}").mkdir()
        (old,) = set_aside(tmp_path / "dst")
        assert (old.put_back, old.remove) == ("", "")
        (tmp_path / f".dst.replaced-{LEFT}").rmdir()


def test_a_name_with_wildcards_sweeps_its_own_leftovers_only(tmp_path: Path) -> None:
    for name in (f".d[ab]*.partial-{LEFT}", f".da.partial-{LEFT}"):
        (tmp_path / name).mkdir()
    recover(tmp_path / "d[ab]*")
    write(tmp_path / "d[ab]*", "new")
    assert names(tmp_path) == {"d[ab]*", f".da.partial-{LEFT}"}


def test_nothing_of_a_run_that_lives_is_swept(tmp_path: Path) -> None:
    with staged(tmp_path / "dst", {}, overwrite=False) as folder:
        before = names(tmp_path)
        recover(tmp_path / "dst")
        with pytest.raises(ReshardError, match="another run is writing") as caught:
            write(tmp_path / "dst", "other")
        assert str(folder.parent) in str(caught.value.problems[0].found)
        assert names(tmp_path) == before


@pytest.fixture
def no_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(descriptor: int, how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)


@pytest.mark.usefixtures("no_locks")
def test_without_locks_nothing_is_swept_and_the_rename_decides(tmp_path: Path) -> None:
    (tmp_path / f".dst.partial-{LEFT}").mkdir()
    recover(tmp_path / "dst")
    assert names(tmp_path) == {f".dst.partial-{LEFT}"}
    with (
        pytest.raises(ReshardError, match="another process created") as caught,
        staged(tmp_path / "dst", {"slow": 4}, overwrite=False) as folder,
    ):
        write(tmp_path / "dst", "fast")
        (folder / "slow").write_text("slow")
    assert caught.value.problems[0].found == "fast"
    assert names(tmp_path) == {"dst", f".dst.partial-{LEFT}"} and names(tmp_path / "dst") == {"fast"}


@pytest.mark.usefixtures("no_locks")
def test_two_runs_that_replace_the_same_folder_at_the_same_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one's output appears between the renames of this one: the old folder is kept, and named."""
    write(tmp_path / "dst", "old")
    rename = Path.rename

    def meanwhile(self: Path, target: Path) -> Path:
        moved = rename(self, target)
        if ".replaced-" in target.name:
            monkeypatch.setattr(Path, "rename", rename)
            write(tmp_path / "dst", "other")
        return moved

    monkeypatch.setattr(Path, "rename", meanwhile)
    with pytest.raises(ReshardError, match="another process created") as caught:
        write(tmp_path / "dst", "new", overwrite=True)
    (kept,) = put_aside(tmp_path / "dst")
    assert caught.value.problems[0].found == f"other; what was there before is now {kept}"
    assert names(tmp_path / "dst") == {"other"} and names(kept) == {"old"}
    assert names(tmp_path) == {"dst", kept.name}


ONE, OTHER = Identity("1", "a", "x"), Identity("1", "a", "y")


def interrupted(target: Path, identity: Identity, error: BaseException, overwrite: bool = False) -> None:
    """A run that has written one file of two when it ends."""
    journal = Journal(identity, {"command": "reshard convert", "folder": str(Path.cwd()), "bytes": 8})
    with (
        suppress(type(error), ReshardError),
        staged(target, {"done": 4, "rest": 4}, overwrite=overwrite, journal=journal) as folder,
    ):
        (folder / "done").write_text("done")
        modified = (folder / "done").stat().st_mtime_ns
        entry = {"file": "done", "bytes": 4, "modified": modified, "batches": [], "begun": {}, "late": []}
        journal.add(entry)
        raise error


def continued(target: Path, identity: Identity | None = None) -> tuple[set[str], list[str]]:
    """What a later run finds and hears."""
    journal, heard = Journal(identity), list[str]()
    stage = staged(
        target,
        {"done": 4, "rest": 4},
        overwrite=True,
        journal=journal,
        on_resume=lambda note, _: heard.append(note),
    )
    with stage as folder:
        there = names(folder)
        assert set(journal.progress.files) == there
        for file in ("done", "rest"):
            (folder / file).write_text(file)
    assert names(target) == {"done", "rest"} and names(target.parent) == {target.name}
    return there, heard


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), OSError(errno.ENOSPC, "full"), OSError(errno.EIO, "broken"), MemoryError()]
)
@pytest.mark.parametrize("overwrite", [False, True])
def test_what_was_written_is_kept_where_the_same_command_may_succeed(
    tmp_path: Path, error: BaseException, overwrite: bool
) -> None:
    if overwrite:
        write(tmp_path / "dst", "old")
    interrupted(tmp_path / "dst", ONE, error, overwrite)
    (left,) = unfinished(tmp_path / "dst")
    assert (left.nbytes, left.total, left.command, left.live) == (4, 8, "reshard convert", False)
    assert (tmp_path / "dst").exists() == overwrite
    recover(tmp_path / "dst")
    there, heard = continued(tmp_path / "dst", ONE)
    assert there == {"done"} and heard == ["continuing: 4 B of 8 B are written already"]


def test_what_was_written_is_removed_where_the_same_command_cannot_succeed(tmp_path: Path) -> None:
    for error in (ReshardError("changed", "the bytes changed"), ValueError(), SystemExit(1)):
        interrupted(tmp_path / "dst", ONE, error)
        assert names(tmp_path) == set()
    refused = ReshardError("file-unreadable", "a file cannot be read")
    refused.__cause__ = OSError(errno.ESTALE, "stale")
    interrupted(tmp_path / "dst", ONE, refused)
    assert len(unfinished(tmp_path / "dst")) == 1


@pytest.mark.parametrize(
    ("identity", "why"),
    [
        (OTHER, "it has other options"),
        (Identity("1", "b", "y"), "the source has changed since"),
        (Identity("2", "b", "y"), "another version of reshard wrote it"),
        (None, "--no-resume is given"),
    ],
)
def test_what_belongs_to_another_output_is_removed_in_one_line(
    tmp_path: Path, identity: Identity | None, why: str
) -> None:
    interrupted(tmp_path / "dst", ONE, KeyboardInterrupt())
    there, heard = continued(tmp_path / "dst", identity)
    assert there == set() and heard == [f"starting anew: 4 B of an unfinished run are removed, as {why}"]


@pytest.mark.parametrize("how", ["gone", "longer", "changed", "journal cut", "journal edited", "old folder"])
def test_only_what_lies_there_as_it_was_left_is_continued(tmp_path: Path, how: str) -> None:
    interrupted(tmp_path / "dst", ONE, KeyboardInterrupt())
    (left,) = unfinished(tmp_path / "dst")
    file, journal = left.folder / "output" / "done", left.folder / "journal"
    if how == "gone":
        file.unlink()
    elif how == "longer":
        file.write_text("longer")
    elif how == "changed":
        os.utime(file, ns=(0, 0))
    elif how == "journal cut":
        os.truncate(journal, journal.stat().st_size - 1)
    elif how == "journal edited":
        journal.write_bytes(journal.read_bytes().replace(b'"bytes":4,', b'"bytes":5,'))
    else:
        (left.folder / "replaced").mkdir()  # it was published
    journal = Journal(ONE)
    with suppress(KeyboardInterrupt), staged(tmp_path / "dst", {"done": 4}, overwrite=False, journal=journal):
        assert journal.progress.files == {} and journal.is_open
        raise KeyboardInterrupt
    assert names(tmp_path) == set()


def test_a_journal_that_is_none_is_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / f".dst.partial-{LEFT}" / "output").mkdir(parents=True)
    os.mkfifo(tmp_path / f".dst.partial-{LEFT}" / "journal")
    assert [each.nbytes for each in unfinished(tmp_path / "dst")] == [None]
    write(tmp_path / "dst", "new")
    assert names(tmp_path) == {"dst"}


@pytest.mark.parametrize("refused", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.EMFILE])
@pytest.mark.parametrize("call", ["mkdir", "read the journal"])
def test_what_the_system_does_not_tell_is_not_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: int, call: str
) -> None:
    """Whether the folder is of the same user, and what its journal says."""
    interrupted(tmp_path / "dst", ONE, KeyboardInterrupt())
    with monkeypatch.context() as patch:
        if call == "mkdir":
            refuse(patch, Path, "mkdir", "probe-", refused)
        else:
            refuse(patch, journal_module, "open_file", "journal", refused)
        with pytest.raises(ReshardError, match=os.strerror(refused)) as caught:
            continued(tmp_path / "dst", ONE)
    assert "run the same command again" in str(caught.value.problems[0].remedy)
    there, heard = continued(tmp_path / "dst", ONE)
    assert there == {"done"} and heard == ["continuing: 4 B of 8 B are written already"]


def refuse(patch: pytest.MonkeyPatch, owner: object, name: str, path: str, number: int) -> None:
    """Let a function fail for paths whose name begins so."""
    original = getattr(owner, name)

    def call(where: Path, *args: object, **options: object) -> object:
        if Path(where).name.startswith(path):
            raise OSError(number, os.strerror(number), str(where))
        return original(where, *args, **options)

    patch.setattr(owner, name, call)


def test_the_journal_has_room_on_a_disk_that_fills_up(tmp_path: Path) -> None:
    with open(tmp_path / "probe", "wb") as probe:
        allocate(probe.fileno(), 0, ROOM)
        if os.fstat(probe.fileno()).st_blocks * 512 < ROOM:
            pytest.skip("this file system cannot allocate")
    journal = Journal(ONE)
    journal.open(tmp_path / "journal", tmp_path, {}, {})
    for number in range(3 * ROOM // 1000):
        journal.add({"replicas": "x" * 1000})
        status = (tmp_path / "journal").stat()
        assert number % 100 or status.st_blocks * 512 >= status.st_size + ROOM // 2
    journal.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_what_another_user_wrote_is_not_continued(tmp_path: Path) -> None:
    """In /tmp, for one, anybody may have foreseen the name of the folder, and made it."""
    interrupted(tmp_path / "dst", ONE, KeyboardInterrupt())
    (left,) = unfinished(tmp_path / "dst")
    os.chown(left.folder / "journal", 65534, 65534)
    there, heard = continued(tmp_path / "dst", ONE)
    assert there == set() and "another user wrote it" in heard[0]


@pytest.mark.usefixtures("no_locks")
def test_without_locks_nothing_is_continued(tmp_path: Path) -> None:
    interrupted(tmp_path / "dst", ONE, KeyboardInterrupt())
    assert names(tmp_path) == set()
    there, heard = continued(tmp_path / "dst", ONE)
    assert there == set() and len(heard) == 1 and "this file system has no locks" in heard[0]


def test_unfinished_runs_are_removed_by_age_and_never_of_one_that_lives(tmp_path: Path) -> None:
    interrupted(tmp_path / "dst", ONE, KeyboardInterrupt())
    (left,) = unfinished(tmp_path / "dst")
    os.utime(left.folder / "journal", (0, time.time() - 100))
    assert remove_unfinished(tmp_path / "dst", 200) == [] and left.folder.exists()
    with (
        suppress(KeyboardInterrupt),
        staged(tmp_path / "dst", {"done": 4, "rest": 4}, overwrite=False, journal=Journal(ONE)),
    ):
        assert unfinished(tmp_path / "dst")[0].live
        with pytest.raises(ReshardError, match="another run is writing"):
            remove_unfinished(tmp_path / "dst", 0)
        raise KeyboardInterrupt
    assert not unfinished(tmp_path / "dst")[0].live
    assert [each.folder for each in remove_unfinished(tmp_path / "dst", 50)] == [left.folder]
    assert names(tmp_path) == set() and remove_unfinished(tmp_path / "dst", 0) == []


def spoil(folder: Path, how: str) -> None:
    if how == "removed":
        shutil.rmtree(folder)
    elif how == "thinned":
        (folder / "a").unlink()
    elif how == "cut":
        (folder / "a").write_text("")
    elif how == "added":
        (folder / "c").touch()


@pytest.mark.parametrize(
    ("how", "found"),
    [
        ("removed", "the folder was removed"),
        ("thinned", "a is missing"),
        ("cut", "a has 0 bytes and not 1"),
        ("added", "c should not be there"),
    ],
)
def test_a_folder_that_others_change_is_not_published(tmp_path: Path, how: str, found: str) -> None:
    """As a sweep does that takes a run in another container for dead."""
    write(tmp_path / "dst", "old")
    with (
        pytest.raises(ReshardError, match="changed while it was written") as caught,
        staged(tmp_path / "dst", {"a": 1, "b": 1}, overwrite=True) as folder,
    ):
        (folder / "a").write_text("a")
        (folder / "b").write_text("b")
        spoil(folder, how)
    assert caught.value.problems[0].found == found
    assert names(tmp_path) == {"dst"} and names(tmp_path / "dst") == {"old"}


def test_a_lock_that_its_holder_has_just_removed_is_taken_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flock, removed = fcntl.flock, []

    def late(descriptor: int, how: int) -> None:
        if not removed:
            removed.append((tmp_path / ".dst.lock-reshard").unlink())
        flock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with staged(tmp_path / "dst", {}, overwrite=False):
        assert (tmp_path / ".dst.lock-reshard").exists()
    assert names(tmp_path) == {"dst"}


def test_what_the_system_refuses_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ReshardError) as caught:
        write(tmp_path / "file" / "dst", "new")
    (problem,) = caught.value.problems
    assert problem.file == str(tmp_path / "file") and problem.found in ("Not a directory", "File exists")
    assert names(tmp_path) == {"file"}


def test_a_good_target_passes(tmp_path: Path) -> None:
    source, empty, old = tmp_path / "src", tmp_path / "empty", tmp_path / "old"
    for folder in (source, empty, old):
        folder.mkdir()
    (old / "config.json").touch()
    assert found(tmp_path / "deep" / "new", source) == []
    assert found(empty, source) == []
    assert found(source / "below", source) == []  # a conversion may be kept beside the iterations
    assert found(old, source, foreign=[]) == []


@pytest.mark.parametrize("foreign", [None, ["precious"]])
def test_a_full_target_is_refused(tmp_path: Path, foreign: list[str] | None) -> None:
    (tmp_path / "dst").mkdir()
    (tmp_path / "dst" / "precious").touch()
    message = "the destination contains files that --overwrite does not delete"
    assert found(tmp_path / "dst", tmp_path / "src", foreign=foreign) == [
        message if foreign else "the destination is not empty"
    ]


@pytest.mark.parametrize("target", ["src", ".", "src/../src", "other/../src", "link"])
def test_a_source_inside_the_target_is_refused(tmp_path: Path, target: str) -> None:
    (tmp_path / "src" / "iter_0000001").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "src")
    for source in (tmp_path / "src", tmp_path / "src" / "iter_0000001"):
        assert found(tmp_path / target, source, foreign=[]) == ["the source lies inside the destination"]


@pytest.mark.parametrize(
    "read",
    ["link to a file", "link to a folder", "link to a link", "link in the target", "file by a crooked path"],
)
def test_whatever_is_read_below_the_target_is_refused(tmp_path: Path, read: str) -> None:
    target, source, elsewhere = (tmp_path / name for name in ("dst", "src", "elsewhere"))
    for folder in (target, source, elsewhere):
        folder.mkdir()
        (folder / "weights").touch()
    if read == "link to a file":
        path = source / "link"
        path.symlink_to(target / "weights")
    elif read == "link to a folder":
        (source / "folder").symlink_to(target)
        path = source / "folder" / "weights"
    elif read == "link to a link":
        (target / "link").symlink_to(elsewhere / "weights")
        path = source / "link"
        path.symlink_to(Path("..") / "dst" / "link")
    elif read == "link in the target":
        path = target / "link"
        path.symlink_to(elsewhere / "weights")
    else:
        path = source / ".." / "dst" / "weights"
    (problem,) = target_problems([source, elsewhere / "weights", path], target, foreign=[])
    assert (
        problem.message == "the destination contains files that the conversion reads"
        and problem.found == str(path)
    )
    assert found(target, source, elsewhere / "weights", foreign=[]) == []


def test_what_is_no_output_of_ours_inside_the_source_is_not_replaced(tmp_path: Path) -> None:
    ckpt, step = tmp_path / "ckpt", tmp_path / "ckpt" / "iter_0000003"
    step.mkdir(parents=True)
    (step / ".metadata").touch()
    assert found(step, ckpt, foreign=[]) == ["the destination is part of the source"]
    (step / "reshard.json").touch()
    assert found(step, ckpt, foreign=[]) == []


def test_a_full_disk_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    asked: list[Path] = []
    monkeypatch.setattr(shutil, "disk_usage", lambda path: asked.append(path) or usage(100, 90, 10))
    target = tmp_path / "not" / "yet"
    assert space_problems(target, 10) == []
    (problem,) = space_problems(target, 11)
    assert (problem.expected, problem.found) == ("11 bytes free", "10 bytes free")
    assert asked == [tmp_path, tmp_path]


def test_a_folder_where_nothing_can_be_written_is_refused() -> None:
    program = """
import os
from pathlib import Path
from reshard.transfer.destination import target_problems
if os.geteuid() == 0:
    os.setuid(65534)  # root may write anywhere
print(*target_problems([Path("/src")], Path("/usr/dst/below"), foreign=None))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stdout.startswith("nothing can be written here\n  file: /usr\n")
