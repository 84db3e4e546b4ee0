"""The flight recorder of torch: which collective each rank is in, by the dumps that it writes.

ProcessGroupNCCL records collectives if TORCH_NCCL_TRACE_BUFFER_SIZE (TORCH_FR_BUFFER_SIZE since torch 2.9) is not 0. It
writes a pickle to TORCH_NCCL_DEBUG_INFO_TEMP_FILE (TORCH_FR_DUMP_TEMP_FILE) and the rank after a timeout, and when a
byte arrives in TORCH_NCCL_DEBUG_INFO_PIPE_FILE, the rank and ".pipe".
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from reshard.base.errors import ReshardError
from reshard.containers.torchfiles.pickles import loads

_FILES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
_PIPES = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"
_LARGEST = 256 << 20
"""Bytes of a dump that is read."""


class Collective(NamedTuple):
    """A collective or message that a rank has begun and not finished."""

    group: str
    number: int
    name: str
    shapes: str

    def __str__(self) -> str:
        return f"{self.name} number {self.number} of group {self.group}, shapes {self.shapes}"


class Dump(NamedTuple):
    """What a rank recorded: what it has begun and not finished, and the last collective of each group."""

    pending: list[Collective]
    last: dict[str, int]


def ask_for_dumps(environment: Mapping[str, str], ranks: Iterable[int]) -> None:
    """Let every rank that has a pipe for it write a dump, without waiting."""
    for rank in ranks if environment.get(_PIPES) else ():
        with suppress(OSError):
            path = f"{environment[_PIPES]}{rank}.pipe"
            if stat.S_ISFIFO(os.stat(path).st_mode):  # noqa: PTH116
                pipe = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
                os.write(pipe, b"1")
                os.close(pipe)


def read_dumps(environment: Mapping[str, str], since: float) -> dict[int, Dump]:
    """The dumps of each rank that were written after a time. Nothing in them is executed."""
    dumps = {}
    for prefix in (Path(environment[name]) for name in _FILES if environment.get(name)):
        for path in sorted(prefix.parent.glob(f"{prefix.name}*")):
            rank = path.name.removeprefix(prefix.name)
            with suppress(OSError, ReshardError, KeyError, TypeError, ValueError, AttributeError):
                state = path.stat()
                if rank.isdecimal() and state.st_mtime >= since and state.st_size <= _LARGEST:
                    dumps[int(rank)] = _parse(loads(path.read_bytes(), str(path)))
    return dumps


def _parse(content: Any) -> Dump:
    """The parts of a dump that matter; fields as in torch/distributed/flight_recorder/components/types.py."""
    pending: list[Collective] = []
    last: dict[str, int] = {}
    for entry in content["entries"]:
        group, number = (
            str(entry["process_group"][1] or entry["process_group"][0]),
            int(entry["collective_seq_id"]),
        )
        is_message = bool(entry["is_p2p"])
        if not is_message:
            last[group] = max(number, last.get(group, 0))
        if not entry["retired"] and entry["state"] != "completed":
            number = int(entry["p2p_seq_id"]) if is_message else number
            pending.append(Collective(group, number, str(entry["profiling_name"]), str(entry["input_sizes"])))
    return Dump(pending, last)


def described(dumps: Mapping[int, Dump]) -> Iterator[str]:
    """A line for each collective in which ranks wait, with the ranks that have not called it."""
    waiting: dict[Collective, list[int]] = {}
    for rank, dump in sorted(dumps.items()):
        if dump.pending:
            waiting.setdefault(dump.pending[0], []).append(rank)
    for collective, ranks in waiting.items():
        behind = [
            rank
            for rank, dump in sorted(dumps.items())
            if dump.last.get(collective.group, 0) < collective.number
        ]
        missing = f"; not called by rank {', '.join(map(str, behind))}" if behind else ""
        yield f"flight recorder: rank {', '.join(map(str, ranks))} in {collective}{missing}"
