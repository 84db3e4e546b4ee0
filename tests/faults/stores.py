"""The same for stores: requests that fail, stop short, are late, or are the last before the process dies.

The server is moto's, in its own process: runs are forked, and a process with threads cannot be forked.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from threading import Event
from typing import Any
from unittest import mock

import s3fs  # noqa: F401  what a child has, it need not import

from reshard.stores import store_errors
from tests.faults.calls import KILLED, Fault
from tests.faults.roads import MISTRAL, SWIFT, Make, converted, copied
from tests.faults.run import Content, Ended, content, run, said
from tests.stores.s3_server import BUCKET, S3, s3_server

URL = f"s3://{BUCKET}"
MARKER = "reshard-unfinished.json"
STATUSES = ("400", "403", "404", "500", "503", "reset")
KINDS = (*STATUSES, "short", "kill")


class Server:
    """A server with one bucket, in its own process. Requests are numbered from the last `strike`."""

    def __init__(self, orders: Connection) -> None:
        self._orders = orders
        self.environment: dict[str, str] = orders.recv()

    def ask(self, name: str, *given: Any) -> Any:
        """Have the server process run something, and return the result."""
        self._orders.send((name, given))
        return self._orders.recv()


@contextmanager
def server() -> Iterator[Server]:
    """A server that runs until the block ends, and that the processes in the block use."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs,), daemon=True)
    process.start()
    try:
        found = Server(ours)
        with (
            mock.patch.dict(os.environ, found.environment),
            mock.patch.object(store_errors, "FIRST_WAIT_SECONDS", 0.01),
        ):
            yield found
    finally:
        ours.close()
        process.join(10)


def _serve(orders: Connection) -> None:
    with s3_server() as s3:
        orders.send(s3.environment)
        known = _Orders(s3)
        while True:
            try:
                name, given = orders.recv()
            except EOFError:
                return
            orders.send(getattr(known, name)(*given))


class _Orders:
    """Handle the commands sent to the server."""

    def __init__(self, s3: S3) -> None:
        self._s3 = s3
        self._victim = 0
        self._is_known = Event()

    def strike(self, fault: Fault | None, seed: int = 0) -> None:
        """From now on, apply a fault to request `at`, and to all later ones if it is `on`; to all if it has no name."""
        self._s3.clear_faults()
        self._s3.requests.clear()
        self._is_known.clear()
        if fault is None:
            return
        random = Random(seed)

        def strikes() -> bool:
            number = len(self._s3.requests) - 1
            return not fault.name or number == fault.at or (fault.on and number > fault.at)

        def before(*request: str) -> int | None:
            if strikes() and fault.kind == "delay":
                time.sleep(random.random() * 0.05)
            return self._what(fault.kind) if strikes() and not fault.late else None

        def after(method: str, path: str, query: str, body: bytes) -> bytes | int | None:
            if strikes() and fault.kind == "short":
                return body[: len(body) // 2] if method == "GET" else None
            return self._what(fault.kind) if strikes() and fault.late else None

        self._s3.fails, self._s3.spoils = before, after

    def _what(self, kind: str) -> int | None:
        if kind == "kill":
            self._is_known.wait(10)
            os.kill(self._victim, signal.SIGKILL)
        return {"reset": 0, "kill": 0}.get(kind, int(kind) if kind.isdigit() else None)

    def victim(self, process: int) -> None:
        """Set the process that dies."""
        self._victim = process
        self._is_known.set()

    def requests(self) -> list[tuple[str, str, str]]:
        """All requests so far."""
        return list(self._s3.requests)

    def fill(self, files: Content) -> None:
        """Set the contents of the bucket, without incomplete uploads."""
        self.strike(None)
        self._s3.clear()
        for upload in self.uploads():
            self._s3.client.abort_multipart_upload(Bucket=BUCKET, **upload)
        for key, body in files.items():
            self._s3.client.put_object(Bucket=BUCKET, Key=key, Body=body)

    def objects(self, prefix: str) -> Content:
        """The contents of the bucket."""
        self.strike(None)
        return self._s3.objects(prefix)

    def uploads(self) -> list[dict[str, str]]:
        """Objects with incomplete uploads."""
        found = self._s3.client.list_multipart_uploads(Bucket=BUCKET).get("Uploads", ())
        return [{"Key": each["Key"], "UploadId": each["UploadId"]} for each in found]


@dataclass
class Remote:
    """A command whose source or destination is in a bucket: `src`, or `dst`."""

    root: Path
    server: Server
    words: tuple[object, ...]
    objects: Content
    """The initial contents of the bucket."""

    def __post_init__(self) -> None:
        (self.root / "tmp").mkdir()
        self.to_bucket = f"{URL}/dst" in self.words
        self.server.ask("fill", self.objects)
        whole = self._run(self.words)
        assert whole.code == 0, whole.err
        self.requests = self.server.ask("requests")
        self.expected = self.found()
        assert self.expected

    def found(self) -> Content:
        """The contents of the destination."""
        return self.server.ask("objects", "dst/") if self.to_bucket else content(self.root / "dst") or {}

    def clear(self) -> None:
        """Restore the initial state. The source stays, because outputs record its time."""
        if self.to_bucket:
            self.server.ask("fill", self.objects)
        for path in [*self.root.glob("*dst*"), *(self.root / "tmp").iterdir()]:
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def _run(self, words: Sequence[object], fault: Fault | None = None, seed: int = 0) -> Ended:
        self.server.ask("strike", fault, seed)
        elsewhere = {"TMPDIR": str(self.root / "tmp")}
        victim: Callable[[int], None] = lambda process: self.server.ask("victim", process)  # noqa: E731
        with mock.patch.dict(os.environ, elsewhere), mock.patch.object(tempfile, "tempdir", None):
            ended = run(words, self.root, on_start=victim)
        return ended._replace(code=KILLED if ended.code == -signal.SIGKILL else ended.code)

    def strike(self, fault: Fault, seed: int = 0) -> str:
        """Run the command with a fault, then without. Returns the outcome in a word; AssertionError if it is wrong."""
        self.clear()
        ended = self._run(self.words, fault, seed)
        requests = self.server.ask("requests")
        struck = requests[fault.at] if fault.name and fault.at < len(requests) else None
        try:
            return self._judged(fault, ended, struck)
        except AssertionError as error:
            raise AssertionError(f"{fault} ({struck}): {error}\n{ended.err}") from None

    def _judged(self, fault: Fault, ended: Ended, struck: tuple[str, str, str] | None) -> str:
        assert ended.code is not None, "it hangs"
        found = self.found()
        is_whole = found == self.expected
        if ended.code == 0 and fault.kind == "404" and not is_whole:
            missing = self.expected.keys() - found.keys()
            assert missing and not any(name.endswith((".safetensors", ".distcp")) for name in missing)
            return "completed without it"  # a store that says that there is no such object is believed
        assert is_whole or not found or (self.to_bucket and MARKER in found), "half an output looks whole"
        if ended.code == KILLED:
            outcome = "killed"
        else:
            assert ended.code in (0, 2), f"exit status {ended.code}"
            outcome = "completed" if ended.code == 0 else "refused"
            assert is_whole or ended.code, "exit status 0, and the destination is not complete"
        if ended.code == 2:
            lines = " ".join(said(ended))
            assert URL in lines and "not-to-be-shown" not in lines, "the store is not named"
        if is_whole:
            return outcome if outcome == "completed" else f"{outcome}, complete"
        written = self._listed(found)
        again = self._run(self.words)
        assert again.code == 0, f"the same command again: {again.code}\n{again.err}"
        assert self.found() == self.expected, "the same command again makes something else"
        # What stays is the name of this machine.
        left = [path for path in (self.root / "tmp").rglob("*") if path.is_file() and path.name != "name"]
        assert not left and not self.server.ask("uploads"), f"left behind: {left}"
        return f"{outcome}, kept" if written else outcome

    def _listed(self, found: Content) -> int:
        """Bytes that need not be written again, among those that `inspect` lists, if any."""
        dst = f"{URL}/dst" if self.to_bucket else self.root / "dst"
        if not (found or list(self.root.glob(".dst.*-*"))):
            return 0
        told = json.loads(self._run(("inspect", dst, "--json")).out)
        assert told["unfinished"], "inspect does not list it"
        return sum(each["written"] or 0 for each in told["unfinished"])


ROADS: dict[str, tuple[Make, tuple[str, ...]]] = {
    "to a bucket": (copied(MISTRAL), ("--to", "huggingface", "--max-shard-size", "20kB")),
    "megatron to a bucket": (copied(SWIFT), ("--to", "megatron", "--tp", "2")),
    "from a bucket": (converted(MISTRAL, to="huggingface", max_shard_size="20kB"), ("--to", "megatron")),
    "megatron from a bucket": (copied(SWIFT), ()),
}
"""Conversions to a bucket, and from one."""


def remote(name: str, root: Path, store: Server, workers: int = 1) -> Remote:
    """The conversion in an empty folder."""
    make, flags = ROADS[name]
    make(root / "src")
    beside = ("--no-tokenizer", "--workers", workers, *flags)
    if " to " in f" {name} ":
        return Remote(root, store, ("convert", root / "src", f"{URL}/dst", *beside), {})
    objects = {f"src/{key}": data for key, data in (content(root / "src") or {}).items()}
    return Remote(root, store, ("convert", f"{URL}/src", root / "dst", *beside), objects)


def every(requests: Sequence[tuple[str, str, str]]) -> Iterator[Fault]:
    """Each fault at each request."""
    yield Fault("delay")
    for at, (method, _, _) in enumerate(requests):
        for kind in STATUSES:
            yield Fault(kind, method, at)
        for kind in ("400", "403", "404"):  # the others are tried again, and again
            yield Fault(kind, method, at, on=True)
        for kind in ("500", "reset"):
            yield Fault(kind, method, at, late=True)
        if method == "GET":
            yield Fault("short", method, at)
        yield Fault("kill", method, at)
        yield Fault("kill", method, at, late=True)


def sampled(requests: Sequence[tuple[str, str, str]], runs: int, seed: int) -> list[Fault]:
    """A sample of `count` faults, with each kind equally often."""
    random = Random(seed)
    first, *rest = every(requests)
    waiting: dict[str, list[Fault]] = {}
    for fault in rest:
        waiting.setdefault(f"{fault.kind} {fault.on} {fault.late}", []).append(fault)
    for each in waiting.values():
        random.shuffle(each)
    faults = [first]
    while len(faults) < runs and any(waiting.values()):
        faults += [each.pop() for each in waiting.values() if each]
    return faults[:runs]
