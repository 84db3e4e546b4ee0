"""A step as a folder of the Hub: every file is known before any weight is read."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from hashlib import sha1
from pathlib import Path
from threading import Lock
from typing import Any

from anyio import CapacityLimiter

from reshard.base.errors import ReshardError
from reshard.cluster.part_worker import identity_of
from reshard.formats.options import ConversionOptions
from reshard.formats.orbax import FORMAT, UNSCANNED
from reshard.hub.model_card import README, model_card
from reshard.planning import plan_conversion
from reshard.serve.options import ServeOptions
from reshard.serve.repositories import NotServedError, Repository, Step
from reshard.transfer.compare import unequal_replicas
from reshard.transfer.file_ranges import FileRanges
from reshard.transfer.memory_budget import MemoryMeter, ThreadShare, shared
from reshard.transfer.plan import OutputFile, Plan

ORBAX = (FORMAT.name, UNSCANNED.name)
CHECKED_SECONDS = 1.0
"""Seconds for which the files of a plan are taken to be unchanged. What is read is checked each time."""


OnEvent = Callable[[dict[str, Any]], None]
"""Callback that receives a record of something that the server did."""


class Revision:
    """A step of a repository, planned in `memory` bytes.

    `commit` changes with the bytes of its files, and so do their ETags.
    """

    def __init__(
        self, repository: Repository, step: Step, plan: Plan, commit: str, share: ThreadShare, memory: int
    ) -> None:
        self.repository, self.step, self.plan, self.commit = repository, step, plan, commit
        self.memory = memory
        self.ranges, self.limiter = FileRanges(plan, share), CapacityLimiter(share.threads)
        self.files = {file.path: file for file in plan.files}
        self._until = 0.0

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
        if time.monotonic() >= self._until:
            if self.plan.sources.changed():
                return False
            self._until = time.monotonic() + CHECKED_SECONDS
        return True


class Revisions:
    """The plans of a server, made one at a time when they are asked for, and kept while they fit in the memory.

    `refused` are the paths that led out of the folders, as `confine` returns them. `on_event` receives what users
    should know of a plan.
    """

    def __init__(self, options: ServeOptions, refused: list[ReshardError], on_event: OnEvent) -> None:
        self._options, self._refused, self._on_event = options, refused, on_event
        self._memory = options.limit // 2  # the other half is for what is on its way to clients
        self._kept: OrderedDict[Path, Revision] = OrderedDict()
        self._commits: dict[tuple[str, str], Path] = {}
        self._lock, self._planning = Lock(), Lock()

    def of(self, repository: Repository, name: str) -> Revision:
        """A revision by the name of its step, "main", or its commit.

        Raises NotServedError, and ReshardError if the step cannot be converted.
        """
        path = self._commits.get((repository.name, name))
        if path is None:
            return self._planned(repository, repository.at(name))
        step = next((each for each in repository.steps() if each.path == path), None)
        revision = self._planned(repository, step) if step else None
        if revision is None or revision.commit != name:
            raise NotServedError(
                "RevisionNotFound", f"{path.name} of {repository.id} has changed since {name}"
            )
        return revision

    def drop(self, revision: Revision) -> None:
        """Plan a step again when it is asked for: its sources have changed."""
        with self._lock:
            if self._kept.get(revision.step.path) is revision:
                del self._kept[revision.step.path]
        revision.ranges.close()

    def _planned(self, repository: Repository, step: Step) -> Revision:
        """The plan of a step, which is made if there is none, or if its sources have changed."""
        with self._planning if self._current(step) is None else nullcontext():
            revision = self._current(step) or self._plan(repository, step)
        with self._lock:
            self._kept[step.path] = revision
            self._kept.move_to_end(step.path)
            while len(self._kept) > 1 and sum(each.memory for each in self._kept.values()) > self._memory:
                self._kept.popitem(last=False)[1].ranges.close()
            self._commits[repository.name, revision.commit] = step.path
        return revision

    def _current(self, step: Step) -> Revision | None:
        with self._lock:
            kept = self._kept.get(step.path)
        return kept if kept and kept.is_current() else None

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
        meter = MemoryMeter(self._memory)
        self._refused.clear()
        plan = plan_conversion(step.path, options, meter=meter)
        # Whoever opens an optional file may take a refusal for its absence.
        for error in (
            each for each in self._refused if str(each.problems[0].file).startswith(str(repository.folder))
        ):
            raise error
        left = meter.left(plan.need)
        share = shared(None, left, plan.need, plan.sources.paths)
        with plan.sources.unchanged(None):
            if problems := unequal_replicas(plan.replicas, share):
                raise ReshardError(problems)
        identity = identity_of(plan, options, checksum=True).digest
        commit = sha1(f"{identity} {repository.id}".encode(), usedforsecurity=False).hexdigest()
        warnings = [str(each) for each in plan.warnings]
        planned = {"event": "planned", "model": repository.id, "step": step.name}
        self._on_event({**planned, "notes": [*plan.notes, *warnings], "bytes": plan.nbytes})
        plan = _with_card(plan, options, repository.id)
        return Revision(repository, step, plan, commit, share, self._memory - left)


def _with_card(plan: Plan, options: ConversionOptions, name: str) -> Plan:
    """The plan with a model card, unless it has one."""
    if README in (file.path for file in plan.files):
        return plan
    card = model_card(plan, options, name, has_digests=False)
    return replace(plan, files=[*plan.files, OutputFile.of_bytes(README, card)])
