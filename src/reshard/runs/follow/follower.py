"""The loop of a watch: one step at a time, the oldest first, and what becomes of a step that cannot be done.

What is done is recorded in a file, and a lock beside it: with --to DIR in DIR, otherwise in a folder below
`$XDG_STATE_HOME/reshard` (`~/.local/state/reshard`), in which steps are also converted before their upload. Nothing is
written into the run.
"""

from __future__ import annotations

import math
import os
import re
import shlex
import shutil
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from hashlib import sha256
from pathlib import Path
from threading import Event
from typing import Any

from reshard.base.errors import ReshardError, listed, reading_values
from reshard.base.exceptions_to_problems import failed_to_print, problems_of
from reshard.base.plain_json import json_of, put
from reshard.base.start_environment import set_for_this_process
from reshard.commands.conversion import convert
from reshard.commands.options import RunOptions
from reshard.final.saved_checkpoints import TRAINER_STATE, FoundCheckpoint, step_of
from reshard.folders.companion_names import RECORD
from reshard.hub import push
from reshard.records.checkpoint_files import foreign_in
from reshard.runs.follow.options import WatchOptions
from reshard.runs.follow.programs import run_program, served
from reshard.runs.follow.rate_limit import rate_limit
from reshard.serve.repositories import NotServedError, Repository, Step, repositories_below
from reshard.transfer.leftovers import remove_unfinished
from reshard.transfer.run_files import locked

# With this, after a dot, begin the record, the lock, and a folder that is being removed.
NAME = "reshard-watch"
# The age of a step of the Trainer from which on the file that it writes last is not waited for.
SETTLED_SECONDS = 60.0
# The looks after which a step that failed is tried again.
PAUSE = 10
PLACEHOLDER = re.compile(r"\{(path|step|name|revision)\}")
CONVERTED, FAILED = "converted", "failed"

Facts = dict[str, Any]
Done = tuple[str, Facts]
"""An event, and what it tells."""


def follow(
    run: Path, options: WatchOptions, tell: Callable[[Facts], None], stop: Event, typed: str = ""
) -> bool:
    """Follow a run until `stop` is set, or once; whether nothing has failed. Raises ReshardError.

    `tell` receives events: a name as `event`, and what it is about. Steps that fail are told, and tried again. `typed`
    is the command that goes on with a conversion which is interrupted.
    """
    options.check(run)
    _repository(run, options.folder)
    if options.push_to_hub:
        set_for_this_process("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # they would fill a log
        push.opened(push.Push(options.push_to_hub))
    digest = sha256(f"{run.resolve()}\n{options.push_to_hub}\n{options.program}".encode()).hexdigest()
    states = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state")
    folder = options.folder or states / "reshard" / f"watch-{digest[:16]}"
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder / NAME):
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, 0, max(os.getpriority(os.PRIO_PROCESS, 0), 10))  # as `nice` does
        follower = _Follower(run, options, folder, tell, stop, typed)
        fine = follower.look()
        while not options.once and not stop.wait(options.every):
            fine = follower.look() and fine
    return fine


def _repository(run: Path, besides: Path | None) -> Repository:
    """The run in a folder, which may have no steps yet, without what is written to `besides`."""
    found = repositories_below((run,)).values()
    runs = [each for each in found if besides is None or each.folder.resolve() != besides.resolve()]
    if len(runs) > 1:
        raise ReshardError(
            "run-holds-several",
            "the folder holds several runs",
            file=str(run),
            found=listed([str(each.folder) for each in runs], 5),
            remedy=f"watch one of them: {runs[0].folder}",
        )
    return runs[0] if runs else Repository("", run)


def _recorded(file: Path, run: str) -> dict[str, list[str]]:
    """The actions that are done, by the name of the step. Raises ReshardError if they are those of another run."""
    with reading_values(file):
        state: Any = json_of(file.read_bytes()) if file.exists() else {"run": run, "done": {}}
        if state["run"] != run:
            raise ReshardError(
                "watch-state-of-another-run",
                "the folder has the steps of another run",
                file=str(file),
                expected=run,
                found=state["run"],
                remedy=f"choose another folder with --to; if the run was moved: rm {file}",
            )
        return {name: list(actions) for name, actions in state["done"].items()}


class _Follower:
    """A run, and what is done with its steps: `_actions`, by the names under which they are recorded."""

    def __init__(
        self,
        run: Path,
        options: WatchOptions,
        folder: Path,
        tell: Callable[[Facts], None],
        stop: Event,
        typed: str,
    ) -> None:
        self._run, self._options, self._folder = run, options, folder
        self._tell, self._stop, self._typed = tell, stop, typed
        self._state = folder / f".{NAME}.json"
        self._done = _recorded(self._state, str(run.resolve()))
        actions: dict[str, tuple[object, Callable[[Step, FoundCheckpoint], Done]]] = {
            CONVERTED: (options.folder, self._convert),
            f"pushed to {options.push_to_hub}": (options.push_to_hub, self._push),
            f"ran {shlex.join(options.program)}": (options.program, self._execute),
        }
        self._actions = {name: action for name, (is_asked, action) in actions.items() if is_asked}
        self._skipped: dict[str, str] = {}
        self._later: dict[str, float] = {}

    def look(self) -> bool:
        """Do what is left for the steps that are there now; whether nothing failed."""
        self._repository = _repository(self._run, self._options.folder)
        own = self._folder.resolve()
        steps = [each for each in self._repository.steps() if own not in each.path.resolve().parents]
        steps = [step for step in steps if step.path != self._repository.folder]
        begun = {each.name[1:].rpartition(".partial-")[0] for each in self._folder.glob(".*.partial-*")}
        for name in begun.difference(step.name for step in steps):  # a watch was killed, and the step deleted
            with suppress(ReshardError):
                remove_unfinished(self._folder / name, 0)
        steps.sort(key=lambda step: (_number(step.name), step.when))
        if [*self._actions] == [CONVERTED]:  # others would be removed at once
            steps = steps[-(self._options.keep or 0) :]
        return False not in [self._take(step) for step in steps]

    def _take(self, step: Step) -> bool:
        """Do what is left for a step; whether nothing failed."""
        left = [each for each in self._actions if each not in self._done.get(step.name, [])]
        if not left or self._later.get(step.name, 0.0) > time.monotonic():
            return True
        if CONVERTED in self._actions and not (self._folder / step.name).exists():  # --keep removed it
            left = list(dict.fromkeys([CONVERTED, *left]))
        try:
            found = self._repository.checkpoint(step)
            if TRAINER_STATE in found.lacks and time.time() - step.when < SETTLED_SECONDS:
                return self._skip(step, f"{TRAINER_STATE} is missing, which is written last")
            self._say(step, "found", path=str(step.path), format=found.format)
            fine = all(self._act(step, found, name) for name in left)
        except (NotServedError, ReshardError, OSError) as error:
            return self._failed(step, error)
        self._remove_old()
        return fine

    def _act(self, step: Step, found: FoundCheckpoint, name: str) -> bool:
        """Do one thing with a step, record it and tell it; whether it succeeded."""
        event, facts = self._actions[name](step, found)
        if event == FAILED:
            self._later[step.name] = math.inf
        else:
            self._done[step.name] = list(dict.fromkeys([*self._done.get(step.name, []), name]))
            put(self._state, {"run": str(self._run.resolve()), "done": self._done})
        self._say(step, event, **facts)
        return event != FAILED

    def _convert(self, step: Step, found: FoundCheckpoint) -> Done:
        target = self._folder / step.name
        is_there = (target / RECORD).is_file()  # a watch was killed before it could record that
        facts = {"bytes": 0} if is_there else self._converted(step, found)
        return CONVERTED, {"path": str(target), **facts}

    def _push(self, step: Step, found: FoundCheckpoint) -> Done:
        repository, private = self._options.push_to_hub, self._options.private
        facts = self._converted(step, found, push_to_hub=repository, private=private, branch=step.name)
        if not self._options.folder:
            shutil.rmtree(self._folder / step.name)
        return "pushed", facts

    def _converted(self, step: Step, found: FoundCheckpoint, **to: Any) -> Facts:
        """Convert a step, or upload it `to` a repository: what is converted already is only uploaded then."""
        options = self._options.conversion_of(found, self._repository.folder)
        if self._options.limit_rate:
            to["on_bytes"] = rate_limit(self._options.limit_rate, self._stop)
        how = RunOptions(memory=self._options.memory, command=self._typed, **to)
        result = convert(step.path, self._folder / step.name, options, how)
        return {
            "bytes": result.report.nbytes if result.report else 0,
            "nonfinite": result.report.nonfinite if result.report else [],
            "warnings": [each.as_dict() for each in (*result.plan.warnings, *result.warnings)],
            **({"url": result.uploaded} if result.uploaded else {}),
        }

    def _execute(self, step: Step, found: FoundCheckpoint) -> Done:
        target: tuple[str, dict[str, str]] = (str((self._folder / step.name).resolve()), {})
        shown = nullcontext(target) if self._options.folder else served(self._repository, self._options)
        with shown as (path, variables):
            values = {"path": path, "step": _step(step), "name": step.name, "revision": step.name}
            words = [PLACEHOLDER.sub(lambda of: str(values[of[1]]), word) for word in self._options.program]
            status = run_program(words, variables)
        return FAILED if status else "ran", {"command": words, "status": status}

    def _say(self, step: Step, event: str, **facts: Any) -> None:
        self._tell({"event": event, "step": _step(step), "name": step.name, **facts})

    def _skip(self, step: Step, reason: str) -> bool:
        """Tell once why a step is not done now. That is no failure."""
        if self._skipped.get(step.name) != reason:
            self._skipped[step.name] = reason
            self._say(step, "skipped", reason=reason)
        return True

    def _failed(self, step: Step, error: Exception) -> bool:
        """Tell why a step could not be done, and try it again later. That it is not whole is no failure."""
        if not step.path.exists():
            return self._skip(step, "it was deleted")
        if isinstance(error, NotServedError):
            return self._skip(step, str(error))
        if isinstance(error, OSError) and failed_to_print(error):
            raise error
        problems = problems_of(error)
        if problems[0].code == "source-changed":
            return self._skip(step, "it changed while it was read")
        self._later[step.name] = time.monotonic() + PAUSE * self._options.every
        self._say(step, FAILED, problems=[each.as_dict() for each in problems])
        return False

    def _remove_old(self) -> None:
        """Remove all folders of steps but the newest. Those in which somebody has put files stay, besides these."""
        made = [each for each in self._folder.iterdir() if each.name in self._done and not each.is_symlink()]
        ours = [each for each in made if (each / RECORD).is_file() and not foreign_in(each)]
        ours.sort(key=lambda each: _number(each.name))
        for each in ours[: -self._options.keep] if self._options.keep else ():
            removed = each.rename(self._folder / f".{NAME}-removed")  # nobody opens a part of it
            shutil.rmtree(removed, ignore_errors=True)
            self._say(Step(each.name, each, 0.0), "removed", path=str(each))


def _number(name: str) -> list[int]:
    return [int(each) for each in re.findall(r"\d+", name)]


def _step(step: Step) -> int:
    return step_of(step.path) or 0
