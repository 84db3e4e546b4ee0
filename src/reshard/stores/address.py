"""What users type to name something in a store, and which part of it may be shown.

A URL can contain a password or a signature that gives access to the store. These are passed to the package that opens
it and to nothing else: paths, messages and records contain the URL without them.
"""

from __future__ import annotations

import os
import re
from typing import NamedTuple
from urllib.parse import SplitResult, unquote, urlsplit

from reshard.errors import ReshardError

PROTOCOLS = {
    "s3": "s3",
    "s3a": "s3",
    "gs": "gs",
    "gcs": "gs",
    "oss": "oss",
    "az": "az",
    "abfs": "az",
    "abfss": "az",
    "hf": "hf",
    "http": "http",
    "https": "http",
}
"""The kind of store behind each scheme."""

_URL = re.compile(rf"({'|'.join(PROTOCOLS)})://")


def is_url(text: str) -> bool:
    """Whether a text begins like the URL of a store."""
    return _URL.match(text) is not None


class Address(NamedTuple):
    """A parsed URL: the part that may be shown, and the rest."""

    scheme: str
    shown: str
    userinfo: str = ""
    query: str = ""

    @property
    def kind(self) -> str:
        """The kind of store, as in `PROTOCOLS`."""
        return PROTOCOLS[self.scheme]


def parsed(url: str) -> Address:
    """The parts of a store's URL.

    Only web servers have queries, and users before the host: elsewhere `?`, `#` and `@` may be part of names.
    Raises ReshardError if the URL names nothing.
    """
    scheme, _, rest = url.partition("://")
    query, userinfo = "", ""
    try:
        split = urlsplit(url if PROTOCOLS[scheme] == "http" else "")
    except ValueError as error:
        raise _nothing(scheme, str(error)) from None
    if model := _of_the_hub(split):
        scheme, rest = "hf", model
    if PROTOCOLS[scheme] == "http":
        userinfo, _, host = split.netloc.rpartition("@")
        query = split.query
        rest = host + unquote(split.path)
    parts = [part for part in rest.split("/") if part not in ("", ".")]
    if not parts or "\0" in rest:
        raise _nothing(scheme, "nothing behind the scheme" if not parts else "a null character")
    return Address(scheme, f"{scheme}://{'/'.join(parts)}", userinfo, query)


def _of_the_hub(split: SplitResult) -> str | None:
    """`Org/Model`, or `Org/Model@revision`, if the URL is that of a model's page."""
    hosts = {"huggingface.co", "hf.co", urlsplit(os.environ.get("HF_ENDPOINT", "")).netloc}
    if not split.netloc or split.netloc not in hosts:
        return None
    page = re.fullmatch(r"/([^/]+/[^/]+?)(?:/tree/([^/]+))?/?", split.path)
    if page is None:
        return None
    return page[1] + (f"@{page[2]}" if page[2] else "")


_NAMED = {"http": "HOST/FOLDER", "hf": "ORG/MODEL"}
"""What URLs of a kind of store name; those of the others name a bucket."""


def _nothing(scheme: str, found: str) -> ReshardError:
    """The error for a URL that cannot be used; it does not quote the URL, which may contain a password."""
    return ReshardError(
        "url-incomplete",
        f"a {scheme}:// URL is incomplete",
        expected=f"{scheme}://{_NAMED.get(PROTOCOLS[scheme], 'BUCKET/FOLDER')}",
        found=found,
        remedy="correct the URL",
    )


def without_secrets(text: str) -> str:
    """The text, which may quote URLs, without their passwords and signatures."""
    text = re.sub(r"([a-z][a-z0-9+.-]*://)[^\s/@'\"]+@", r"\1", text)
    return re.sub(r"([a-z][a-z0-9+.-]*://[^\s?'\"]+)\?[^\s'\"<>)]*", r"\1", text)
