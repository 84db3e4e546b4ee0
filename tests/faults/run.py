"""Command-line runs in processes that a fault may end, and the requirements that hold after any fault."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import reshard.cli.convert
import reshard.cli.inspect
import reshard.cli.verify  # noqa: F401  what a child has, it need not import
from reshard.cli import main
from tests.faults.calls import KILLED, Call, Calls, Fault

PATIENCE = 120
"""Seconds after which a run counts as hung."""
SMALL = {"WINDOW_BYTES": 1 << 14, "WIDE_WINDOW_BYTES": 1 << 15, "FLUSH_BYTES": 1 << 14}
"""Sizes in `reshard.transfer` that split small files into many windows, each recorded in the journal."""
Content = dict[str, bytes]


class Ended(NamedTuple):
    """The end of a run: its exit status (None if it hung), its output, and its calls as far as they are known."""

    code: int | None
    out: str
    err: str
    calls: list[Call]
    struck: Call | None


@contextmanager
def small_windows() -> Iterator[None]:
    """Split files into many windows, wherever the code keeps these sizes."""
    modules = [module for name, module in sorted(sys.modules.items()) if name.startswith("reshard.transfer.")]
    places = [
        (module, name, size) for module in modules for name, size in SMALL.items() if hasattr(module, name)
    ]
    assert {name for _, name, _ in places} >= {"WINDOW_BYTES", "FLUSH_BYTES"}
    patches = [mock.patch.object(module, name, size) for module, name, size in places]
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in patches:
            patch.stop()


def run(
    words: Sequence[object],
    root: Path,
    fault: Fault | None = None,
    seed: int = 0,
    on_start: Callable[[int], None] = lambda process: None,
) -> Ended:
    """Run the command line in its own process, with a fault in its calls below `root`."""
    with tempfile.TemporaryDirectory() as told:
        child = os.fork()
        if not child:
            _in_child([str(word) for word in words], root, fault, seed, Path(told))
        on_start(child)
        code = _waited(child)
        texts = [(Path(told) / name).read_text(errors="replace") for name in ("out", "err")]
        path = Path(told) / "calls"
        calls, struck = json.loads(path.read_text()) if path.exists() else ([], None)
        return Ended(code, *texts, [Call(*each) for each in calls], Call(*struck) if struck else None)


def _in_child(words: list[str], root: Path, fault: Fault | None, seed: int, told: Path) -> None:
    code = 70  # something that no command ends with
    try:
        for number, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(told / name, os.O_WRONLY | os.O_CREAT), number)
            setattr(sys, f"std{name}", os.fdopen(number, "w", closefd=False))
        calls = Calls(root, fault, seed)
        with small_windows():
            try:
                with calls.watching():
                    main(words)
                code = 0
            except SystemExit as stopped:
                code = stopped.code if isinstance(stopped.code, int) else 0 if stopped.code is None else 70
        (told / "calls").write_text(json.dumps([calls.made, calls.struck]))
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _waited(child: int) -> int | None:
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def content(folder: Path) -> Content | None:
    """Every file below a folder, by its relative path; None if there is no folder."""
    if not folder.exists():
        return None
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def said(ended: Ended) -> list[str]:
    """The lines of a refusal, which has a message, a file and a remedy, and no traceback."""
    assert "Traceback" not in ended.err and "bug in reshard" not in ended.err, "a traceback"
    lines = [line.strip() for line in ended.err.splitlines()]
    if not (lines and lines[-1].startswith("Error: Invalid value for ")):
        for starts in (("error: ",), ("fix: ", "expected: "), ("file: ",)):
            assert any(line.startswith(starts) for line in lines), f"no line begins with {starts[0]}"
    return lines


def _is_weights(name: str) -> bool:
    return Path(name).suffix in (".safetensors", ".bin", ".pt", ".distcp") or Path(name).name == ".metadata"


@dataclass
class Check:
    """A command that changes nothing, and finds problems in `root`: its exit status is 1 or 2."""

    root: Path
    words: tuple[object, ...]

    def __post_init__(self) -> None:
        found = run(self.words, self.root)
        assert found.code, found.out
        self.code, self.calls = found.code, found.calls

    def strike(self, fault: Fault, seed: int = 0) -> str:
        """Run it with a fault, after which nothing damaged may look correct."""
        ended = run(self.words, self.root, fault, seed)
        if fault.kind in ("short", "delay"):
            assert ended.code == self.code, f"{fault}: exit status {ended.code}\n{ended.err}"
        if ended.code == KILLED:
            return "killed"
        assert ended.code in (1, 2), f"{fault} ({ended.struck}): exit status {ended.code}\n{ended.err}"
        if ended.code == 2:
            said(ended)
        return "found" if ended.code == 1 else "refused"


@dataclass
class Scene:
    """A folder with `src`, other inputs of the command, and a command that makes `dst`.

    With `before`, the destination has a folder that the command replaces. With `interrupted`, the disk was full in an
    earlier run, whose output is still there.
    """

    root: Path
    words: tuple[object, ...]
    before: Content | None = None
    interrupted: bool = False

    def __post_init__(self) -> None:
        self.given = {path.name for path in self.root.iterdir()} - {"dst"}
        self.left: dict[Path, tuple[bytes, int]] = {}
        """What the earlier run has left, with the times of files."""
        self.clear()
        self.written = self._interrupt() if self.interrupted else 0
        """How many bytes of the output that is."""
        whole = run(self.words, self.root)
        assert whole.code == 0, whole.err
        self.calls = whole.calls
        self.expected = content(self.dst)
        assert self.expected

    @property
    def dst(self) -> Path:
        return self.root / "dst"

    def clear(self) -> None:
        """Restore the initial state."""
        for path in self.root.iterdir():
            if path.name not in self.given:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        for name, data in (self.before or {}).items():
            (self.dst / name).parent.mkdir(parents=True, exist_ok=True)
            (self.dst / name).write_bytes(data)

        for path, (data, modified) in self.left.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
            os.utime(path, ns=(modified, modified))

    def _interrupt(self) -> int:
        """Let a run fill the disk halfway, and keep its output; returns the bytes of output that it recorded."""
        writes = sum(call.name == "pwrite" for call in run(self.words, self.root).calls)
        self.clear()
        stopped = run(self.words, self.root, Fault("ENOSPC", "pwrite", writes // 2, on=True))
        assert stopped.code == 2, stopped.err
        for folder in self.root.glob(".dst.partial-*"):
            files = [path for path in folder.rglob("*") if path.is_file()]
            self.left |= {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in files}
        (unfinished,) = self._listed()["unfinished"]
        assert unfinished["written"]
        self.clear()
        return int(unfinished["written"])

    def strike(self, fault: Fault, seed: int = 0) -> str:
        """Run the command with a fault, then without. Returns the outcome in a word; AssertionError if it is wrong."""
        self.clear()
        return self.judged(fault, run(self.words, self.root, fault, seed))

    def judged(self, fault: Fault, ended: Ended) -> str:
        """The outcome of a run with a fault, after which the same command runs without."""
        try:
            return self._judged(fault, ended)
        except AssertionError as error:
            raise AssertionError(f"{fault} ({ended.struck}): {error}\n{ended.err}") from None

    def _judged(self, fault: Fault, ended: Ended) -> str:
        assert ended.code is not None, "it hangs"
        found = content(self.dst)
        is_whole = found == self.expected
        if (
            fault.kind == "ENOENT"
            and ended.code == 0
            and not is_whole
            and self._lacks_files_alone(found or {})
        ):
            return "completed without it"
        assert is_whole or found == self.before or (found is None and self._is_beside(ended)), (
            "the destination is neither as before nor complete"
        )
        if fault.kind.startswith(("kill", "power")) and ended.code == KILLED:
            outcome = "killed"
        else:
            assert ended.code in (0, 2), f"exit status {ended.code}"
            outcome = "completed" if ended.code == 0 else "refused"
            if ended.code == 0:
                assert is_whole, "exit status 0, and the destination is not complete"
            else:
                self._says_what_is_wrong(ended, fault)
        written = self._lists_what_is_left()
        if not is_whole:
            # A system that says that there is no such file is believed.
            assert written >= self.written or fault.kind == "ENOENT", "what an earlier run wrote is lost"
            outcome += ", kept" if written else ""
            self._continues()
        elif outcome != "completed":
            outcome += ", complete"
        return outcome

    def _says_what_is_wrong(self, ended: Ended, fault: Fault) -> None:
        lines = said(ended)
        if ended.struck and not (fault.on or fault.kind == "ENOENT") and not self._is_ours(ended.struck.path):
            assert any(ended.struck.path in line for line in lines), "the file that failed is not named"

    def _lacks_files_alone(self, found: Content) -> bool:
        """Whether the output is complete except for a tokenizer or another file that may be missing in the source.

        If the system reports that a file does not exist, this is believed.
        """
        assert self.expected is not None
        same = {name for name, data in found.items() if data == self.expected.get(name)}
        missing = self.expected.keys() - found.keys()
        return (
            found.keys() - same <= {"reshard.json"} and bool(missing) and not any(map(_is_weights, missing))
        )

    def _is_ours(self, path: str) -> bool:
        """Whether a path is the destination, or something that a run creates next to it."""
        return not self.given.intersection(Path(os.path.relpath(path, self.root)).parts[:1])

    def _lists_what_is_left(self) -> int:
        """Bytes of the output that the next run need not write."""
        kept = {*self.given, "dst", ".dst.lock-reshard"}
        left = {path.name for path in self.root.iterdir()} - kept
        if not left:
            return 0
        told = self._listed()
        named = {Path(each["folder"]).name for each in [*told["unfinished"], *told["set_aside"]]}
        assert left <= named, f"inspect does not list {left - named}"
        return sum(each["written"] or 0 for each in told["unfinished"])

    def _is_beside(self, ended: Ended) -> bool:
        """Whether the old folder is where `inspect` reports it, and so is the run unless it was killed."""
        (told,) = self._listed()["set_aside"]
        said_so = ended.code == KILLED or f"mv {told['folder']} {self.dst}" in " ".join(ended.err.split())
        return said_so and content(Path(told["folder"])) == self.before

    def _listed(self) -> dict[str, Any]:
        return dict(json.loads(run(("inspect", self.dst, "--json"), self.root).out))

    def _continues(self) -> None:
        again = run(self.words, self.root)
        assert again.code == 0, f"the same command again: {again.code}\n{again.err}"
        assert content(self.dst) == self.expected, "the same command again makes something else"
        left = {path.name for path in self.root.iterdir()} - {*self.given, "dst"}
        assert not left, f"left behind: {left}"
