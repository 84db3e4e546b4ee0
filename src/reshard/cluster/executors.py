"""Executors that run the parts of a conversion, in the style of `concurrent.futures`, named as `--on` takes them.

dask://HOST:PORT    the workers of a Dask scheduler
ray, ray://HOST:PORT    a Ray cluster: that of RAY_ADDRESS or of this machine, or through Ray Client
slurm:partition=P,nodes=N,time=MINUTES    Slurm jobs through submitit, which takes all other settings too
mpi    the ranks of `mpiexec -n N python -m mpi4py.futures -m reshard …`
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from tempfile import gettempdir
from typing import Any, Protocol, TypeVar

from reshard.base.errors import ReshardError, type_and_message
from reshard.base.missing_packages import install_command
from reshard.cluster.slurm_executor import NO_LIMIT, Slurm, check_texts, silent
from reshard.stores import is_remote

A = TypeVar("A")
T = TypeVar("T")

CONNECT_SECONDS = 20
"""Seconds to wait for the scheduler to answer, and then for a worker."""

GIB = 1 << 30


class Executor(Protocol):
    """Runs functions in other processes.

    `slots` is how many run at a time, `queue` the most that should be submitted at a time, `most` the most bytes of a
    part, `threads` the threads for each part (None: as many as on a complete machine).
    """

    threads: int | None
    most: int

    @property
    def slots(self) -> int: ...

    @property
    def queue(self) -> int: ...

    def submit(self, function: Callable[[A], T], arguments: Sequence[A], folder: Path) -> list[Future[T]]:
        """Call the function with each of the arguments. `folder`, which all machines see, is for the executor."""

    def close(self) -> None:
        """Cancel everything that has not ended."""


@contextmanager
def opened(on: str) -> Iterator[Executor]:
    """The executor that `--on` names, ready for use; call `check` first. Raises ReshardError if nothing answers."""
    kind, rest = _parsed_executor(on)
    executor: Executor = kind(rest)
    try:
        yield executor
    finally:
        executor.close()


def check_executor(on: str, folder: Path) -> None:
    """Raise ReshardError if no executor is named `on`, if its package is missing, or if it cannot write to `folder`."""
    kind, _ = _parsed_executor(on)
    if kind is Slurm:
        check_texts(Path(gettempdir()) if is_remote(folder) else folder, on)
    if not find_spec(kind.package):
        name = next(name for name, each in EXECUTORS.items() if each is kind)
        raise ReshardError(
            "executor-package-not-installed",
            f"--on {name} needs a package that is not installed",
            found=f"the package {kind.package!r} is missing",
            remedy=f"{install_command(kind.package)}, here and on all nodes",
        )


def _parsed_executor(on: str) -> tuple[type[Any], str]:
    """The class of the executor, and the rest after its name."""
    for name, kind in EXECUTORS.items():
        if match := re.fullmatch(name + kind.form, on):
            return kind, "".join(match.groups(""))
    name = re.split("[:/=, ]", on)[0]
    meant = EXECUTORS.get(name)
    raise ReshardError(
        "executor-address-malformed" if meant else "executor-unknown",
        f"--on: wrong syntax for {name}" if meant else f"--on: unknown engine {name!r}",
        expected=meant.usage if meant else "; ".join(each.usage for each in EXECUTORS.values()),
        found=on,
        remedy="leave out --on to run on this machine, or correct it",
    )


def _silent(name: str, address: str, error: Exception | str) -> ReshardError:
    return silent(
        error if isinstance(error, str) else type_and_message(error),
        name,
        expected=f"a cluster at {address}" if address else "a cluster",
        remedy="check the address, and that its scheduler and workers run",
    )


class Dask:
    """The workers of a Dask scheduler."""

    package, form, usage = "distributed", "://(.+)", "dask://HOST:PORT"
    threads, most = 2, GIB

    def __init__(self, address: str) -> None:
        distributed = import_module("distributed")
        for name in ("distributed", "distributed.client"):
            logging.getLogger(name).setLevel(logging.CRITICAL + 1)  # errors report what matters
        url = address if "://" in address else f"tcp://{address}"
        try:
            self._client = distributed.Client(url, timeout=CONNECT_SECONDS, set_as_default=False)
        except (OSError, ValueError) as error:
            raise _silent("Dask", address, error) from error
        try:
            self._client.wait_for_workers(1, timeout=CONNECT_SECONDS)
        except TimeoutError as error:
            self._client.close()
            raise _silent("Dask", address, "the scheduler has no workers") from error
        self._address = address
        self._executor = self._client.get_executor(pure=False)

    @property
    def slots(self) -> int:
        try:
            return max(1, sum(int(threads) for threads in self._client.nthreads().values()))
        except OSError as error:
            raise _silent("Dask", self._address, error) from error

    @property
    def queue(self) -> int:
        return 2 * self.slots

    def submit(self, function: Callable[[A], T], arguments: Sequence[A], folder: Path) -> list[Future[T]]:
        return [self._executor.submit(function, argument) for argument in arguments]

    def close(self) -> None:
        with suppress(Exception):  # the scheduler may be gone
            self._executor.shutdown(wait=False)
            self._client.close(timeout=5)


class Ray:
    """The CPUs of a Ray cluster."""

    package, form, usage = "ray", "(?:://(.+))?", "ray, or ray://HOST:PORT"
    threads, most = 2, GIB

    def __init__(self, address: str) -> None:
        self._ray = import_module("ray")
        self._is_ours = not self._ray.is_initialized()
        if self._is_ours:
            try:
                self._ray.init(
                    address=f"ray://{address}" if address else None,
                    logging_level="error",
                    log_to_driver=False,
                )
            except (OSError, RuntimeError, ValueError) as error:
                raise _silent("Ray", address, error) from error
        self._call = self._ray.remote(max_retries=0)(_call)
        self._running: list[Any] = []

    @property
    def slots(self) -> int:
        return max(1, int(self._ray.cluster_resources().get("CPU", 1)))

    @property
    def queue(self) -> int:
        return 2 * self.slots

    def submit(self, function: Callable[[A], T], arguments: Sequence[A], folder: Path) -> list[Future[T]]:
        tasks = [self._call.remote(function, argument) for argument in arguments]
        self._running += tasks
        return [each.future() for each in tasks]

    def close(self) -> None:
        if self._is_ours:
            self._ray.shutdown()
            return
        for each in self._running:
            self._ray.cancel(each)


def _call(function: Callable[[A], T], argument: A) -> T:
    return function(argument)


class Mpi:
    """The ranks of an MPI job except the first, which runs the program."""

    package, form, usage = "mpi4py", "", "mpi"
    threads, most, queue = 2, GIB, NO_LIMIT

    def __init__(self, nothing: str) -> None:
        futures = import_module("mpi4py.futures")
        if import_module("mpi4py.futures._core").SharedPool is None:
            raise ReshardError(
                "mpi-without-ranks",
                "--on mpi finds no worker ranks",
                expected="a command started with mpiexec and mpi4py.futures",
                remedy="mpiexec -n 5 python -m mpi4py.futures -m reshard convert … --on mpi (one rank "
                "distributes the work)",
            )
        self._executor = futures.MPIPoolExecutor()
        self.slots = max(1, int(self._executor.num_workers))

    def submit(self, function: Callable[[A], T], arguments: Sequence[A], folder: Path) -> list[Future[T]]:
        return [self._executor.submit(function, argument) for argument in arguments]

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)


EXECUTORS: dict[str, type[Any]] = {"dask": Dask, "ray": Ray, "slurm": Slurm, "mpi": Mpi}
