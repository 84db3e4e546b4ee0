"""The last checkpoint of a run converted to a folder that loads, which gets its name when all checks have passed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reshard import adapters
from reshard.base.errors import Problem, ReshardError, listed
from reshard.commands.conversion import convert
from reshard.commands.options import RunOptions
from reshard.final.acceptance import CheckResult, Origin, checked, checks_of
from reshard.final.finite_weights import assert_finite, damaged, first_nonfinite
from reshard.final.saved_checkpoints import FoundCheckpoint
from reshard.folders.base_hints import BASE
from reshard.folders.companion_names import CONFIG, RECORD
from reshard.folders.companions import find_companions
from reshard.formats import open_checkpoint
from reshard.formats.checkpoint import Checkpoint
from reshard.formats.contract import CheckpointKind
from reshard.formats.options import ConversionOptions
from reshard.records.checkpoint_files import foreign_in
from reshard.stores.hub import cached_folder, may_have
from reshard.transfer.leftovers import recover
from reshard.transfer.staging import publish

GENERATION_CONFIG = "generation_config.json"
UNCHECKED_SUFFIX = ".unchecked"
"""Suffix of the name of a folder that has not passed its checks."""


@dataclass(frozen=True)
class FinalFolder:
    """A folder that was made from a checkpoint. It has its final name only if all `checks` passed."""

    path: Path
    checks: tuple[CheckResult, ...]

    @property
    def whole(self) -> bool:
        """Whether every check passed."""
        return all(check.right for check in self.checks)

    @property
    def problems(self) -> list[Problem]:
        """The problems of all checks."""
        return [problem for check in self.checks for problem in check.problems]

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "final": str(self.path),
            "whole": self.whole,
            "checks": [check.as_dict() for check in self.checks],
        }


@dataclass(frozen=True)
class FinalRequest:
    """How to make the folder.

    `base` is what the user passed, `model` what the command names, and `trust` its trust_remote_code; relative paths
    start at `folder`.
    """

    merge: bool = False
    base: Path | None = None
    model: str = ""
    trust: bool = False
    folder: Path = Path()


def draft_of(place: Path) -> Path:
    """Where a folder is made and checked before it is moved to `place`: a link to a folder stays a link."""
    place = Path(os.path.realpath(place))
    return place.with_name(place.name + UNCHECKED_SUFFIX)


def final_of(saved: FoundCheckpoint, place: Path, request: FinalRequest = FinalRequest()) -> FinalFolder:
    """Make a Hugging Face folder, or a PEFT adapter, from a checkpoint, and check it.

    What users have put into the folder of an earlier run stays there.
    """
    draft = draft_of(place)
    shutil.rmtree(draft, ignore_errors=True)
    checks = list(_checks(saved, draft, request))
    if not all(check.right for check in checks):
        return FinalFolder(draft, tuple(checks))
    published = checked("your files", lambda: _publish(draft, place))
    if published.found:
        checks.append(published)
    return FinalFolder(place if published.right else draft, tuple(checks))


def without_checkpoint(place: Path, where: Path) -> FinalFolder:
    """The failed check of a run that left no checkpoint with complete weights."""
    problem = Problem(
        "final-checkpoint-missing",
        "no complete checkpoint was found",
        file=str(where),
        remedy="pass the folder of its checkpoints: --output DIR",
    )
    return FinalFolder(draft_of(place), (CheckResult("checkpoint", problem.message, (problem,)),))


def _publish(draft: Path, place: Path) -> str:
    """Move a checked folder to its place; tells what was kept of the folder that it replaces."""
    recover(place)
    kept = publish(draft, place, _of_the_user(place))
    return f"kept in {place.name}: {listed(kept)}" if kept else ""


def _of_the_user(folder: Path) -> Sequence[str]:
    """What is the user's own in a folder: all of it, if reshard did not write there."""
    if not folder.is_dir():
        return ()
    is_ours = (folder / RECORD).is_file()
    return foreign_in(folder) if is_ours else sorted(each.name for each in folder.iterdir())


def _checks(saved: FoundCheckpoint, draft: Path, request: FinalRequest) -> Iterator[CheckResult]:
    """Convert and check; if the checkpoint cannot be opened or converted, nothing else is done."""
    opened = checked("opened", lambda: open_checkpoint(saved.path).format)
    if not opened.right:
        yield opened
        return
    checkpoint = open_checkpoint(saved.path)
    is_adapter = adapters.checkpoint_kind(checkpoint) is not CheckpointKind.MODEL
    base = _base_of(checkpoint, request, is_adapter=is_adapter)

    def converted() -> str:
        options = _options_for(checkpoint, base, merge=request.merge, is_adapter=is_adapter)
        written = convert(saved.path, draft, options, RunOptions())
        assert_finite(written.report.nonfinite if written.report else [], draft, base)
        return (
            f"{written.plan.tensors} tensors, {written.plan.parameters:,} parameters, from {saved.path.name}"
        )

    conversion = checked("converted", converted)
    yield conversion
    if conversion.right:
        yield from checks_of(draft, Origin(base, request.trust))


def _base_of(checkpoint: Checkpoint, request: FinalRequest, *, is_adapter: bool) -> Path | None:
    """The folder of the base model: what the user passed, what the checkpoint or else the command names."""
    own = [adapters.find_settings(checkpoint).base or ""] if is_adapter else []
    hinted = [hint.value for hint in checkpoint.hints() if hint.kind == BASE]
    names = [str(request.base or ""), *own, *hinted, request.model]
    return next((folder for name in names if name and (folder := _local_model(request.folder, name))), None)


def _local_model(working: Path, name: str) -> Path | None:
    """A folder, or a model of the Hub in the local cache."""
    if (working / name).is_dir():
        return working / name
    return cached_folder(name) if may_have(name) else None


def damaged_base(working: Path, name: str) -> Problem | None:
    """The problem of a base whose first weights are NaN or infinite; None if they are not, or cannot be read."""
    with suppress(OSError, ReshardError):
        base = _local_model(working, name)
        wrong = first_nonfinite(open_checkpoint(base)) if base else None
        return damaged(base, [wrong]) if base and wrong else None
    return None


def _options_for(
    checkpoint: Checkpoint, base: Path | None, *, merge: bool, is_adapter: bool
) -> ConversionOptions:
    """How to convert a checkpoint to a folder that loads. Raises ReshardError if there is no adapter to merge.

    The base is only named if it is needed: for an adapter, a config or a tokenizer. PEFT ignores the config of the base
    next to an adapter.
    """
    if merge and not is_adapter:
        raise ReshardError(
            "final-adapter-missing",
            "no adapter to merge",
            file=str(checkpoint.path),
            found="a checkpoint with all weights",
            remedy="leave out --merge",
        )
    own = checkpoint.companions()
    theirs = find_companions(checkpoint.sources, base) if base else own
    is_whole = own.config is not None and own.has_tokenizer and not is_adapter
    extra_files = {} if own.has_tokenizer else theirs.files
    extra_files = {CONFIG: theirs.files[CONFIG], **extra_files} if CONFIG in theirs.files else extra_files
    return ConversionOptions(
        to="peft" if is_adapter and not merge else "huggingface",
        base=None if is_whole else base,
        merge=merge,
        no_tokenizer=not (own.has_tokenizer or theirs.has_tokenizer),
        beside={
            name: file
            for name, file in extra_files.items()
            if file.suffix != ".py" and name != GENERATION_CONFIG
        }
        if is_adapter and not merge
        else {},
    )
