"""Diagnose targets: what each one is, what is wrong with it, and which finding is the cause of the others.

Only what a target needs is imported: for a log, no format of checkpoints, and so no numpy.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

from reshard.base.errors import Problem, ReshardError, raise_all
from reshard.base.foreign_text import clipped, printable_line
from reshard.base.languages import Text
from reshard.base.plain_json import decoded
from reshard.base.suggest import similar_path
from reshard.runs.checks.finding import Finding
from reshard.runs.checks.launch_scripts import check_launches, launch_of
from reshard.runs.checks.location import CONFIG_SUFFIXES, SHELL_SUFFIXES, Launch
from reshard.runs.checks.machine_checks import check_machine
from reshard.runs.checks.phrases import phrase_text
from reshard.runs.checks.root_causes import combined
from reshard.runs.doctor.examination import Examination
from reshard.runs.doctor.log_diagnosis import STDIN, findings_in, log_of
from reshard.runs.doctor.remedy_spelling import RunTools, spelled
from reshard.runs.doctor.run_folders import (
    ARGUMENT_FILES,
    LOG_PATTERNS,
    MAX_LOGS,
    configs_in,
    logs_in,
)
from reshard.runs.doctor.text.ended_well import ended_well
from reshard.runs.doctor.text.log import Log
from reshard.runs.doctor.text.text_files import PROBED_BYTES, encoding_of
from reshard.runs.doctor.unknown_failure import of_unended
from reshard.stores import as_path, typed_path

if TYPE_CHECKING:
    from reshard.commands.inspection import Inspection

WEIGHT_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".distcp"}
TEXT_SUFFIXES = {"", ".log", ".txt", ".out", ".err", ".py", *SHELL_SUFFIXES, *CONFIG_SUFFIXES}
"""Suffixes of files that are no checkpoint if they are text."""
CHECKED_SUFFIXES = (".py", *SHELL_SUFFIXES, *CONFIG_SUFFIXES)
"""Suffixes of files that are no logs."""


def examine(
    *targets: str | PathLike[str],
    on_bytes: Callable[[int], None] = lambda count: None,
    on_read: Callable[[Text], None] = lambda read: None,
) -> Examination:
    """Find what is wrong with targets, seen together, and the facts behind the findings.

    Parameters
    ----------
    *targets : str or path-like
        As for `doctor`. Without a target, only findings about this machine.
    on_bytes : callable
        Called with the number of bytes of logs as they are read.
    on_read : callable
        Called, for each target without findings, with what it was taken for and how much of it was read.

    Returns
    -------
    Examination
        Findings, logs and facts.

    Raises
    ------
    ReshardError
        For every target that cannot be read.
    """
    if not targets:
        return Examination(spelled(check_machine(), RunTools()))
    paths = (str(each) if _is_plain(str(each)) else str(typed_path(str(each))) for each in targets)
    named = list(dict.fromkeys(paths))
    launch = next(filter(None, map(launch_of, named)), None)
    seen = _Seen(on_bytes, on_read, launch)
    for target in named:
        seen.of_usage(target)
    of_targets = [finding for target in named for finding in seen.of_target(target)]
    raise_all(seen.problems)
    of_targets += seen.without_end(of_targets)
    findings = spelled((typed(finding, seen.commands) for finding in combined(of_targets)), seen.usage)
    return Examination(findings, seen.logs, seen.usage.texts, seen.inspected, of_targets, seen.logs_left_out)


def _is_plain(target: str) -> bool:
    """Whether a target is a local path that needs no expansion: it is shown as it was typed."""
    return "://" not in target and not target.startswith("~")


@dataclass
class _Seen:
    """What the targets of one diagnosis have shown besides findings."""

    on_bytes: Callable[[int], None]
    on_read: Callable[[Text], None]
    launch: Launch | None = None
    """How a shell script among the targets starts the others."""
    commands: list[str] = field(default_factory=list)
    """Commands that convert a checkpoint."""
    problems: list[Problem] = field(default_factory=list)
    """Why targets cannot be read."""
    usage: RunTools = field(default_factory=RunTools)
    """What was run, according to all targets."""
    logs: list[Log] = field(default_factory=list)
    logs_left_out: int = 0
    inspected: dict[str, Inspection | None] = field(default_factory=dict)
    ends_well: bool = False
    """Whether a log says that the run ended well: one rank says it for all."""
    unended: Finding | None = None
    """The answer for the first log that says neither this nor why it failed."""

    def of_usage(self, target: str) -> None:
        """Record what a script or a config shows about the run; logs are read later, only once."""
        path = as_path(target)
        if target == STDIN or not path.exists():
            return
        if path.is_dir():
            texts = [*configs_in(path), *(path / name for name in ARGUMENT_FILES if (path / name).is_file())]
        else:
            texts = [path] * path.name.endswith(CHECKED_SUFFIXES)
        for each in texts:
            with each.open("rb") as file:
                self.usage.see(decoded(file.read(MAX_TEXT_BYTES)), str(each))

    def of_target(self, target: str) -> Sequence[Finding]:
        """The findings of one target."""
        try:
            if is_checkpoint(target):
                path = as_path(target)
                return self._of_folder(path) if path.is_dir() else self._of_weights(path)
            return self._of_file(readable(target))
        except ReshardError as error:
            self.problems += error.problems
            return []

    def _of_file(self, path: Path | None) -> Sequence[Finding]:
        """The findings of a file, by its suffix; without a path, those of standard input."""
        suffix = path.suffix if path else ""
        if suffix == ".py":
            from reshard.runs.checks.script import read_source
            from reshard.runs.checks.script_checks import check_script

            return check_script(read_source(str(path)), self.launch)
        if suffix in SHELL_SUFFIXES:
            return check_launches(str(path))
        if suffix in CONFIG_SUFFIXES:
            from reshard.runs.checks.config_checks import check_config

            return check_config(str(path), launch=self.launch)
        return self._of_text(str(path) if path else STDIN)

    def _of_text(self, target: str, on_read: Callable[[Text], None] | None = None) -> Sequence[Finding]:
        """The findings of a log."""
        on_read = on_read or self.on_read
        count = 0

        def counted(lines: int) -> None:
            nonlocal count
            count += lines

        log = log_of(target, self.on_bytes, counted)
        findings = findings_in(log, self.usage)
        if all(each.severity != "error" for each in findings):
            self._note_end(log, count, on_read)
        self._keep(log, has_findings=bool(findings))
        return findings

    def _note_end(self, log: Log, count: int, on_read: Callable[[Text], None]) -> None:
        """Note whether a log without errors says that its run ended well, and report what was read."""
        printable_line = {"target": "stdin" if log.name == STDIN else log.name, "count": count}
        if line := ended_well(log.lines):
            self.ends_well = True
            on_read(
                phrase_text(
                    "read-end", line=line.number, said=clipped(line.text.strip(), MAX_SAID), **printable_line
                )
            )
        else:
            self.unended = self.unended or of_unended(log)
            on_read(phrase_text("read-lines", **printable_line))

    def without_end(self, findings: Sequence[Finding]) -> list[Finding]:
        """The answer if no target shows an error, and none of the logs says that the run ended well."""
        is_known = self.ends_well or any(each.severity == "error" for each in findings)
        return [] if is_known or self.unended is None else [self.unended]

    def _keep(self, log: Log, has_findings: bool) -> None:
        """Keep a log for its facts, unless there are many: half of the room is for those with findings."""
        lines = sum(len(each.lines) for each in [*self.logs, log])
        if not self.logs or lines <= (MAX_LOG_LINES if has_findings else MAX_LOG_LINES // 2):
            self.logs.append(log)
        else:
            self.logs_left_out += 1

    def _of_weights(self, path: Path) -> Sequence[Finding]:
        from reshard.runs.checks.checkpoint_checks import check_checkpoint

        self.inspected[str(path)] = None
        findings, command = check_checkpoint(path, partial(self.inspected.__setitem__, str(path)))
        self.commands.append(command)
        return findings

    def _of_folder(self, folder: Path) -> Sequence[Finding]:
        """The findings of a checkpoint, or of the folder of a run with its logs and configs."""
        from reshard.runs.checks.config_checks import check_config

        logs, configs = logs_in(folder), configs_in(folder)
        findings: list[Finding] = []
        without_weights: ReshardError | None = None
        try:
            findings += self._of_weights(folder)
        except ReshardError as error:
            without_weights = error
        findings += self._of_logs(folder, logs)
        for path in configs:
            with suppress(ReshardError):  # files of other tools
                findings += check_config(str(path), launch=self.launch)
        if without_weights and not (findings or logs):
            raise nothing_in(without_weights)
        return findings

    def _of_logs(self, folder: Path, logs: Sequence[Path]) -> list[Finding]:
        """The findings of the logs of a run. Those without any are counted if they are many."""
        clean: list[Text] = []
        findings = [each for path in logs[:MAX_LOGS] for each in self._of_text(str(path), clean.append)]
        if len(clean) > MAX_NAMED_LOGS:
            clean = [
                phrase_text("read-logs", count=len(clean), total=min(len(logs), MAX_LOGS), target=folder)
            ]
        if len(logs) > MAX_LOGS:
            clean.append(phrase_text("logs-not-read", count=len(logs) - MAX_LOGS, target=folder))
        for each in clean:
            self.on_read(each)
        return findings


MAX_LOG_LINES = 400_000
"""Lines of logs that are kept for their facts, in about 150 MB."""
MAX_SAID = 100
"""Characters of the line that says that a run ended well."""
MAX_NAMED_LOGS = 8
"""Logs without findings that are named one by one."""


def nothing_in(error: ReshardError) -> ReshardError:
    """The error for a folder that has no logs either."""
    from reshard.formats.not_found import NOTHING_FOUND, PASS_WEIGHTS

    return ReshardError(
        Problem(
            "folder-without-logs",
            "neither a checkpoint nor a log is in this folder",
            file=problem.file,
            expected=f"a checkpoint, or logs: {', '.join(LOG_PATTERNS)}",
            found=problem.found,
            remedy="pass the console output of the run: many programs print it and do not save it",
        )
        if problem.code == NOTHING_FOUND and problem.remedy == PASS_WEIGHTS
        else problem
        for problem in error.problems
    )


MAX_TEXT_BYTES = 1 << 20
"""Bytes at the beginning of a script or a config that show what was run."""


def bytes_of_logs(*targets: str) -> int:
    """The total that `on_bytes` will report; the size of standard input is unknown."""
    paths = [Path(target) for target in targets if target != STDIN]
    files = [path for path in paths if path.is_file() and not path.name.endswith(CHECKED_SUFFIXES)]
    files += [log for path in paths if path.is_dir() for log in logs_in(path)[:MAX_LOGS]]
    return sum(path.stat().st_size for path in files)


def is_checkpoint(target: str) -> bool:
    """Whether a target is a folder, or a weight file."""
    path = as_path(target)
    if target == STDIN or path.is_dir():
        return target != STDIN
    if not path.exists() or path.suffix in WEIGHT_SUFFIXES or _is_text(path):
        return path.suffix in WEIGHT_SUFFIXES and path.exists()
    from reshard.formats import foreign

    return foreign.recognized(path) is not None


def _is_text(path: Path) -> bool:
    """Whether a file is a text that is no checkpoint, by its suffix and its first bytes."""
    if path.suffix not in TEXT_SUFFIXES or not path.is_file():
        return False
    with path.open("rb") as file:
        return encoding_of(file.read(PROBED_BYTES)) is not None


def readable(target: str) -> Path | None:
    """The path of a text file, None for standard input. Raises ReshardError if it cannot be read."""
    if target == STDIN:
        return None
    path = as_path(target)
    if not path.exists():
        raise ReshardError(
            "target-not-found",
            "no such file or directory",
            file=target,
            expected="a log, a script, a config, a checkpoint, or - for standard input",
            remedy=f"did you mean {similar}?" if (similar := similar_path(path)) else "check the path",
        )
    if path.suffix == ".ipynb":
        raise ReshardError(
            "notebook-unreadable",
            "notebooks are not read",
            file=target,
            expected="a script, and the error in a text file",
            remedy=f"save the code as a script: jupyter nbconvert --to script {shlex.quote(target)}",
        )
    if not path.is_file():
        raise ReshardError(  # it is opened twice, and may never have a writer
            "target-not-a-regular-file",
            "not a regular file",
            file=target,
            remedy="pipe its content in: COMMAND | reshard doctor -",
        )
    with path.open("rb") as file:
        begin = file.read(PROBED_BYTES)
    if not begin or encoding_of(begin) is None:
        raise ReshardError(
            "target-not-text" if begin else "target-empty",
            "this file is not text" if begin else "this file is empty",
            file=str(path),
            expected="a log, a script, a config, or a checkpoint",
            remedy="pass a file that the run wrote, or pipe a log: … 2>&1 | reshard doctor -",
        )
    return path


_CONVERT = re.compile(r"^reshard convert .+ --to huggingface.*$", re.MULTILINE)


def typed(finding: Finding, commands: Sequence[str]) -> Finding:
    """A finding whose remedy names the given checkpoint where it explains how to convert one, if there is only one."""
    if len(commands) != 1 or not commands[0] or "--to" in commands[0].split():
        return finding
    cure = (
        _CONVERT.sub(lambda _: printable_line(commands[0]), text)
        for text in (finding.remedy.en, finding.remedy.zh)
    )
    return replace(finding, remedy=Text(*cure))
