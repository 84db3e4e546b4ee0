"""Runs that do not finish, and their messages."""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections import namedtuple
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
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
from tests.commandline import Result, listing, reshard

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
    problem = refusal("convert", src, src.parent / "new" / "folders" / "dst", *MEGATRON, "--no-resume")
    assert problem["message"] == "the system refused to read or to write"
    assert problem["found"] == "No space left on device" and "free some space" in problem["remedy"]
    assert not (src.parent / "new").exists()


def test_a_run_continues_when_the_disk_has_room_again(
    copy: Copy, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    src = copy("qwen3")
    command = convert(src, "--to", "huggingface", "--max-shard-size", "50KB", "--workers", "1")
    request.getfixturevalue("full_disk")
    result = reshard(*command)
    assert result.code == 2 and "found: No space left on device" in result.err
    assert "free some space, then run the same command again: " in result.err
    monkeypatch.undo()
    result = reshard(*command, "--json")
    assert result.code == 0 and 0 < result.json["resumed"] < result.json["written"] == result.json["bytes"]
    assert reshard("verify", src, src.parent / "dst").code == 0


def test_a_write_error_leaves_the_old_checkpoint(
    copy: Copy, originals: Callable[[str], Path], request: pytest.FixtureRequest
) -> None:
    src = copy("qwen3")
    shutil.copytree(originals("legacy"), src.parent / "dst")
    request.getfixturevalue("full_disk")  # only now: making the original needs room
    refusal(*convert(src, *MEGATRON, "--overwrite", "--no-resume"))  # compares what is there before and after
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
import errno, fcntl, os, signal, sys, time
from reshard.cli import main
if "INT" in sys.argv[1]:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell begins with it ignored
if "nohup" in sys.argv[1]:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
pwrite = os.pwrite
def slow(*args):
    time.sleep(0.05)
    while "gate" in sys.argv[1] and not os.path.exists(os.path.join(sys.argv[3], "go")):
        time.sleep(0.01)
    return pwrite(*args)
os.pwrite = slow
from reshard.transfer import threads
end = threads._end
def opening(pool, futures, begin, stopped):
    if sys.exc_info()[0]:
        stopped.set()
        open(os.path.join(sys.argv[3], "go"), "w").close()
    end(pool, futures, begin, stopped)
if "opens" in sys.argv[1]:
    threads._end = opening
def flock(*args):
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
if "no locks" in sys.argv[1]:
    fcntl.flock = flock
main(sys.argv[2:])
"""


def begin_slowly(
    src: Path, dst: Path, *flags: str, how: str = "INT", within: tuple[str, ...] = ()
) -> subprocess.Popen[str]:
    """A conversion in its own process that has begun to write, and will take long to finish.

    With a gate, it waits until `go` exists in the source; a gate that opens lets it continue when it is interrupted.
    """
    before = set(dst.parent.glob(f".{dst.name}.partial-*"))
    command = [*within, sys.executable, "-c", SLOW, how, "convert", str(src), str(dst), *MEGATRON, *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not any(
        list(path.glob("**/*.distcp")) for path in set(dst.parent.glob(f".{dst.name}.partial-*")) - before
    ):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.01)
    return process


def ended(process: subprocess.Popen[str]) -> Result:
    out, err = process.communicate(timeout=120)
    return Result(process.returncode, out, err)


SIGNALS = [
    (signal.SIGINT, 130, ""),
    (signal.SIGTERM, 143, " by SIGTERM"),
    (signal.SIGHUP, 129, " by SIGHUP"),
    (signal.SIGUSR1, 138, " by SIGUSR1"),
]


@pytest.mark.parametrize(
    ("number", "status", "by"),
    SIGNALS,
)
@pytest.mark.parametrize("again", [False, True])
@pytest.mark.core("True-2-*")
def test_a_signal_in_the_middle(copy: Copy, number: int, status: int, by: str, again: bool) -> None:
    """Ctrl-C, the end of a Slurm job, a closed terminal; some of them send the signal twice."""
    src = copy("qwen3")
    before = listing(src.parent)
    process = begin_slowly(src, src.parent / "new" / "dst", "--no-resume")
    process.send_signal(number)
    if again:
        process.send_signal(number)
    assert ended(process) == Result(status, "", f"interrupted{by}: nothing was changed\n")
    assert listing(src.parent) == before


@pytest.mark.parametrize(("number", "status", "by"), SIGNALS)
@pytest.mark.thorough
def test_a_run_that_a_signal_ended_says_how_to_continue(
    copy: Copy, number: int, status: int, by: str
) -> None:
    src = copy("qwen3")
    folder = src.parent / "a folder"
    folder.mkdir()
    dst = folder / "dst"
    process = begin_slowly(src, dst, how="INT, gate, opens")
    process.send_signal(number)
    result = ended(process)
    said, command = result.err.splitlines()
    assert result.code == status and re.fullmatch(rf"interrupted{by}: .* of .* are written and kept", said)
    assert command == f"continue with: reshard convert {src} '{dst}' --to megatron"
    listed = reshard("inspect", dst)
    assert listed.code == 1 and f"reshard convert {src} '{dst}' --to megatron" in listed.out
    result = reshard(*shlex.split(command.partition("reshard ")[2]))
    assert result.code == 0 and "note: continuing: " in result.err
    assert reshard("verify", src, dst).code == 0 and {path.name for path in folder.iterdir()} == {"dst"}


def test_a_hangup_that_is_ignored_stays_so(copy: Copy) -> None:
    src = copy("qwen3")
    process = begin_slowly(src, src.parent / "dst", "--quiet", how="nohup")
    process.send_signal(signal.SIGHUP)
    assert ended(process) == Result(0, "", "")
    assert (src.parent / "dst" / "reshard.json").exists()


def test_a_command_that_runs_beside_the_main_thread(copy: Copy) -> None:
    """Only the main thread can install signal handlers."""
    src = copy("qwen3")
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(reshard, *convert(src, *MEGATRON)).result().code == 0


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Ctrl-C as in a shell's foreground job; a background job starts with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("overwrite", [(), ("--overwrite",)])
@pytest.mark.parametrize(
    ("when", "number"), [("before", signal.SIGINT), ("after", signal.SIGINT), ("after", signal.SIGTERM)]
)
def test_a_signal_at_the_rename_is_told_as_it_is(
    copy: Copy, monkeypatch: pytest.MonkeyPatch, overwrite: tuple[str, ...], when: str, number: int
) -> None:
    src = copy("qwen3")
    dst, rename = src.parent / "dst", Path.rename
    if overwrite:
        converted(src, dst, *MEGATRON)
        (dst / "config.json").write_text("{}")
    before = listing(src.parent)

    def signalled(self: Path, target: Path) -> Path:
        if target != dst:
            return rename(self, target)
        monkeypatch.setattr(Path, "rename", rename)
        if when == "before":
            signal.raise_signal(number)
        moved = rename(self, target)
        signal.raise_signal(number)
        return moved

    monkeypatch.setattr(Path, "rename", signalled)
    result = reshard(*convert(src, *MEGATRON, *overwrite))
    assert result.code == 128 + number and result.out == ""
    by = "" if number == signal.SIGINT else " by SIGTERM"
    if when == "before":
        assert " are written and kept\ncontinue with: reshard convert " in result.err
        now = listing(src.parent).items()
        assert {path: state for path, state in now if not path.startswith(".dst.partial-")} == before
    else:
        assert result.err == f"interrupted{by}: {dst} is complete\n"
        assert {path.name for path in src.parent.iterdir()} == {"src", "dst"}
        assert reshard("verify", src, dst).code == 0 and (dst / "config.json").stat().st_size > 2


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_while_the_result_is_printed(copy: Copy, monkeypatch: pytest.MonkeyPatch) -> None:
    src = copy("qwen3")
    monkeypatch.setattr("reshard.cli.convert._print_result", lambda *_: signal.raise_signal(signal.SIGINT))
    result = reshard(*convert(src, *MEGATRON))
    assert (result.code, result.err) == (130, f"interrupted: {src.parent / 'dst'} is complete\n")


def test_what_a_killed_run_left_is_swept_by_the_next(copy: Copy) -> None:
    src = copy("qwen3")
    dst = src.parent / "dst"
    process = begin_slowly(src, dst)
    process.kill()
    process.communicate(timeout=60)
    assert list(src.parent.glob(".dst.partial-*")) and not dst.exists()
    converted(src, dst, *MEGATRON)
    assert {path.name for path in src.parent.iterdir()} == {"src", "dst"}


def test_what_a_killed_run_left_is_swept_before_space_is_counted(
    copy: Copy, monkeypatch: pytest.MonkeyPatch
) -> None:
    src = copy("qwen3")
    leftover = src.parent / ".dst.partial-0123abcd"
    leftover.mkdir()
    usage = namedtuple("usage", "total used free")
    free = [10**9, 1000]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 0, free[leftover.exists()]))
    converted(src, src.parent / "dst", *MEGATRON)


def test_an_old_checkpoint_comes_back_and_is_not_lost_to_one_who_did_not_ask(copy: Copy) -> None:
    """A run was killed between its renames. The next one finds the old checkpoint and refuses to replace it."""
    src = copy("qwen3")
    dst = src.parent / "dst"
    converted(src, dst, *MEGATRON)
    dst.rename(src.parent / ".dst.replaced-0123abcd")
    result = reshard(*convert(src, *MEGATRON))
    assert result.code == 2 and "the destination is not empty" in result.err
    assert reshard("verify", src, dst).code == 0
    assert {path.name for path in src.parent.iterdir()} == {"src", "dst"}


def test_an_old_checkpoint_that_cannot_come_back_is_told(copy: Copy) -> None:
    src = copy("qwen3")
    dst, kept = src.parent / "dst", src.parent / ".dst.replaced-0123abcd"
    converted(src, dst, *MEGATRON)
    shutil.copytree(dst, kept)
    result = reshard(*convert(src, *MEGATRON, "--overwrite"))
    assert result.code == 0 and "warning: a killed run left" in result.err
    assert f"  file: {kept}\n" in result.err
    assert reshard("verify", src, kept).code == 0


# ------------------------------------------------------------------------------------------ two writers


@pytest.fixture(scope="module")
def container() -> tuple[str, ...]:
    """The command line that runs a command in its own PID namespace, as a container does."""
    for user in ((), ("--user", "--map-root-user")):
        words = ("unshare", *user, "--pid", "--fork", "--mount-proc")
        if shutil.which("unshare") and not subprocess.run([*words, "true"], capture_output=True).returncode:
            return words
    pytest.skip("this machine lets nobody make namespaces")


@pytest.mark.thorough
def test_of_two_containers_the_second_is_refused(copy: Copy, container: tuple[str, ...]) -> None:
    src = copy("qwen3")
    dst = src.parent / "dst"
    first = begin_slowly(src, dst, "--quiet", how="gate", within=container)
    (folder,) = src.parent.glob(".dst.partial-*")
    command = [*container, sys.executable, "-m", "reshard", *map(str, convert(src, *MEGATRON)), "--json"]
    second = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    (problem,) = json.loads(second.stdout)["problems"]
    assert second.returncode == 2 and problem["message"] == "another run is writing to the destination"
    assert str(folder) in problem["found"]
    (src / "go").touch()
    assert ended(first) == Result(0, "", "")
    assert reshard("verify", src, dst).code == 0
    assert {path.name for path in src.parent.iterdir()} == {"src", "dst"}


@pytest.mark.thorough
@pytest.mark.parametrize("overwrite", [(), ("--overwrite",)])
def test_without_locks_one_of_two_has_its_whole_output_there(
    copy: Copy, container: tuple[str, ...], overwrite: tuple[str, ...]
) -> None:
    src = copy("qwen3")
    dst = src.parent / "dst"
    if overwrite:
        converted(src, dst, *MEGATRON)
    flags = ("--quiet", *overwrite)
    runs = [
        begin_slowly(src, dst, *flags, *layout, how="gate, no locks", within=container)
        for layout in (("--tp", "2"), ("--pp", "2"))
    ]
    (src / "go").touch()
    results = [ended(run) for run in runs]
    codes = sorted(result.code for result in results)
    assert codes in ([0, 2], [0, 0] if overwrite else [])
    for result in results:
        said = ("another process created", "the system refused") if result.code else ("",)
        assert result.err.startswith(tuple(f"error: {each}" if each else "" for each in said))
    assert reshard("verify", src, dst).code == 0
    listed = {*json.loads((dst / "reshard.json").read_text())["files"], "reshard.json"}
    assert {path.relative_to(dst).as_posix() for path in dst.rglob("*") if path.is_file()} == listed
    # The one that failed names the old folder, if the other one came between its two renames.
    kept = {Path(each).name for result in results for each in re.findall(r"is now (\S+)", result.err)}
    assert {path.name for path in src.parent.iterdir()} == {"src", "dst", *kept}


@pytest.mark.thorough
def test_a_folder_that_is_swept_in_the_middle_is_not_published(copy: Copy) -> None:
    """By a cleanup that takes a process it cannot see for dead."""
    src = copy("qwen3")
    before = listing(src.parent)
    process = begin_slowly(src, src.parent / "dst", "--max-shard-size", "100KB")
    (folder,) = src.parent.glob(".dst.partial-*")
    shutil.rmtree(folder)
    result = ended(process)
    assert result.code == 2 and "error: the output was changed while it was written" in result.err
    assert "the folder was removed" in result.err and "Traceback" not in result.err
    assert listing(src.parent) == before


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
    monkeypatch.setattr("reshard.api.conversion.converted", lambda *args, **options: {}["surprise"])
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
