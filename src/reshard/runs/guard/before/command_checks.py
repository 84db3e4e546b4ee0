"""Checks of a command before it starts: its script and configs, its Python, and this machine."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from reshard.base.errors import Problem, ReshardError
from reshard.runs.checks.command.command_settings import (
    CONFIG_OPTIONS,
    FOREIGN_CONFIG_OPTIONS,
    plain_source,
    source_of,
    typed,
)
from reshard.runs.checks.command.read_command import TrainingCommand
from reshard.runs.checks.environment import Environment
from reshard.runs.checks.finding import Finding
from reshard.runs.checks.launch_scripts import check_launches, uneven_layout
from reshard.runs.checks.location import CONFIG_SUFFIXES, SHELL_SUFFIXES, Launch, Location
from reshard.runs.checks.machine_checks import check_machine
from reshard.runs.checks.root_causes import combined
from reshard.runs.doctor.remedy_spelling import RunTools, spelled
from reshard.runs.guard.before import checkpoint_output, resources
from reshard.runs.guard.before.command_python import python_answer
from reshard.runs.guard.before.data_records import data_problems
from reshard.runs.guard.before.model_folders import check_models


@dataclass
class Checked:
    """What the checks found. Errors among the `problems` stop the start."""

    problems: list[Problem] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)
    """What could not be checked, and why, in a sentence each."""
    environment: Environment | None = None
    tools: frozenset[str] = frozenset()
    """The programs that the command uses, by their names in remedies."""

    @property
    def errors(self) -> list[Problem]:
        return [problem for problem in self.problems if problem.severity == "error"]


def check_command(command: TrainingCommand) -> Checked:
    """All problems of a command that can be seen before it starts. Nothing of it is executed or imported."""
    pool = ThreadPoolExecutor(1)
    pending = pool.submit(python_answer, command)  # meanwhile, other checks go on
    pool.shutdown(wait=False)
    checked = Checked()
    text = "\n".join(_texts(command))
    checked.problems += resources.disk(command, resources.weights_of(command), text)
    checked.problems += _of_output(command, text)
    answer = pending.result()
    environment = checked.environment = answer.environment
    checked.problems += _missing(command, answer.missing)
    checked.problems += resources.port(command, environment)
    checked.problems += data_problems(command)
    findings = list(_of_files(command, answer.versions, checked))
    findings += _of_settings(command, answer.versions) if command.launcher else []
    findings += check_models(command, answer.versions)
    findings += _of_environment(command, environment, text) if environment else []
    usage = RunTools()
    usage.see(text)
    checked.tools = frozenset(usage.found)
    checked.problems += spelled(map(judged, combined(findings)), usage) if findings else []
    checked.unchecked += _unchecked(command, environment, answer.silence)
    return checked


def judged(finding: Finding) -> Finding:
    """A finding that stops the start only if it is sure."""
    is_guess = finding.severity == "error" and finding.certainty != "sure"
    return replace(finding, severity="warning") if is_guess or finding.code in POSSIBLE_ERRORS else finding


POSSIBLE_ERRORS = (
    "env-requirement",
    "env-trl-transformers",
    "script-first-rank-only",
    "sharded-save-model",
    "config-unknown-key",
)
"""Errors with which a run can still end well, or whose program may be another than it seems."""


def _texts(command: TrainingCommand) -> Iterator[str]:
    """The words, files and settings that show what a run does."""
    yield " ".join(command.words)
    for path in (*([command.script] if command.script else []), *command.configs):
        if path.is_file():
            yield path.read_text("utf-8", "replace")


def _of_files(command: TrainingCommand, installed: Mapping[str, str], checked: Checked) -> Iterator[Finding]:
    """What is wrong with script and configs, for the number of processes that will run them."""
    for path in (*_shell_scripts(command), *([command.script] if command.script else []), *command.configs):
        try:
            findings = _of_file(path, command, installed)
        except ReshardError as error:
            checked.problems += error.problems if path.exists() else [_lost(path, command)]
            continue
        yield from findings


def _shell_scripts(command: TrainingCommand) -> list[Path]:
    paths = (command.folder / word for word in command.words if word.endswith(SHELL_SUFFIXES))
    return [path for path in paths if path.is_file()]


def _of_file(path: Path, command: TrainingCommand, installed: Mapping[str, str]) -> list[Finding]:
    place = Location("the command", None, " ".join(command.words))
    launch = Launch(place, command.processes, command.processes * command.nodes)
    if path.suffix in SHELL_SUFFIXES:
        return check_launches(str(path))
    if path.suffix in CONFIG_SUFFIXES:
        from reshard.runs.checks.config_checks import check_config

        return check_config(str(path), installed, launch, refuses_unknown=_refuses_unknown(command))
    from reshard.runs.checks.script_checks import check_script

    return check_script(replace(source_of(str(path)), installed=installed), launch)


def _refuses_unknown(command: TrainingCommand) -> bool:
    """Whether the command ends if its config has keys that it does not know; TRL's own scripts ignore them."""
    from reshard.runs.checks.parser_options import refuses_unknown

    if command.script is None:
        return command.launcher == "trl" or not command.module.startswith("trl.scripts.")
    return refuses_unknown(plain_source(command.script))


def _lost(path: Path, command: TrainingCommand) -> Problem:
    return Problem(
        "script-not-found",
        "the script does not exist",
        file=str(path),
        found=f"{command.launcher} in {command.folder}",
        remedy="check the path; it is relative to the command's working directory",
    )


def _missing(command: TrainingCommand, modules: tuple[str, ...]) -> Iterator[Problem]:
    for name in modules:
        yield Problem(
            "module-not-installed",
            f"this Python has no module {name}",
            found=" ".join(command.interpreter or ()),
            remedy=f"activate the environment that has it, or install it: {' '.join(command.interpreter or ())} "
            f"-m pip install {name.split('.')[0]}",
        )


RESUME_PATTERN = re.compile(
    r"resume|load_checkpoint|--load\b|overwrite_output_dir|from_checkpoint|--finetune[= ]false"
)


def _of_output(command: TrainingCommand, text: str) -> Iterator[Problem]:
    if command.output is not None:
        yield from checkpoint_output.unwritable(command.output, _output_option(command))
        if not RESUME_PATTERN.search(text):
            yield from checkpoint_output.occupied(command.output)


def _output_option(command: TrainingCommand) -> str:
    """How the command names its output."""
    name = next((name for name, (value, _) in command.settings.items() if _is(command, value)), "output_dir")
    return name if "." in name else f"--{name}"


def _is(command: TrainingCommand, value: Any) -> bool:
    return isinstance(value, str) and command.folder / value == command.output


# --------------------------------------------------------------------------------------------------- settings


def _of_settings(command: TrainingCommand, installed: Mapping[str, str]) -> Iterator[Finding]:
    """What is wrong with the options of a command, and with what they and its configs say together."""
    from reshard.runs.checks.parser_options import check_options

    tool = "trl" if command.module.startswith("trl.scripts.") else TOOL_PACKAGES.get(command.launcher, "")
    options = {
        name: command.settings[name][1]
        for name in typed(command.arguments, "")
        if name in command.settings and name not in CONFIG_OPTIONS
    }
    if not tool:
        options = {name: place for name, place in options.items() if place.text.startswith("--")}
    yield from check_options(options, plain_source(command.script), tool, installed)
    if not _shell_scripts(command):
        yield from uneven_layout(command, Location("the command", None, " ".join(command.words)))


TOOL_PACKAGES = {"llamafactory": "llamafactory", "swift": "ms-swift"}
"""Tools that refuse options of other releases, and their packages."""


# ------------------------------------------------------------------------------------------------ environment


def _of_environment(command: TrainingCommand, environment: Environment, text: str) -> Iterator[Finding]:
    """The doctor's findings about the environment as the launcher will make it for the ranks."""
    variables = dict(environment.variables)
    if command.has_ranks:
        world = command.processes * command.nodes
        variables |= {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(command.processes), "RANK": "0"}
    for finding in check_machine(replace(environment, variables=variables)):
        concerns = CONCERNS.get(finding.code)
        if concerns is None or concerns(command, text):
            yield finding


def _on_gpus(command: TrainingCommand, text: str) -> bool:
    """Whether nothing shows that the run uses the CPU."""
    hidden = command.environment.get("CUDA_VISIBLE_DEVICES")
    wanted = re.search(r"\bgloo\b|use_cpu|no_cuda|--cpu\b|\"cpu\"|'cpu'", text)
    return (hidden is None or hidden.strip() not in ("", "-1")) and wanted is None


CONCERNS: Mapping[str, Callable[[TrainingCommand, str], bool]] = {
    "env-more-processes-than-gpus": _on_gpus,
    "env-torch-without-cuda": _on_gpus,
    "env-no-bf16": lambda command, text: _on_gpus(command, text) and "bf16" in text,
    "env-old-driver": _on_gpus,
    "env-capability-not-built": _on_gpus,
    "env-device-map-tp": lambda command, text: (
        "device_map" in text and (command.has_ranks or "WORLD_SIZE" in command.environment)
    ),
    "env-accelerate-fsdp2-lora": lambda command, text: bool(
        re.search("fsdp", text, re.IGNORECASE) and re.search("lora|peft", text, re.IGNORECASE)
    ),
    "env-trl-transformers": lambda command, text: "trl" in text,
    "env-small-shm": lambda command, text: command.processes > 1,
}
"""When a finding about the environment concerns a command; the others always do."""


# -------------------------------------------------------------------------------------------------- unchecked


def _unchecked(command: TrainingCommand, environment: Environment | None, silence: str) -> Iterator[str]:
    if not command.launcher:
        yield f"The script was not checked: reshard does not know what `{command.words[0]}` starts."
    elif command.script is None and command.module:
        yield f"The code of the module {command.module} was not checked, only its settings."
    if environment is None:
        yield f"The installed packages were not checked: {silence}."
    for name in FOREIGN_CONFIG_OPTIONS:
        value = command.setting(name)
        if isinstance(value, str) and value.endswith(".json") and not (command.folder / value).is_file():
            yield f"{name} was not checked: {value} does not exist."
