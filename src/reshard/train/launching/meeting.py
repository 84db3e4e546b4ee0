"""Where the other nodes of a run wait for the first one: it looks before the run, and tells them if it refuses.

They connect to the address where the ranks will meet. As long as the first node looks, nobody listens there; then it is
torch's store, which says nothing before it is asked, or the refusal.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from contextlib import suppress

from reshard.errors import Problem, ReshardError

REFUSAL = b"reshard refuses: "
LONGEST = 1000
"""Bytes of a refusal."""
SILENCE = 1.0
"""Seconds after which who says nothing is torch's store."""
LINGER = 20.0
"""Seconds that a refusal can be heard."""
PATIENCE = 1800.0
"""Seconds that node 0 may look: it reads all data."""


def refuse(port: int, others: int, problems: Sequence[Problem]) -> None:
    """Tell so many other nodes that the run is refused. Those that come later than `LINGER` do not hear it."""
    message = REFUSAL + "; ".join(problem.message for problem in problems).encode()[:LONGEST] + b"\n"
    deadline = time.monotonic() + LINGER
    with suppress(OSError), socket.create_server(("", port), reuse_port=False) as server:
        for _ in range(others):
            server.settimeout(max(deadline - time.monotonic(), 0.01))
            connection, _ = server.accept()
            with connection:
                connection.sendall(message)


def wait(address: str, port: int) -> None:
    """Wait until the ranks can meet. Raises ReshardError where node 0 refuses, or is not heard of."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        try:
            with socket.create_connection((address, port), SILENCE) as connection:
                said = _said(connection)
        except OSError:  # nobody listens yet
            time.sleep(SILENCE / 2)
            continue
        if said.startswith(REFUSAL):
            raise ReshardError(
                "node-0-refuses",
                "node 0 refuses the run",
                found=said.removeprefix(REFUSAL).decode("utf-8", "replace").strip(),
                remedy="see what node 0 prints, and run the same command again on all of them",
            )
        return
    raise ReshardError(
        "node-0-silent",
        "node 0 does not answer",
        expected=f"the same command there, and a road to {address}:{port}",
        found=f"nobody listened for {PATIENCE / 60:.0f} minutes",
        remedy="see what node 0 prints; check the address, and firewalls between the nodes",
    )


def _said(connection: socket.socket) -> bytes:
    connection.settimeout(SILENCE)
    said = b""
    with suppress(OSError):
        while part := connection.recv(LONGEST):
            said += part
    return said
