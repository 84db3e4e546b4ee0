"""Guards of several nodes tell each other how their part of the run ended, so that the cause is named once.

They meet when their commands have ended: in a shared folder, or at the address where the ranks met before, whose port
is free again then. Node 0 collects what the others say and sends all of it to each of them.

Before a run of train, its other nodes wait for node 0, which checks it first, at the same address. While node 0 checks,
nothing listens there; then either torch's store does, which sends nothing unasked, or a server that sends the refusal.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from reshard.base.errors import ReshardError
from reshard.base.plain_json import json_of

NodeMessage = Mapping[str, Any]
"""What a guard says about its node. Each has "node", its number."""
WAIT_SECONDS = 20.0
"""Seconds that guards wait for each other. The ranks of a node end some seconds after those of another have failed."""
RETRY_SECONDS = 0.2
"""Seconds between two attempts."""
MAX_MESSAGE = 1 << 16
"""Maximum length of a message in bytes."""
REFUSAL_PREFIX = b"reshard refuses: "
CHECK_SECONDS = 1800.0
"""Seconds that node 0 may take for its checks: it reads all data."""


def place_named(text: str) -> Path | tuple[str, int]:
    """The place that --meet names: HOST:PORT, or else a folder. Raises ReshardError if it is neither."""
    host, colon, port = text.rpartition(":")
    if not colon or "/" in text:
        return Path(text)
    if not (host and port.isdecimal() and 0 < int(port) < 1 << 16):
        raise ReshardError(
            "meeting-place-wrong",
            "--meet names neither a folder nor an address",
            expected="a shared folder, or HOST:PORT of the first node",
            found=text,
            remedy="correct it, for example: --meet /shared/run1, or --meet node0:29500",
        )
    return host.strip("[]"), int(port)


def first_to_fail(said: Sequence[NodeMessage]) -> NodeMessage:
    """The node on which the run failed first: others only lost a connection to it."""
    return min(said, key=lambda each: (bool(each.get("follows")), each["node"]))


@dataclass(frozen=True)
class NodeMeeting:
    """Where the guards of `nodes` nodes meet: a folder, or a host and a port. This one is on node `node`."""

    node: int
    nodes: int
    place: Path | tuple[str, int]

    def exchange(self, told: NodeMessage) -> list[NodeMessage]:
        """What the guards of all nodes say, by node; of those that do not come in time, nothing."""
        said = json.dumps({**told, "node": self.node})[:MAX_MESSAGE].encode() + b"\n"
        if isinstance(self.place, Path):
            found = self._in_folder(self.place, said)
        else:
            found = self._collect(self.place[1], said) if self.node == 0 else self._send(*self.place, said)
        own = [each for each in found if each.get("node") == self.node] or [json_of(said)]
        others = (each for each in found if each.get("node") != self.node)
        return sorted([*own, *others], key=lambda each: each["node"])

    def _in_folder(self, folder: Path, said: bytes) -> list[NodeMessage]:
        """By a file of each node."""
        folder.mkdir(parents=True, exist_ok=True)
        own = folder / f".guard-node-{self.node}.json"
        partial = own.with_suffix(".partial")
        partial.write_bytes(said)
        partial.replace(own)
        deadline, since = time.monotonic() + WAIT_SECONDS, time.time() - WAIT_SECONDS
        while True:
            files = [each for each in folder.glob(".guard-node-*.json") if each.stat().st_mtime > since]
            if len(files) >= self.nodes or time.monotonic() > deadline:
                return list(_messages(b"".join(each.read_bytes() for each in files)))
            time.sleep(RETRY_SECONDS)

    def _collect(self, port: int, said: bytes) -> list[NodeMessage]:
        """On node 0: listen, and answer with everything that was said."""
        deadline, heard = time.monotonic() + WAIT_SECONDS, [said]
        with ExitStack() as open_here:
            server = _serve(port, deadline)
            if server is None:
                return []
            open_here.enter_context(server)
            guests: list[socket.socket] = []
            while len(heard) < self.nodes and time.monotonic() < deadline:
                with suppress(OSError):
                    server.settimeout(max(deadline - time.monotonic(), RETRY_SECONDS))
                    guest, _ = server.accept()
                    guests.append(open_here.enter_context(guest))
                    heard += [line] if any(_messages(line := _line(guest))) else []
            for guest in guests:
                with suppress(OSError):
                    guest.sendall(b"".join(heard))
        return list(_messages(b"".join(heard)))

    def _send(self, host: str, port: int, said: bytes) -> list[NodeMessage]:
        """On other nodes: tell node 0, and read its answer."""
        deadline = time.monotonic() + WAIT_SECONDS
        while time.monotonic() < deadline:
            with suppress(OSError), socket.create_connection((host, port), RETRY_SECONDS * 5) as guest:
                guest.sendall(said)
                guest.settimeout(WAIT_SECONDS + RETRY_SECONDS)
                if answer := b"".join(iter(partial(guest.recv, MAX_MESSAGE), b"")):
                    return list(_messages(answer))
            time.sleep(RETRY_SECONDS)
        return []


def _serve(port: int, deadline: float) -> socket.socket | None:
    """A server on the port, as soon as the run has left it."""
    while time.monotonic() < deadline:
        with suppress(OSError):
            return socket.create_server(("", port))
        time.sleep(RETRY_SECONDS)
    return None


def _line(guest: socket.socket) -> bytes:
    guest.settimeout(RETRY_SECONDS * 5)
    said = b""
    with suppress(OSError):
        while not said.endswith(b"\n") and len(said) < MAX_MESSAGE and (part := guest.recv(MAX_MESSAGE)):
            said += part
    return said if said.endswith(b"\n") else b""


def _messages(lines: bytes) -> Iterator[NodeMessage]:
    """The messages that guards can have sent; whatever else has connected is ignored."""
    for line in lines.splitlines():
        with suppress(ValueError):
            said = json_of(line)
            if isinstance(said, dict) and isinstance(said.get("node"), int):
                yield said
