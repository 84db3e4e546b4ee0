"""Models of the Hugging Face Hub as local folders: in the local cache, or downloaded to it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from urllib.parse import quote

import reshard.formats  # noqa: F401  which declares the names of the files that are fetched
from reshard.base.errors import ReshardError, size
from reshard.stores.checkpoint_names import declared
from reshard.stores.hub import HubStore, cached, url_of

SAFETENSORS_SUFFIX = ".safetensors"
COMMIT_HASH = re.compile("[0-9a-f]{40}")


def typed_url(typed: str, revision: str | None = None) -> str:
    """The URL of a model, `hf://Org/Model@revision`, from an id or a URL. Raises ReshardError for credentials in it."""
    name = typed.removeprefix("hf://")
    HubStore.address(f"hf://{name}")
    return f"hf://{name}@{quote(revision, safe='')}" if revision else f"hf://{name}"


def model_folder(url: str, note: Callable[[str], None] = lambda text: None) -> Path:
    """The folder of a model `hf://Org/Model@revision` in the local cache. Downloads what is missing.

    `note` receives what is downloaded. Raises ReshardError if the Hub has no such model, denies access to it,
    or cannot be asked and the local cache lacks it.
    """
    store = HubStore(url)
    return _here(store) or _downloaded(store, note)


def here(folder: Path) -> Path:
    """The folder of the base model: if it was in another machine's cache, that in this one's. Raises ReshardError."""
    url = url_of(folder)
    return folder if folder.is_dir() or not url.startswith("hf://") else model_folder(url)


def _downloaded(store: HubStore, note: Callable[[str], None]) -> Path:
    """The folder of a revision, after downloading what it lacks. Asked by name, so the cache knows it by that too."""
    from huggingface_hub import snapshot_download

    with store.translated(store.url):
        wanted = {"revision": store.revision or None, "ignore_patterns": _skipped(store)}
        missing = [
            each for each in snapshot_download(store.name, dry_run=True, **wanted) if each.will_download
        ]
        if missing:
            total = size(sum(each.file_size or 0 for each in missing))
            note(f"downloading {store.name}: {len(missing)} files, {total}")
        return Path(snapshot_download(store.name, **wanted))


def _here(store: HubStore) -> Path | None:
    """The folder in the local cache, if it suffices: without a network, and for a commit, which does not change.

    Raises ReshardError if the Hub has no such model, or if it cannot be asked and the cache lacks it.
    """
    from huggingface_hub import constants

    here = cached(store.name, store.revision)
    if here and (constants.HF_HUB_OFFLINE or COMMIT_HASH.fullmatch(store.revision)):
        return here
    try:
        return None if store.commit else here
    except ReshardError as error:
        if error.problems[0].code != "store-answer-wrong":
            raise
        if here:
            return here
        raise ReshardError(
            "hub-not-reached",
            "the model is not in the local cache, and the Hub cannot be reached",
            file=store.url,
            found=error.problems[0].found,
            remedy=f"{store.download_command()} on a machine with a network, or check this one's",
        ) from None


def _skipped(store: HubStore) -> list[str]:
    """Patterns of files that contain the same weights again."""
    names = [PurePosixPath(path) for path in store.listed()]
    at_top = [path for path in names if len(path.parts) == 1 and path.suffix == SAFETENSORS_SUFFIX]
    if not at_top:
        return []
    usual = [path for path in at_top if path.name.startswith("model")]
    return [*declared().other, *(declared().twice if usual else ())]
