"""Run one function on N ranks of a gloo process group, one forked process each.

Torch and megatron-core are imported once, in the caller; forking then starts a rank in milliseconds, whereas
`torchrun` imports them once per rank and job.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any, TypeVar

from reshard.base.errors import ReshardError
from reshard.engines.megatron import cpu_patches

T = TypeVar("T")

_IMPORTS = (
    "torch._dynamo",
    "megatron.core.dist_checkpointing",
    "megatron.core.distributed",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.optimizer",
    "megatron.core.pipeline_parallel",
)
# When one rank fails, others notice only through their own timeouts. They get this long to add their tracebacks.
_GRACE_SECONDS = 1.0


class RankError(RuntimeError):
    """A rank raised, died or did not finish in time. The message contains the traceback of each failed rank."""


@dataclass
class _Rank:
    """One forked process, the pipe for its answer, and the answer."""

    number: int
    pid: int
    pipe: Connection
    value: Any = None
    failure: str | ReshardError | None = None
    failed_at: float = 0.0
    answered: bool = False


@dataclass
class _Session:
    ranks: list[_Rank] = field(default_factory=list)

    def collect(self, deadline: float) -> None:
        """Read answers until all are in, the deadline passes, or the grace period after a failure is over."""
        while pending := [rank for rank in self.ranks if not rank.answered]:
            ready = wait([rank.pipe for rank in pending], timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                return
            for rank in pending:
                if rank.pipe in ready:
                    _receive(rank)
                    if rank.failure:
                        deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)

    def close(self) -> None:
        """Kill and reap every rank, with its child processes."""
        for rank in self.ranks:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(rank.pid, signal.SIGKILL)
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank.pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(rank.pid, 0)
            rank.pipe.close()


def run_ranks(world_size: int, function: Callable[..., T], *args: Any, timeout: float = 300.0) -> list[T]:
    """Call `function(*args)` on each of `world_size` ranks and return their results, in rank order.

    Inside, `torch.distributed` is initialized with gloo. Arguments are passed by fork and may be anything; results are
    pickled. Output of a rank goes to standard error. Nothing outlives the call: on an exception, a timeout
    (seconds) or an interrupt every rank is killed. Raises RankError with the tracebacks of the failed ranks, the
    earliest first, because the others fail as a consequence.
    """
    _import_all()
    sys.stdout.flush()
    sys.stderr.flush()
    session = _Session()
    with tempfile.TemporaryDirectory(prefix="reshard-ranks-") as folder:
        try:
            for number in range(world_size):
                session.ranks.append(_fork(number, world_size, Path(folder) / "store", function, args))
            session.collect(time.monotonic() + timeout)
        finally:
            session.close()
    failed = sorted((rank for rank in session.ranks if rank.failure), key=lambda rank: rank.failed_at)
    if failed and isinstance(failed[0].failure, ReshardError):
        raise failed[0].failure
    if failed:
        raise RankError("\n".join(f"rank {rank.number} of {world_size}: {rank.failure}" for rank in failed))
    late = [str(rank.number) for rank in session.ranks if not rank.answered]
    if late:
        raise RankError(f"rank {', '.join(late)} of {world_size} did not finish within {timeout:g} s")
    return [rank.value for rank in session.ranks]


def _import_all() -> None:
    """Import what every rank needs, before forking."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for module in _IMPORTS:
            importlib.import_module(module)


def _fork(number: int, world_size: int, store: Path, function: Callable[..., Any], args: Any) -> _Rank:
    ours, theirs = Pipe(duplex=False)
    parent = os.getpid()
    pid = os.fork()
    if pid:
        theirs.close()
        return _Rank(number, pid, ours)
    status = 1
    try:
        _become_rank(parent)
        theirs.send_bytes(_answer(number, world_size, store, function, args))
        status = 0
    finally:
        # Skip the parent's exit handlers and pytest's frames in this process.
        sys.stderr.flush()
        os._exit(status)


def _become_rank(parent: int) -> None:
    """Detach from the parent's terminal and standard output, but still end with the parent."""
    gc.freeze()  # do not collect the parent's process group: its threads do not exist here
    os.setpgid(0, 0)  # so that the writers of a rank are killed with it
    cpu_patches.die_with_parent()
    if os.getppid() != parent:
        os._exit(1)
    os.dup2(2, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)


def _answer(number: int, world_size: int, store: Path, function: Callable[..., Any], args: Any) -> bytes:
    """The pickled (value, failure, time of failure) of this rank's call: a ReshardError, or another's traceback."""
    import torch

    try:
        tempfile.tempdir = str(store.parent)  # ranks do not clean up; the session removes its folder
        torch.set_num_threads(1)  # the parent's OpenMP threads did not survive the fork
        cpu_patches.enable()  # only here: the parent's torch stays unpatched
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{store}", rank=number, world_size=world_size
        )
        value = function(*args)
        torch.distributed.barrier()
        return pickle.dumps((value, None, 0.0))
    except ReshardError as error:
        return pickle.dumps((None, error, time.monotonic()))
    except BaseException:
        return pickle.dumps((None, traceback.format_exc(), time.monotonic()))


def _receive(rank: _Rank) -> None:
    rank.answered = True
    try:
        rank.value, rank.failure, rank.failed_at = pickle.loads(rank.pipe.recv_bytes())
    except EOFError:
        _, status = os.waitpid(rank.pid, 0)
        rank.failure = (
            f"the process ended without an answer (exit status {os.waitstatus_to_exitcode(status)})"
        )
