"""Guards of several nodes tell each other how their part of the run ended, so that the cause is named once.

They meet when their commands have ended, at the address where the ranks met before, whose port is free again then.
Node 0 collects what the others say and sends all of it to each of them.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

from reshard.base.plain_json import json_of

NodeMessage = Mapping[str, Any]
"""What a guard says about its node. Each has "node", its number."""
WAIT_SECONDS = 20.0
"""Seconds that guards wait for each other. The ranks of a node end some seconds after those of another have failed."""
RETRY_SECONDS = 0.2
"""Seconds between two attempts."""
MAX_MESSAGE = 1 << 16
"""Maximum length of a message in bytes."""


def first_to_fail(messages: Sequence[NodeMessage]) -> NodeMessage:
    """The node on which the run failed first: others only lost a connection to it."""
    return min(messages, key=lambda each: (bool(each.get("follows")), each["node"]))


@dataclass(frozen=True)
class NodeMeeting:
    """Where the guards of `nodes` nodes meet: a host and a port. This one is on node `node`."""

    node: int
    nodes: int
    address: tuple[str, int]

    def exchange(self, summary: NodeMessage) -> list[NodeMessage]:
        """What the guards of all nodes say, by node; of those that do not come in time, nothing."""
        own = json.dumps({**summary, "node": self.node})[:MAX_MESSAGE].encode() + b"\n"
        lines = self._collect(own) if self.node == 0 else self._send(own)
        messages = {each["node"]: each for each in _messages(own + lines)}
        return [messages[node] for node in sorted(messages)]

    def _collect(self, own: bytes) -> bytes:
        """On node 0: the messages of all nodes, which every one of them gets."""
        deadline, received = time.monotonic() + WAIT_SECONDS, [own]
        with ExitStack() as open_here:
            server = _serve(self.address[1], deadline)
            if server is None:
                return b""
            open_here.enter_context(server)
            guests: list[socket.socket] = []
            while len(received) < self.nodes and time.monotonic() < deadline:
                with suppress(OSError):
                    server.settimeout(max(deadline - time.monotonic(), RETRY_SECONDS))
                    guest, _ = server.accept()
                    guests.append(open_here.enter_context(guest))
                    received += [line] if any(_messages(line := _line(guest))) else []
            for guest in guests:
                with suppress(OSError):
                    guest.sendall(b"".join(received))
        return b"".join(received)

    def _send(self, own: bytes) -> bytes:
        """On other nodes: send the message to node 0, which answers with those of all nodes."""
        deadline = time.monotonic() + WAIT_SECONDS
        while time.monotonic() < deadline:
            with suppress(OSError), socket.create_connection(self.address, RETRY_SECONDS * 5) as guest:
                guest.sendall(own)
                guest.settimeout(WAIT_SECONDS + RETRY_SECONDS)
                with guest.makefile("rb") as file:
                    if answer := file.read():
                        return answer
            time.sleep(RETRY_SECONDS)
        return b""


def _serve(port: int, deadline: float) -> socket.socket | None:
    """A server on the port, as soon as the run has left it."""
    while time.monotonic() < deadline:
        with suppress(OSError):
            return socket.create_server(("", port))
        time.sleep(RETRY_SECONDS)
    return None


def _line(guest: socket.socket) -> bytes:
    guest.settimeout(RETRY_SECONDS * 5)
    with suppress(OSError), guest.makefile("rb") as file:
        return file.readline(MAX_MESSAGE)
    return b""


def _messages(lines: bytes) -> Iterator[NodeMessage]:
    """The messages that guards can have sent; whatever else has connected is ignored."""
    for line in lines.splitlines():
        with suppress(ValueError):
            message = json_of(line)
            if isinstance(message, dict) and isinstance(message.get("node"), int):
                yield message
