"""Errors of the packages that open stores, translated to those of reshard."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from reshard.base.errors import ReshardError
from reshard.base.foreign_text import without_secrets
from reshard.base.missing_packages import install_command
from reshard.stores.address import StoreKind

MAX_TRIES = 5
FIRST_WAIT_SECONDS = 0.5
"""Seconds before the second try, doubled before each further one, plus a random extra of up to as much again."""

DENIED_STATUSES = {401, 403}
TRANSIENT_STATUSES = {408, 425, 429, 500, 502, 503, 504}
"""HTTP statuses after which another try may succeed."""


def status_of(error: BaseException) -> int | None:
    """The HTTP status of an error, or of the package's error that caused it."""
    seen: BaseException | None = error
    while seen is not None:
        response = getattr(seen, "response", None)
        if isinstance(response, dict):
            status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        else:
            status = getattr(response, "status_code", None)
        for value in (status, *(getattr(seen, name, None) for name in ("status", "status_code", "code"))):
            if isinstance(value, int) and 100 <= value < 600:
                return value
        if _of_package(seen):
            break  # its causes are about parts of a response
        seen = seen.__cause__
    return None


def is_denied(error: Exception) -> bool:
    """Whether the store does not know the user, or does not let it do this."""
    return (
        isinstance(error, PermissionError)
        or status_of(error) in DENIED_STATUSES
        or "Credential" in type(error).__name__
    )


def is_transient(error: Exception) -> bool:
    """Whether a repeated request may succeed."""
    if isinstance(error, PermissionError | FileNotFoundError | ImportError | ReshardError):
        return False
    if "Credential" in type(error).__name__ or type(error).__name__ == "EndpointConnectionError":
        return False  # botocore has retried already
    if (status := status_of(error)) is not None:
        return status in TRANSIENT_STATUSES
    return isinstance(error, OSError | TimeoutError | EOFError) or _of_package(error)


T = TypeVar("T")


def retry(ask: Callable[[], T]) -> T:
    """What `ask` returns, retried after a pause if an error may pass. Raises the last error."""
    pauses = [FIRST_WAIT_SECONDS * 2**attempt for attempt in range(MAX_TRIES - 1)]
    while True:
        try:
            return ask()
        except Exception as error:
            if not pauses or not is_transient(error):
                raise
        time.sleep(pauses.pop(0) * (1 + random.random()))


def _of_package(error: BaseException) -> bool:
    """Whether a package defines this exception: in a request, it is about the store, and mostly about the network."""
    package = type(error).__module__.partition(".")[0]
    return package != "reshard" and package not in sys.stdlib_module_names


@contextmanager
def read_errors(url: str, kind: StoreKind) -> Iterator[None]:
    """Raise FileNotFoundError for a missing file, and ReshardError if a store fails to answer in another way."""
    try:
        yield
    except ReshardError:
        raise
    except FileNotFoundError as error:
        if error.filename:
            raise
        raise FileNotFoundError(2, "No such file or directory", url) from error
    except ImportError as error:
        raise missing_package(url, kind, error) from error
    except Exception as error:
        status = status_of(error)
        if status == 404:
            raise FileNotFoundError(2, "No such file or directory", url) from error
        answer = error_text(error)
        if is_denied(error):
            raise ReshardError(
                "store-read-denied",
                "the store does not let this user read here",
                file=url,
                found=answer,
                remedy=kind.sign_in,
            ) from error
        if not (isinstance(error, OSError) or status or _of_package(error)):
            raise
        raise ReshardError(
            "store-answer-wrong",
            "the request to the store failed",
            file=url,
            found=answer,
            remedy="check the address and the network, then run the same command again",
        ) from error


MAX_ERROR_CHARACTERS = 300
"""Characters of an error that are quoted: some contain the complete response."""


def error_text(error: Exception) -> str:
    """The type and text of an error."""
    text = without_secrets(
        " ".join(str(error).split())
    )  # before it is cut, since half a URL may not look like one
    return f"{type(error).__name__}: {text}"[:MAX_ERROR_CHARACTERS]


def missing_package(url: str, kind: StoreKind, error: ImportError) -> ReshardError:
    """The error for a package that is not installed."""
    return ReshardError(
        "store-package-not-installed",
        f"the package that opens {url.partition('://')[0]}:// is not installed",
        file=url,
        expected=kind.package,
        found=str(error),
        remedy=install_command(kind.package),
    )
