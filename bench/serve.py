"""Downloads over loopback from `reshard serve`: a Megatron checkpoint beside the folder that `convert` makes of it.

Both are served by one process, in alternation. Source bytes and memory are the server's own counts.
"""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from bench.models import QWEN2_5_3B, QWEN3_MOE, make

DENSE = {**QWEN2_5_3B, "num_hidden_layers": 8, "vocab_size": 65536}  # 1.5 GB
LAYOUTS = {"dense": (DENSE, ["--tp", "4"]), "moe": (QWEN3_MOE, ["--tp", "4", "--ep", "4", "--etp", "1"])}
HEADER = [
    "| page cache | what is served | GB/s, median (min–max) | source bytes for a byte |",
    "|---|---|---|---|",
]
CLIENTS = 4
QUIET = ["--no-tokenizer", "--quiet", "--overwrite"]


class Served:
    """A server of some checkpoints, by their names."""

    def __init__(self, port: int, lines: Path, process: subprocess.Popen[bytes]) -> None:
        self.port, self._lines, self._process = port, lines, process

    def files(self, name: str) -> list[str]:
        """The files with weights of a model."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port)
        connection.request("GET", f"/api/models/local/{name}")
        siblings = json.loads(connection.getresponse().read())["siblings"]
        return [each["rfilename"] for each in siblings if each["rfilename"].endswith(".safetensors")]

    def get(self, name: str, file: str, begin: int = 0, end: int | None = None) -> int:
        """The bytes of a file, or of a range of it, that arrived."""
        connection, buffer, total = http.client.HTTPConnection("127.0.0.1", self.port), bytearray(1 << 20), 0
        last = "" if end is None else str(end - 1)
        connection.request(
            "GET", f"/local/{name}/resolve/main/{file}", headers={"Range": f"bytes={begin}-{last}"}
        )
        response = connection.getresponse()
        while count := response.readinto(buffer):
            total += count
        connection.close()
        return total

    def download(self, name: str, clients: int = 1) -> tuple[float, float]:
        """Bytes per second of all files, and bytes read for each that was sent. Each client takes a part of a file."""
        files = self.files(name)
        known = len(self._lines.read_text().splitlines())
        began = time.perf_counter()
        if clients == 1:
            total = sum(self.get(name, file) for file in files)
        else:
            size = self.get(name, files[0], 0, None)
            began, places = time.perf_counter(), [size * part // clients for part in range(clients + 1)]
            known = len(self._lines.read_text().splitlines())
            with ThreadPoolExecutor(clients) as pool:
                parts = [pool.submit(self.get, name, files[0], *places[i : i + 2]) for i in range(clients)]
                total = sum(part.result() for part in parts)
        seconds = time.perf_counter() - began
        time.sleep(0.5)  # the lines of the last answers
        lines = map(json.loads, self._lines.read_text().splitlines()[known:])
        sent = [each for each in lines if each["event"] == "sent"]
        return total / seconds, sum(each["read"] for each in sent) / sum(each["bytes"] for each in sent)

    def peak(self) -> int:
        """The most bytes of memory that the server had."""
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) << 10


@contextmanager
def served(folder: Path) -> Iterator[Served]:
    """A server of everything in a folder."""
    with TemporaryDirectory() as home:
        lines = Path(home) / "lines"
        command = [
            sys.executable,
            "-m",
            "reshard",
            "serve",
            str(folder),
            "--no-tokenizer",
            "--port",
            "0",
            "--json",
        ]
        with lines.open("wb") as out:
            process = subprocess.Popen(command, stdout=out)
        while not lines.read_text().endswith("\n"):
            time.sleep(0.05)
        address = json.loads(lines.read_text().splitlines()[0])["address"]
        try:
            yield Served(int(address.rpartition(":")[2]), lines, process)
        finally:
            process.terminate()
            process.wait()


def rows(data: Path, rounds: int) -> Iterator[str]:
    """The rows of the table, and what is said below it."""
    top = data / "served"
    for name, (config, layout) in LAYOUTS.items():
        model = make(data / f"served-{name}", config)
        run = [sys.executable, "-m", "reshard", "convert"]
        subprocess.run(
            [*run, str(model), str(top / f"{name}-megatron"), "--to", "megatron", *layout, *QUIET], check=True
        )
        subprocess.run([*run, str(top / f"{name}-megatron"), str(top / f"{name}-folder"), *QUIET], check=True)
    with served(top) as server:
        for cache in ("warm", "cold"):
            for name in LAYOUTS:
                yield from _side_by_side(server, top, name, cache, rounds)
        yield ""
        yield f"The server's memory was {server.peak() / 2**20:.0f} MiB at most."


def _side_by_side(server: Served, top: Path, name: str, cache: str, rounds: int) -> Iterator[str]:
    ways = {
        f"{name}: the folder that `convert` writes": (f"{name}-folder", 1),
        f"{name}: Megatron": (f"{name}-megatron", 1),
        f"{name}: Megatron, {CLIENTS} clients, a part of a file each": (f"{name}-megatron", CLIENTS),
    }
    found: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    for turn in range(rounds + 1):
        for way, (served_as, clients) in ways.items():
            if cache == "cold":
                _forget(top / served_as)
            result = server.download(served_as, clients)
            if turn:  # the first reads the source from the disk, and plans
                found[way].append(result)
    for way, results in found.items():
        speeds = [speed / 1e9 for speed, _ in results]
        reads = max(read for _, read in results)
        yield f"| {cache} | {way} | {median(speeds):.2f} ({min(speeds):.2f}–{max(speeds):.2f}) | {reads:.3f} |"


def _forget(folder: Path) -> None:
    """Drop the files of a folder from the page cache."""
    for file in (each for each in folder.rglob("*") if each.is_file()):
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
