"""Repositories of the Hugging Face Hub, at one commit, from the local cache for files that it has."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from reshard.base import schemes
from reshard.base.errors import ReshardError
from reshard.stores.address import Address, StoreKind, normalized_url, url_with_password
from reshard.stores.checkpoint_names import declared
from reshard.stores.file_info import FileInfo
from reshard.stores.open_file import LocalFile
from reshard.stores.range_responses import TIMEOUT_SECONDS, RangeRequest, ResponseBody
from reshard.stores.remote_file import RemoteStore
from reshard.stores.store_errors import retry

REPOSITORY_ID = re.compile(r"[\w.-]+/[\w.-]+")
_PAGE = re.compile(r"/([^/]+/[^/]+?)(?:/tree/([^/]+))?/?")
_PASSWORD = re.compile(r"[^@]*:.*@|[^/@]*@")
_SNAPSHOT = re.compile(r"/models--([^/]+?)--([^/]+)/snapshots/[0-9a-f]{40}/?$")


class HubStore(RemoteStore):
    """A repository. A branch or tag is resolved once, so that all bytes belong to one commit."""

    kind = StoreKind(
        schemes.HUB,
        "huggingface_hub",
        "run `hf auth login`, and accept the terms of the model on its page if it has any",
        "ORG/MODEL",
    )
    depth = 2

    @classmethod
    def address(cls, url: str) -> Address:
        """A revision may be behind an @, but not a repository."""
        scheme, _, rest = url.partition("://")
        if _PASSWORD.match(rest):
            raise url_with_password(scheme, cls.kind)
        return Address(scheme, normalized_url(scheme, rest, cls.kind))

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.name, _, self.revision = url.removeprefix("hf://").partition("@")
        self.revision = unquote(self.revision)  # refs/pr/1 is typed as refs%2Fpr%2F1

    def refresh(self) -> None:
        """Do nothing: a commit does not change."""

    @cached_property
    def commit(self) -> str:
        """The commit of the revision. Raises ReshardError if it does not exist."""
        with self.read_errors(self.url):
            from huggingface_hub import HfApi, constants
            from huggingface_hub.errors import (
                GatedRepoError,
                OfflineModeIsEnabled,
                RepositoryNotFoundError,
                RevisionNotFoundError,
            )

            if constants.HF_HUB_OFFLINE:
                if folder := cached_folder(self.name, self.revision):
                    return folder.name
                raise self._offline()
            try:
                info = retry(lambda: HfApi().repo_info(self.name, revision=self.revision or None))
            except OfflineModeIsEnabled:
                raise self._offline() from None
            except GatedRepoError:
                raise
            except RevisionNotFoundError as error:
                raise self._unknown(f"revision {self.revision}", "check the revision") from error
            except RepositoryNotFoundError as error:
                raise self._unknown(
                    f"model {self.name}",
                    "check the name or path; if the model is private, run `hf auth login`",
                ) from error
            return str(info.sha)

    def _unknown(self, what: str, remedy: str) -> ReshardError:
        return ReshardError("hub-not-found", f"the Hub has no {what}", file=self.url, remedy=remedy)

    def download_command(self) -> str:
        """The command that downloads the model to the local cache."""
        return f"hf download {self.name}" + (f" --revision {self.revision}" if self.revision else "")

    def listed(self) -> list[str]:
        """The paths of all files of the commit. Raises ReshardError."""
        return list(self._files)

    def _offline(self) -> ReshardError:
        return ReshardError(
            "hub-offline",
            "the model is not in the local cache, and the Hub is not used (HF_HUB_OFFLINE is set)",
            file=self.url,
            remedy=f"{self.download_command()} on a machine with a network, or unset HF_HUB_OFFLINE",
        )

    @cached_property
    def _files(self) -> dict[str, FileInfo]:
        """All files of the commit, by path."""
        from huggingface_hub import HfApi, constants

        if constants.HF_HUB_OFFLINE and (folder := cached_folder(self.name, self.commit)):
            blobs = {path: path.resolve() for path in folder.rglob("*") if path.is_file()}
            return {
                path.relative_to(folder).as_posix(): FileInfo(blob.stat().st_size, 0, blob.name)
                for path, blob in blobs.items()
            }
        with self.read_errors(self.url):
            tree = retry(
                lambda: list(HfApi().list_repo_tree(self.name, recursive=True, revision=self.commit))
            )
        return {
            each.path: FileInfo(each.size, 0, each.lfs.sha256 if each.lfs else each.blob_id)
            for each in tree
            if hasattr(each, "blob_id")
        }

    def _in(self, url: str) -> str:
        return url[len(self.url) + 1 :]

    def list_files(self, root: str, *, deep: bool) -> dict[str, FileInfo]:
        entries = {f"{self.url}/{path}": entry for path, entry in self._files.items()}
        return {url: entry for url, entry in entries.items() if url == root or url.startswith(root + "/")}

    def look_up(self, url: str) -> FileInfo | None:
        return self._files.get(self._in(url))

    def fetch(self, wanted: RangeRequest) -> bytes:
        from huggingface_hub import hf_hub_url, try_to_load_from_cache

        path = self._in(wanted.url)
        local = try_to_load_from_cache(self.name, path, revision=self.commit)
        if isinstance(local, str):
            with LocalFile(local) as file:
                return file.read(wanted.begin, wanted.end - wanted.begin)
        return _downloaded(hf_hub_url(self.name, path, revision=self.commit), wanted)


def _downloaded(url: str, wanted: RangeRequest) -> bytes:
    """A range of bytes. No ETag is compared: a commit does not change, and servers behind the Hub have their own."""
    from huggingface_hub import utils

    how: dict[str, Any] = {
        "max_retries": 0,
        "headers": {
            "Range": f"bytes={wanted.begin}-{wanted.end - 1}",
            "Accept-Encoding": "identity",
            **utils.build_hf_headers(),
        },
        "timeout": TIMEOUT_SECONDS,
    }
    stream = getattr(utils, "http_stream_backoff", None)  # since huggingface_hub 1
    with (
        stream("GET", url, **how)
        if stream
        else utils.http_backoff("GET", url, stream=True, **how) as response
    ):
        utils.hf_raise_for_status(response)
        wanted.check_coding(response.headers.get("Content-Encoding"))
        body = ResponseBody(wanted, wanted.size_in(response.headers.get("Content-Range")))
        for part in response.iter_bytes() if stream else response.iter_content(1 << 16):
            body.add(part)
        return body.content()


def cached_folder(name: str, revision: str = "") -> Path | None:
    """The folder in the local cache for a repository at a revision, if its weights are there."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    for left_out in (None, [*declared().other, *declared().twice]):
        with suppress(LocalEntryNotFoundError, ValueError):
            wanted: dict[str, Any] = {"revision": revision or None, "ignore_patterns": left_out}
            folder = Path(snapshot_download(name, local_files_only=True, **wanted))
            return folder if any(path.suffix in declared().weights for path in folder.rglob("*")) else None
    return None


def model_name(folder: Path) -> str:
    """The Hub id of a model in a folder of the local cache; the path of any other folder."""
    snapshot = _SNAPSHOT.search(str(folder))
    return f"{snapshot[1]}/{snapshot[2]}" if snapshot else str(folder)


def url_of_page(url: str) -> str | None:
    """The hf:// URL of the model whose page on the Hub is at an https:// URL; None for any other."""
    try:
        page = urlsplit(url)
    except ValueError:
        return None
    hosts = {"huggingface.co", "hf.co", urlsplit(os.environ.get("HF_ENDPOINT", "")).netloc} - {""}
    named = _PAGE.fullmatch(page.path) if page.netloc in hosts else None
    if named is None:
        return None
    return f"hf://{named[1]}" + (f"@{named[2]}" if named[2] else "")


def may_have(typed: str) -> bool:
    """Whether what was typed, if it is not a local path, should be looked up on the Hub or in its local cache."""
    if not REPOSITORY_ID.fullmatch(typed) or Path(typed).parent.exists() or Path(typed).is_symlink():
        return False
    try:
        from huggingface_hub import constants
    except ImportError:
        return False
    return not constants.HF_HUB_OFFLINE or cached_folder(typed) is not None
