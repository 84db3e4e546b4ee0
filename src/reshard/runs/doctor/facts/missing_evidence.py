"""What the targets of a diagnosis cannot show, and the command that would."""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Mapping, Sequence
from pathlib import PurePath
from shlex import quote
from typing import cast

from reshard.runs.checks.history.api_table import PACKAGE_OF_ROOT
from reshard.runs.doctor.facts.run_settings import Fact
from reshard.runs.doctor.text.log import Log, Traceback
from reshard.runs.doctor.text.partial_failures import (
    CUT_OFF_TRACEBACK,
    EXIT_STATUS,
    is_consequence,
    is_launchers,
)
from reshard.runs.doctor.upstream_search import own_code, package_of

_FILE = re.compile(r"(?<![\w./-])[\w./-]{1,200}\.(?:ya?ml|json)")
_CONFIG = re.compile(r"(?i)config|deepspeed|\.ya?ml")
_PATH = re.compile(r"(?:\.{0,2}/|~/)\S*|\S+/checkpoint-\d+")
_OF_WEIGHTS = re.compile(r"(?i)model_(?:name_or_)?path|checkpoint|resume|(?:^|[_.-])load$|adapter|^model$")
_KILLED = re.compile(r"SIGKILL|[Ss]ignal:? 9\b|exitcode\s*: -9|\bKilled\b")

RERUN_COMMAND = "torchrun --log-dir logs --redirects 3 --tee 3 TRAIN.py; reshard doctor logs"
"""Writes a log for each process."""


def unseen_in(
    logs: Sequence[Log],
    root: Traceback | None,
    texts: Mapping[str, str],
    seen: Mapping[str, Sequence[Fact]],
) -> Iterator[Fact]:
    """What is not there, given what was `seen`: logs, tracebacks, versions, files and checkpoints that are named."""
    if not logs:
        yield _fact("the log of the run", "COMMAND 2>&1 | tee run.log")
        return
    again = f"reshard doctor {quote(logs[0].name)}"
    if root is not None:
        yield from _of_failure(root, logs)
        yield from _of_versions(root, {each["package"] for each in seen["versions"]}, again)
        code = (own_code(root.root) or "").rpartition(":")[0]
        if code and not _is_given(code, texts):
            yield _fact(f"the script {code}, in which the first failure was raised", f"{again} {quote(code)}")
    if not seen["commands"]:
        yield _fact("the command line of the run", f"{again} RUN.sh")
    opened = {str(each["file"]).rstrip("/") for each in seen["checkpoints"]}
    for name, value in dict.fromkeys(_named(seen)):
        if _FILE.fullmatch(value) and _CONFIG.search(f"{name} {value}") and not _is_given(value, texts):
            yield _fact(f"the file {value}", f"{again} {value}")
        elif _OF_WEIGHTS.search(name) and _PATH.fullmatch(value) and value.rstrip("/") not in opened:
            yield _fact(f"the checkpoint {value} ({name})", f"reshard inspect {quote(value)}")


def _named(seen: Mapping[str, Sequence[Fact]]) -> Iterator[tuple[str, str]]:
    """Settings with their values, and the other words of commands."""
    for command in seen["commands"]:
        flags = [
            (str(each["name"]), str(value))
            for each in cast("list[Fact]", command["flags"])
            for value in (each["value"] if isinstance(each["value"], list) else [each["value"]])
        ]
        yield from flags
        yield from (("", word) for word in str(command["text"]).split() if word not in dict(flags).values())
    yield from ((str(each["name"]), str(each["value"])) for each in seen["settings"])


def _of_failure(root: Traceback, logs: Sequence[Log]) -> Iterator[Fact]:
    named = {line.stream for log in logs for line in log.lines} - {""}
    if is_launchers(root) or is_consequence(root):
        yield _fact(
            "the failure of another process, from which the first one in these logs follows", RERUN_COMMAND
        )
    elif named and len(named) < max(log.world_size for log in logs):
        yield _fact(f"which lines processes other than {', '.join(sorted(named))} printed", RERUN_COMMAND)
    if root.exception == CUT_OFF_TRACEBACK:
        yield _fact("the end of the traceback", "COMMAND 2>&1 | tee run.log")
    if root.exception == EXIT_STATUS and any(_KILLED.search(line.text) for log in logs for line in log.lines):
        yield _fact("who sent SIGKILL", "sudo dmesg -T | grep -iE 'oom|killed process'")
    if re.search(r"CUDA out of memory|OutOfMemoryError", root.error_text):
        yield _fact("what else is in the GPU's memory", "nvidia-smi")


def _of_versions(root: Traceback, known: Container[object], again: str) -> Iterator[Fact]:
    folders = {folder for frame in root.root.frames if (folder := package_of(frame))}
    packages = sorted(name for each in folders if (name := PACKAGE_OF_ROOT.get(each, each)) not in known)
    if packages:
        yield _fact(
            f"the versions of {', '.join(packages)}", f"pip freeze > versions.txt; {again} versions.txt"
        )


def _is_given(file: str, texts: Mapping[str, str]) -> bool:
    return any(PurePath(file).name == PurePath(each).name for each in texts)


def _fact(what: str, command: str) -> Fact:
    return {"what": what, "command": command}
