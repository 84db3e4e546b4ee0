"""The end of a guarded command: which rank failed first and why, the last checkpoint, and how to continue.

Exit status: that of the command; 128 + N if the callback says that signal N stopped the run, though launchers make 1
of it; 1 if the guard ended it, or if the folder of `--final` did not pass its checks.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from reshard.base.later_imports import imported_later
from reshard.runs.guard.options import GuardOptions
from reshard.runs.guard.supervise.signal_passing import STOPPED, signal_name
from reshard.runs.guard.supervise.supervision import CommandOutcome

with imported_later(__name__):  # what explains a failure takes a second, and a good run needs none of this
    from rich.console import Console

    from reshard.base.errors import Problem, listed
    from reshard.base.foreign_text import printable_line
    from reshard.final.final_folder import (
        FinalFolder,
        FinalRequest,
        damaged_base,
        final_of,
        without_checkpoint,
    )
    from reshard.final.saved_checkpoints import SavedCheckpoints, saved_in
    from reshard.runs.checks.command.read_command import StartedProgram
    from reshard.runs.guard.end.failure import Failure, RunEvidence, print_what, print_why, read_failure
    from reshard.runs.guard.end.log_parts import read_parts
    from reshard.runs.guard.end.requeue import is_cured, requeue, restarts
    from reshard.runs.guard.end.resume import Resume, resume_of
    from reshard.runs.guard.watch.watcher import Notice

PHRASES = {
    "en": {
        "elsewhere": "{} on node {} {}: {}",
        "there": "the guard of that node says why",
        "log": "all that the command printed: {}",
        "left": "ranks that still run, and hold their GPUs and ports: kill {}",
        "interrupted": "the command was ended by {}",
        "last": "the last complete checkpoint: {}",
        "older": "the last complete checkpoint is from before this start: {}",
        "resumable": "the last one that a run can continue from: {}",
        "not resumable": "a run cannot continue from it: it lacks {}",
        "none": "no complete checkpoint was found in {}",
        "incomplete": "not used: {} ({})",
        "resume": "continue from it: {}",
        "advice": "to continue: {}",
        "final": "the checked folder: {}",
        "not made": "--final: {} was not made, because the run did not end well",
        "unchanged": "--final: {} is as it was before the run, which did not end well",
        "unchecked": "the folder did not pass its checks, and is kept as {}",
    },
    "zh": {
        "elsewhere": "{}（节点 {}）{}：{}",
        "there": "原因见该节点上的 guard",
        "log": "命令的全部输出：{}",
        "left": "仍在运行、占用 GPU 和端口的 rank：kill {}",
        "interrupted": "命令被 {} 结束",
        "last": "最近的完整检查点：{}",
        "older": "最近的完整检查点早于这次启动：{}",
        "resumable": "最近一个可以续训的检查点：{}",
        "not resumable": "不能从它续训：缺少 {}",
        "none": "在 {} 中没有找到完整的检查点",
        "incomplete": "未采用：{}（{}）",
        "resume": "从它继续：{}",
        "advice": "要继续：{}",
        "final": "已检查的目录：{}",
        "not made": "--final：运行没有正常结束，未生成 {}",
        "unchanged": "--final：运行没有正常结束，{} 保持原样",
        "unchecked": "目录没有通过检查，保留为 {}",
    },
}
MAX_SENTENCE = 300
"""Characters of an error that the guards of other nodes are told."""
MAX_SHOWN = 3
"""Incomplete checkpoints, and tensors of a problem, that are named."""


@dataclass(frozen=True)
class EndedCommand:
    """A command that has ended. `started` says what it was, `output` where its checkpoints are, if that is known.

    `model` is the base that its settings name, `trust` their trust_remote_code; `tools` are those that it uses, as the
    doctor calls them.
    """

    started: StartedProgram
    log: Path
    folder: Path
    output: Path | None = None
    model: str = ""
    trust: bool = False
    ranks: int = 0
    tools: frozenset[str] = frozenset()
    oom_kills: int = 0
    """Since the start."""


@dataclass(frozen=True)
class EndReport:
    """How a command ended, and what is left of it."""

    outcome: CommandOutcome
    log: Path | None
    where: Path
    failure: Failure | None = None
    saved: SavedCheckpoints | None = None
    resume: Resume | None = None
    final: FinalFolder | None = None
    place: Path | None = None
    """The folder of `--final`."""
    requeued: str | Problem = ""
    elsewhere: Mapping[str, Any] | None = None
    """What the guard of another node says, if the run failed first there."""

    @property
    def status(self) -> int:
        """The exit status of the guard."""
        if self.outcome.stopped:
            return 1
        return self.outcome.status or int(self.final is not None and not self.final.whole)

    def as_dict(self, language: str = "en") -> dict[str, Any]:
        """For `--json`."""
        checkpoint = self.saved.last if self.saved else None
        return {
            **self.outcome.as_dict(),
            "status": self.status,
            "log": str(self.log) if self.log else None,
            "failure": self.failure.as_dict(language) if self.failure else None,
            "checkpoint": str(checkpoint.path) if checkpoint else None,
            "step": checkpoint.step if checkpoint else None,
            "resumable": str(self.saved.resumable.path) if self.saved and self.saved.resumable else None,
            "incomplete": self._incomplete(),
            "resume": list(self.resume.words) if self.resume and self.resume.words else None,
            "advice": self.resume.advice if self.resume else "",
            "final": self.final.as_dict() if self.final else None,
            "requeued": str(self.requeued),
            "elsewhere": dict(self.elsewhere) if self.elsewhere else None,
        }

    def summary_for_nodes(self) -> dict[str, Any]:
        """What the guards of other nodes are told."""
        assert self.failure
        printable_line = " ".join(self.failure.shown[-1:])[:MAX_SENTENCE]
        return {
            "who": self.failure.who,
            "did": self.failure.did,
            "follows": self.failure.follows,
            "shown": printable_line,
        }

    def _incomplete(self) -> dict[str, list[str]]:
        """What later checkpoints lack."""
        if self.saved is None:
            return {}
        steps = [each for each in self.saved.checkpoints if each.diverged and each.step is not None]
        reasons = {str(each.path): [f"lacks {name}" for name in each.lacks] for each in steps}
        return {**{str(path): lost for path, lost in self.saved.incomplete.items()}, **reasons}

    def print(self, console: Console, language: str = "en") -> None:
        """Print it; the cause and its cure come last."""
        lines = self._lines(PHRASES[language])
        if self.failure is None or self.elsewhere:
            _print(lines, console)
            return
        print_what(self.failure, console)
        _print(lines, console)
        print_why(self.failure, console, language)

    def _lines(self, texts: dict[str, str]) -> Iterable[str]:
        if self.elsewhere:
            parts = [self.elsewhere.get(name, "") for name in ("who", "node", "did", "shown")]
            yield ""
            yield printable_line(texts["elsewhere"].format(*parts))
            yield texts["there"]
        if self.outcome.signal and not self.failure:
            yield texts["interrupted"].format(signal_name(self.outcome.signal))
        if self.outcome.status and self.outcome.left:
            yield texts["left"].format(" ".join(map(str, self.outcome.left)))
        if self.outcome.status and self.log:
            yield texts["log"].format(printable_line(str(self.log)))
        if self.saved is not None:
            yield from map(printable_line, self._of_checkpoints(texts))
        if self.final:
            yield from map(printable_line, self._of_final(texts))
        elif self.place:
            yield printable_line(texts["unchanged" if self.place.exists() else "not made"].format(self.place))
        yield from str(self.requeued).splitlines()

    def _of_checkpoints(self, texts: dict[str, str]) -> Iterable[str]:
        import shlex

        for path, lost in list(self._incomplete().items())[:MAX_SHOWN]:
            yield texts["incomplete"].format(path, "; ".join(lost[:MAX_SHOWN]))
        checkpoint = self.saved.last if self.saved else None
        if checkpoint is None:
            yield texts["none"].format(self.where)
            return
        yield texts["last" if checkpoint.when >= self.outcome.began else "older"].format(checkpoint.path)
        if checkpoint.lacks:
            yield texts["not resumable"].format(", ".join(checkpoint.lacks))
            if self.saved and self.saved.resumable:
                yield texts["resumable"].format(self.saved.resumable.path)
        if self.resume:
            advice = shlex.join(self.resume.words) if self.resume.words else self.resume.advice
            yield texts["resume" if self.resume.words else "advice"].format(advice)

    def _of_final(self, texts: dict[str, str]) -> Iterable[str]:
        assert self.final
        for check in self.final.checks:
            yield f"{check.mark} {check.name}: {check.found}"
            for _, alike in groupby(check.problems, lambda problem: problem.code):
                yield from _together(list(alike))
        if self.final.path.is_dir():
            yield texts["final" if self.final.whole else "unchecked"].format(self.final.path)


def _print(lines: Iterable[str], console: Console) -> None:
    for line in lines:
        console.print(line, markup=False)


def _together(problems: list[Problem]) -> list[str]:
    """Problems of one kind, without their message: the first, with the tensors of all."""
    names = listed([each.tensor for each in problems if each.tensor], MAX_SHOWN)
    return str(replace(problems[0], tensor=names or None)).splitlines()[1:]


def ended(
    ran: EndedCommand,
    outcome: CommandOutcome,
    options: GuardOptions,
    note: Callable[[str], None] = lambda text: None,
) -> EndReport:
    """What a command left behind, and what to do. `note` prints what takes long.

    A good run without `--final` costs nothing. Below a working folder, only what has changed since the start was saved
    by the run.
    """
    number = _stopped_by(ran.log) if outcome.status and not outcome.stopped else 0
    if number:
        outcome = replace(outcome, status=128 + number, signal=number)
    report = EndReport(outcome, ran.log, ran.output or ran.folder, place=options.final)
    if not outcome.failed and not options.final:
        return report
    saved = saved_in(report.where, 0.0 if ran.output else outcome.began)
    if not outcome.failed:
        return replace(report, final=_final(ran, saved, options, note))
    failure = _failure(ran, outcome, options)
    resume = resume_of(ran.started, saved.resumable) if saved.resumable else None
    requeued = _requeued(ran, outcome, options, failure, resume)
    return replace(report, failure=failure, saved=saved, resume=resume, requeued=requeued)


def _failure(ran: EndedCommand, outcome: CommandOutcome, options: GuardOptions) -> Failure | None:
    if outcome.signal and not outcome.stopped:
        return None
    if outcome.stopped:
        return Failure.of_notice(_with_cause(outcome.stopped, ran, options))
    scripts = (ran.started.script,) if ran.started.script else ()
    how = (ran.ranks, ran.oom_kills, outcome.status, tuple(outcome.notices))
    return read_failure(ran.log, RunEvidence(ran.tools, scripts, ran.output, *how))


def _with_cause(stopped: Notice, ran: EndedCommand, options: GuardOptions) -> Notice:
    """Why the guard ended the run. A NaN loss can come from the weights that the run started with."""
    named = str(options.base or ran.model)
    if stopped.problem.code != "loss-not-finite" or not named:
        return stopped
    damaged = damaged_base(ran.folder, named)
    if damaged is None:
        return stopped
    return replace(stopped, problem=damaged, lines=(str(stopped.problem.found), *stopped.lines))


def _final(
    ran: EndedCommand, saved: SavedCheckpoints, options: GuardOptions, note: Callable[[str], None]
) -> FinalFolder:
    """The folder of `--final`."""
    assert options.final
    if saved.weights is None:
        return without_checkpoint(options.final, ran.output or ran.folder)
    note(f"converting {saved.weights.path} to {options.final}, and checking it")
    request = FinalRequest(options.merge, options.base, ran.model, ran.trust, ran.folder)
    return final_of(saved.weights, options.final, request)


def _requeued(
    ran: EndedCommand,
    outcome: CommandOutcome,
    options: GuardOptions,
    failure: Failure | None,
    resume: Resume | None,
) -> str | Problem:
    """A job is not requeued if it would begin again, although there is a checkpoint."""
    goes_on = resume is None or (ran.output is not None and resume.words is not None)
    is_wanted = options.requeue and goes_on and is_cured(outcome.signal, failure)
    return requeue(options.requeue) if is_wanted else ""


def _stopped_by(log: Path) -> int:
    """The signal after which the callback saved a checkpoint and stopped the run; 0 if it does not say so."""
    with suppress(OSError):  # the command may have cleaned the working folder
        signals = re.findall(STOPPED.format(r"\b(SIG[A-Z0-9]+)", r"\d+"), read_parts(log))
        return signal.Signals[signals[-1]].value if signals else 0
    return 0


def continuing(ran: EndedCommand, options: GuardOptions) -> tuple[str, ...] | None:
    """In a job that Slurm has requeued for `--requeue`: the command that continues, if there is a checkpoint."""
    if not (options.requeue and restarts() and ran.output):
        return None
    checkpoint = saved_in(ran.output).resumable
    return resume_of(ran.started, checkpoint).words if checkpoint else None
