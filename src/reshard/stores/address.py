"""URLs of stores: what kind of store they name, and which part of them may be shown.

A URL can contain a password or a signature that gives access to the store. These are passed to the package that opens
it and to nothing else: paths, messages and records contain the URL without them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from reshard.base.errors import ReshardError


@dataclass(frozen=True)
class StoreKind:
    """What all stores of a kind have in common.

    `schemes` are those of their URLs, `package` opens them, `sign_in` says where it finds its credentials, and
    `example` is what a URL has behind the scheme. `file_system` is the package's class (MODULE.CLASS) if fsspec does
    not know that it opens the scheme.
    """

    schemes: tuple[str, ...]
    package: str
    sign_in: str
    example: str = "BUCKET/FOLDER"
    file_system: str = ""


class Address(NamedTuple):
    """A parsed URL: the part that may be shown, and the rest."""

    scheme: str
    url: str
    userinfo: str = ""
    query: str = ""


def normalized_url(scheme: str, rest: str, kind: StoreKind) -> str:
    """The URL that names a file or folder, in one spelling. Raises ReshardError if it names nothing."""
    parts = [part for part in rest.split("/") if part not in ("", ".")]
    if not parts or "\0" in rest:
        raise incomplete_url(scheme, kind, "nothing behind the scheme" if not parts else "a null character")
    return f"{scheme}://{'/'.join(parts)}"


def incomplete_url(scheme: str, kind: StoreKind, found: str) -> ReshardError:
    """The error for a URL that cannot be used."""
    return ReshardError(
        "url-incomplete",
        f"a {scheme}:// URL is incomplete",
        expected=f"{scheme}://{kind.example}",
        found=found,
        remedy="correct the URL",
    )


def url_with_password(scheme: str, kind: StoreKind) -> ReshardError:
    """The error for a URL that contains a user with a password."""
    return ReshardError(
        "url-with-credentials",
        "the URL contains credentials",
        rule="the packages that open these stores take no credentials from URLs, which end up in logs and histories",
        expected=f"{scheme}://{kind.example}",
        remedy=f"leave them out of the URL, and replace them if others can see this; {kind.sign_in}",
    )
