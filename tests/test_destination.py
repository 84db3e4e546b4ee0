"""Outputs that must not be replaced, or cannot be written, are refused before anything is written."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest

from reshard.stores import source_path
from reshard.transfer.destination import bucket_problems, space_problems, target_problems


def found(target: Path, *sources: Path, foreign: list[str] | None = None) -> list[str]:
    """The obstacles to a conversion."""
    return [problem.message for problem in target_problems(sources, target, foreign=foreign)]


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
    inside, same = "the source is inside the destination", "the source and the destination are the same"
    told = inside if target == "." else same
    assert found(tmp_path / target, tmp_path / "src", foreign=[]) == [told]
    assert found(tmp_path / target, tmp_path / "src" / "iter_0000001", foreign=[]) == [inside]


def test_a_source_beside_a_target_in_a_store_is_not_inside_it() -> None:
    source = source_path("s3://bucket/model-base")
    assert bucket_problems([source], "s3://bucket/model", [], foreign=None) == []
    (problem,) = bucket_problems([source / "step"], "s3://bucket/model-base", [], foreign=None)
    assert problem.code == "source-in-destination"


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
