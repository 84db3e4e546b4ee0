"""Upload the files of a conversion to a repository of the Hugging Face Hub, in one commit: all of them or none.

Obstacles are found before anything is converted: no login, no permission to write, other files in the
repository. Credentials are those of huggingface_hub (`hf auth login`, HF_TOKEN), and no message shows one.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from reshard.base.errors import ReshardError, listed, type_and_message
from reshard.base.foreign_text import without_secrets
from reshard.base.later_imports import imported_later
from reshard.base.missing_packages import install_command
from reshard.base.plain_json import json_of
from reshard.folders.companion_names import FILES_KEY, README, RECORD
from reshard.formats import written
from reshard.formats.contract import HUB
from reshard.formats.options import ConversionOptions
from reshard.transfer.plan import Plan
from reshard.version import __version__

with imported_later(__name__):
    from reshard.hub import model_card


REPOSITORY_NAME = re.compile(r"(?:[A-Za-z0-9][\w.-]{0,95}/)?[A-Za-z0-9][\w.-]{0,95}")
FOREIGN_FILES = (README, ".gitattributes", ".gitignore", "LICENSE")
"""Files that may be in a repository besides an upload: they do not describe the weights, or are the user's own card."""

OnUpload = Callable[[str, int], None]
"""Callback that receives the address of the repository and the bytes of its files, before the upload."""


@dataclass(frozen=True)
class Push:
    """Where to upload: `Org/Name`, or `Name` of the logged-in user; `private` applies to a new repository.

    A new `branch` begins with the first commit of the repository, whatever else is on `main`.
    """

    repository: str
    private: bool = False
    overwrite: bool = False
    branch: str | None = None


class Upload:
    """A repository that can be written to. Raises ReshardError for every obstacle."""

    def __init__(self, push: Push, plan: Plan, digest: str) -> None:
        """`digest` is that of the plan: files in the repository with the same digest may be uploaded again."""
        self._push, self._plan, self._digest = push, plan, digest
        _refuse_others(plan)
        self._api, self.name = opened(push)
        with _understood(push.repository):
            self._state = self._look()

    @property
    def url(self) -> str:
        """The address for a browser."""
        tree = f"/tree/{self._push.branch}" if self._push.branch else ""
        return f"{self._api.endpoint}/{self.name}{tree}"

    @property
    def place(self) -> dict[str, Any]:
        """Where the output will be uploaded, and who will see it, for `--json`."""
        private = self._push.private if self._state is None else bool(self._state.private)
        return {"url": self.url, "new": self._state is None, "private": private}

    @property
    def note(self) -> str:
        """The same in words."""
        place = self.place
        kind = "private" if place["private"] else "public"
        if not place["new"]:
            return f"the output will be uploaded to {self.url}, an existing {kind} repository"
        how = "" if place["private"] else "; --private makes it private, as some organizations do by default"
        return f"the output will be uploaded to {self.url}, a new {kind} repository{how}"

    def create(self) -> None:
        """Create the repository and the branch if they do not exist."""
        with _understood(self.name):
            if self._state is None:
                self._api.create_repo(self.name, private=self._push.private or None, exist_ok=True)
            if self._push.branch:
                *_, first = self._api.list_repo_commits(self.name)
                self._api.create_branch(
                    self.name, branch=self._push.branch, revision=first.commit_id, exist_ok=True
                )

    def _look(self) -> Any:
        """The present state of the repository; None if it does not exist."""
        from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

        try:
            info = self._api.model_info(self.name)
        except RepositoryNotFoundError:
            return None
        if "write" in signature(self._api.auth_check).parameters:
            self._api.auth_check(self.name, write=True)
        if self._push.private and not info.private:
            raise ReshardError(
                "repository-public",
                "the repository is public",
                file=self.url,
                rule="--private makes a new repository private, but does not change an existing one",
                remedy="make it private in its settings on the Hub, or choose another name",
            )
        with suppress(RevisionNotFoundError):
            self._obsolete(self._info() if self._push.branch else info)
        return info

    def _info(self) -> Any:
        """The files and the last commit of the branch."""
        return self._api.model_info(self.name, revision=self._push.branch)

    def _obsolete(self, info: Any) -> list[str]:
        """The files of an older upload that would be left over. Raises ReshardError if other files are in the way."""
        names = {file.rfilename for file in info.siblings}
        ours = {file.path for file in self._plan.files}
        record = self._record() if RECORD in names else {}
        if not names - set(FOREIGN_FILES) or record.get("plan") == self._digest:
            return []
        if not self._push.overwrite:
            raise ReshardError(
                "repository-not-empty",
                "the repository is not empty",
                file=self.url,
                rule="old shards or a stale index must not remain next to new ones",
                found=listed(sorted(names - set(FOREIGN_FILES)), 5),
                remedy="choose another repository, or pass --overwrite to replace its files (its history keeps them)",
            )
        files = record.get(FILES_KEY)
        old = {RECORD, *files} if isinstance(files, dict | list) else set()
        if foreign := sorted(names - old - ours - set(FOREIGN_FILES)):
            raise ReshardError(
                "repository-foreign-files",
                "the repository contains files that --overwrite does not delete",
                file=self.url,
                rule="--overwrite deletes what reshard uploaded, and nothing else",
                found=listed(foreign, 5),
                remedy="delete these files on the Hub, or choose another repository",
            )
        return sorted((old & names) - ours)

    def _record(self) -> dict[str, Any]:
        """The content of `reshard.json` in the repository; empty if it is not ours."""
        try:
            record = json_of(self._content(RECORD))
        except ValueError:
            return {}
        return record if isinstance(record, dict) else {}

    def _content(self, name: str) -> bytes:
        with TemporaryDirectory() as folder:
            file = self._api.hf_hub_download(self.name, name, revision=self._push.branch, local_dir=folder)
            return Path(file).read_bytes()

    def send(self, folder: Path, options: ConversionOptions, on_upload: OnUpload) -> None:
        """Upload all files of the plan from `folder`, and the model card, unless the repository has another's."""
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete

        names = sorted(file.path for file in self._plan.files)
        with _understood(self.name, folder):
            info = self._info()
            obsolete = self._obsolete(info)
            operations: list[Any] = [CommitOperationDelete(name) for name in obsolete]
            operations += [CommitOperationAdd(name, str(folder / name)) for name in names]
            if README not in names and self._is_ours(info):
                card = model_card.model_card(self._plan, options, self.name, self._push.branch)
                operations.append(CommitOperationAdd(README, card))
            on_upload(self.url, self._plan.nbytes)
            self._api.create_commit(
                self.name,
                operations,
                commit_message=f"Convert from {self._plan.source} with reshard {__version__}",
                parent_commit=info.sha,
                revision=self._push.branch,
            )

    def _is_ours(self, info: Any) -> bool:
        """Whether the card of the repository is ours, or there is none."""
        if README not in {file.rfilename for file in info.siblings}:
            return True
        return model_card.SIGNATURE.encode() in self._content(README)


def opened(push: Push) -> tuple[Any, str]:
    """The client, and the full name of the repository. Raises ReshardError if the user may not write there."""
    if not REPOSITORY_NAME.fullmatch(push.repository):
        raise ReshardError(
            "repository-name-malformed",
            "this is not the name of a repository",
            expected="Org/Name: letters, digits, - _ and .",
            found=push.repository,
            remedy="correct --push-to-hub",
        )
    api = _client()
    with _understood(push.repository):
        return api, _writable(api, push)


def _refuse_others(plan: Plan) -> None:
    """Raise ReshardError for a format that the Hub cannot store."""
    able = [name for name, target in written().items() if target.names.dialects == (HUB,)]
    if plan.target not in able:
        raise ReshardError(
            "push-format-not-for-hub",
            "--push-to-hub is for checkpoints that transformers or PEFT load from the Hub",
            expected=f"--to {' or --to '.join(able)}",
            found=f"--to {plan.target}",
            remedy="pass --to huggingface, or leave out --push-to-hub",
        )


def _client() -> Any:
    try:
        from huggingface_hub import HfApi
    except ImportError:
        raise ReshardError(
            "huggingface-hub-not-installed",
            "the package huggingface_hub is not installed",
            rule="--push-to-hub uploads with it",
            remedy=install_command("huggingface_hub"),
        ) from None
    for handler in logging.getLogger("huggingface_hub").handlers:
        handler.addFilter(_unsigned)  # its warnings quote addresses that let anybody upload
    return HfApi(library_name="reshard", library_version=__version__)


def _unsigned(record: logging.LogRecord) -> bool:
    """Remove signatures from a log record, and keep the record."""
    record.msg, record.args = without_secrets(record.getMessage()), ()
    return True


def _writable(api: Any, push: Push) -> str:
    """The full name of the repository, after checking the logged-in user."""
    user = api.whoami()
    if user.get("auth", {}).get("accessToken", {}).get("role") == "read":
        raise ReshardError(
            "hub-token-read-only",
            "the token has no write access",
            file=f"{api.endpoint}/{push.repository}",
            rule="--push-to-hub needs a token with write access",
            found=f"a read token of {user['name']}",
            remedy="make a token with write access at https://huggingface.co/settings/tokens, then `hf auth login`",
        )
    return push.repository if "/" in push.repository else f"{user['name']}/{push.repository}"


REMEDIES = {
    401: (
        "hub-token-refused",
        "the Hub does not accept the token",
        "log in again: `hf auth login`, or correct HF_TOKEN",
    ),
    403: (
        "hub-write-denied",
        "the token may not write there",
        "use a token with write access to it, or choose another repository",
    ),
    404: (
        "repository-not-found",
        "there is no such repository, or the token may not see it",
        "check the name, and the rights of the token",
    ),
    412: (
        "repository-changed",
        "somebody else changed the repository meanwhile",
        "look at what they did, then run the same command again",
    ),
    429: (
        "hub-asks-for-a-pause",
        "the Hub asks for a pause",
        "wait some minutes, then run the same command again",
    ),
}


@contextmanager
def _understood(repository: str, folder: Path | None = None) -> Iterator[None]:
    """Explain what the Hub, its client or the network refused. The files in `folder` are complete."""
    try:
        yield
    except (ReshardError, MemoryError):
        raise
    except Exception as error:
        code, message, remedy = _explanation(error)
        kept = f"; {folder} is complete, and only the upload is repeated" if folder else ""
        raise ReshardError(
            code, message, file=repository, found=_text(error), remedy=remedy + kept
        ) from error


def _explanation(error: BaseException) -> tuple[str, str, str]:
    """The code, message and remedy of an error. The cause of an error may say more than the error."""
    from huggingface_hub.errors import LocalTokenNotFoundError, OfflineModeIsEnabled

    chain = [error, *filter(None, (error.__cause__, error.__context__))]
    if any(isinstance(each, LocalTokenNotFoundError) for each in chain):
        return (
            "hub-not-logged-in",
            "nobody is logged in to the Hugging Face Hub",
            "log in with `hf auth login`, or set HF_TOKEN",
        )
    if any(isinstance(each, OfflineModeIsEnabled) for each in chain):
        return (
            "hub-switched-off",
            "the Hugging Face Hub is switched off",
            "unset HF_HUB_OFFLINE, then run the same command again",
        )
    for each in chain:
        status = getattr(getattr(each, "response", None), "status_code", None)
        if status in REMEDIES:
            return REMEDIES[status]
    return (
        "hub-unusable",
        "the Hugging Face Hub could not be used",
        "check the network, then run the same command again",
    )


def _text(error: Exception) -> str:
    """The text of an error and its causes, on one line."""
    cause = f", because of {_text(error.__cause__)}" if isinstance(error.__cause__, Exception) else ""
    return " ".join(type_and_message(error).split()) + cause
