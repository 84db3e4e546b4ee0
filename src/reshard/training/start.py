"""Run a request completely: preflight, launch, finish."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reshard.base.errors import ReshardError
from reshard.training import output_folder, signals
from reshard.training.engine_registry import engine_of
from reshard.training.launching import launch, slurm_job
from reshard.training.launching.end_of_run import RunScreen
from reshard.training.launching.rank_environment import launched_rank
from reshard.training.launching.torchrun import Torchrun
from reshard.training.options import RUN_OPTIONS, StartOptions
from reshard.training.planning.gpu_models import PlannedMachine, machine_asked
from reshard.training.preconditions import config_problems
from reshard.training.preflight import MACHINE_CODES, look_first, preflight
from reshard.training.preflight_report import Preflight
from reshard.training.run import Run
from reshard.training.run_request import run_of
from reshard.training.worker import restarted

if TYPE_CHECKING:
    from reshard.guard.end.final_folder import FinishedRun


@dataclass(frozen=True)
class Outcome:
    """How a run ended. `status` is that of the command: 0 done, 1 failed, 128 plus the signal that ended it."""

    status: int
    preflight: Preflight | None = None
    finished: FinishedRun | None = None
    submitted: slurm_job.SubmittedJob | None = None
    """The job, if the run was submitted to Slurm."""

    def __bool__(self) -> bool:
        """Whether the run and every check of its output succeeded."""
        return self.status == 0

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
        found, finished = self.preflight, self.finished
        return {
            "status": self.status,
            "preflight": found.as_dict() if found else None,
            "finished": finished.as_dict() if finished else None,
            **(self.submitted.as_dict() if self.submitted else {}),
        }


def trained(
    method: str,
    given: Mapping[str, Any],
    rest: Sequence[str] = (),
    *,
    options: Mapping[str, Any] | None = None,
    note: Callable[[str], None] = lambda text: None,
    quiet: bool = False,
    language: str = "en",
    on_preflight: Callable[[Preflight], None] = lambda found: None,
) -> tuple[Run, Outcome]:
    """Do what is asked for with some of the `StartOptions`: train here, or submit the run. Raises ReshardError.

    The engine's options are the words of `rest`, and `options`.
    """
    asked = StartOptions(**given)
    config = Path(asked.config) if asked.config is not None else None
    run = run_of(
        method, {name: value for name, value in given.items() if name in RUN_OPTIONS}, rest, config, note
    )
    run = replace(run, options={**run.options, **(options or {})})
    here = asked.slurm is None
    machine = machine_asked(asked.gpus, asked.gpu_memory, run.ranks.nnodes, dry_run=asked.dry_run and here)

    def accepted(found: Preflight) -> Preflight:
        on_preflight(found)
        problems = [*(config_problems(config) if config else []), *found.problems]
        if problems and not asked.dry_run:
            launch.refuse(found.run, problems)
        if problems:
            raise ReshardError(problems)
        return found

    if here:
        return run, _start(run, asked, machine, accepted, RunScreen(quiet=quiet, language=language))
    return run, _submit(run, asked, accepted)


AcceptPreflight = Callable[[Preflight], Preflight]
"""Shows what was found, and returns it. Raises ReshardError with all problems of the run."""


def _start(
    run: Run,
    asked: StartOptions,
    machine: PlannedMachine | None,
    accepted: AcceptPreflight,
    screen: RunScreen,
) -> Outcome:
    """Train, or be one of the training ranks, and make the final folder.

    One process of a run acts for all: it runs the preflight, and finishes. A dry run can be for another `machine`.
    Raises ReshardError with everything that prevents the run, before anything is started; also if ranks refuse to
    continue.
    """
    if restarted() and launched_rank(run):
        going_on = engine_of(run).checkpoints.last(run.output) is not None
        run, asked = replace(run, resume=going_on), replace(asked, overwrite=asked.overwrite or not going_on)
    leads = launch.leads(run)
    if asked.dry_run:  # another node can look at its own machine, too
        here = leads or not launched_rank(run)
        return Outcome(
            0, accepted(preflight(run, overwrite=asked.overwrite, machine=machine)) if here else None
        )
    if not leads:
        launch.wait_for_first(run)
        return _through(run, None, None, screen)
    looking = look_first(run, overwrite=asked.overwrite)
    with (None if looking.stops else launch.ahead(run, looking.handed_on())) or nullcontext() as started:
        found = accepted((started and started.looked()) or looking.further())
        with output_folder.held(run):
            if asked.overwrite and not run.resume:
                output_folder.clear(run)
            return _through(run, found, started, screen)


def _submit(run: Run, asked: StartOptions, accepted: AcceptPreflight) -> Outcome:
    """Check a run, and submit it to Slurm. Raises ReshardError for all its problems."""
    run, submission = slurm_job.submission_of(run, str(asked.slurm))
    found = preflight(run, overwrite=asked.overwrite)
    found = replace(
        found,
        problems=[each for each in found.problems if each.code not in MACHINE_CODES],
        warnings=[each for each in found.warnings if each.code not in MACHINE_CODES],
        command=[],
    )
    accepted(found)
    if asked.dry_run:
        return Outcome(0, found)
    return Outcome(0, found, submitted=slurm_job.submit(run, submission, overwrite=asked.overwrite))


def _through(run: Run, found: Preflight | None, started: Torchrun | None, screen: RunScreen) -> Outcome:
    """Launch and finish; or run as a rank that does neither the preflight nor the finish."""
    place = launched_rank(run)  # before the launch sets torch's variables
    try:
        record = found.as_dict() if found else {}
        status = launch.launch(run, record, started=started, screen=screen)
        if status or not found:
            return Outcome(status, found)
        from reshard.training.finish import finish  # with all formats

        with signals.raised():
            finished = finish(run)
    except signals.StoppedRun as stop:
        launch.interrupted(run, str(stop), screen, place=place)
        return Outcome(stop.status, found)
    return Outcome(0 if finished.whole else 1, found, finished)
