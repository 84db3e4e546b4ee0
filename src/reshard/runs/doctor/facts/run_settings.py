"""What a run was given, as its logs, scripts and configs state it: versions, commands, settings, each with its line."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import takewhile
from typing import Any

from packaging.utils import canonicalize_name

from reshard.base.errors import ReshardError
from reshard.runs.checks.command.options import options_in
from reshard.runs.checks.config_text import read_config
from reshard.runs.checks.location import CONFIG_SUFFIXES, SHELL_SUFFIXES
from reshard.runs.doctor.text.log import Log, LogLine
from reshard.runs.doctor.text.run_details import LOGGED_PACKAGES, command_in
from reshard.runs.doctor.text.text_files import ELLIPSIS

Fact = dict[str, object]


def at(file: str, line: int | None) -> Fact:
    """Where a fact was seen."""
    return {"file": file, "line": line}


_NAME = "|".join((*LOGGED_PACKAGES, "pytorch", "python", "sglang", "ray")).replace("-", "[-_]")
_VERSION = r"v?(?P<version>\d+(?:\.\d+)+(?:[.+]?[a-z][\w.+]*)?)(?![\w.])"
_STATED = re.compile(
    rf"^\s*(?:[-*]\s+|\[(?:pip3?|conda)\]\s+)?[`'\"]?(?P<name>{_NAME})[`'\"]?"
    rf"(?:\s*==|:\s+|\s+version(?:\s\([^)]*\))?\s?[:.]*\s*|\s+info\s\.+\s|\s+(?=\S+$)){_VERSION}",
    re.IGNORECASE,
)
"""A line that states an installed version: of `pip list`, of the reports of environments that programs print."""
_INSTALLED = re.compile(
    rf"\bbut you have (?P<name>[\w.-]+) {_VERSION}"
    r"|\b(?:vLLM API server version |LLM engine \()v?(?P<of>\d[\w.+]*)"
    r'|^\s*File "\S*/lib(?:64)?/(?P<python>python)(?P<its>3\.\d+)/'
)
_NEEDED = re.compile(r"(?i)requir|need|newer|later|higher|at least|minimum|recommend|upgrade|compatible")
"""Words of lines about versions that are not the installed ones."""


def versions_in(logs: Sequence[Log]) -> Iterator[Fact]:
    """The installed versions that logs state, each where it is first seen."""
    seen: set[tuple[str, str]] = set()
    for file, number, name, version in _stated(logs):
        package = "torch" if name.lower() == "pytorch" else canonicalize_name(name)
        if (package, version) not in seen:
            seen.add((package, version))
            yield {"package": package, "version": version, **at(file, number)}


def _stated(logs: Sequence[Log]) -> Iterator[tuple[str, int, str, str]]:
    for log in logs:
        for line in log.lines:
            for name, version in _versions_of(line.text):
                yield log.name, line.number, name, version


def _versions_of(text: str) -> Iterator[tuple[str, str]]:
    if text.startswith("Successfully installed "):
        parts = (each.rpartition("-") for each in text.split()[2:])
        yield from ((name, version) for name, _, version in parts if name)
    for match in _INSTALLED.finditer(text):
        yield match["name"] or match["python"] or "vllm", match["version"] or match["its"] or match["of"]
    if (stated := _STATED.match(text)) and not _NEEDED.search(text):
        yield stated["name"], stated["version"]


def commands_in(logs: Sequence[Log], texts: Mapping[str, str]) -> Iterator[Fact]:
    """The first command of each log and shell script that starts a run."""
    commands = [(log.name, log.command) for log in logs]
    for file, text in texts.items():
        lines = [LogLine(number, "", line) for number, line in enumerate(text.splitlines(), 1)]
        commands += [(file, command_in(lines))] if file.endswith(SHELL_SUFFIXES) else []
    for file, line in commands:
        if line and ELLIPSIS not in line.text:
            yield {"text": line.text.strip(), "flags": _flags(line.text), **at(file, line.number)}


_NO_VALUE = re.compile(r"^.*\.py$|^\+{0,2}[A-Za-z][\w.]*=")
"""The script, or an override: no value of the flag before it."""
_OPERATOR = re.compile(r"\d?[<>|&;]")
"""Where a shell's command ends."""


def _flags(command: str) -> list[Fact]:
    """The flags of a command, with the words that follow, and its overrides (`name=value`)."""
    arguments: list[str] = []
    with suppress(ValueError):  # an open quote
        arguments = list(takewhile(lambda word: not _OPERATOR.match(word), shlex.split(command)))
    options = options_in(arguments, ends=_NO_VALUE.match)
    return [{"name": option.name, "value": option.value(None)} for option in options]


_ASSIGNED = re.compile(
    r"^\s*(?:export\s+)?(?P<name>[A-Za-z_]\w*)=(?P<quote>[\"']?)(?P<value>[^\s\"'$`;&|()]*)(?P=quote)\s*(?:#.*)?$"
)
MAX_VALUE = 200
"""Characters of a value."""


def settings_in(texts: Mapping[str, str]) -> Iterator[Fact]:
    """The values in configs and in shell scripts, if they are no mappings and short."""
    for file, text in texts.items():
        for name, value, line in _settings_of(file, text):
            parts = value if isinstance(value, list) else [value]
            is_plain = all(each is None or isinstance(each, (bool, int, float, str)) for each in parts)
            if is_plain and len(f"{name}{value}") <= MAX_VALUE:
                yield {"name": name, "value": value, **at(file, line)}


def _settings_of(file: str, text: str) -> Iterator[tuple[str, object, int]]:
    if file.endswith(SHELL_SUFFIXES):
        for number, line in enumerate(text.splitlines(), 1):
            if match := _ASSIGNED.match(line):
                yield match["name"], match["value"], number
    elif file.endswith(CONFIG_SUFFIXES):
        with suppress(ReshardError):  # which is a finding of its own
            config = read_config(file)
            for name, value in _leaves(config.content, ""):
                if at_line := config.key_lines.get(name):
                    yield name, value, at_line


def _leaves(content: Mapping[Any, Any], prefix: str) -> Iterator[tuple[str, object]]:
    for key, value in content.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
