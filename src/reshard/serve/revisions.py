"""A step as a folder of the Hub: every file is known before any weight is read."""

from __future__ import annotations

import time
from collections.abc import Callable, MutableSequence
from dataclasses import replace
from hashlib import sha1
from pathlib import Path
from threading import Lock
from typing import Any

from anyio import CapacityLimiter

from reshard.base.errors import ReshardError, raise_all
from reshard.cluster.part_worker import identity_of
from reshard.folders.companion_names import README
from reshard.formats.options import ConversionOptions
from reshard.formats.orbax import FORMAT, UNSCANNED
from reshard.hub.model_card import model_card
from reshard.planning import plan_conversion
from reshard.serve.options import ServeOptions
from reshard.serve.repositories import NotServedError, Repository, Step
from reshard.transfer.compare import unequal_replicas
from reshard.transfer.file_ranges import FileRanges
from reshard.transfer.memory_budget import MemoryMeter, ThreadShare, shared
from reshard.transfer.plan import OutputFile, Plan

ORBAX = (FORMAT.name, UNSCANNED.name)
# Seconds for which the files of a plan are taken to be unchanged. What is read is checked each time.
CHECKED_SECONDS = 1.0

OnEvent = Callable[[dict[str, Any]], None]
"""Callback that receives a record of something that the server did."""


class Revision:
    """A step of a repository, planned in `memory` bytes.

    `commit` changes with the bytes of its files, and so do their ETags. `checked` is when the sources were last seen to
    be as they were, on the clock `time.monotonic`.
    """

    def __init__(
        self, repository: Repository, step: Step, plan: Plan, commit: str, share: ThreadShare, memory: int
    ) -> None:
        self.repository, self.step, self.plan, self.commit = repository, step, plan, commit
        self.memory, self.checked = memory, time.monotonic()
        self.ranges, self.limiter = FileRanges(plan, share), CapacityLimiter(share.threads)
        self.files = {file.path: file for file in plan.files}

    def file(self, path: str) -> OutputFile:
        """A file. Raises NotServedError."""
        if path not in self.files:
            raise NotServedError("EntryNotFound", f"{self.repository.id} has no file {path!r}")
        return self.files[path]

    def etag(self, path: str) -> str:
        """What identifies the bytes of a file, though none was read: 40 hexadecimal digits."""
        return sha1(f"{self.commit} {path}".encode(), usedforsecurity=False).hexdigest()

    def is_current(self) -> bool:
        """Whether all sources are as they were."""
        now = time.monotonic()
        if now < self.checked + CHECKED_SECONDS:
            return True
        if self.plan.sources.changed():
            return False
        self.checked = now
        return True


class Revisions:
    """The plans of a server, made one at a time when they are asked for, and kept while they fit in half its memory.

    `refused` are the paths that led out of the folders, as `confine` returns them. `on_event` receives what users
    should know of a plan.
    """

    def __init__(
        self, options: ServeOptions, refused: MutableSequence[ReshardError], on_event: OnEvent
    ) -> None:
        self._options, self._refused, self._on_event = options, refused, on_event
        self._kept: dict[Path, Revision] = {}
        self._names: dict[tuple[str, str], str] = {}
        self._planning = Lock()

    def of(self, repository: Repository, name: str) -> Revision:
        """A revision by the name of its step, "main", or its commit.

        Raises NotServedError, and ReshardError if the step cannot be converted.
        """
        of_step = self._names.get((repository.name, name), name)
        step = repository.at(of_step)
        revision = self._current(step) or self._planned(repository, step)
        if of_step != name != revision.commit:
            raise NotServedError("RevisionNotFound", f"{of_step} of {repository.id} has changed since {name}")
        return revision

    def _current(self, step: Step) -> Revision | None:
        kept = self._kept.get(step.path)
        return kept if kept and kept.is_current() else None

    def _planned(self, repository: Repository, step: Step) -> Revision:
        """The plan of a step, which another thread may have made meanwhile."""
        with self._planning:
            if found := self._current(step):
                return found
            revision = self._kept[step.path] = self._plan(repository, step)
            self._names[repository.name, revision.commit] = step.name
            limit = self._options.limit // 2  # the other half is for answers
            while len(self._kept) > 1 and sum(each.memory for each in self._kept.values()) > limit:
                del self._kept[min(self._kept, key=lambda path: self._kept[path].checked)]
        return revision

    def _plan(self, repository: Repository, step: Step) -> Revision:
        """Plan a step, and compare what it stores more than once. Raises NotServedError and ReshardError."""
        checkpoint = repository.checkpoint(step)
        if checkpoint.format in ORBAX:
            raise ReshardError(
                "orbax-not-served",
                "an Orbax checkpoint cannot be served",
                file=str(step.path),
                rule="the server opens all files itself, below its folders, and tensorstore opens those of Orbax",
                remedy=f"convert it, and serve the output: reshard convert {step.path} OUT",
            )
        options = self._options.conversion_of(checkpoint, repository.folder)
        # More than the half that is for plans: what answers take meanwhile is counted, too.
        memory = self._options.limit * 3 // 4
        meter = MemoryMeter(memory)
        self._refused.clear()
        plan = plan_conversion(step.path, options, meter=meter)
        # Whoever opens an optional file may take a refusal for its absence.
        for error in [*self._refused]:
            if Path(str(error.problems[0].file)).is_relative_to(repository.folder):
                raise error
        memory -= meter.left(plan.need)
        share = shared(None, self._options.limit // 4, plan.need, plan.sources.paths)
        with plan.sources.unchanged(None):
            raise_all(unequal_replicas(plan.replicas, share))
        identity = identity_of(plan, options, checksum=True).digest
        commit = sha1(f"{identity} {repository.id}".encode(), usedforsecurity=False).hexdigest()
        notes = [*plan.notes, *map(str, plan.warnings)]
        planned = {"event": "planned", "model": repository.id, "step": step.name}
        self._on_event({**planned, "notes": notes, "bytes": plan.nbytes})
        return Revision(repository, step, _with_card(plan, options, repository.id), commit, share, memory)


def _with_card(plan: Plan, options: ConversionOptions, name: str) -> Plan:
    """The plan with a model card, unless it has one."""
    if README in (file.path for file in plan.files):
        return plan
    card = model_card(plan, options, name, has_digests=False)
    return replace(plan, files=[*plan.files, OutputFile.of_bytes(README, card)])
