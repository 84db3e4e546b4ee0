"""Run a request completely: preflight, launch, finish."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reshard.base.errors import Problem, ReshardError
from reshard.training import outputs, signals
from reshard.training.run import Run

if TYPE_CHECKING:
    from reshard.guard.final import Finished
    from reshard.training.launching.ending import Screen
    from reshard.training.launching.slurm import Submitted
    from reshard.training.launching.torchrun import Torchrun
    from reshard.training.outlook import Preflight
    from reshard.training.planning.gpus import Machine


@dataclass(frozen=True)
class Outcome:
    """How a run ended. `status` is that of the command: 0 done, 1 failed, 128 plus the signal that ended it."""

    status: int
    preflight: Preflight | None = None
    finished: Finished | None = None
    submitted: Submitted | None = None
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


def start(
    run: Run,
    config: Path | None = None,
    *,
    dry_run: bool = False,
    machine: Machine | None = None,
    overwrite: bool = False,
    quiet: bool = False,
    language: str = "en",
    on_preflight: Callable[[Preflight], None] = lambda found: None,
) -> Outcome:
    """Train, or be one of the training ranks, and make the final folder.

    One process of a run acts for all: it runs the preflight, and finishes. A dry run can be for another `machine`.
    Raises ReshardError with everything that prevents the run, before anything is started; also if ranks refuse to
    continue.
    """
    from reshard.training.engines import engine_of
    from reshard.training.launching import launch
    from reshard.training.launching.ending import Screen
    from reshard.training.launching.places import place_of
    from reshard.training.preflight import look_first, preflight
    from reshard.training.worker import restarted

    if restarted() and place_of(run):
        going_on = engine_of(run).checkpoints.last(run.output) is not None
        run, overwrite = replace(run, resume=going_on), overwrite or not going_on

    def accepted(found: Preflight) -> Preflight:
        on_preflight(found)
        problems = _problems(found, config)
        if problems and not dry_run:
            launch.refuse(run, problems)
        if problems:
            raise ReshardError(problems)
        return found

    leads, screen = launch.leads(run), Screen(quiet=quiet, language=language)
    if dry_run:  # another node can look at its own machine, too
        here = leads or not place_of(run)
        found = preflight(run, overwrite=overwrite, machine=machine) if here else None
        return Outcome(0, accepted(found) if found else None)
    if not leads:
        launch.wait_for_first(run)
        return _through(run, None, None, screen)
    looking = look_first(run, overwrite=overwrite)
    with (None if looking.stops else launch.ahead(run, looking.handed_on())) or nullcontext() as started:
        found = accepted((started and started.looked()) or looking.further())
        with outputs.held(run):
            if overwrite and not run.resume:
                outputs.clear(run)
            return _through(run, found, started, screen)


def submit(
    run: Run,
    settings: str,
    config: Path | None = None,
    *,
    dry_run: bool = False,
    overwrite: bool = False,
    on_preflight: Callable[[Preflight], None] = lambda found: None,
) -> Outcome:
    """Check a run, and submit it to Slurm with the settings of `--slurm`. Raises ReshardError for all its problems."""
    from reshard.training.launching import slurm
    from reshard.training.preflight import OF_THIS_MACHINE, preflight

    run, submission = slurm.submission_of(run, settings)
    found = preflight(run, overwrite=overwrite)
    found = replace(
        found,
        problems=[each for each in found.problems if each.code not in OF_THIS_MACHINE],
        warnings=[each for each in found.warnings if each.code not in OF_THIS_MACHINE],
        command=[],
    )
    on_preflight(found)
    if problems := _problems(found, config):
        raise ReshardError(problems)
    return Outcome(
        0, found, submitted=None if dry_run else slurm.submit(run, submission, overwrite=overwrite)
    )


def _problems(found: Preflight, config: Path | None) -> list[Problem]:
    from reshard.training.preconditions import config_problems

    return [*(config_problems(config) if config else []), *found.problems]


def _through(run: Run, found: Preflight | None, started: Torchrun | None, screen: Screen) -> Outcome:
    """Launch and finish; or run as a rank that does neither the preflight nor the finish."""
    from reshard.training.final.finish import finish
    from reshard.training.launching import launch
    from reshard.training.launching.places import place_of

    try:
        record = found.as_dict() if found else {}
        status = launch.launch(run, record, started=started, screen=screen)
        if status or not found:
            return Outcome(status, found)
        with signals.raised():
            finished = finish(run)
    except signals.Stopped as stop:
        launch.interrupted(run, str(stop), screen, place=place_of(run))
        return Outcome(stop.status, found)
    return Outcome(0 if finished.whole else 1, found, finished)
