"""Runs that do not finish, and how anything is told."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import reshard as api
from tests.bad_input.damage import (
    MEGATRON,
    Copy,
    convert,
    converted,
    edit_tensors,
    find,
    flip,
    refusal,
    refused,
)
from tests.commandline import listing, reshard

# ----------------------------------------------------------------------------- runs that do not finish


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk fills up while the weights are written."""
    written, pwrite = 0, os.pwrite

    def write(descriptor: int, data: Any, offset: int) -> int:
        nonlocal written
        written += len(data)
        if written > 100_000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwrite(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", write)


@pytest.mark.usefixtures("full_disk")
def test_a_write_error_leaves_nothing(copy: Copy) -> None:
    src = copy("qwen3")
    problem = refusal("convert", src, src.parent / "new" / "folders" / "dst", *MEGATRON)
    assert problem["message"] == "the system refused to read or to write"
    assert problem["found"] == "No space left on device" and "free some space" in problem["remedy"]
    assert not (src.parent / "new").exists()


def test_a_write_error_leaves_the_old_checkpoint(
    copy: Copy, originals: Callable[[str], Path], request: pytest.FixtureRequest
) -> None:
    src = copy("qwen3")
    shutil.copytree(originals("legacy"), src.parent / "dst")
    request.getfixturevalue("full_disk")  # only now: making the original needs room
    refusal(*convert(src, *MEGATRON, "--overwrite"))  # compares what is there before and after
    assert reshard("verify", src, src.parent / "dst").code == 0


def test_damage_that_shows_while_bytes_are_copied_leaves_the_old_checkpoint(copy: Copy) -> None:
    src = copy("torch_dist")
    converted(src, src.parent / "dst")
    path = find(src, "__1_0.distcp")
    flip(path, path.stat().st_size // 2)
    refusal(*convert(src, "--overwrite"))


def test_ctrl_c_in_a_callback(copy: Copy) -> None:
    src = copy("qwen3")
    before = listing(src.parent)

    def interrupt(count: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        api.convert(src, src.parent / "dst", to="megatron", on_bytes=interrupt)
    assert listing(src.parent) == before


SLOW = """
import os, signal, sys, time
from reshard.cli import main
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell begins with it ignored
pwrite = os.pwrite
def slow(*args):
    time.sleep(0.05)
    return pwrite(*args)
os.pwrite = slow
main(sys.argv[1:])
"""


def begin_slowly(src: Path, dst: Path, *flags: str) -> subprocess.Popen[str]:
    """A conversion in a process of its own that has begun to write, and will take long to finish."""
    command = [sys.executable, "-c", SLOW, "convert", str(src), str(dst), *MEGATRON, *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not list(dst.parent.glob(f".{dst.name}.partial-*/**/*.distcp")):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.01)
    return process


def test_ctrl_c_in_the_middle(copy: Copy) -> None:
    src = copy("qwen3")
    before = listing(src.parent)
    process = begin_slowly(src, src.parent / "dst")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert (out, err) == ("", "interrupted: nothing was changed\n")
    assert listing(src.parent) == before


def test_what_a_killed_run_left_is_swept_by_the_next(copy: Copy) -> None:
    src = copy("qwen3")
    dst = src.parent / "dst"
    process = begin_slowly(src, dst)
    process.kill()
    process.communicate(timeout=60)
    (leftover,) = src.parent.glob(".dst.partial-*")
    assert leftover.name == f".dst.partial-{process.pid}" and not dst.exists()
    alive = src.parent / f".dst.partial-{os.getppid()}"  # of a run that still goes on
    alive.mkdir()
    converted(src, dst, *MEGATRON)
    assert not leftover.exists() and alive.exists()


# -------------------------------------------------------------------------------------- how it is told


def test_debug_shows_the_traceback(copy: Copy) -> None:
    src = copy("qwen3")
    (src / "model.safetensors").unlink()
    result = reshard(*convert(src, *MEGATRON, "--debug"))
    assert result.code == 2 and result.out == ""
    assert "Traceback (most recent call last)" in result.err and "ReshardError" in result.err
    assert "error: no checkpoint found here" in result.err
    machine = reshard(*convert(src, *MEGATRON, "--debug", "--json"))
    assert machine.json["problems"][0]["message"] == "no checkpoint found here"


def test_what_nobody_foresaw_is_told_without_a_traceback(copy: Copy, monkeypatch: pytest.MonkeyPatch) -> None:
    src = copy("qwen3")
    monkeypatch.setattr("reshard.api.convert", lambda *args, **options: {}["surprise"])
    problem = refusal(*convert(src, *MEGATRON))
    assert problem["found"] == "KeyError: 'surprise'" and "--debug" in problem["remedy"]
    assert "Traceback" in reshard(*convert(src, *MEGATRON, "--debug")).err


def test_many_problems_are_counted_and_json_lists_all(copy: Copy) -> None:
    src = copy("qwen3")

    def remove(tensors: dict[str, Any]) -> None:
        for name in [name for name in tensors if "layers.1." in name or "layers.2." in name]:
            del tensors[name]

    edit_tensors(src, remove)
    problems = refused(*convert(src, *MEGATRON))
    assert len(problems) == 22
    err = reshard(*convert(src, *MEGATRON)).err
    assert err.count("error: a tensor is missing") == 12 and "… and 10 more (--json lists all)" in err
