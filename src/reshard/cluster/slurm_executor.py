"""Slurm as an executor, as `--on` names it: job arrays, submitted by submitit and followed with `squeue`."""

from __future__ import annotations

import errno
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from threading import Event, Thread
from typing import Any, TypeVar

from reshard.base.errors import UNUSABLE, ReshardError, type_and_message
from reshard.base.missing_packages import install_command
from reshard.stores import is_remote
from reshard.transfer.part_claims import names_in

A = TypeVar("A")
T = TypeVar("T")

NO_LIMIT = 1 << 62
"""No limit on the jobs of an array."""

GENERIC = ("timeout_min", "mem_gb", "cpus_per_task", "gpus_per_node", "stderr_to_stdout", "name")
"""Settings that submitit has for all of its executors."""

POLL_SECONDS = 10.0
"""Seconds between two calls of `squeue`."""

GRACE_SECONDS = 30.0
"""Seconds after which a job that `squeue` no longer lists, and without a result, is lost: file servers are slow."""

SILENCE_SECONDS = 1800.0
"""Seconds without an answer from `squeue` after which jobs without a result are lost."""

ANSWER_SECONDS = 60
"""Seconds that a command of Slurm may take."""

USUAL_ARRAY_SIZE = 1001
"""The most jobs of an array, unless Slurm's configuration says otherwise."""

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_IN_PATHS = re.compile(_CONTROL.pattern + r"|[%\\]")


PACKAGE = "submitit"
_SYNTAX = re.compile(r"slurm(?::([\w-]+=[^,=]+(?:,[\w-]+=[^,=]+)*))?")


def check_executor(on: str, folder: Path) -> None:
    """Raise ReshardError if `on` names no executor, if its package is missing, or if it cannot write to `folder`."""
    _settings_in(on)
    check_texts(Path(gettempdir()) if is_remote(folder) else folder, on)
    if not find_spec(PACKAGE):
        raise ReshardError(
            "executor-package-not-installed",
            "--on slurm needs a package that is not installed",
            found=f"the package {PACKAGE!r} is missing",
            remedy=f"{install_command(PACKAGE)}, here and on all nodes",
        )


@contextmanager
def opened(on: str) -> Iterator[Slurm]:
    """The executor that `--on` names; call `check_executor` first. Raises ReshardError if Slurm does not answer."""
    executor = Slurm(_settings_in(on))
    try:
        yield executor
    finally:
        executor.close()


def _settings_in(on: str) -> str:
    match = _SYNTAX.fullmatch(on)
    if not match:
        raise ReshardError(
            "executor-unknown",
            "--on names no cluster that reshard can use",
            expected="slurm:partition=NAME,nodes=N,time=MINUTES",
            found=on,
            remedy="leave out --on to run on this machine, or correct it",
        )
    return match[1] or ""


class Slurm:
    """Slurm jobs, each on one node, at most `slots`. `cluster=local` runs them as processes on this machine."""

    def __init__(self, settings: str) -> None:
        values = dict(each.split("=", 1) for each in settings.split(",") if each)
        self._cluster = values.pop("cluster", "slurm")
        self.slots = nodes_of(values.pop("nodes", "1"))
        self._parameters = {**parameters_of(values), "slurm_array_parallelism": self.slots}
        self._jobs: dict[Any, Future[Any]] = {}
        self._missing: dict[str, float] = {}
        """When jobs were first found to be absent from the queue, by their number."""
        self._closed = Event()
        self._thread: Thread | None = None
        with TemporaryDirectory() as folder:
            submitit_executor(Path(folder), self._cluster, self._parameters)
        self._longest = longest_array() if self._cluster == "slurm" else NO_LIMIT

    def submit(self, function: Callable[[A], T], arguments: Sequence[A], folder: Path) -> list[Future[T]]:
        """Call the function with each of the arguments. `folder`, which all machines see, is for jobs and logs."""
        futures: list[Future[T]] = []
        for begin in range(0, len(arguments), self._longest):  # each is a job array
            executor = submitit_executor(folder / "jobs", self._cluster, self._parameters)
            with accepted(), executor.batch():
                jobs = [executor.submit(function, each) for each in arguments[begin : begin + self._longest]]
            new: list[Future[T]] = [Future() for _ in jobs]
            self._jobs.update(zip(jobs, new, strict=True))
            futures += new
        if self._thread is None:
            self._thread = Thread(target=self._watch, daemon=True)
            self._thread.start()
        return futures

    def _watch(self) -> None:
        """Pass the result of each finished job to its future."""
        polled = answered = time.monotonic()
        while not self._closed.wait(0.2):
            for job in self._ended():
                future = self._jobs.pop(job)
                try:
                    future.set_result(job.result())
                except Exception as error:
                    future.set_exception(error)
            now = time.monotonic()
            if self._cluster == "slurm" and now - polled > POLL_SECONDS:
                polled = now
                listed = queued()
                answered = answered if listed is None else now
                self._lose(listed, is_silent=now - answered > SILENCE_SECONDS)

    def _ended(self) -> list[Any]:
        """The jobs that have a result."""
        jobs = list(self._jobs)
        if self._cluster != "slurm":
            return [job for job in jobs if job.done()]
        found: set[str] = set()
        with suppress(OSError):
            found.update(*map(names_in, {job.paths.folder for job in jobs}))
        return [job for job in jobs if job.paths.result_pickle.name in found]

    def _lose(self, listed: set[str] | None, *, is_silent: bool) -> None:
        """Give up jobs that are not in the queue and have had no result for some time; `listed` is None if unknown."""
        now, ended = time.monotonic(), self._ended()
        for job, future in list(self._jobs.items()):
            number = str(job.job_id)
            if listed is not None and number in listed:
                self._missing.pop(number, None)
            elif listed is not None:
                self._missing.setdefault(number, now)
            is_lost = is_silent or now - self._missing.get(number, now) > GRACE_SECONDS
            if is_lost and job not in ended:
                del self._jobs[job]
                why = "squeue does not answer" if is_silent else "it left the queue without a result"
                future.set_exception(RuntimeError(f"Slurm job {number}: {why}{_end_of(job)}"))

    def close(self) -> None:
        """Cancel everything that has not ended."""
        self._closed.set()
        if self._thread:
            self._thread.join()
        for job in self._jobs:
            with suppress(Exception):
                job.cancel(check=False)


def _end_of(job: Any) -> str:
    """The last line that a job wrote to its log, if any."""
    for path in (job.paths.stderr, job.paths.stdout):
        with suppress(OSError):
            lines = path.read_text(errors="replace").split("\n")
            return next(
                (f"; its log ends with: {line.strip()[:300]}" for line in lines[::-1] if line.strip()), ""
            )
    return ""


def queued() -> set[str] | None:
    """The numbers of this user's jobs that have not ended; None if Slurm does not answer."""
    command = ["squeue", "--noheader", "--array", f"--user={os.getuid()}", "--format=%F %K"]
    try:
        rows = [line.split() for line in _answer(command).splitlines()]
    except (OSError, subprocess.SubprocessError):
        return None
    return {row[0] if row[1:] in ([], ["N/A"]) else f"{row[0]}_{row[1]}" for row in rows if row}


def longest_array() -> int:
    """The most jobs of an array. Raises ReshardError if Slurm's controller does not answer."""
    try:
        settings = _answer(["scontrol", "show", "config"])
    except FileNotFoundError:
        settings = ""
    except subprocess.CalledProcessError as error:
        raise silent(error.stderr.strip().split("\n")[-1]) from error
    except (OSError, subprocess.SubprocessError) as error:
        raise silent(type_and_message(error)) from error
    match = re.search(r"(?m)^MaxArraySize\s*=\s*(\d+)", settings)
    return max(1, int(match[1])) if match else USUAL_ARRAY_SIZE


def _answer(command: Sequence[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_SECONDS, check=True).stdout


@contextmanager
def accepted() -> Iterator[None]:
    """Raise ReshardError if Slurm rejects what the block submits. What is written already is kept."""
    try:
        yield
    except Exception as error:  # from submitit or sbatch
        raise ReshardError(
            "slurm-submission-failed",
            "Slurm refused the job",
            found=" ".join(str(error).split())[-300:],
            remedy="correct the settings for Slurm; `sinfo` lists partitions, their times and their nodes",
        ) from OSError(errno.EAGAIN, str(error))


def nodes_of(text: str) -> int:
    """The number of nodes. Raises ReshardError if it is not a positive number."""
    if not text.isdecimal() or not int(text):
        raise settings_error(f"nodes={text}")
    return int(text)


def parameters_of(settings: Mapping[str, str]) -> dict[str, str | int]:
    """Settings as typed, under submitit's names; `time` is in minutes (60 by default)."""
    parameters: dict[str, str | int] = {"timeout_min": 60}
    for typed, value in settings.items():
        name = {"time": "timeout_min"}.get(typed, typed)
        parameters[name if name in GENERIC else f"slurm_{name}"] = int(value) if value.isdecimal() else value
    return parameters


def submitit_executor(folder: Path, cluster: str, parameters: Mapping[str, Any], **more: Any) -> Any:
    """submitit's executor for a cluster, "slurm" or "local". Raises ReshardError for settings that it does not know."""
    check_texts(folder, *(f"{name}={value}" for name, value in parameters.items()))
    if cluster == "slurm" and not shutil.which("sbatch"):
        raise silent("`sbatch` not found")
    try:
        executor = import_module("submitit").AutoExecutor(folder=folder, cluster=cluster, **more)
        executor.update_parameters(**parameters)
    except (NameError, *UNUSABLE) as error:
        raise settings_error(type_and_message(error).partition(" Valid arguments")[0]) from error
    return executor


def check_texts(folder: Path, *settings: str) -> None:
    """Raise ReshardError for characters with a meaning in the script that submitit writes.

    A newline would continue the script, and Slurm replaces `%` and `\\` in the names of logs.
    """
    path = str(folder.absolute())
    wrong = [path] if _IN_PATHS.search(path) else []
    wrong += [text for text in settings if _CONTROL.search(text)]
    if wrong:
        raise ReshardError(
            "slurm-special-character",
            "a path or setting for Slurm contains a special character",
            expected="no control characters, and no % or \\ in the path of the output",
            found=", ".join(map(repr, wrong)),
            remedy="rename the folder, or correct the setting",
        )


def settings_error(found: str) -> ReshardError:
    """The error for settings that Slurm does not have."""
    return ReshardError(
        "slurm-settings-malformed",
        "invalid settings for Slurm",
        expected="nodes=N, time=MINUTES, and settings of submitit: partition, account, qos, cpus_per_task, mem_gb …",
        found=found,
        remedy="correct them: NAME=VALUE,NAME=VALUE",
    )


def silent(found: str) -> ReshardError:
    """The error for a cluster that cannot be used from this machine."""
    return ReshardError(
        "executor-silent",
        "Slurm does not respond",
        expected="a cluster, and its commands sbatch, squeue and scontrol",
        found=found,
        remedy="run the command on a machine where `sinfo` lists the partitions, such as the cluster's login node",
    )
