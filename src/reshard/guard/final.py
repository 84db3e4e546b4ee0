"""`--final`: the last checkpoint converted to a folder that loads, which gets its name when all checks have passed."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reshard import adapters
from reshard.base.errors import Problem, ReshardError, listed
from reshard.commands.conversion import How, convert
from reshard.folders.companions import find_companions
from reshard.folders.provenance import BASE, find_hints
from reshard.formats import open_checkpoint
from reshard.formats.checkpoint import Checkpoint
from reshard.formats.target import Kind
from reshard.guard import acceptance
from reshard.guard.acceptance import Check, Origin, checked
from reshard.guard.checkpoints import Found
from reshard.guard.finite import assert_finite
from reshard.guard.publish import UNCHECKED, publish
from reshard.planning import Options
from reshard.stores.hub import cached, may_have

GENERATION = "generation_config.json"


@dataclass(frozen=True)
class Finished:
    """The output of a run. `final` and `merged` have their final names only if all `checks` passed."""

    final: Path
    merged: Path | None
    checks: tuple[Check, ...]

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


def named(drafts: Mapping[Path, Path], final: Path, merged: Path | None, checks: list[Check]) -> Finished:
    """Give folders their final names if all checks have passed. What users added to older folders stays."""
    whole = all(check.right for check in checks)
    for place, draft in drafts.items() if whole else ():
        if kept := publish(draft, place):
            checks.append(Check("your files", f"kept in {place.name}: {listed(kept)}"))
    places = (final, merged) if whole else (drafts[final], drafts[merged] if merged else None)
    return Finished(*places, tuple(checks))


@dataclass(frozen=True)
class Ask:
    """How to make the folder.

    `base` is what the user passed, `model` what the command names, and `trust` its trust_remote_code; relative paths
    start at `folder`.
    """

    merge: bool = False
    base: Path | None = None
    model: str = ""
    trust: bool = False
    folder: Path = Path()


def final_of(found: Found, place: Path, ask: Ask = Ask()) -> Finished:
    """Make a Hugging Face folder, or a PEFT adapter, from a checkpoint, and check it."""
    draft = place.with_name(place.name + UNCHECKED)
    shutil.rmtree(draft, ignore_errors=True)
    return named({place: draft}, place, None, list(_checks(found, draft, ask)))


def missing(place: Path, where: Path) -> Finished:
    """The failed check of a run that left no checkpoint with complete weights."""
    problem = Problem(
        "final-checkpoint-missing",
        "no checkpoint with complete weights was found",
        file=str(where),
        remedy="pass the folder of its checkpoints: --output DIR",
    )
    return Finished(place, None, (Check("checkpoint", problem.message, (problem,)),))


def _checks(found: Found, draft: Path, ask: Ask) -> Iterator[Check]:
    """Convert and check; if the folder cannot be made, nothing is checked."""
    opened = checked("opened", lambda: open_checkpoint(found.path).format)
    if not opened.right:
        yield opened
        return
    checkpoint = open_checkpoint(found.path)
    is_adapter = adapters.kind_of(checkpoint) is Kind.ADAPTER
    base = _base_of(checkpoint, ask, is_adapter=is_adapter)
    made = checked("converted", lambda: _made(checkpoint, found.path, draft, base, ask.merge, is_adapter))
    yield made
    if made.right:
        look = acceptance.of_adapter if is_adapter and not ask.merge else acceptance.of_model
        yield from look(draft, Origin(base, ask.trust))


def _base_of(checkpoint: Checkpoint, ask: Ask, *, is_adapter: bool) -> Path | None:
    """The folder of the base model: what the user passed, what the checkpoint or else the command names."""
    own = [adapters.find(checkpoint).settings.base or ""] if is_adapter else []
    hints = find_hints([checkpoint.path, checkpoint.root], checkpoint.sources, checkpoint.args)
    told = [str(ask.base or ""), *own, *(hint.value for hint in hints if hint.kind == BASE), ask.model]
    return next((folder for name in told if name and (folder := _folder(ask.folder, name))), None)


def _folder(working: Path, name: str) -> Path | None:
    """A folder, or a model of the Hub in the local cache."""
    if (working / name).is_dir():
        return working / name
    return cached(name) if may_have(name) else None


def _made(
    checkpoint: Checkpoint, path: Path, draft: Path, base: Path | None, merge: bool, is_adapter: bool
) -> str:
    """Convert the checkpoint. The base is only named if it is needed: for an adapter, a config or a tokenizer."""
    if merge and not is_adapter:
        raise ReshardError(
            "final-adapter-missing",
            "no adapter to merge",
            file=str(path),
            found="a checkpoint with all weights",
            remedy="leave out --merge",
        )
    to = "peft" if is_adapter and not merge else "huggingface"
    own = find_companions(checkpoint.sources, *checkpoint.folders)
    theirs = find_companions(checkpoint.sources, base) if base else own
    is_whole = own.config is not None and own.has_tokenizer and not is_adapter
    files = theirs.files if to == "peft" and not own.has_tokenizer else {}
    options = Options(
        to=to,
        base=None if is_whole else base,
        merge=merge,
        tokenizer=own.has_tokenizer or theirs.has_tokenizer,
        beside={name: file for name, file in files.items() if file.suffix != ".py" and name != GENERATION},
    )
    made = convert(path, draft, options, How())
    assert_finite(made, draft, base)
    return f"{made.plan.tensors} tensors, {made.plan.parameters:,} parameters, from {path.name}"
