"""The output of an interrupted run is kept, and continued only by a run that would write the same."""

from __future__ import annotations

import errno
import json
import os
import time
from contextlib import suppress
from pathlib import Path

import pytest

from reshard.base.errors import UNUSABLE, ReshardError
from reshard.transfer import journal as journal_module
from reshard.transfer.elements import Overflow
from reshard.transfer.journal import RESERVED_BYTES, Journal, OutputIdentity
from reshard.transfer.leftovers import recover, remove_unfinished, unfinished
from reshard.transfer.sink import allocate
from reshard.transfer.staging import staged
from reshard.transfer.written_file import BegunBlock, FileState, WrittenFile
from tests.staging import LEFT, names, write

ONE, OTHER = OutputIdentity("1", "a", "x"), OutputIdentity("1", "a", "y")


def interrupted(
    target: Path, identity: OutputIdentity, error: BaseException, overwrite: bool = False
) -> None:
    """A run that is interrupted after writing one of two files."""
    journal = Journal(identity, {"command": "reshard convert", "folder": str(Path.cwd()), "bytes": 8})
    with (
        suppress(type(error), ReshardError),
        staged(target, {"done": 4, "rest": 4}, overwrite=overwrite, journal=journal) as folder,
    ):
        (folder / "done").write_text("done")
        journal.record("done", WrittenFile(4, state=FileState.of((folder / "done").stat()), digest="0f"))
        raise error


def continued(target: Path, identity: OutputIdentity | None = None) -> tuple[set[str], list[str]]:
    """The files and the messages of a later run."""
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
        (OutputIdentity("1", "b", "y"), "the source has changed since"),
        (OutputIdentity("2", "b", "y"), "another version of reshard wrote it"),
        (None, "--no-resume is given"),
    ],
)
def test_what_belongs_to_another_output_is_removed_in_one_line(
    tmp_path: Path, identity: OutputIdentity | None, why: str
) -> None:
    interrupted(tmp_path / "dst", ONE, KeyboardInterrupt())
    there, heard = continued(tmp_path / "dst", identity)
    assert there == set() and heard == [f"starting over: 4 B of an unfinished run are removed, because {why}"]


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
        journal.write_bytes(journal.read_bytes().replace(b'"finished":4,', b'"finished":5,'))
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
    """Such as whether the folder belongs to the same user, and the content of its journal."""
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
    """Make a function fail for paths whose names begin with `path`."""
    original = getattr(owner, name)

    def call(where: Path, *args: object, **options: object) -> object:
        if Path(where).name.startswith(path):
            raise OSError(number, os.strerror(number), str(where))
        return original(where, *args, **options)

    patch.setattr(owner, name, call)


def test_the_journal_has_room_on_a_disk_that_fills_up(tmp_path: Path) -> None:
    with open(tmp_path / "probe", "wb") as probe:
        allocate(probe.fileno(), 0, RESERVED_BYTES)
        if os.fstat(probe.fileno()).st_blocks * 512 < RESERVED_BYTES:
            pytest.skip("this file system cannot allocate")
    journal = Journal(ONE)
    journal.open(tmp_path / "journal", tmp_path, {}, {})
    for number in range(3 * RESERVED_BYTES // 1000):
        journal.add({"replicas": "x" * 1000})
        status = (tmp_path / "journal").stat()
        assert number % 100 or status.st_blocks * 512 >= status.st_size + RESERVED_BYTES // 2
    journal.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_what_another_user_wrote_is_not_continued(tmp_path: Path) -> None:
    """In /tmp, for example, anybody could have guessed the folder's name and created it."""
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


def test_a_record_of_a_file_is_the_same_when_it_was_stored() -> None:
    overflow = Overflow(2, 7e4, "float16")
    written = WrittenFile(
        finished=12,
        batches={0, 1, 2, 7},
        begun={3: BegunBlock(12, 16, 5, True, overflow), 4: BegunBlock(20, 21, 0, False)},
        late=[(3, b"\x00\xff\x01\x02")],
        nonfinite={"a", "b"},
        overflowed={("a", 8): overflow},
    )
    again = WrittenFile.of_entry(json.loads(json.dumps(written.as_entry())))
    assert again == written and again.nbytes == 17 and not again.is_whole
    again.add(WrittenFile(finished=9, batches={3}))
    assert again.nbytes == 22 and again.begun.keys() == {4}
    whole = WrittenFile(22, state=FileState(1, 2, 3, "boot"), digest="0f", elsewhere="etag")
    assert WrittenFile.of_entry(json.loads(json.dumps(whole.as_entry()))) == whole


@pytest.mark.parametrize("batches", [[[0, 1 << 40]], [["0", 1]], [[0]], 3])
def test_batches_that_no_file_has_are_refused(batches: object) -> None:
    with pytest.raises(UNUSABLE):
        WrittenFile.of_entry({**WrittenFile().as_entry(), "batches": batches})
