"""How the other nodes of a run wait for node 0, which checks the run first and tells them if it refuses.

They connect to the rendezvous address. While node 0 checks, nothing listens there; then either torch's store does,
which sends nothing unasked, or a server that sends the refusal.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from contextlib import suppress

from reshard.base.errors import Problem, ReshardError

REFUSAL = b"reshard refuses: "
LONGEST = 1000
"""Maximum length of a refusal in bytes."""
SILENCE = 1.0
"""Seconds of silence after which a listener is taken for torch's store."""
LINGER = 20.0
"""Seconds that node 0 offers a refusal."""
PATIENCE = 1800.0
"""Seconds that node 0 may take for its checks: it reads all data."""


def refuse(port: int, others: int, problems: Sequence[Problem]) -> None:
    """Send the refusal to `others` nodes. Nodes that connect after `LINGER` do not receive it."""
    message = REFUSAL + "; ".join(problem.message for problem in problems).encode()[:LONGEST] + b"\n"
    deadline = time.monotonic() + LINGER
    with suppress(OSError), socket.create_server(("", port), reuse_port=False) as server:
        for _ in range(others):
            server.settimeout(max(deadline - time.monotonic(), 0.01))
            connection, _ = server.accept()
            with connection:
                connection.sendall(message)


def wait(address: str, port: int) -> None:
    """Wait until the ranks can meet. Raises ReshardError if node 0 refuses or does not answer."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        try:
            with socket.create_connection((address, port), SILENCE) as connection:
                said = _said(connection)
        except OSError:  # nothing listens yet
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
        expected=f"the same command there, and a network route to {address}:{port}",
        found=f"nobody listened for {PATIENCE / 60:.0f} minutes",
        remedy="see what node 0 prints; check the address, and firewalls between the nodes",
    )


def _said(connection: socket.socket) -> bytes:
    with suppress(OSError):  # silence
        return connection.makefile("rb").readline(2 * LONGEST)
    return b""
