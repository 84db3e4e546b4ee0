"""What a server has done: totals, and a record of each answer with a file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from reshard.runs.serve.file_answer import Transfer
from reshard.runs.serve.revisions import Revision

HELP = {
    "requests": "Answers with a file or a part of it.",
    "sent_bytes": "Bytes of files sent to clients.",
    "read_bytes": "Bytes of checkpoints read for them.",
    "seconds": "Seconds that these answers took, in all.",
    "errors": "Answers that were cut off.",
}


class ServedCounts:
    """Totals since the start of the server. `on_event` receives a record of each answer."""

    def __init__(self, on_event: Callable[[dict[str, Any]], None]) -> None:
        self._totals = dict.fromkeys(HELP, 0.0)
        self._on_event = on_event

    def add(self, method: str, path: str, revision: Revision, transfer: Transfer) -> None:
        """Count an answer."""
        record = {
            "requests": 1,
            "sent_bytes": transfer.sent,
            "read_bytes": transfer.read,
            "seconds": transfer.seconds,
            "errors": int(bool(transfer.error)),
        }
        for name, value in record.items():
            self._totals[name] += value
        if method == "HEAD":
            return
        self._on_event(
            {
                "event": "sent",
                "model": revision.repository.id,
                "step": revision.step.name,
                "path": path,
                "bytes": transfer.sent,
                "read": transfer.read,
                "seconds": round(transfer.seconds, 3),
                "error": transfer.error or None,
            }
        )

    def as_text(self) -> str:
        """The totals as Prometheus reads them."""
        lines = []
        for name, value in self._totals.items():
            full = f"reshard_{name}_total"
            lines += [f"# HELP {full} {HELP[name]}", f"# TYPE {full} counter", f"{full} {value:g}"]
        return "\n".join(lines) + "\n"
