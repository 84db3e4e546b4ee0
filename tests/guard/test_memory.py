"""A warning comes before memory is full."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from reshard.base.free_memory import free_memory
from reshard.runs.guard.watch.memory_watch import MemoryWatcher
from reshard.runs.guard.watch.process_tree import Process

MIB = 1 << 20


def machine(root: Path, available: int, total: int = 1000) -> None:
    """A /proc with this much memory, in MiB."""
    (root / "proc").mkdir(parents=True, exist_ok=True)
    (root / "proc/meminfo").write_text(
        f"MemTotal:       {total << 10} kB\nMemFree:        0 kB\nMemAvailable:   {available << 10} kB\n"
        "HugePages_Total:       0\n"
    )


def group(folder: Path, total: str, used: int, cached: int, *, unified: bool) -> None:
    """A control group, in bytes, as Linux describes it."""
    folder.mkdir(parents=True)
    names = (
        ("memory.max", "memory.current") if unified else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    )
    prefix = "" if unified else "total_"
    for name, value in zip(names, (total, str(used)), strict=True):
        (folder / name).write_text(f"{value}\n")
    rows = {"anon": used - cached, f"{prefix}inactive_file": cached // 2, f"{prefix}active_file": cached // 2}
    (folder / "memory.stat").write_text("".join(f"{name} {value}\n" for name, value in rows.items()))


def process(root: Path, pid: int, groups: str, memory: int = 500 * MIB) -> Process:
    (root / f"proc/{pid}").mkdir(parents=True)
    (root / f"proc/{pid}/cgroup").write_text(groups)
    return Process(pid, 1, rank=1, state="R", seconds=0, memory=memory, command="python train.py")


def test_this_machine() -> None:
    (first, *_) = free_memory(os.getpid())
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert first.limit == "the machine's memory" and first.total == pages and 0 < first.free < first.total


@pytest.mark.parametrize(
    ("groups", "folder", "unified"),
    [
        ("0::/pod/box\n", "sys/fs/cgroup/pod", True),
        ("5:memory:/pod/box\n2:cpu:/\n0::/\n", "sys/fs/cgroup/memory/pod", False),
    ],
)
def test_a_container(tmp_path: Path, groups: str, folder: str, unified: bool) -> None:
    """The limit of a group around that of the process counts, and the page cache does not."""
    machine(tmp_path, 900)
    group(tmp_path / folder, str(100 * MIB), 97 * MIB, 10 * MIB, unified=unified)
    group(
        tmp_path / folder / "box", "max" if unified else str((1 << 63) - 4096), 90 * MIB, 0, unified=unified
    )
    one = process(tmp_path, 7, groups)
    watcher = MemoryWatcher(tmp_path)
    assert list(watcher.tick(10, {7: one})) == []
    current = "memory.current" if unified else "memory.usage_in_bytes"
    (tmp_path / folder / current).write_text(str(107 * MIB))
    (notice,) = watcher.tick(20, {7: one})
    assert notice.problem.code == "memory-nearly-full" and not notice.stop
    assert (
        notice.problem.found
        == "3.1 MB of 104.9 MB left (the container's memory limit), full in 3 s at this rate"
    )
    assert notice.lines == ("524.3 MB: rank 1, process 7: python train.py",)


def test_it_warns_again_at_each_half(tmp_path: Path) -> None:
    one = process(tmp_path, 7, "0::/\n")
    watcher = MemoryWatcher(tmp_path)
    said = []
    for n, available in enumerate((60, 45, 40, 30, 22, 20, 60, 11, 10)):
        machine(tmp_path, available)
        said += [available for _ in watcher.tick(10.0 * n + 10, {7: one})]
    assert said == [45, 22, 11]
