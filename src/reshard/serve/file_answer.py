"""The answer with a file, or ranges of it: computed part by part as the client takes them, in bounded memory."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from itertools import chain
from typing import Any

from anyio import fail_after, to_thread
from starlette.responses import StreamingResponse
from starlette.types import Send

from reshard.base.errors import ReshardError
from reshard.serve.revisions import Revision

# Ranges in one request; if there are more, the header is ignored, as it may be (RFC 9110, section 14).
MAX_RANGES = 64
RANGE = re.compile(r"(\d{1,18})-(\d{0,18})|-(\d{1,18})")
# Seconds after which a client that takes nothing is disconnected.
STALL_SECONDS = 60.0
# What is before a range, in an answer with several.
PART = "\r\n--{}\r\nContent-Type: application/octet-stream\r\nContent-Range: {}\r\n\r\n"


def ranges_of(header: str, size: int) -> list[range] | None:
    """The bytes that a header asks for; empty if there are none of them, None if the header is empty or malformed."""
    unit, _, ranges = header.partition("=")
    matches = [RANGE.fullmatch(each.strip()) for each in ranges.split(",")]
    if unit.strip().lower() != "bytes" or len(matches) > MAX_RANGES or None in matches:
        return None
    return list(filter(None, (_range(match, size) for match in matches if match)))


def _range(match: re.Match[str], size: int) -> range:
    first, last, suffix = match.groups()
    if suffix is not None:
        return range(max(0, size - int(suffix)), size)
    return range(int(first), min(size, int(last) + 1) if last else size)


def content_of(ranges: list[range] | None, size: int, headers: dict[str, str]) -> list[range | bytes]:
    """What an answer consists of: ranges of the file, and what is between them. Adds to `headers` what describes it."""
    content: list[range | bytes] = [*(ranges or [range(size)])]
    about = [f"bytes {each.start}-{each.stop - 1}/{size}" for each in ranges or ()]
    if len(content) > 1:
        boundary = secrets.token_hex(16)
        heads = [PART.format(boundary, each).encode() for each in about]
        content = [*chain.from_iterable(zip(heads, content, strict=True)), f"\r\n--{boundary}--\r\n".encode()]
        headers["Content-Type"] = f"multipart/byteranges; boundary={boundary}"
    elif about:
        headers["Content-Range"] = about[0]
    headers["Content-Length"] = str(sum(map(len, content)))
    return content


class MemoryTurns:
    """Memory that is held at the same time, of at most `limit` bytes: whoever needs more than is left waits."""

    def __init__(self, limit: int) -> None:
        self._limit, self._used, self._released = limit, 0, asyncio.Event()

    def has_room(self, nbytes: int) -> bool:
        """Whether nobody has to wait for so much. What exceeds the limit alone fits when nobody else holds any."""
        return not self._used or self._used + nbytes <= self._limit

    async def take(self, nbytes: int) -> None:
        """Hold memory, as soon as there is room."""
        while not self.has_room(nbytes):
            await self._released.wait()
        self._used += nbytes

    def give(self, nbytes: int) -> None:
        """Hold less."""
        self._used -= nbytes
        self._released.set()
        self._released = asyncio.Event()

    @asynccontextmanager
    async def held(self, nbytes: int) -> AsyncIterator[None]:
        """Hold memory during a block."""
        await self.take(nbytes)
        try:
            yield
        finally:
            self.give(nbytes)


class FileAnswer(StreamingResponse):
    """Ranges of a file, with what is between them (`bytes`). `on_end` receives it when it has ended.

    If a source changes or is damaged, the connection is closed before the wrong bytes: the client sees fewer bytes than
    were announced. `reading` is the memory of threads that compute, `sending` that of what clients have not taken yet.

    Attributes
    ----------
    sent, read : int
        Bytes sent to the client, and bytes of sources read for them.
    error : str | None
        Why it was cut off.
    """

    def __init__(
        self,
        revision: Revision,
        path: str,
        content: list[range | bytes],
        reading: MemoryTurns,
        sending: MemoryTurns,
        on_end: Callable[[FileAnswer], None],
        **how: Any,
    ) -> None:
        super().__init__((), **how)
        self.revision, self.path, self._content = revision, path, content
        self._reading, self._sending, self._on_end = reading, sending, on_end
        self._held: list[int] = []
        self.sent, self.read = 0, 0
        self.error: str | None = "the client is gone"  # if this is cancelled

    async def stream_response(self, send: Send) -> None:
        """Send all content. After an error, the answer is left incomplete, and the server closes the connection."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            for each in self._content:
                if isinstance(each, bytes):
                    await self._send(each, send)
                else:
                    await self._send_range(each, send)
            await self._send(b"", send)
            self.error = None
            await send({"type": "http.response.body"})
        except TimeoutError:
            self.error = f"the client read nothing for {STALL_SECONDS:.0f} seconds"
        except (ReshardError, OSError) as error:
            self.error = str(error)
            self.revision.checked = 0.0  # the next answer looks at the sources first
        finally:
            self._give()
            self.revision.ranges.close()  # the disk has room again for files that were deleted meanwhile
            self._on_end(self)

    async def _send_range(self, places: range, send: Send) -> None:
        ranges, thread = self.revision.ranges, partial(to_thread.run_sync, limiter=self.revision.limiter)
        for part in await thread(ranges.parts, self.path, places.start, places.stop):
            for window in await thread(part.windows):
                needed = 2 * len(window)  # once more in the buffer of the connection
                if not self._sending.has_room(needed):
                    await self._send(b"", send)
                    self._give()
                await self._sending.take(needed)
                self._held.append(needed)
                async with self._reading.held(ranges.share.each):
                    data, read = await thread(part.read, window)  # while the window before leaves the buffer
                self.read += read
                await self._send(data, send)
                self._give(but=1)
                self.sent += len(data)

    async def _send(self, data: bytes | memoryview, send: Send) -> None:
        """Send a part, once the one before has left the buffer of the connection. Raises TimeoutError."""
        with fail_after(STALL_SECONDS):
            await send({"type": "http.response.body", "body": data, "more_body": True})

    def _give(self, but: int = 0) -> None:
        """Hold no memory any more, but for the last windows."""
        while len(self._held) > but:
            self._sending.give(self._held.pop(0))
