"""The kinds of stores, and the stores of this process by their URLs."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from threading import RLock

from reshard.base.errors import ReshardError
from reshard.stores.address import Address
from reshard.stores.hub import HubStore, url_of_page
from reshard.stores.object_stores import OBJECT_STORES, ObjectStore
from reshard.stores.orbax import ArrayFolder, OrbaxStore, arrays_in
from reshard.stores.s3 import S3
from reshard.stores.store import Store
from reshard.stores.tar_store import ArchiveStore
from reshard.stores.web import WebStore

STORES: tuple[type[Store], ...] = (
    *(S3, *OBJECT_STORES, HubStore, WebStore),
    *(ArchiveStore, OrbaxStore),
)
"""All kinds of stores."""

WRITABLE = [kind.kind.schemes[0] for kind in STORES if issubclass(kind, ObjectStore)]
"""A scheme of each kind that can be written."""

SCHEMES = {scheme: each for each in STORES for scheme in each.kind.schemes}
"""The kind of store behind each scheme."""

_URL = re.compile(rf"({'|'.join(SCHEMES)})://")
_FOREIGN = re.compile(rf"[a-z][\w+.-]*://|({'|'.join(SCHEMES)})(:/|//)", re.IGNORECASE)

_stores: dict[str, Store] = {}
_lock = RLock()


def is_url(text: str) -> bool:
    """Whether a text begins like the URL of a store."""
    return _URL.match(text) is not None


def store_class(url: str) -> type[Store]:
    """The kind of store that a URL names."""
    return SCHEMES[url.partition("://")[0]]


def parsed(url: str) -> Address:
    """The parts of a store's URL, or of a model's page on the Hub. Raises ReshardError if it names nothing."""
    url = url_of_page(url) or url
    return store_class(url).address(url)


def check_local(text: str) -> None:
    """Raise ReshardError for a URL where a path on this machine is needed, and for one that no store has."""
    if _FOREIGN.match(text):
        known, stores = is_url(text), ", ".join(f"{scheme}://" for scheme in SCHEMES)
        raise ReshardError(
            "path-not-local" if known else "url-names-nothing",
            "a path on this machine is needed here" if known else "reshard cannot read this URL",
            file=text,
            expected="a path" if known else f"a path, or one of {stores} and a name",
            remedy="correct the URL, or download the files and pass the folder",
        )


def connect(typed: str) -> str:
    """Have everything below a typed URL listed when it is next asked for. Returns the URL as it may be shown."""
    place = parsed(typed)
    made = SCHEMES[place.scheme].holding(place)
    with _lock:
        before = _stores.get(made.url)
        if before is None or type(before) is not type(made):
            before = _stores[made.url] = made
        before.begin(place)
    return place.shown


def container(folder: Path) -> ArrayFolder:
    """The arrays in a folder of Orbax, as it is now; what was decoded of them before is forgotten."""
    made = OrbaxStore(arrays_in(folder))
    with _lock:
        before = _stores.get(made.url)
        if isinstance(before, OrbaxStore):
            before.forget()
        _stores[made.url] = made
    return made.container


def at(url: str) -> Store:
    """The store that contains a path."""
    with _lock:
        found = _known(url)
        if found is None:
            place = parsed(url)
            found = SCHEMES[place.scheme].holding(place)
            _stores[found.url] = found
        return found


def refresh(urls: Iterable[str]) -> None:
    """Make the stores of some paths report their present state from now on."""
    for each in {id(found): found for found in map(at, urls)}.values():
        each.refresh()


def forget() -> None:
    """Forget all stores, and what is known of them."""
    with _lock:
        _stores.clear()


def _known(url: str) -> Store | None:
    while url:
        if found := _stores.get(url):
            return found
        url = url.rpartition("/")[0]
    return None
