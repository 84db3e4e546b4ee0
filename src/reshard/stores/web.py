"""Plain web servers, which have no listings: files are found by requesting them.

A server that shows folders as pages of links, as nginx and `python -m http.server` do, is read through these pages.
Otherwise a folder has the files that its `reshard.json` or its index of weights names, and those that checkpoints
usually have. The beginning of each is requested, which shows its size, its state, and whether the server supports
ranges. A HEAD would not do: the signature of a URL that was made for a GET is not valid for it.
"""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Coroutine, Iterable, Mapping
from functools import cached_property, partial
from pathlib import PurePosixPath
from typing import Any, TypeVar
from urllib.parse import quote, unquote, urljoin, urlsplit

from reshard.base import schemes
from reshard.base.errors import ReshardError
from reshard.base.plain_json import JSON_MOST, json_of
from reshard.stores.address import Address, StoreKind, incomplete_url, normalized_url
from reshard.stores.checkpoint_names import declared
from reshard.stores.file_info import FileInfo
from reshard.stores.range_responses import DOWNLOAD_INSTEAD, TIMEOUT_SECONDS, RangeRequest, ResponseBody
from reshard.stores.remote_file import MAX_HEADS_BYTES, MIN_READ_BYTES, RemoteFile, RemoteStore, pool
from reshard.stores.store_errors import DENIED_STATUSES, TRANSIENT_STATUSES, retry, status_of

A = TypeVar("A")
T = TypeVar("T")

READ_FROM_BEGINNING = (".json", ".jinja", ".txt", ".safetensors")
"""Files that are read from their beginning once found: the first request for them fetches it too."""

MAX_DEPTH = 3
"""Levels of nested folders whose links are followed."""

MAX_FILES = 20_000
"""Most files below a URL: each takes a request."""

MAX_PAGE_BYTES = 8 << 20
"""Most bytes of a page of links."""

MAX_PAGES_BYTES = 64 << 20
"""Most bytes of all pages below a URL."""

PAGES_AT_ONCE = 16
"""Pages that are asked for before the limits are checked again."""

_LINK = re.compile(r"""<a\s[^<>]*?\bhref\s*=\s*(?:"([^"<>]*)"|'([^'<>]*)'|([^\s"'<>]+))""", re.IGNORECASE)


class WebStore(RemoteStore):
    """A web server. The user and query of a typed URL are sent only with requests at or below that URL."""

    kind = StoreKind(
        schemes.WEB,
        "aiohttp",
        "check that the URL works in a browser, and has not expired",
        "HOST/FOLDER",
    )

    @classmethod
    def address(cls, url: str) -> Address:
        """The user and the query may give access, and are not shown."""
        scheme = url.partition("://")[0]
        try:
            split = urlsplit(url)
            _ = split.port  # raises ValueError, as for a password that contains a slash
        except ValueError:  # its text quotes what may be a password
            raise incomplete_url(scheme, cls.kind, "an invalid host or port") from None
        userinfo, _, host = split.netloc.rpartition("@")
        if ":" in unquote(userinfo.partition(":")[0]):
            raise incomplete_url(scheme, cls.kind, "a user's name with a colon")
        return Address(
            scheme, normalized_url(scheme, host + unquote(split.path), cls.kind), userinfo, split.query
        )

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._typed: dict[str, Address] = {}
        self._seen: set[str] = set()
        """The files that existed before the last `refresh`."""

    def begin(self, typed: Address) -> None:
        self._typed[typed.url] = typed
        self._seen.clear()
        super().begin(typed)

    def refresh(self) -> None:
        listings = filter(None, self._listed.values())
        self._seen |= {url for each in listings for url, entry in each.entries.items() if not entry.is_folder}
        super().refresh()

    @cached_property
    def fs(self) -> Any:
        """The file system of fsspec."""
        with self.read_errors(self.url):
            import aiohttp
            from fsspec.implementations.http import HTTPFileSystem

            limits = aiohttp.ClientTimeout(
                total=None, sock_connect=TIMEOUT_SECONDS, sock_read=TIMEOUT_SECONDS
            )
            return HTTPFileSystem(
                encoded=True,
                use_listings_cache=False,
                skip_instance_cache=True,
                client_kwargs={"timeout": limits, "trust_env": True, "auto_decompress": False},
            )

    def _request_url(self, url: str) -> str:
        """The complete URL of a request, with the parts that are never shown."""
        root = next((each for each in self._typed if url == each or url.startswith(each + "/")), None)
        scheme, _, rest = url.partition("://")
        typed = self._typed[root] if root else None
        user = f"{typed.userinfo}@" if typed and typed.userinfo else ""
        query = f"?{typed.query}" if typed and typed.query else ""
        host, _, path = rest.partition("/")
        return f"{scheme}://{user}{host}/{quote(path, safe='/~!$&()*+,;=:@')}{query}"

    def fetch(self, wanted: RangeRequest) -> bytes:
        return self._run(self._request, wanted)[1]

    async def _request(self, wanted: RangeRequest) -> tuple[FileInfo, bytes]:
        """The file as an answer describes it, and the bytes wanted; fewer if it is not known and ends before."""
        async with await self._response(
            wanted.url, Range=f"bytes={wanted.begin}-{wanted.end - 1}"
        ) as response:
            entry = _entry(response.headers)
            if response.status == 416:  # nothing from this byte on
                if wanted.known or response.headers.get("Content-Range", "bytes */0") != "bytes */0":
                    raise wanted.changed(None)
                return entry, b""
            if response.status != 206 and response.content_type == "text/html":
                raise FileNotFoundError(wanted.url)  # a folder, or a page in place of a missing file
            if response.status != 206:
                raise ReshardError(
                    "server-without-ranges",
                    "the server sends complete files only",
                    file=wanted.url,
                    expected="an answer to a request for a range of bytes (206)",
                    found=f"HTTP {response.status}",
                    remedy="download the folder, and pass the local path",
                )
            wanted.check_coding(response.headers.get("Content-Encoding"))
            entry = entry._replace(size=wanted.size_in(response.headers.get("Content-Range")))
            wanted.check_state(entry)
            body = ResponseBody(wanted, entry.size)
            async for part in response.content.iter_any():
                body.add(part)
            return entry, body.content()

    async def _response(self, url: str, **headers: str) -> Any:
        """The answer to a request, its body not yet read. Raises FileNotFoundError, and aiohttp's errors."""
        import asyncio  # only here, as most runs need no web server

        session = await self.fs.set_session()
        # If a server compresses its answers, their offsets are not those of the file.
        answer = session.get(
            self.fs.encode_url(self._request_url(url)), headers={"Accept-Encoding": "identity", **headers}
        )
        try:
            response = await asyncio.wait_for(answer, TIMEOUT_SECONDS)
        except asyncio.TimeoutError:
            raise TimeoutError(f"no answer for {TIMEOUT_SECONDS} seconds") from None
        if response.status == 404:
            response.close()
            raise FileNotFoundError(url)
        if response.status != 416:
            response.raise_for_status()
        return response

    def _run(self, function: Callable[[A], Coroutine[Any, Any, T]], argument: A) -> T:
        from fsspec.asyn import sync

        result: T = sync(self.fs.loop, function, argument)
        return result

    def look_up(self, url: str, most: int = 1) -> FileInfo | None:
        """The entry at a URL. Its first `most` bytes are fetched too, and kept if there is more than one."""
        with self.read_errors(url):
            try:
                entry, content = retry(lambda: self._run(self._request, RangeRequest(url, 0, most)))
            except FileNotFoundError:
                return None
            except Exception as error:
                if status_of(error) in DENIED_STATUSES and not self._is_typed(url):
                    return None  # a signature or a password is valid only for what was typed
                raise
            if most > 1:
                self.heads[url] = [(0, content)]
            return entry

    def _is_typed(self, url: str) -> bool:
        return any(url == each or url.startswith(each + "/") for each in self._typed)

    def list_files(self, root: str, *, deep: bool) -> dict[str, FileInfo]:
        if self._seen:
            known = sorted(url for url in self._seen if url == root or url.startswith(root + "/"))
            looked = zip(known, pool().map(self.look_up, known), strict=True)
            return {url: entry for url, entry in looked if entry}
        present = self._existing_files([root]) if PurePosixPath(root.removeprefix(self.url)).suffix else {}
        folder, _, typed = root.rpartition("/")
        if typed in declared().naming:
            siblings = {*self._names_in(root), *declared().usual}
            self._outside.update(self._existing_files(f"{folder}/{name}" for name in siblings))
        if present:
            return present
        links = self._links(root, MAX_DEPTH if deep else 1)
        if links:
            return self._existing_files(links)
        present = self._existing_files(f"{root}/{name}" for name in declared().usual)
        more = {f"{root}/{name}" for url in present for name in self._names_in(url)}
        return {**present, **self._existing_files(more - present.keys())}

    def _names_in(self, url: str) -> set[str]:
        """The sibling files that a file names: those of a record, or the shards of an index."""
        names_in = declared().naming.get(url.rpartition("/")[2])
        entry = self.look_up(url) if names_in else None
        if names_in is None or entry is None or entry.size > JSON_MOST:
            return set()  # whoever reads it reports what is wrong, here and below
        content = RemoteFile(url, entry, self).read(0, entry.size)
        try:
            return {str(each) for each in names_in(json_of(content)) if _is_plain(str(each))}
        except (AttributeError, LookupError, TypeError, ValueError):
            return set()

    def _links(self, root: str, depth: int) -> set[str]:
        """The files that the pages of a folder link to; empty if it has none."""
        pages, files, seen, received = [root], set[str](), set[str](), 0
        for _ in range(depth):
            seen.update(pages)
            for some in (pages[at : at + PAGES_AT_ONCE] for at in range(0, len(pages), PAGES_AT_ONCE)):
                for links, nbytes in pool().map(self._page, some):
                    files |= links
                    received += nbytes
                _check_count(root, len(files) + len(seen))
                if received > MAX_PAGES_BYTES:
                    raise _too_long(root, f"pages of more than {MAX_PAGES_BYTES:,} bytes in total")
            folders = {each for each in files if each.endswith("/")}
            files -= folders
            pages = sorted({each.rstrip("/") for each in folders} - seen)
        return files

    def _page(self, folder: str) -> tuple[set[str], int]:
        """The URLs below a folder that its page links to, those of folders with a final slash, and the page's bytes."""
        with self.read_errors(folder):
            try:
                text = retry(lambda: self._run(self._text, folder + "/"))
            except FileNotFoundError:
                return set(), 0
            except Exception as error:
                status = status_of(error)
                if status is None or status in TRANSIENT_STATUSES:
                    raise
                return set(), 0  # the folder shows no links
        links = (html.unescape(link[1] or link[2] or link[3] or "") for link in _LINK.finditer(text))
        return {f"{folder}/{below}" for link in links if (below := _path_below(folder, link))}, len(text)

    async def _text(self, url: str) -> str:
        """The text of a page; empty if there is something else at its URL."""
        async with await self._response(url) as response:
            if "html" not in response.content_type:
                return ""
            wanted = RangeRequest(url, 0, MAX_PAGE_BYTES)
            wanted.check_coding(response.headers.get("Content-Encoding"))
            body = ResponseBody(wanted, MAX_PAGE_BYTES)
            async for part in response.content.iter_any():
                if len(body) + len(part) > MAX_PAGE_BYTES:
                    raise _too_long(url, f"a page of more than {MAX_PAGE_BYTES:,} bytes")
                body.add(part)
            return body.text()

    def _existing_files(self, urls: Iterable[str]) -> dict[str, FileInfo]:
        """The entries that exist. Raises ReshardError if the server refuses all of them."""
        candidates = list(urls)
        _check_count(self.url, len(candidates))
        most = min(MIN_READ_BYTES, MAX_HEADS_BYTES // max(1, len(candidates)))
        present, refused = dict[str, FileInfo](), list[ReshardError]()
        for url, entry in zip(
            candidates, pool().map(partial(self._entry_or_refusal, most=most), candidates), strict=True
        ):
            if isinstance(entry, FileInfo):
                present[url] = entry
            elif entry is not None:
                refused.append(entry)
        if refused and not present:
            raise refused[0]
        return present

    def _entry_or_refusal(self, url: str, most: int) -> FileInfo | ReshardError | None:
        try:
            return self.look_up(url, most if url.endswith(READ_FROM_BEGINNING) else 1)
        except ReshardError as error:
            if status_of(error) in DENIED_STATUSES:  # as stores answer that must not show what exists
                return error
            raise


def _check_count(url: str, count: int) -> None:
    if count > MAX_FILES:
        raise _too_long(url, f"more than {MAX_FILES:,} files")


def _too_long(url: str, found: str) -> ReshardError:
    return ReshardError(
        "listing-too-long",
        "the server lists too many files",
        file=url,
        expected=f"pages of at most {MAX_PAGE_BYTES:,} bytes, {MAX_PAGES_BYTES:,} in total, "
        f"with at most {MAX_FILES:,} files below the URL",
        found=found,
        remedy=f"pass the URL of the checkpoint itself, not of a folder above it; or {DOWNLOAD_INSTEAD}",
    )


def _path_below(folder: str, link: str) -> str:
    """The path below a folder that a link on its page leads to; empty if it leads elsewhere, or nowhere."""
    host, _, path = folder.partition("://")[2].partition("/")
    top = f"/{path}/" if path else "/"
    try:
        target = urlsplit(urljoin(f"http://{host}/{quote(path)}/", link))
    except ValueError:  # brackets that enclose no address
        return ""
    whole = unquote(target.path)
    below = whole.removeprefix(top)
    is_below = target.netloc == host and whole.startswith(top) and _is_plain(below.removesuffix("/"))
    return below if is_below else ""


def _is_plain(path: str) -> bool:
    """Whether a relative path can be one of a file: no control characters, and no way up."""
    return path.isprintable() and not {"", ".", ".."} & set(path.split("/"))


def _entry(headers: Mapping[str, str]) -> FileInfo:
    """A file as the headers of an answer describe it, without its size."""
    return FileInfo(
        0, _time(headers.get("Last-Modified", "")), headers.get("ETag", "").removeprefix("W/").strip('"')
    )


def _time(text: str) -> int:
    """A time in nanoseconds, 0 if the server's clock or words make no sense."""
    from email.utils import parsedate_to_datetime

    try:
        return int(parsedate_to_datetime(text).timestamp() * 10**9)
    except (IndexError, OverflowError, TypeError, ValueError):
        return 0
