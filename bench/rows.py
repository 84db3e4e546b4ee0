"""How a rank reads its columns of a row-parallel weight: a short run of each row, at a stride of one row.

Four ways without checksums, and reshard's own with them, which reads either row by row or across the gaps. All
read the same file, interpreted as weights with rows of different lengths. One thread; nothing is written.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from reshard.algebra.dtypes import BY_NAME
from reshard.algebra.storage import Storage
from reshard.algebra.tensors import Cells
from reshard.algebra.views import Piece
from reshard.transfer import gather
from reshard.transfer.gather import Gatherer
from reshard.transfer.ledger import Ledger
from reshard.transfer.thread_files import OpenFiles

TP = 8
RUNS = (2, 4, 7, 13, 32)
"""KiB that a rank reads of each row: o_proj of Llama-3.1-70B and 405B, their down_proj, and longer."""

SIZE = 64 << 20
SPAN = 2 << 20
MEMORY = Path("/dev/shm")

HEADER = [
    "| KiB of a row | how it is read | tmpfs GB/s | disk, warm | disk, cold | CPU s for a GB, warm |",
    "|---|---|---|---|---|---|",
]


class Weight(NamedTuple):
    """A file of rows; a rank reads `run` bytes of each."""

    path: Path
    run: int

    @property
    def row(self) -> int:
        return self.run * TP

    @property
    def count(self) -> int:
        return SIZE // self.row

    @property
    def begin(self) -> int:
        """The offset within a row of rank 3's part."""
        return 3 * self.run


Way = Callable[[Weight, "np.ndarray[Any, Any]"], None]


def a_read_a_row(weight: Weight, out: np.ndarray[Any, Any]) -> None:
    with _opened(weight) as file:
        for i in range(weight.count):
            os.preadv(file, (out[i],), i * weight.row + weight.begin)


def scattered(weight: Weight, out: np.ndarray[Any, Any]) -> None:
    """One call for many rows: each is read into its place, and the gaps into one scratch buffer."""
    gap = bytearray(weight.row - weight.run)
    many = min(512, max(1, SPAN // weight.row))  # the system allows 1,024 buffers
    with _opened(weight) as file:
        for i in range(0, weight.count, many):
            places = [place for row in out[i : i + many] for place in (row, gap)]
            os.preadv(file, places[:-1], i * weight.row + weight.begin)


def picked(weight: Weight, out: np.ndarray[Any, Any]) -> None:
    """One read of many rows into a reused buffer, from which numpy copies the columns."""
    many = max(1, SPAN // weight.row)
    room = np.empty((many, weight.row), np.uint8)
    with _opened(weight) as file:
        for i in range(0, weight.count, many):
            part = room[: min(many, weight.count - i)]
            os.preadv(file, (part,), i * weight.row)
            out[i : i + many] = part[:, weight.begin : weight.begin + weight.run]


def mapped(weight: Weight, out: np.ndarray[Any, Any]) -> None:
    with _opened(weight) as file, mmap.mmap(file, SIZE, prot=mmap.PROT_READ) as pages:
        rows = np.frombuffer(pages, np.uint8, weight.count * weight.row).reshape(weight.count, weight.row)
        out[:] = rows[:, weight.begin : weight.begin + weight.run]
        del rows


def reshard(gap: int) -> Way:
    """reshard's gatherer with its checksums, which reads across gaps of up to `gap` bytes."""

    def read(weight: Weight, out: np.ndarray[Any, Any]) -> None:
        files, size = OpenFiles(), weight.run // 2
        cells = Cells(Storage(str(weight.path), 0, SIZE), BY_NAME["bfloat16"])
        axes = ((weight.count, size * TP, size), (size, 1, 1))
        before, gather.MAX_GAP_BYTES = gather.MAX_GAP_BYTES, gap
        try:
            gatherer = Gatherer(files, Ledger(every=True))
            gatherer.fill((Piece(cells, 3 * size, 0, axes),), cells.dtype, out.reshape(-1).view(np.uint16))
        finally:
            gather.MAX_GAP_BYTES = before
            files.close()

    return read


WAYS: dict[str, Way] = {
    "a read a row": a_read_a_row,
    "one preadv to the rows": scattered,
    "2 MiB, picked": picked,
    "mapped": mapped,
    "reshard, a read a row": reshard(0),
    "reshard, across gaps": reshard(1 << 30),
    "**reshard**": reshard(gather.MAX_GAP_BYTES),
}


@contextmanager
def _opened(weight: Weight) -> Iterator[int]:
    file = os.open(weight.path, os.O_RDONLY)
    try:
        yield file
    finally:
        os.close(file)


def rows(data: Path, rounds: int) -> Iterator[str]:
    """Rows of a Markdown table: medians over rounds in which the ways alternate."""
    data.mkdir(parents=True, exist_ok=True)
    content = np.random.default_rng(0).integers(0, 256, SIZE, np.uint8)
    places = [folder / f"reshard-rows-{os.getpid()}" for folder in (MEMORY, data) if folder.is_dir()]
    try:
        for place in places:
            with place.open("wb") as file:
                file.write(content)
                os.fsync(file.fileno())
        for kib in RUNS:
            yield from _race([Weight(place, kib << 10) for place in places], content, min(rounds, 3))
    finally:
        for place in places:
            place.unlink(missing_ok=True)


def _race(weights: list[Weight], content: np.ndarray[Any, Any], rounds: int) -> Iterator[str]:
    first = weights[0]
    wanted = content[: first.count * first.row].reshape(first.count, TP, first.run)[:, 3]
    turns = [(weight, False) for weight in weights] + [(weights[-1], True)]
    taken: dict[str, list[list[float]]] = {name: [[] for _ in range(len(turns) + 1)] for name in WAYS}
    for _ in range(rounds):
        for name, way in WAYS.items():
            for place, (weight, is_cold) in enumerate(turns):
                wall, cpu = _timed(way, weight, wanted, is_cold)
                taken[name][place].append(wall)
                if (weight, is_cold) == (weights[-1], False):
                    taken[name][-1].append(cpu)
    for name, columns in taken.items():
        *walls, cpu = (median(column) for column in columns)
        rates = [f"{wanted.nbytes / wall / 1e9:.2f}" for wall in walls]
        rates = rates if len(weights) > 1 else ["none", *rates]
        yield f"| {first.run >> 10} | {name} | {' | '.join(rates)} | {cpu / wanted.nbytes * 1e9:.2f} |"


def _timed(way: Way, weight: Weight, wanted: np.ndarray[Any, Any], is_cold: bool) -> tuple[float, float]:
    """Wall seconds and processor seconds. Raises AssertionError if wrong bytes were read."""
    with _opened(weight) as file:
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED if is_cold else os.POSIX_FADV_WILLNEED)
        if not is_cold:
            while os.read(file, SPAN):
                pass
    out = np.zeros(wanted.shape, np.uint8)
    begin = time.perf_counter(), time.process_time()
    way(weight, out)
    end = time.perf_counter(), time.process_time()
    assert np.array_equal(out, wanted), weight
    return end[0] - begin[0], end[1] - begin[1]
