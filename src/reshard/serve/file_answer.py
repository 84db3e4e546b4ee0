"""The answer with a file, or ranges of it: computed part by part as the client takes them, in bounded memory."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial

import anyio
import anyio.to_thread
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from reshard.base.errors import ReshardError
from reshard.serve.revisions import Revision

STALL_SECONDS = 60.0
"""Seconds after which a client that takes nothing is disconnected."""
GONE = "the client is gone"


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


class FileAnswer(Response):
    """Ranges of a file, with what is between them (`bytes`); nothing for HEAD. `on_end` receives it when it has ended.

    If a source changes or is damaged, the connection is closed before the wrong bytes: the client sees fewer bytes than
    were announced.

    Attributes
    ----------
    sent, read : int
        Bytes sent to the client, and bytes of sources read for them.
    error : str
        Why it was cut off; empty if it was not.
    is_wrong : bool
        Whether that is because of the sources.
    """

    def __init__(
        self,
        revision: Revision,
        path: str,
        content: Sequence[range | bytes],
        headers: dict[str, str],
        turns: MemoryTurns,
        on_end: Callable[[FileAnswer], None],
    ) -> None:
        is_part = len(content) > 1 or "Content-Range" in headers  # which several ranges have one by one
        super().__init__(None, 206 if is_part else 200, headers)
        self.revision, self.path, self._content = revision, path, content
        self._turns, self._on_end = turns, on_end
        self.sent, self.read, self.error, self.is_wrong = 0, 0, "", False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        if scope["method"] == "HEAD":
            await send({"type": "http.response.body"})
            return
        try:
            async with anyio.create_task_group() as tasks:

                async def cancel_when_gone() -> None:
                    while (await receive())["type"] != "http.disconnect":
                        pass
                    tasks.cancel_scope.cancel()

                tasks.start_soon(cancel_when_gone)
                await self._send_all(send)
                tasks.cancel_scope.cancel()
        finally:
            self._on_end(self)

    async def _send_all(self, send: Send) -> None:
        """Send all content. After an error, the answer is left incomplete, and the server closes the connection."""
        self.error = GONE  # if this is cancelled
        try:
            for each in self._content:
                if isinstance(each, bytes):
                    await send({"type": "http.response.body", "body": each, "more_body": True})
                else:
                    await self._send_range(each, send)
            self.error = ""
            await send({"type": "http.response.body"})
        except TimeoutError:
            self.error = f"the client took nothing for {STALL_SECONDS:.0f} seconds"
        except (ReshardError, OSError) as error:
            self.error, self.is_wrong = str(error), True

    async def _send_range(self, places: range, send: Send) -> None:
        thread = partial(anyio.to_thread.run_sync, limiter=self.revision.limiter)
        for part in await thread(self.revision.ranges.parts, self.path, places.start, places.stop):
            for window in await thread(part.windows):
                async with self._turns.held(2 * len(window)):  # once more in the buffer of the connection
                    data, read = await thread(part.read, window)
                    self.read += read
                    with anyio.fail_after(STALL_SECONDS):
                        await send({"type": "http.response.body", "body": data, "more_body": True})
                        # What is sent next waits until this has left the buffer.
                        await send({"type": "http.response.body", "body": b"", "more_body": True})
                    self.sent += len(data)
