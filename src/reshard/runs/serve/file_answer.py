"""The answer with a file, or ranges of it: computed part by part as the client takes them, in bounded memory."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial

import anyio
import anyio.to_thread
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from reshard.base.errors import ReshardError
from reshard.runs.serve.byte_ranges import Span
from reshard.runs.serve.revisions import Revision

STALL_SECONDS = 60.0
"""Seconds after which a client that takes nothing is disconnected."""


class MemoryTurns:
    """Memory that answers hold at the same time: whoever needs more than is left waits."""

    def __init__(self, limit: int) -> None:
        self._limit, self._used, self._changed = limit, 0, anyio.Condition()

    @asynccontextmanager
    async def held(self, nbytes: int) -> AsyncIterator[None]:
        """Hold memory during a block. What exceeds the limit alone has its turn when nobody else holds any."""
        async with self._changed:
            while self._used and self._used + nbytes > self._limit:
                await self._changed.wait()
            self._used += nbytes
        try:
            yield
        finally:
            with anyio.CancelScope(shield=True):
                async with self._changed:
                    self._used -= nbytes
                    self._changed.notify_all()


@dataclass
class Transfer:
    """An answer as it is counted: bytes sent, bytes of sources read for it, seconds, and why it was cut off.

    `damaged` says that it was not for the client's sake.
    """

    sent: int = 0
    read: int = 0
    seconds: float = 0.0
    error: str = ""
    damaged: bool = False
    begun: float = field(default_factory=time.monotonic)


class FileAnswer(Response):
    """Ranges of a file, with what is between them (`bytes`); nothing for HEAD. `on_end` receives what was transferred.

    If a source changes or is damaged, the connection is closed before the wrong bytes, and the client sees fewer bytes
    than were announced.
    """

    def __init__(
        self,
        revision: Revision,
        path: str,
        content: Sequence[Span | bytes],
        headers: dict[str, str],
        turns: MemoryTurns,
        on_end: Callable[[Transfer], None],
    ) -> None:
        self.status_code, self.background = 206 if "Content-Range" in headers else 200, None
        self._revision, self._path, self._content = revision, path, content
        self._turns, self._on_end, self._transfer = turns, on_end, Transfer()
        self.body = b""
        self.init_headers(headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send(
                {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
            )
            if scope["method"] == "HEAD":
                await send({"type": "http.response.body"})
            else:
                await self._send_until_gone(receive, send)
        finally:
            self._transfer.seconds = time.monotonic() - self._transfer.begun
            self._on_end(self._transfer)

    async def _send_until_gone(self, receive: Receive, send: Send) -> None:
        async with anyio.create_task_group() as tasks:

            async def watch() -> None:
                while (await receive())["type"] != "http.disconnect":
                    pass
                tasks.cancel_scope.cancel()

            tasks.start_soon(watch)
            await self._send_all(send)
            tasks.cancel_scope.cancel()

    async def _send_all(self, send: Send) -> None:
        """Send all content. After an error, the answer is left incomplete, and the server closes the connection."""
        self._transfer.error = "the client is gone"  # if this is cancelled
        try:
            for each in self._content:
                if isinstance(each, bytes):
                    await send({"type": "http.response.body", "body": each, "more_body": True})
                else:
                    await self._send_span(each, send)
            self._transfer.error = ""
            await send({"type": "http.response.body"})
        except TimeoutError:
            self._transfer.error = f"the client took nothing for {STALL_SECONDS:.0f} seconds"
        except (ReshardError, OSError) as error:
            self._transfer.error, self._transfer.damaged = str(error), True

    async def _send_span(self, span: Span, send: Send) -> None:
        thread = partial(anyio.to_thread.run_sync, limiter=self._revision.limiter)
        ranges = self._revision.ranges
        for part in await thread(partial(ranges.parts, self._path, *span)):
            for window in await thread(part.windows):
                async with self._turns.held(2 * window.nbytes):  # once more in the buffer of the connection
                    data, read = await thread(partial(part.read, window))
                    self._transfer.read += read
                    with anyio.fail_after(STALL_SECONDS):
                        await send({"type": "http.response.body", "body": data, "more_body": True})
                        # What is sent next waits until this has left the buffer.
                        await send({"type": "http.response.body", "body": b"", "more_body": True})
                    self._transfer.sent += len(data)
