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
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from hashlib import sha256
from multiprocessing import get_context
from pathlib import Path
from threading import Event, Lock
from typing import Any

from reshard.base.errors import ReshardError, listed, reading_values
from reshard.base.exceptions_to_problems import failed_to_print, problems_of
from reshard.base.options import part_of
from reshard.base.plain_json import json_of, put
from reshard.base.start_environment import set_for_this_process, start_environment
from reshard.commands.conversion import convert
from reshard.commands.options import RunOptions
from reshard.final.saved_checkpoints import TRAINER_STATE, FoundCheckpoint, step_of
from reshard.folders.companion_names import RECORD
from reshard.hub import push
from reshard.records.checkpoint_files import foreign_in
from reshard.runs.follow.options import WatchOptions
from reshard.runs.guard.supervise.child_processes import end_with_parent
from reshard.serve.options import ServeOptions, ShownOptions
from reshard.serve.repositories import SETTLED_SECONDS, NotServedError, Repository, Step, repositories_below
from reshard.transfer.leftovers import remove_unfinished
from reshard.transfer.run_files import locked

# What Linux counts of this process.
IO = Path("/proc/self/io")
# With this, after a dot, begin the record, the lock, and a folder that is being removed.
NAME = "reshard-watch"
# What a command prints goes there: stdout has the events.
STDERR = 2
# The looks after which a step that failed is tried again.
PAUSE = 10
PLACEHOLDER = re.compile(r"\{(path|step|name|revision)\}")
CONVERTED, FAILED = "converted", "failed"

Facts = dict[str, Any]


def follow(
    run: Path, options: WatchOptions, tell: Callable[[Facts], None], stop: Event, typed: str = ""
) -> bool:
    """Follow a run until `stop` is set, or once; whether nothing has failed. Raises ReshardError.

    `tell` receives events: a name as `event`, and what it is about. Steps that fail are told, and tried again. `typed`
    is the command that goes on with a conversion which is interrupted.
    """
    options.check(run)
    _steps_of(run, options.folder)
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


def _steps_of(run: Path, besides: Path | None) -> list[Step]:
    """The steps of a run, the oldest first, without what is written to `besides`. Raises ReshardError."""
    own = besides.resolve() if besides else None
    found = [each for each in Repository("", run).steps if own not in each.path.resolve().parents]
    steps = [each for each in found if each.path != run]
    runs = sorted({str(each.path.parent) for each in steps})
    if len(runs) > 1:
        raise ReshardError(
            "run-holds-several",
            "the folder holds several runs",
            file=str(run),
            found=listed(runs, 5),
            remedy=f"watch one of them: {runs[0]}",
        )
    return sorted(steps, key=lambda step: (_number(step.name), step.when))


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
        actions: dict[str, tuple[object, Callable[[Step, FoundCheckpoint], tuple[str, Facts]]]] = {
            CONVERTED: (options.folder, self._convert),
            f"pushed to {options.push_to_hub}": (options.push_to_hub, self._push),
            f"ran {shlex.join(options.program)}": (options.program, self._execute),
        }
        self._actions = {name: action for name, (is_asked, action) in actions.items() if is_asked}
        self._skipped: dict[str, str] = {}
        self._later: dict[str, float] = {}

    def look(self) -> bool:
        """Do what is left for the steps that are there now; whether nothing failed."""
        steps = _steps_of(self._run, self._folder)
        begun = {each.name[1:].rpartition(".partial-")[0] for each in self._folder.glob(".*.partial-*")}
        for name in begun.difference(step.name for step in steps):  # a watch was killed, and the step deleted
            with suppress(ReshardError):
                remove_unfinished(self._folder / name, 0)
        if [*self._actions] == [CONVERTED]:  # others would be removed at once
            steps = steps[-(self._options.keep or 0) :]
        return False not in [self._take(step) for step in steps]

    def _take(self, step: Step) -> bool:
        left = [each for each in self._actions if each not in self._done.get(step.name, [])]
        if not left or self._later.get(step.name, 0.0) > time.monotonic():
            return True
        if CONVERTED in self._actions and not (self._folder / step.name).exists():  # --keep removed it
            left = list(dict.fromkeys([CONVERTED, *left]))
        try:
            found = Repository(self._run.name, self._run).checkpoint(step)
            if TRAINER_STATE in found.lacks and time.time() - step.when < SETTLED_SECONDS:
                return self._skip(step, f"{TRAINER_STATE} is missing, which is written last")
            self._say(step, "found", path=str(step.path), format=found.format)
            fine = all(self._act(step, found, name) for name in left)
        except (NotServedError, ReshardError, OSError) as error:
            return self._failed(step, error)
        self._remove_old()
        return fine

    def _act(self, step: Step, found: FoundCheckpoint, name: str) -> bool:
        event, facts = self._actions[name](step, found)
        if event == FAILED:
            self._later[step.name] = math.inf
        else:
            self._done[step.name] = list(dict.fromkeys([*self._done.get(step.name, []), name]))
            put(self._state, {"run": str(self._run.resolve()), "done": self._done})
        self._say(step, event, **facts)
        return event != FAILED

    def _convert(self, step: Step, found: FoundCheckpoint) -> tuple[str, Facts]:
        target = self._folder / step.name
        is_there = (target / RECORD).is_file()  # a watch was killed before it could record that
        facts = {"bytes": 0} if is_there else self._converted(step, found)
        return CONVERTED, {"path": str(target), **facts}

    def _push(self, step: Step, found: FoundCheckpoint) -> tuple[str, Facts]:
        repository, private = self._options.push_to_hub, self._options.private
        facts = self._converted(step, found, push_to_hub=repository, private=private, branch=step.name)
        if not self._options.folder:
            shutil.rmtree(self._folder / step.name)
        return "pushed", facts

    def _converted(self, step: Step, found: FoundCheckpoint, **to: Any) -> Facts:
        """Convert a step, or upload it `to` a repository: what is converted already is only uploaded then."""
        options = self._options.conversion_of(found, self._run)
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

    def _execute(self, step: Step, found: FoundCheckpoint) -> tuple[str, Facts]:
        target: tuple[str, dict[str, str]] = (str((self._folder / step.name).resolve()), {})
        shown = nullcontext(target) if self._options.folder else served(self._run, step, self._options)
        with shown as (path, variables):
            number = str(step_of(step.path) or 0)
            values = {"path": path, "step": number, "name": step.name, "revision": step.name}
            words = [PLACEHOLDER.sub(lambda of: values[of[1]], word) for word in self._options.program]
            status = run_program(words, variables)
        return FAILED if status else "ran", {"command": words, "status": status}

    def _say(self, step: Step, event: str, **facts: Any) -> None:
        self._tell({"event": event, "step": step_of(step.path) or 0, "name": step.name, **facts})

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
        aside = self._folder / f".{NAME}-removed"  # nobody opens a part of it
        for each in ours[: -self._options.keep] if self._options.keep else ():
            shutil.rmtree(aside, ignore_errors=True)  # what a kill left
            shutil.rmtree(each.rename(aside), ignore_errors=True)
            self._say(Step(each.name, each, 0.0), "removed", path=str(each))


def _number(name: str) -> list[int]:
    return [int(each) for each in re.findall(r"\d+", name)]


def moved_bytes() -> int:
    """The bytes that this process has read and written; 0 if the system does not count them."""
    return sum(map(int, re.findall(r"[rw]char: (\d+)", IO.read_text()))) if IO.exists() else 0


def rate_limit(
    rate: int,
    stop: Event,
    clock: Callable[[], float] = time.monotonic,
    moved: Callable[[], int] = moved_bytes,
) -> Callable[[int], None]:
    """A callback for the bytes of each window that a conversion wrote: its threads sleep until the limit is kept.

    Where nothing is counted, as many were read. `rate` is in bytes per second. `stop` ends the sleeping.
    """
    begin, before, lock, written = clock(), moved(), Lock(), 0

    def wait(nbytes: int) -> None:
        nonlocal written
        with lock:  # all threads sleep
            written += nbytes
            done = max(moved() - before, 2 * written)
            stop.wait(max(0.0, done / rate - (clock() - begin)))

    return wait


def run_program(words: Sequence[str], variables: Mapping[str, str]) -> int:
    """The exit status of a command, negative if a signal ended it. Raises OSError if it cannot be started.

    What it has started is ended with it if this is interrupted.
    """
    with subprocess.Popen(
        words,
        stdin=subprocess.DEVNULL,
        stdout=STDERR,
        env={**start_environment(), **variables},
        start_new_session=True,
        preexec_fn=partial(end_with_parent, signal.SIGTERM, os.getpid()),
    ) as program:
        try:
            return program.wait()
        except BaseException:
            with suppress(ProcessLookupError):
                os.killpg(program.pid, signal.SIGTERM)
            raise


@contextmanager
def served(run: Path, step: Step, options: ShownOptions) -> Iterator[tuple[str, dict[str, str]]]:
    """The name of a run that another process serves, and the variables to find it. Raises ReshardError."""
    from reshard.serve.server import address_of, listening

    shown = ServeOptions(**vars(part_of(ShownOptions, options)), port=0)
    listener = listening(shown)
    server = get_context("spawn").Process(
        target=_serve, args=(run, shown, listener, os.getpid()), daemon=True
    )
    server.start()
    try:
        found = repositories_below((run,)).values()
        yield (
            next(each.id for each in found if each.folder in step.path.parents),
            {"HF_ENDPOINT": address_of(listener)},
        )
    finally:
        listener.close()
        server.kill()
        server.join()


def _serve(run: Path, options: ServeOptions, listener: Any, parent: int) -> None:
    from reshard.serve.server import TOKEN_VARIABLE, serve

    end_with_parent(signal.SIGKILL, parent)
    os.environ.pop(TOKEN_VARIABLE, None)  # only commands of this watch know the port
    serve([run], options, listener, lambda event: None)
