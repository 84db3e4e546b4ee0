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

_PASSWORD = r"(?!arn:)[^/@:]*:.*@"
_USERS = {"hf": re.compile(r"[^@]*:.*@"), "az": re.compile(_PASSWORD)} | dict.fromkeys(
    ("s3", "gs", "oss"), re.compile(rf"{_PASSWORD}|[^/]*@")
)
"""A user with a password, by kind of store. Azure's containers and the Hub's revisions have an @ too."""

_URL = re.compile(rf"({'|'.join(PROTOCOLS)})://")
_FOREIGN = re.compile(rf"[a-z][\w+.-]*://|({'|'.join(PROTOCOLS)})(:/|//)", re.IGNORECASE)


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
        _ = split.port  # raises ValueError, as for a password that contains a slash
    except ValueError as error:
        raise _nothing(scheme, str(error)) from None
    if model := _of_the_hub(split):
        scheme, rest = "hf", model
    if PROTOCOLS[scheme] == "http":
        userinfo, _, host = split.netloc.rpartition("@")
        query = split.query
        rest = host + unquote(split.path)
    elif user := _USERS[PROTOCOLS[scheme]].match(rest):
        raise _with_password(scheme, user[0])
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


def _with_password(scheme: str, user: str) -> ReshardError:
    from reshard.stores.errors import SIGN_IN

    return ReshardError(
        "url-with-credentials",
        "the URL contains credentials",
        rule="the packages that open these stores take no credentials from URLs, which end up in logs and histories",
        expected=f"{scheme}://{_NAMED.get(PROTOCOLS[scheme], 'BUCKET/FOLDER')}",
        remedy=f"leave them out of the URL, and replace them if others can see this; {SIGN_IN[PROTOCOLS[scheme]]}",
    )


def check_local(text: str) -> None:
    """Raise ReshardError for a URL where a path on this machine is needed, and for one that no store has."""
    if _FOREIGN.match(text):
        known, stores = is_url(text), ", ".join(f"{scheme}://" for scheme in PROTOCOLS)
        raise ReshardError(
            "path-not-local" if known else "url-names-nothing",
            "a path on this machine is needed here" if known else "reshard cannot read this URL",
            file=text,
            expected="a path" if known else f"a path, or one of {stores} and a name",
            remedy="correct the URL, or download the files and pass the folder",
        )


def _nothing(scheme: str, found: str) -> ReshardError:
    """The error for a URL that cannot be used."""
    return ReshardError(
        "url-incomplete",
        f"a {scheme}:// URL is incomplete",
        expected=f"{scheme}://{_NAMED.get(PROTOCOLS[scheme], 'BUCKET/FOLDER')}",
        found=found,
        remedy="correct the URL",
    )
