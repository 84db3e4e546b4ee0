"""The same command continues a conversion that was killed, and writes the same output as without the kill."""

from __future__ import annotations

import os
import shutil
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Lock
from typing import Any

import pytest

import reshard as api
from reshard.transfer import batch, digests, execute, journal, ledger, resumed_output, run_state, written_file
from reshard.transfer.leftovers import recover, unfinished
from reshard.transfer.staging import publish
from tests.bad_input.conftest import originals as originals
from tests.bad_input.damage import edit_tensors, find, flip

ROADS: dict[str, tuple[str, dict[str, Any]]] = {
    "shards": ("torch_dist", {"max_shard_size": "100KB"}),
    "one file": ("legacy", {"dtype": "float32"}),
    "torch_dist": ("qwen3", {"to": "megatron", "tp": 2, "pp": 2}),
    "zip files": ("qwen3_moe", {"to": "megatron-legacy", "ep": 2}),
    "zip files from zip files": ("torch_dist moe", {"to": "megatron-legacy", "tp": 2}),
    "dcp": ("legacy moe", {"to": "dcp"}),
}
"""Conversions: tensors that are sharded and transposed, files with checksums on either side."""


class Death:
    """Ends a process before one of its system calls, like SIGKILL or a machine failure.

    A failing machine loses all data that was not synced; here it is overwritten.
    """

    def __init__(self, at: int | None, *, forgets: bool) -> None:
        self.at, self.forgets = at, forgets
        self.calls = 0
        self._lock = Lock()
        self._unsynced: dict[str, list[tuple[int, int]]] = {}

    def before(self, patch: pytest.MonkeyPatch) -> None:
        """Count all calls that change something on the disk."""
        calls = {
            os: (
                "pwrite",
                "write",
                "fsync",
                "fdatasync",
                "ftruncate",
                "mkdir",
                "rename",
                "link",
                "unlink",
                "rmdir",
            )
        }
        for module, names in calls.items():
            for name in names:
                patch.setattr(module, name, self._watched(name, getattr(module, name)))

    def _watched(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **options: Any) -> Any:
            if name == "write" and not self._path(args[0]).endswith("/journal"):
                return call(*args)
            with self._lock:
                if self.calls == self.at:
                    self._die()
                self.calls += 1
                result = call(*args, **options)
                if name == "pwrite":
                    self._unsynced.setdefault(self._path(args[0]), []).append((args[2], result))
                elif name in ("fsync", "fdatasync"):
                    self._unsynced.pop(self._path(args[0]), None)
                return result

        return watched

    @staticmethod
    def _path(descriptor: int) -> str:
        return str(Path(f"/proc/self/fd/{descriptor}").readlink())

    def _die(self) -> None:
        for path, ranges in self._unsynced.items() if self.forgets else ():
            with open(path, "r+b") as file:
                for offset, length in ranges:
                    file.seek(offset)
                    file.write(b"\xaa" * length)
        os._exit(9)


def dying(convert: Callable[[], object], death: Death) -> int:
    """Run something in a process that dies partway; returns its exit status."""
    child = os.fork()
    if not child:
        try:
            with pytest.MonkeyPatch.context() as patch:
                death.before(patch)
                convert()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def content(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }


@pytest.fixture(autouse=True)
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Split files into many windows, each recorded in the journal."""
    for module in (batch, execute):
        monkeypatch.setattr(module, "WINDOW_BYTES", 1 << 14)
    for module in (run_state, journal):
        monkeypatch.setattr(module, "FLUSH_BYTES", 1 << 14)


def killed_everywhere(src: Path, dst: Path, options: dict[str, Any], points: Callable[[int], range]) -> None:
    """Kill a conversion at `points` of all its system calls, then the one that continues it, and compare the third."""

    def convert() -> None:
        api.convert(src, dst, workers=2, **options)

    alive = Death(None, forgets=False)
    with pytest.MonkeyPatch.context() as patch:
        alive.before(patch)
        convert()
    expected, reached = content(dst), set()
    for at in points(alive.calls):
        shutil.rmtree(dst)
        for death in (Death(at, forgets=bool(at % 2)), Death(at // 2, forgets=not at % 2)):
            if not dst.exists():
                reached.add(dying(convert, death))
        if not dst.exists():
            convert()
        assert content(dst) == expected, at
        assert {path.name for path in dst.parent.iterdir()} <= {"dst", *left(dst)}
    assert reached <= {0, 9} and 9 in reached


def left(dst: Path) -> list[str]:
    """Files left by a run killed after its last rename; the next run for the same destination removes them."""
    return [path.name for path in dst.parent.glob(".dst.*") if not (path / "output").exists()]


@pytest.fixture
def memory() -> Iterator[Path]:
    """A folder in memory, where syncing takes no time."""
    folder = Path(tempfile.mkdtemp(dir="/dev/shm"))
    yield folder
    shutil.rmtree(folder)


@pytest.mark.parametrize("road", ROADS)
@pytest.mark.core("torch_dist")
def test_it_continues_where_it_was_killed(originals: Callable[[str], Path], memory: Path, road: str) -> None:
    source, options = ROADS[road]
    killed_everywhere(
        originals(source), memory / "dst", options, lambda calls: range(calls // 9, calls, calls // 4)
    )


@pytest.mark.slow
@pytest.mark.parametrize("road", ROADS)
def test_it_continues_wherever_it_was_killed(
    originals: Callable[[str], Path], tmp_path: Path, road: str
) -> None:
    """On a disk, where most writes bypass the page cache."""
    source, options = ROADS[road]
    killed_everywhere(originals(source), tmp_path / "dst", options, lambda calls: range(0, calls, 11))


def kills(convert: Callable[[], object], dst: Path, step: int) -> Iterator[int]:
    """Kill a conversion after more and more steps, until it finishes first; yield the bytes written each time."""
    at = step
    while dying(convert, Death(at, forgets=False)) == 9 and not dst.exists():
        found = unfinished(dst)
        if not found:  # killed after it had failed and removed what it wrote
            break
        yield found[0].nbytes or 0
        at += step
    shutil.rmtree(dst, ignore_errors=True)


@pytest.mark.core("shards")
@pytest.mark.parametrize("road", ["shards", "torch_dist"])
def test_the_record_tells_what_both_runs_have_read(
    originals: Callable[[str], Path], memory: Path, monkeypatch: pytest.MonkeyPatch, road: str
) -> None:
    """Nothing is read again for the checksums of the sources: the journal has the reads of the first run."""
    monkeypatch.setattr(ledger, "MAX_UNREAD_BYTES", 0)
    monkeypatch.setattr(ledger, "MAX_UNREAD_DIVISOR", 1 << 40)
    src, dst = memory / "src", memory / "dst"
    shutil.copytree(originals(ROADS[road][0]), src)
    options = {**ROADS[road][1], "workers": 1}
    api.convert(src, dst, **options)
    expected, resumed = (dst / "reshard.json").read_bytes(), 0
    shutil.rmtree(dst)
    for nbytes in kills(lambda: api.convert(src, dst, **options), dst, 40):
        api.convert(src, dst, **options)
        resumed += nbytes > 0
        assert (dst / "reshard.json").read_bytes() == expected
        shutil.rmtree(dst)
    assert resumed


@pytest.mark.thorough
@pytest.mark.parametrize("road", ["torch_dist", "zip files"])
def test_what_nobody_waited_for_is_used_only_if_it_is_there(
    originals: Callable[[str], Path], memory: Path, road: str
) -> None:
    """With --no-sync, a run continues after a kill, and after a failure of the machine that lost unsynced pages."""
    source, options = ROADS[road]
    src, dst = originals(source), memory / "dst"
    with pytest.MonkeyPatch.context() as patch:
        waits: list[int] = []
        for name in ("fsync", "fdatasync"):
            patch.setattr(os, name, waits.append)
        api.convert(src, dst, no_sync=True, **options)
    assert not waits
    expected, there, lost = content(dst), [], []
    for number, at in enumerate(range(60, 1000, 90)):
        shutil.rmtree(dst, ignore_errors=True)
        forgets = bool(number % 2)
        death = Death(at, forgets=forgets)
        if dying(lambda: api.convert(src, dst, workers=1, no_sync=True, **options), death) != 9:
            break
        (found,) = unfinished(dst)
        done = api.convert(src, dst, **options, no_sync=bool(number % 4 < 2))
        assert content(dst) == expected and api.verify(dst), at
        assert done.report and found.nbytes is not None
        (lost if forgets else there).append((found.nbytes, done.report.resumed))
    assert there and all(nbytes == resumed for nbytes, resumed in there)
    assert any(nbytes for nbytes, _ in lost) and not any(resumed for _, resumed in lost)


def changed_bytes(path: Path) -> None:
    flip(path, path.stat().st_size // 20)


def changed_and_dated_back(path: Path) -> None:
    before = path.stat()
    changed_bytes(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def truncated(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def truncated_and_extended(path: Path) -> None:
    size = path.stat().st_size
    os.truncate(path, size // 20)
    os.truncate(path, size)


def extended(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"more")


@pytest.mark.parametrize(
    "spoil", [changed_bytes, changed_and_dated_back, truncated, truncated_and_extended, extended]
)
@pytest.mark.parametrize("road", ["shards", "one file", "torch_dist", "zip files", "dcp"])
@pytest.mark.core("shards-changed_and_dated_back", "dcp-changed_bytes")
def test_what_changed_between_two_runs_is_written_again(
    originals: Callable[[str], Path],
    memory: Path,
    road: str,
    spoil: Callable[[Path], None],
    request: pytest.FixtureRequest,
) -> None:
    """Complete files and unfinished ones: no certificate is made of what the disk returns."""
    if road in ("one file", "dcp"):
        request.getfixturevalue("small_cells")
    source, options = ROADS[road]
    src, dst = originals(source), memory / "dst"
    alive = Death(None, forgets=False)
    with pytest.MonkeyPatch.context() as patch:
        alive.before(patch)
        api.convert(src, dst, workers=1, **options)
    expected = content(dst)
    for part in (3, 7, 9):
        shutil.rmtree(dst)
        death = Death(alive.calls * part // 10, forgets=False)
        assert dying(lambda: api.convert(src, dst, workers=1, **options), death) == 9
        (found,) = unfinished(dst)
        weights = [path for path in (found.folder / "output").rglob("*") if path.is_file()]
        for path in [path for path in weights if path.stat().st_size > 5000]:
            spoil(path)
        done = api.convert(src, dst, verify=True, **options)
        assert content(dst) == expected and api.verify(dst)
        assert done.report and found.nbytes and done.report.resumed < found.nbytes


@pytest.fixture
def small_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cells smaller than windows, as they are outside of tests."""
    for module in (digests, resumed_output):
        monkeypatch.setattr(module, "CELL_BYTES", 1 << 12)


class Counted:
    """Counts the bytes read from sources and from the kept output, and the bytes written."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.source = self.kept = self.written = 0
        self._lock = Lock()
        for name in ("pread", "preadv", "pwrite"):
            patch.setattr(os, name, self._counting(getattr(os, name), name == "pwrite"))

    def _counting(self, call: Callable[..., Any], is_write: bool) -> Callable[..., Any]:
        def counting(descriptor: int, *args: Any) -> Any:
            result = call(descriptor, *args)
            count = result if isinstance(result, int) else len(result)
            path = str(Path(f"/proc/self/fd/{descriptor}").readlink())
            is_output = "/output/" in path
            if path.endswith("/journal"):
                return result
            with self._lock:
                self.written += count if is_write else 0
                self.kept += count if is_output and not is_write else 0
                self.source += 0 if is_output or is_write else count
            return result

        return counting


@pytest.mark.core("torch_dist", "zip files")
@pytest.mark.usefixtures("small_cells")
@pytest.mark.parametrize("road", ROADS)
def test_a_resumed_run_does_only_what_is_left(
    originals: Callable[[str], Path], memory: Path, monkeypatch: pytest.MonkeyPatch, road: str
) -> None:
    """After a kill at 80 %: at most 30 % of all reads and writes, and one read of what was kept.

    Reads for the plan and of unused bytes, which are most of those of a tiny model, do not count.
    """
    monkeypatch.setattr(ledger, "MAX_UNREAD_BYTES", 0)
    monkeypatch.setattr(ledger, "MAX_UNREAD_DIVISOR", 1 << 40)
    source, options = ROADS[road]
    src, dst = originals(source), memory / "dst"
    with pytest.MonkeyPatch.context() as patch:
        planning = Counted(patch)
        api.convert(src, dst, workers=1, dry_run=True, **options)
    with pytest.MonkeyPatch.context() as patch:
        whole = Counted(patch)
        api.convert(src, dst, workers=1, **options)
    shutil.rmtree(dst)

    def killed() -> None:
        with pytest.MonkeyPatch.context() as patch:
            count = Counted(patch)

            def on_bytes(nbytes: int) -> None:
                if count.written > 0.8 * whole.written:
                    os._exit(9)

            api.convert(src, dst, workers=1, on_bytes=on_bytes, **options)

    assert dying(killed, Death(None, forgets=False)) == 9
    with pytest.MonkeyPatch.context() as patch:
        rest = Counted(patch)
        report = api.convert(src, dst, workers=1, **options).report
    assert report and report.resumed > 0.7 * report.nbytes
    complete = whole.source - planning.source + whole.written
    assert rest.source - planning.source + rest.written <= 0.3 * complete
    assert rest.kept - whole.kept <= 1.05 * report.resumed  # a zip file gets some checksums last


@pytest.mark.parametrize("change", ["nothing", "written again", "another start of the machine"])
def test_complete_files_are_read_only_if_something_happened_to_them(
    originals: Callable[[str], Path], memory: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    source, options = ROADS["shards"]
    src, dst = originals(source), memory / "dst"

    alive = Death(None, forgets=False)
    with pytest.MonkeyPatch.context() as patch:
        alive.before(patch)
        api.convert(src, dst, workers=1, **options)
    shutil.rmtree(dst)
    death = Death(alive.calls * 7 // 10, forgets=False)
    assert dying(lambda: api.convert(src, dst, workers=1, **options), death) == 9
    (found,) = unfinished(dst)
    written = journal.read_journal(found.folder / "journal").files
    complete = {found.folder / "output" / path for path, each in written.items() if each.is_whole}
    assert complete
    if change == "written again":
        for path in complete:
            times = path.stat()
            path.write_bytes(path.read_bytes())
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    elif change == "another start of the machine":
        monkeypatch.setattr(written_file, "_boot", lambda: "another")
    read = set[Path]()

    def digest_of(path: Path, *args: Any, **options: Any) -> str:
        read.add(path)
        return digests.digest_of(path, *args, **options)

    monkeypatch.setattr(resumed_output, "digest_of", digest_of)
    assert api.convert(src, dst, **options).report
    assert read == (set() if change == "nothing" else complete)
    assert api.verify(dst)


@pytest.mark.usefixtures("small_cells")
def test_what_an_interrupted_run_has_flushed_is_not_read_again(
    originals: Callable[[str], Path], memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, options = ROADS["torch_dist"]
    src, dst = originals(source), memory / "dst"

    def interrupted(nbytes: int) -> None:
        if count.written > 200_000:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        whole = Counted(patch)
        api.convert(src, dst, workers=1, **options)
    shutil.rmtree(dst)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        count = Counted(patch)
        api.convert(src, dst, workers=1, on_bytes=interrupted, **options)
    rest = Counted(monkeypatch)
    report = api.convert(src, dst, workers=1, **options).report
    assert report and report.resumed > 100_000
    assert rest.kept - whole.kept < 0.2 * report.resumed  # parts of cells
    assert api.verify(dst)


def test_what_nobody_waits_for_cannot_be_read_back(originals: Callable[[str], Path], tmp_path: Path) -> None:
    with pytest.raises(api.ReshardError, match="--no-sync and --verify cannot be combined"):
        api.convert(originals("qwen3"), tmp_path / "dst", to="megatron", no_sync=True, verify=True)
    assert not (tmp_path / "dst").exists()


@pytest.mark.thorough
def test_damage_is_found_though_the_bytes_passed_before(
    originals: Callable[[str], Path], memory: Path
) -> None:
    """A checksum covers all bytes of a tensor; the first run has read one part of them and the second the rest."""
    src, dst = memory / "src", memory / "dst"
    shutil.copytree(originals("torch_dist"), src)
    path = find(src, "__0_0.distcp")
    flip(path, path.stat().st_size // 2)
    passed = 0
    for nbytes in kills(lambda: api.convert(src, dst), dst, 25):
        passed += nbytes > 0
        with pytest.raises(api.ReshardError, match="changed since they were written"):
            api.convert(src, dst)
        assert not unfinished(dst) and not dst.exists()
    assert passed > 4


@pytest.mark.thorough
def test_values_that_are_not_finite_are_told_of_both_runs(
    originals: Callable[[str], Path], memory: Path
) -> None:
    src, dst = memory / "src", memory / "dst"
    shutil.copytree(originals("qwen3"), src)

    def spoil(tensors: dict[str, Any]) -> None:
        for tensor in tensors.values():
            tensor.flatten()[-1] = float("nan")

    edit_tensors(src, spoil)
    expected = api.convert(src, dst, to="megatron").report
    shutil.rmtree(dst)
    for _ in kills(lambda: api.convert(src, dst, to="megatron"), dst, 80):
        report = api.convert(src, dst, to="megatron").report
        assert expected and report and report.nonfinite == expected.nonfinite and report.resumed
        shutil.rmtree(dst)


def test_a_folder_that_is_published_keeps_what_is_there_wherever_it_is_killed(tmp_path: Path) -> None:
    """The next run finds the old folder or the new one, with all that is the user's."""
    draft, place = tmp_path / "draft", tmp_path / "dst"
    old, new = {"weights": b"old", "notes/mine": b"mine"}, {"weights": b"new"}

    def write(folder: Path, files: dict[str, bytes]) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        for name, data in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(data)

    reached = set()
    for at in range(40):
        write(place, old)
        write(draft, new)
        reached.add(dying(lambda: publish(draft, place, ["notes"]) and None, Death(at, forgets=False)))
        recover(place)
        assert content(place) in (old, old | new), at
        write(draft, new)
        assert publish(draft, place, ["notes"]) == ["notes"]
        assert content(place) == old | new
        assert [path.name for path in tmp_path.iterdir()] == ["dst"], at
    assert reached == {0, 9}
