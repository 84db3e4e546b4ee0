"""How much memory a process can use: that of the machine, and the limits of its control groups."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple


class FreeMemory(NamedTuple):
    """Memory that a process can use, in bytes, and what limits it."""

    limit: str
    total: int
    free: int


def free_memory(pid: int, root: Path = Path("/")) -> Iterator[FreeMemory]:
    """All limits on the memory of a process. Files that the kernel caches count as free, as it drops them first."""
    with suppress(OSError, ValueError, KeyError):
        machine = _fields(root / "proc/meminfo")
        yield FreeMemory("the machine's memory", machine["MemTotal"] << 10, machine["MemAvailable"] << 10)
    for mount, group, unified in memory_groups(root, str(pid)):
        yield from _group_rooms(mount, group, unified=unified)


def memory_groups(root: Path, pid: str) -> Iterator[tuple[Path, Path, bool]]:
    """The control groups of a process's memory: where they are mounted, the group, and whether it is of cgroup v2."""
    with suppress(OSError):
        for entry in (root / f"proc/{pid}/cgroup").read_text().splitlines():
            _, controllers, path = entry.split(":", 2)
            if not controllers or "memory" in controllers.split(","):
                mount = root / "sys/fs/cgroup" / ("memory" if controllers else "")
                yield mount, mount / path.strip("/"), not controllers


def _group_rooms(mount: Path, group: Path, *, unified: bool) -> Iterator[FreeMemory]:
    """The limits of a control group and of those around it, as far as they are mounted here."""
    limit, usage = (
        ("memory.max", "memory.current")
        if unified
        else (
            "memory.limit_in_bytes",
            "memory.usage_in_bytes",
        )
    )
    for folder in (group, *group.parents):
        if not folder.is_relative_to(mount):
            return
        with suppress(OSError, ValueError, KeyError):  # no limit: "max", or no file
            total, used = (int((folder / name).read_text()) for name in (limit, usage))
            stat = _fields(folder / "memory.stat")
            prefix = "" if unified else "total_"
            cached = sum(stat[prefix + name] for name in ("active_file", "inactive_file"))
            yield FreeMemory("the container's memory limit", total, total - used + cached)


def _fields(path: Path) -> dict[str, int]:
    rows = (line.replace(":", " ").split() for line in path.read_text().splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1}
