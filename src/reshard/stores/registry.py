"""The kinds of stores, and the stores of this process by their URLs."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from threading import RLock

from reshard.base.errors import ReshardError
from reshard.stores.address import Address
from reshard.stores.hub import HubStore, url_of_page
from reshard.stores.local_store import LocalStore
from reshard.stores.object_stores import OBJECT_STORES, ObjectStore
from reshard.stores.s3 import S3
from reshard.stores.store import Store
from reshard.stores.tar_store import ArchiveStore
from reshard.stores.web import WebStore

STORES: tuple[type[Store], ...] = (S3, *OBJECT_STORES, HubStore, WebStore, ArchiveStore)
"""The kinds of stores of this package. Others are added by `register`."""

WRITABLE = [kind.kind.schemes[0] for kind in STORES if issubclass(kind, ObjectStore)]
"""A scheme of each kind that can be written."""

SCHEMES = {scheme: each for each in STORES for scheme in each.kind.schemes}
"""The kind of store behind each scheme."""

_stores: dict[str, Store] = {}
_lock = RLock()


def register(kind: type[Store]) -> None:
    """Open URLs with the schemes of another kind of store from now on."""
    SCHEMES.update(dict.fromkeys(kind.kind.schemes, kind))


def urls_inside(path: Path) -> list[str]:
    """The URLs that the content of a file or folder has in each kind of store that shows what is inside one."""
    return [kind.inside(path) for kind in SCHEMES.values() if issubclass(kind, LocalStore)]


def is_url(text: str) -> bool:
    """Whether a text begins like the URL of a store."""
    scheme, separator, _ = text.partition("://")
    return bool(separator) and scheme in SCHEMES


def is_writable(path: str) -> bool:
    """Whether files can be written at a path on this machine, or at the URL of a store."""
    return not is_url(path) or issubclass(store_class(path), ObjectStore)


def store_class(url: str) -> type[Store]:
    """The kind of store that a URL names."""
    return SCHEMES[url.partition("://")[0]]


def parse_address(url: str) -> Address:
    """The parts of a store's URL, or of a model's page on the Hub. Raises ReshardError if it names nothing."""
    url = url_of_page(url) or url
    return store_class(url).address(url)


def check_local(text: str) -> None:
    """Raise ReshardError for a URL where a path on this machine is needed, and for one that no store has."""
    if re.match(rf"[a-z][\w+.-]*://|({'|'.join(SCHEMES)})(:/|//)", text, re.IGNORECASE):
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
    place = parse_address(typed)
    store = SCHEMES[place.scheme].containing(place)
    with _lock:
        before = _stores.get(store.url)
        if before is None or type(before) is not type(store):
            before = _stores[store.url] = store
        before.begin(place)
    return place.url


def replace(store: Store) -> Store | None:
    """Use a store for its URL from now on. Returns the one that was used before."""
    with _lock:
        before = _stores.get(store.url)
        _stores[store.url] = store
        return before


def store_at(url: str) -> Store:
    """The store that contains a path."""
    with _lock:
        store = _known_store(url)
        if store is None:
            place = parse_address(url)
            store = SCHEMES[place.scheme].containing(place)
            _stores[store.url] = store
        return store


def refresh(urls: Iterable[str]) -> None:
    """Make the stores of some paths report their present state from now on."""
    for each in {id(store): store for store in map(store_at, urls)}.values():
        each.refresh()


def forget() -> None:
    """Forget all stores, and what is known of them."""
    with _lock:
        _stores.clear()


def _known_store(url: str) -> Store | None:
    while url:
        if store := _stores.get(url):
            return store
        url = url.rpartition("/")[0]
    return None
