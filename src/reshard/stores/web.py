"""Plain web servers, which have no listings: files are found by requesting them.

A server that shows folders as pages of links, as nginx and `python -m http.server` do, is read through these pages.
Otherwise a folder has the files that its `reshard.json` or its index of weights names, and those that checkpoints
usually have. The beginning of each is requested, which shows its size, its state, and whether the server supports
ranges. A HEAD would not do: the signature of a URL that was made for a GET is not valid for it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from email.utils import parsedate_to_datetime
from functools import cached_property, partial
from pathlib import PurePosixPath
from typing import Any, NamedTuple
from urllib.parse import quote, unquote, urlsplit

from reshard.errors import ReshardError
from reshard.stores.address import Address
from reshard.stores.errors import DENIED, retried, status_of, translated
from reshard.stores.remote import AHEAD, HEADS, RemoteFile, pool
from reshard.stores.store import Entry, Store

INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
KNOWN = (
    "reshard.json",
    "config.json",
    *INDEXES,
    "model.safetensors",
    "pytorch_model.bin",
    "adapter_config.json",
    "adapter_model.safetensors",
    "adapter_model.bin",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "preprocessor_config.json",
    "processor_config.json",
    ".metadata",
    "metadata.json",
    "common.pt",
    "latest_checkpointed_iteration.txt",
)
"""The files requested in a folder that shows no links and has none of the files that name others."""

BEGUN = (".json", ".jinja", ".txt", ".safetensors")
"""Files that are read from their beginning once found: the first request for them fetches it too."""

DEPTH = 3
"""Levels of nested folders whose links are followed."""

PATIENCE = 60
"""Seconds without data after which a request fails."""


class Answer(NamedTuple):
    """The bytes received, and the headers."""

    content: bytes
    headers: Mapping[str, str]


class WebStore(Store):
    """A web server. The user and query of a typed URL are sent only with requests at or below that URL."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._typed: dict[str, Address] = {}
        self._seen: set[str] = set()
        """The files that existed before the last `refresh`."""

    def begin(self, typed: Address) -> None:
        self._typed[typed.shown] = typed
        self._seen.clear()
        super().begin(typed)

    def refresh(self) -> None:
        listings = filter(None, self._listed.values())
        self._seen |= {url for each in listings for url, entry in each.entries.items() if not entry.is_folder}
        super().refresh()

    @cached_property
    def fs(self) -> Any:
        """The file system of fsspec."""
        with translated(self.url):
            import aiohttp
            from fsspec.implementations.http import HTTPFileSystem

            limits = aiohttp.ClientTimeout(total=None, sock_connect=PATIENCE, sock_read=PATIENCE)
            return HTTPFileSystem(
                encoded=True,
                use_listings_cache=False,
                skip_instance_cache=True,
                client_kwargs={"timeout": limits, "trust_env": True},
            )

    def _whole(self, url: str) -> str:
        """The complete URL of a request, with the parts that are never shown."""
        root = next((each for each in self._typed if url == each or url.startswith(each + "/")), None)
        scheme, _, rest = url.partition("://")
        typed = self._typed[root] if root else None
        user = f"{typed.userinfo}@" if typed and typed.userinfo else ""
        query = f"?{typed.query}" if typed and typed.query else ""
        host, _, path = rest.partition("/")
        return f"{scheme}://{user}{host}/{quote(path, safe='/~!$&()*+,;=:@')}{query}"

    def fetch(self, url: str, begin: int, end: int) -> bytes:
        return self._ask(url, begin, end).content

    def _ask(self, url: str, begin: int, end: int) -> Answer:
        from fsspec.asyn import sync

        answer: Answer = sync(self.fs.loop, self._asked, url, begin, end)
        return answer

    async def _asked(self, url: str, begin: int, end: int) -> Answer:
        session = await self.fs.set_session()
        whole = self.fs.encode_url(self._whole(url))
        # If a server compresses its answers, their offsets are not those of the file.
        headers = {"Range": f"bytes={begin}-{end - 1}", "Accept-Encoding": "identity"}
        async with session.get(whole, headers=headers) as response:
            if response.status == 404:
                raise FileNotFoundError(url)
            if response.status == 416:  # nothing from this byte on: an empty file
                return Answer(b"", dict(response.headers))
            response.raise_for_status()
            if response.status != 206 and response.content_type == "text/html":
                raise FileNotFoundError(url)  # a folder, or a page in place of a missing file
            if response.status != 206:
                raise ReshardError(
                    "server-without-ranges",
                    "the server sends complete files only",
                    file=url,
                    expected="an answer to a request for a range of bytes (206)",
                    found=f"HTTP {response.status}",
                    remedy="download the folder, and pass the local path",
                )
            return Answer(await response.read(), dict(response.headers))

    def _look(self, url: str, most: int = 1) -> Entry | None:
        """The entry at a URL. Its first `most` bytes are fetched too, and kept if there is more than one."""
        with translated(url):
            try:
                answer = retried(lambda: self._ask(url, 0, most))
                if most > 1:
                    self.heads[url] = [(0, answer.content)]
                return _entry(answer.headers)
            except FileNotFoundError:
                return None
            except Exception as error:
                if status_of(error) in DENIED and not self._is_typed(url):
                    return None  # a signature or a password is valid only for what was typed
                raise

    def _is_typed(self, url: str) -> bool:
        return any(url == each or url.startswith(each + "/") for each in self._typed)

    def _find(self, root: str, *, deep: bool) -> dict[str, Entry]:
        if self._seen:
            known = sorted(url for url in self._seen if url == root or url.startswith(root + "/"))
            looked = zip(known, pool().map(self._look, known), strict=True)
            return {url: entry for url, entry in looked if entry}
        found = self._present([root]) if PurePosixPath(root.removeprefix(self.url)).suffix else {}
        if root.endswith(INDEXES):
            folder = root.rpartition("/")[0]
            self._outside.update(self._present(f"{folder}/{name}" for name in {*self._named(root), *KNOWN}))
        if found:
            return found
        links = self._links(root, DEPTH if deep else 1)
        if links:
            return self._present(links)
        found = self._present(f"{root}/{name}" for name in KNOWN)
        more = {f"{root}/{name}" for url in found for name in self._named(url)}
        return {**found, **self._present(more - found.keys())}

    def _named(self, url: str) -> set[str]:
        """The sibling files that a file names: those of a record, or the shards of an index."""
        name = url.rpartition("/")[2]
        if name not in (*INDEXES, "reshard.json"):
            return set()
        entry = self._look(url)
        if entry is None:
            return set()
        with translated(url):
            try:
                content = json.loads(RemoteFile(url, entry).read(0, entry.size))
                files = content["files"] if name == "reshard.json" else content["weight_map"].values()
                return {str(each) for each in files}
            except (AttributeError, LookupError, TypeError, ValueError):
                return set()  # whoever reads it reports what is wrong

    def _links(self, root: str, depth: int) -> set[str]:
        """The files that the pages of a folder link to; empty if it has none."""
        pages, files, seen = [root], set(), set()
        for _ in range(depth):
            for page in pages:
                seen.add(page)
                try:
                    links = self.fs.ls(self._whole(page + "/"), detail=False)
                except Exception:
                    continue  # no page: the folder shows no links
                shown = {f"{self.url}/{unquote(urlsplit(each).path).lstrip('/')}" for each in links}
                files |= {each for each in shown if each.startswith(page + "/")}
            pages = sorted(
                each.rstrip("/") for each in files if each.endswith("/") and each.rstrip("/") not in seen
            )
            files = {each for each in files if not each.endswith("/")}
        return files

    def _present(self, urls: Iterable[str]) -> dict[str, Entry]:
        """The entries that exist. Raises ReshardError if the server refuses all of them."""
        asked = list(urls)
        most = min(AHEAD, HEADS // max(1, len(asked)))
        found, refused = dict[str, Entry](), list[ReshardError]()
        for url, entry in zip(asked, pool().map(partial(self._glance, most=most), asked), strict=True):
            if isinstance(entry, Entry):
                found[url] = entry
            elif entry is not None:
                refused.append(entry)
        if refused and not found:
            raise refused[0]
        return found

    def _glance(self, url: str, most: int) -> Entry | ReshardError | None:
        try:
            return self._look(url, most if url.endswith(BEGUN) else 1)
        except ReshardError as error:
            if status_of(error) in DENIED:  # as stores answer that must not show what exists
                return error
            raise


def _entry(headers: Mapping[str, str]) -> Entry:
    """The entry of a file, from the answer to a request for its first byte."""
    told = {key.lower(): value for key, value in headers.items()}
    size = told.get("content-range", "").rpartition("/")[2]
    if not size.isdecimal():
        size = "0"
    modified = 0
    if told.get("last-modified"):
        modified = int(parsedate_to_datetime(told["last-modified"]).timestamp() * 10**9)
    return Entry(int(size), modified, told.get("etag", "").removeprefix("W/").strip('"'))
