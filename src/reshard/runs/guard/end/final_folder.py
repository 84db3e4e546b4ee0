"""`--final`: the last checkpoint converted to a folder that loads, which gets its name when all checks have passed."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reshard import adapters
from reshard.base.errors import Problem, ReshardError, listed
from reshard.commands.conversion import Conversion, convert
from reshard.commands.options import RunOptions
from reshard.folders.base_hints import BASE, find_hints
from reshard.folders.companions import CONFIG, find_companions
from reshard.formats import open_checkpoint
from reshard.formats.checkpoint import Checkpoint
from reshard.formats.contract import CheckpointKind
from reshard.formats.options import ConversionOptions
from reshard.runs.guard.end import acceptance
from reshard.runs.guard.end.acceptance import CheckResult, Origin, checked
from reshard.runs.guard.end.finite_weights import assert_finite
from reshard.runs.guard.end.publish import UNCHECKED_SUFFIX, publish
from reshard.runs.guard.end.saved_checkpoints import FoundCheckpoint
from reshard.stores.hub import cached, may_have

GENERATION_CONFIG = "generation_config.json"


@dataclass(frozen=True)
class FinishedRun:
    """The output of a run. `final` and `merged` have their final names only if all `checks` passed."""

    final: Path
    merged: Path | None
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
            "final": str(self.final),
            "merged": str(self.merged) if self.merged else None,
            "whole": self.whole,
            "checks": [check.as_dict() for check in self.checks],
        }


def named(
    drafts: Mapping[Path, Path], final: Path, merged: Path | None, checks: list[CheckResult]
) -> FinishedRun:
    """Give folders their final names if all checks have passed. What users added to older folders stays."""
    whole = all(check.right for check in checks)
    for place, draft in drafts.items() if whole else ():
        if kept := publish(draft, place):
            checks.append(CheckResult("your files", f"kept in {place.name}: {listed(kept)}"))
    if not whole:
        final, merged = drafts[final], drafts[merged] if merged else None
    return FinishedRun(final, merged, tuple(checks))


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


def final_of(found: FoundCheckpoint, place: Path, ask: FinalRequest = FinalRequest()) -> FinishedRun:
    """Make a Hugging Face folder, or a PEFT adapter, from a checkpoint, and check it."""
    draft = place.with_name(place.name + UNCHECKED_SUFFIX)
    shutil.rmtree(draft, ignore_errors=True)
    return named({place: draft}, place, None, list(_checks(found, draft, ask)))


def missing(place: Path, where: Path) -> FinishedRun:
    """The failed check of a run that left no checkpoint with complete weights."""
    problem = Problem(
        "final-checkpoint-missing",
        "no complete checkpoint was found",
        file=str(where),
        remedy="pass the folder of its checkpoints: --output DIR",
    )
    draft = place.with_name(place.name + UNCHECKED_SUFFIX)
    return FinishedRun(draft, None, (CheckResult("checkpoint", problem.message, (problem,)),))


def _checks(found: FoundCheckpoint, draft: Path, ask: FinalRequest) -> Iterator[CheckResult]:
    """Convert and check; if the checkpoint cannot be opened, nothing else is done."""
    opened = checked("opened", lambda: open_checkpoint(found.path).format)
    if not opened.right:
        yield opened
        return
    checkpoint = open_checkpoint(found.path)
    is_adapter = adapters.kind_of(checkpoint) is not CheckpointKind.MODEL
    base = _base_of(checkpoint, ask, is_adapter=is_adapter)

    def make() -> Conversion:
        options = options_for(checkpoint, base, merge=ask.merge, is_adapter=is_adapter)
        return convert(found.path, draft, options, RunOptions())

    yield from made(make, found.path, draft, Origin(base, ask.trust), is_adapter=is_adapter and not ask.merge)


def made(
    make: Callable[[], Conversion],
    source: Path,
    draft: Path,
    origin: Origin,
    *,
    is_adapter: bool,
    bits: Callable[[], str] | None = None,
    of: str = "",
) -> Iterator[CheckResult]:
    """Make a folder and check it; if it cannot be made, nothing is checked. `of` is a prefix of the checks' names."""
    converted = checked(f"{of}converted", lambda: _converted(make(), source, draft, origin.base))
    yield converted
    if not converted.right:
        return
    if bits:
        yield checked("bits", bits)
    yield from (
        acceptance.of_adapter(draft, origin) if is_adapter else acceptance.of_model(draft, origin, of=of)
    )


def _converted(made: Conversion, source: Path, draft: Path, base: Path | None) -> str:
    assert_finite(made, draft, base)
    plan, name = made.plan, source.name.removesuffix(UNCHECKED_SUFFIX)
    return f"{plan.tensors} tensors, {plan.parameters:,} parameters, from {name}"


def _base_of(checkpoint: Checkpoint, ask: FinalRequest, *, is_adapter: bool) -> Path | None:
    """The folder of the base model: what the user passed, what the checkpoint or else the command names."""
    own = [adapters.find_settings(checkpoint).base or ""] if is_adapter else []
    hints = find_hints([checkpoint.path, checkpoint.root], checkpoint.sources, checkpoint.args)
    told = [str(ask.base or ""), *own, *(hint.value for hint in hints if hint.kind == BASE), ask.model]
    return next((folder for name in told if name and (folder := local_model(ask.folder, name))), None)


def local_model(working: Path, name: str) -> Path | None:
    """A folder, or a model of the Hub in the local cache."""
    if (working / name).is_dir():
        return working / name
    return cached(name) if may_have(name) else None


def options_for(
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
    own = find_companions(checkpoint.sources, *checkpoint.folders)
    theirs = find_companions(checkpoint.sources, base) if base else own
    is_whole = own.config is not None and own.has_tokenizer and not is_adapter
    beside = {} if own.has_tokenizer else theirs.files
    beside = {CONFIG: theirs.files[CONFIG], **beside} if CONFIG in theirs.files else beside
    return ConversionOptions(
        to="peft" if is_adapter and not merge else "huggingface",
        base=None if is_whole else base,
        merge=merge,
        no_tokenizer=not (own.has_tokenizer or theirs.has_tokenizer),
        beside={
            name: file for name, file in beside.items() if file.suffix != ".py" and name != GENERATION_CONFIG
        }
        if is_adapter and not merge
        else {},
    )
