"""Output appears whole or not at all, and what stood in its place is never lost."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest

from reshard.errors import Problem, ReshardError
from reshard.staging import check_target, staged

NOBODY = 4_194_305
"""One more than the highest process number that Linux gives."""


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def write(target: Path, *files: str, overwrite: bool = False) -> None:
    with staged(target, overwrite=overwrite) as folder:
        for file in files:
            (folder / file).parent.mkdir(exist_ok=True)
            (folder / file).write_text(file)


def checked(source: Path, target: Path, *, overwrite: bool = False, replaceable: bool = False) -> None:
    check_target(source, target, overwrite=overwrite, replaceable=replaceable, needed=1)


def test_the_target_appears_when_the_block_ends(tmp_path: Path) -> None:
    target = tmp_path / "new" / "dst"
    with staged(target, overwrite=False) as folder:
        (folder / "file").touch()
        assert folder.parent == target.parent and not target.exists()
    assert names(target) == {"file"} and names(target.parent) == {"dst"}


def test_an_empty_target_is_taken(tmp_path: Path) -> None:
    (tmp_path / "dst").mkdir()
    write(tmp_path / "dst", "file")
    assert names(tmp_path / "dst") == {"file"} and names(tmp_path) == {"dst"}


@pytest.mark.parametrize(
    "error", [ReshardError(Problem("no")), KeyboardInterrupt(), SystemExit(1), ValueError()]
)
def test_nothing_stays_when_the_block_fails(tmp_path: Path, error: BaseException) -> None:
    with (
        pytest.raises(type(error)),
        staged(tmp_path / "new" / "folders" / "dst", overwrite=False) as folder,
    ):
        (folder / "deep").mkdir()
        (folder / "deep" / "file").touch()
        raise error
    assert names(tmp_path) == set()


def test_folders_that_others_use_meanwhile_stay(tmp_path: Path) -> None:
    with pytest.raises(ValueError), staged(tmp_path / "new" / "dst", overwrite=False) as folder:
        (folder.parent / "neighbour").touch()
        raise ValueError
    assert names(tmp_path / "new") == {"neighbour"}


def test_a_failure_leaves_the_old_folder(tmp_path: Path) -> None:
    write(tmp_path / "dst", "old")
    with pytest.raises(ValueError), staged(tmp_path / "dst", overwrite=True):
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
        if ".partial-" in self.name:
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


def test_ctrl_c_while_the_old_folder_is_removed_does_not_tell_of_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "dst", "old")

    def interrupted(folder: Path, **options: bool) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", interrupted)
        write(tmp_path / "dst", "new", overwrite=True)
    assert names(tmp_path / "dst") == {"new"} and len(names(tmp_path)) == 2
    (aside,) = tmp_path.glob(".dst.replaced-*")
    aside.rename(tmp_path / f".dst.replaced-{NOBODY}")  # as it is once this process has ended
    write(tmp_path / "dst", "newer", overwrite=True)
    assert names(tmp_path) == {"dst"} and names(tmp_path / "dst") == {"newer"}


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
    assert synced == [(".dst.partial", False), ("deep", False), (tmp_path.name.partition("-")[0], True)]


def test_a_link_to_a_folder_stays_a_link(tmp_path: Path) -> None:
    write(tmp_path / "disk" / "real", "old")
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "real")
    write(tmp_path / "link", "new", overwrite=True)
    assert (tmp_path / "link").is_symlink() and names(tmp_path / "disk" / "real") == {"new"}
    assert names(tmp_path) == {"disk", "link"} and names(tmp_path / "disk") == {"real"}


def test_leftovers_of_killed_runs_are_swept(tmp_path: Path) -> None:
    write(tmp_path / "dst", "old")
    stays = {f".dst.partial-{os.getppid()}", f".other.partial-{NOBODY}", ".dst.partial-copy", ".dst.backup-1"}
    for name in (*stays, f".dst.partial-{NOBODY}", f".dst.replaced-{NOBODY}"):
        (tmp_path / name).mkdir()
    write(tmp_path / "dst", "new", overwrite=True)
    assert names(tmp_path) == {"dst", *stays}


def test_a_run_that_was_killed_between_its_renames_is_put_right(tmp_path: Path) -> None:
    """The old checkpoint had been moved aside and the new one was not in place yet."""
    write(tmp_path / "dst", "old")
    (tmp_path / "dst").rename(tmp_path / f".dst.replaced-{NOBODY}")
    with pytest.raises(ValueError), staged(tmp_path / "dst", overwrite=True):
        raise ValueError
    assert names(tmp_path) == {"dst"} and names(tmp_path / "dst") == {"old"}


def test_a_name_with_wildcards_sweeps_its_own_leftovers_only(tmp_path: Path) -> None:
    for name in (f".d[ab]*.partial-{NOBODY}", f".da.partial-{NOBODY}"):
        (tmp_path / name).mkdir()
    write(tmp_path / "d[ab]*", "new")
    assert names(tmp_path) == {"d[ab]*", f".da.partial-{NOBODY}"}


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
    checked(source, tmp_path / "deep" / "new")
    checked(source, empty)
    checked(source, source / "below")  # a conversion may be kept beside the iterations
    checked(source, old, overwrite=True, replaceable=True)


@pytest.mark.parametrize(("overwrite", "replaceable"), [(False, False), (False, True), (True, False)])
def test_a_full_target_is_refused(tmp_path: Path, overwrite: bool, replaceable: bool) -> None:
    (tmp_path / "dst").mkdir()
    (tmp_path / "dst" / "precious").touch()
    with pytest.raises(ReshardError, match="not empty"):
        checked(tmp_path / "src", tmp_path / "dst", overwrite=overwrite, replaceable=replaceable)


@pytest.mark.parametrize("target", ["src", ".", "src/../src", "other/../src", "link"])
def test_a_source_inside_the_target_is_refused(tmp_path: Path, target: str) -> None:
    (tmp_path / "src" / "iter_0000001").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "src")
    for source in (tmp_path / "src", tmp_path / "src" / "iter_0000001"):
        with pytest.raises(ReshardError, match="inside the destination"):
            checked(source, tmp_path / target, overwrite=True, replaceable=True)


def test_a_full_disk_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    asked: list[Path] = []
    monkeypatch.setattr(shutil, "disk_usage", lambda path: asked.append(path) or usage(100, 90, 10))
    target = tmp_path / "not" / "yet"
    check_target(tmp_path / "src", target, overwrite=False, replaceable=False, needed=10)
    with pytest.raises(ReshardError) as caught:
        check_target(tmp_path / "src", target, overwrite=False, replaceable=False, needed=11)
    (problem,) = caught.value.problems
    assert (problem.expected, problem.found) == ("11 bytes free", "10 bytes free")
    assert asked == [tmp_path, tmp_path]


def test_a_folder_where_nothing_can_be_written_is_refused() -> None:
    program = """
import os
from pathlib import Path
from reshard.staging import check_target
if os.geteuid() == 0:
    os.setuid(65534)  # root may write anywhere
check_target(Path("/src"), Path("/usr/dst/below"), overwrite=False, replaceable=False, needed=1)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "nothing can be written here\n  file: /usr" in done.stderr
