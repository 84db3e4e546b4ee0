"""Output appears complete or not at all, and what it replaces is never lost."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from reshard.base.errors import Problem, ReshardError
from reshard.transfer import locks
from reshard.transfer.leftovers import recover, set_aside
from reshard.transfer.run_files import move_aside
from reshard.transfer.staging import staged
from tests.commandline import reshard as command
from tests.staging import LEFT, names, write


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


def test_what_is_kept_of_the_old_folder_replaces_nothing_new(tmp_path: Path) -> None:
    target = tmp_path / "dst"
    write(target, "both", "kept", "old")
    with staged(target, {"both": 4}, overwrite=True, keeps=lambda: ["both", "kept"]) as folder:
        (folder / "both").write_text("new!")
    assert {path.name: path.read_text() for path in target.iterdir()} == {"both": "new!", "kept": "kept"}


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
    """It may be the only copy. A later run uses another name for what it moves aside."""
    write(tmp_path / f".dst.replaced-{LEFT}", "precious")
    write(tmp_path / "dst", "other")
    recover(tmp_path / "dst")
    write(tmp_path / "dst", "new", overwrite=True)
    assert names(tmp_path) == {"dst", f".dst.replaced-{LEFT}"} and names(tmp_path / "dst") == {"new"}
    assert move_aside(tmp_path / "dst") == [tmp_path / f".dst.replaced-{LEFT}"]
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
    """From the first rename on that involves `first`."""
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
    old = move_aside(tmp_path / "dst")
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
    (kept,) = move_aside(tmp_path / "dst")
    assert caught.value.problems[0].found == f"other; what was there before is now {kept}"
    assert names(tmp_path / "dst") == {"other"} and names(kept) == {"old"}
    assert names(tmp_path) == {"dst", kept.name}


@pytest.mark.usefixtures("no_locks")
def test_a_run_whose_output_another_one_replaces_at_once_leaves_no_old_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "dst", "old")
    rename = Path.rename

    def meanwhile(self: Path, target: Path) -> Path:
        moved = rename(self, target)
        if target == tmp_path / "dst":
            monkeypatch.setattr(Path, "rename", rename)
            write(tmp_path / "dst", "other", overwrite=True)
        return moved

    monkeypatch.setattr(Path, "rename", meanwhile)
    write(tmp_path / "dst", "new", overwrite=True)
    assert names(tmp_path) == {"dst"} and names(tmp_path / "dst") == {"other"}


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
    """As by a cleanup that takes a run in another container for dead."""
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


def test_a_lock_that_its_holder_removed_meanwhile_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between opening a lock and taking it, its holder may finish and remove it; others would create a new one."""
    path, take, taken = tmp_path / "lock", locks.fcntl.flock, []

    def removed_first(descriptor: int, how: int) -> None:
        if not taken:
            path.unlink()
        taken.append(take(descriptor, how))

    monkeypatch.setattr(locks.fcntl, "flock", removed_first)
    with locks.held(path) as has_locks:
        assert has_locks and len(taken) == 2 and path.exists()
        with pytest.raises(BlockingIOError), locks.held(path):
            pass
    assert not path.exists()
