"""Datasets of the Hugging Face Hub as local folders with the files of one split.

The library `datasets` determines these files: it knows the configurations in README.md, and the names of splits.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Any

from reshard.base.errors import ReshardError, size
from reshard.base.suggest import did_you_mean
from reshard.stores.hub import HubStore
from reshard.stores.store_errors import translated

DATASET_PREFIX = "hf://datasets/"
CARD_FILES = ("README.md", ".huggingface.yaml")
"""Where a dataset's configurations are declared."""
DATASET_CACHE = "reshard"
"""Where the folders are, next to the Hub's cache, with links into it."""
_ID = re.compile(r"[\w.-]+/[\w.-]+(@[^/]+)?")
NoteCallback = Callable[[str], None]


def may_be(typed: str, suffixes: tuple[str, ...]) -> bool:
    """Whether what was typed, if it is not a local path, may name a dataset. Data files end in `suffixes`."""
    if typed.startswith(DATASET_PREFIX):
        return True
    return bool(_ID.fullmatch(typed)) and not typed.endswith(suffixes) and not Path(typed).parent.exists()


def dataset_folder(
    typed: str, split: str, config: str | None = None, note: NoteCallback = lambda text: None
) -> Path:
    """The folder with the files of a split. Downloads what is missing.

    `typed` is `Org/Set`, or `hf://datasets/Org/Set@revision`. `note` receives what is downloaded. Raises ReshardError
    if the URL contains credentials, the Hub has no such dataset, configuration or split, or it cannot be asked and
    the local cache lacks it.
    """
    from huggingface_hub import constants, snapshot_download

    HubStore.address(f"hf://{typed.removeprefix(DATASET_PREFIX)}")
    name, _, revision = typed.removeprefix(DATASET_PREFIX).partition("@")
    url = f"{DATASET_PREFIX}{name}"
    source = {"repo_id": name, "repo_type": "dataset", "revision": revision or None}
    with _explained(url, name, revision):
        folder = Path(snapshot_download(**source, allow_patterns=list(CARD_FILES)))
        with TemporaryDirectory() as place:
            _outline(Path(place), folder, _listed(name, folder.name))
            files = _chosen(url, _splits(Path(place), url, config), split, Path(place))
        wanted = {**source, "allow_patterns": [*files, *CARD_FILES]}
        if not constants.HF_HUB_OFFLINE:
            missing = [each for each in snapshot_download(**wanted, dry_run=True) if each.will_download]
            if missing:
                total = size(sum(each.file_size or 0 for each in missing))
                note(f"downloading {name}: {len(missing)} files, {total}")
        folder = Path(snapshot_download(**wanted))
    root = Path(constants.HF_HUB_CACHE).parent / DATASET_CACHE / f"datasets--{name.replace('/', '--')}"
    return _linked(folder, files, root / folder.name / (config or "default") / split)


@contextmanager
def _explained(url: str, name: str, revision: str) -> Iterator[None]:
    """Raise ReshardError for what the Hub, or its cache, does not have."""
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    at = f" --revision {revision}" if revision else ""
    with translated(url, HubStore.kind):
        try:
            yield
        except GatedRepoError:
            raise
        except (RepositoryNotFoundError, RevisionNotFoundError) as error:
            missing = isinstance(error, RevisionNotFoundError)
            raise ReshardError(
                "hub-dataset-not-found",
                f"the Hub has no revision {revision} of {name}"
                if missing
                else f"the Hub has no dataset {name}",
                file=url,
                remedy="check the name or path; if the dataset is private, run `hf auth login`",
            ) from None
        except LocalEntryNotFoundError:
            raise ReshardError(
                "hub-dataset-not-cached",
                "the dataset is not in the local cache, and the Hub cannot be reached",
                file=url,
                remedy=f"hf download {name} --repo-type dataset{at} on a machine with a network, or unset "
                "HF_HUB_OFFLINE; if this is a path, correct it",
            ) from None


def _listed(name: str, commit: str) -> list[str]:
    """The paths of all files of a dataset at a commit. huggingface_hub keeps them next to what it downloads."""
    from huggingface_hub import get_cached_repo_tree

    return [each.path for each in get_cached_repo_tree(name, repo_type="dataset", revision=commit)]


def _outline(place: Path, folder: Path, files: list[str]) -> None:
    """Create empty files with the names of all files of a dataset; only its cards have content."""
    for file in files:
        inside = PurePosixPath(file)
        if inside.is_absolute() or ".." in inside.parts:
            continue
        path = place / inside
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes((folder / file).read_bytes() if file in CARD_FILES else b"")


def _splits(place: Path, url: str, config: str | None) -> Mapping[str, Any]:
    """The files of each split of a configuration, as `datasets` finds them. Raises ReshardError if it finds none."""
    from datasets import load_dataset_builder

    try:
        found = load_dataset_builder(str(place), config).config.data_files
    except (
        Exception
    ) as error:  # ValueError for configurations, its own errors for files, and whatever cards cause
        said = " ".join(str(error).split()).replace(str(place), url)
        raise ReshardError(
            "hub-dataset-unreadable",
            "datasets does not find the files of this dataset",
            file=url,
            found=said[:300],
            remedy="choose a configuration with --dataset-config, or convert the data to JSONL or Parquet",
        ) from None
    return {str(split): files for split, files in (found or {}).items()}


def _chosen(url: str, splits: Mapping[str, Any], split: str, place: Path) -> list[str]:
    """The files of a split, by their paths in the dataset. Raises ReshardError if there is no such split."""
    if split in splits:
        return [os.path.relpath(file, place) for file in splits[split]]
    raise ReshardError(
        "hub-dataset-split-missing",
        "the dataset has no such split",
        file=url,
        expected=", ".join(splits),
        found=split,
        remedy=did_you_mean(split, splits, "choose one of these")
        + " (--dataset-train-split, and --dataset-test-split for --eval-data)",
    )


def _linked(folder: Path, files: list[str], place: Path) -> Path:
    """A folder with only links to the files of a split. Several processes may create it at once."""
    for file in files:
        link = place / file
        link.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            link.symlink_to((folder / file).resolve())
    return place
