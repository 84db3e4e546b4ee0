"""A guarded run, from its command to its report."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from reshard.base.errors import ReshardError, raise_all
from reshard.base.interrupts import ignored
from reshard.base.plain_json import put
from reshard.base.start_environment import start_environment
from reshard.runs.checks.command.read_command import StartedProgram, TrainingCommand, read_command
from reshard.runs.checks.command.shell_start import as_started
from reshard.runs.guard.before.checkpoint_output import of_options
from reshard.runs.guard.before.command_checks import Checked, check_command
from reshard.runs.guard.before.resources import models_of
from reshard.runs.guard.end.end_report import EndedCommand, EndReport, continuing, ended
from reshard.runs.guard.options import GuardOptions
from reshard.runs.guard.screen import NOT_CHECKED_MARK, GuardScreen
from reshard.runs.guard.supervise.node_meeting import NodeMeeting, first_to_fail
from reshard.runs.guard.supervise.output_relay import OutputRelay
from reshard.runs.guard.supervise.shell_terminal import ShellTerminal
from reshard.runs.guard.supervise.supervision import starter, supervise
from reshard.runs.guard.watch.memory_watch import MemoryWatcher, oom_kills
from reshard.runs.guard.watch.stack_signal import FOLDER_VARIABLE
from reshard.runs.guard.watch.stacks import read_stack
from reshard.runs.guard.watch.stall import StallLimits, StallWatcher
from reshard.runs.guard.watch.trainer_progress import TrainerProgress
from reshard.runs.guard.watch.watcher import Notice, Watcher

RUNS_FOLDER = "reshard-guard"
"""Where the folders of runs are, in the working folder."""
LOG, REPORT = "output.log", "guard.json"


def guarded(
    words: Sequence[str], options: GuardOptions, *, quiet: bool = False, stdout: int = 1, language: str = "en"
) -> EndReport:
    """Run a command under guard, with its stdout on the descriptor `stdout`. Raises ReshardError if it is refused."""
    here = Path.cwd()  # a command may go on in another folder: command.folder
    environment = start_environment()
    as_started(words, environment, here)
    command = read_command(words, environment, here)
    raise_all(of_options(options, command))
    if command.node_rank:
        options = replace(options, final=None)  # node 0 makes it
    checked = _checked(command, GuardScreen(quiet=quiet)) if options.check else Checked()
    try:
        folder = _folder_for(options)
    except OSError as error:
        raise ReshardError(
            "log-not-writable",
            "the folder for the log cannot be created",
            file=str(error.filename or options.log or RUNS_FOLDER),
            found=error.strerror,
            remedy="choose another one: --log DIR",
        ) from error
    ran = _ran(command, checked, options, folder / LOG)
    starts = as_started(continuing(ran, options) or words, environment, here)
    relay = OutputRelay.of(folder / LOG, stdout=stdout, terminal=ShellTerminal.of(starts, (stdout, 2)))
    screen = GuardScreen(relay, quiet=quiet)
    screen.print(f"output is kept in {folder / LOG}")
    environment[FOLDER_VARIABLE] = str(folder)
    watchers = watchers_of(options, folder, environment)
    kills = oom_kills()
    outcome = supervise(starter(starts, environment, here, relay), relay, watchers, screen.say)
    try:
        ran = replace(ran, oom_kills=oom_kills() - kills)
        report = ended(ran, outcome, options, screen.print)
        report = _among_nodes(report, command, screen)
    except KeyboardInterrupt:
        if not outcome.status:
            raise
        screen.print(f"interrupted; to explain the run: reshard doctor {folder / LOG}")
        report = EndReport(outcome, folder / LOG, ran.output or ran.folder)
    with ignored():
        with suppress(OSError):  # the disk may be full, and the folder gone
            put(folder / REPORT, report.as_dict(language))
        if report.status or not quiet:
            report.print(screen.console, language)
    return report


def _checked(command: TrainingCommand, screen: GuardScreen) -> Checked:
    """Print the warnings about a command, and what could not be checked. Raises ReshardError with its errors."""
    checked = check_command(command)
    for problem in checked.problems:
        if problem.severity != "error":
            screen.say(Notice(problem))
    for sentence in checked.unchecked:
        screen.print(f"{NOT_CHECKED_MARK} {sentence}")
    raise_all(checked.errors)
    return checked


def _ran(command: TrainingCommand, checked: Checked, options: GuardOptions, log: Path) -> EndedCommand:
    """What the report has to know of a command."""
    versions = checked.environment.versions if checked.environment else None
    models = models_of(command)
    return EndedCommand(
        StartedProgram(command.words, command.script, command.module, versions),
        log,
        command.folder,
        options.output or command.output,
        model=models[0] if len(models) == 1 else "",
        trust=str(command.setting("trust_remote_code")).lower() == "true",
        ranks=command.processes * command.nodes,
        tools=checked.tools,
    )


def _among_nodes(report: EndReport, command: TrainingCommand, screen: GuardScreen) -> EndReport:
    """The report, with what another node says if the run failed there first."""
    if command.nodes == 1 or command.rendezvous is None or report.failure is None:
        return report
    screen.print("waiting for the guards of the other nodes")
    meeting = NodeMeeting(command.node_rank, command.nodes, command.rendezvous)
    first = first_to_fail(meeting.exchange(report.summary_for_nodes()))
    return report if first["node"] == command.node_rank else replace(report, elsewhere=first)


def watchers_of(options: GuardOptions, folder: Path, environment: dict[str, str]) -> list[Watcher]:
    """The watchers of a run. `folder` is where its scripts announce themselves."""
    progress = TrainerProgress(options.nan_steps)
    stall = StallWatcher(
        progress,
        partial(read_stack, folder=folder),
        StallLimits(startup=options.startup, stall=options.stall),
        stop=options.on_stall == "stop",
        environment=environment,
    )
    return [progress, stall, MemoryWatcher()]


def _folder_for(options: GuardOptions) -> Path:
    """The folder for the log. In the middle of a project, it is inside of one with a .gitignore.

    If `--log` contains the log of another run, which may still go on, it is a new one in there.
    """
    home = (options.log or Path(RUNS_FOLDER)).absolute()
    if options.log:
        home.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            (home / LOG).touch(exist_ok=False)
            return home
    folder = home / f"{time.strftime('%Y-%m-%d-%H%M%S')}-{os.getpid()}"
    folder.mkdir(parents=True)
    if options.log:
        return folder
    (home / ".gitignore").write_text("*\n", encoding="utf-8")
    return folder
