"""Run one function on N ranks of a gloo process group, one forked process each.

Torch and megatron-core are imported once, in the caller; forking then starts a rank in milliseconds, whereas
`torchrun` imports them once per rank and job.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import logging
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from reshard.base.errors import ReshardError
from reshard.oracle.megatron import cpu_patches

T = TypeVar("T")

_IMPORTS = (
    "torch._dynamo",
    "megatron.core.dist_checkpointing",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.pipeline_parallel",
)
# When one rank fails, others notice only through their own timeouts. They get this long to add their tracebacks.
_GRACE_SECONDS = 1.0
_PR_SET_PDEATHSIG = 1


class RankError(RuntimeError):
    """A rank raised or died. The message contains the traceback of each failed rank."""


class _Rank(NamedTuple):
    """A forked process, and the end of the pipe from which its answer is read."""

    process: Any
    pipe: Connection


class _Answer(NamedTuple):
    """What a rank returned, or why it failed and when: a ReshardError, or the traceback of another exception."""

    value: Any = None
    failure: str | ReshardError | None = None
    failed_at: float = 0.0


def run_ranks(world_size: int, function: Callable[..., T], *args: Any) -> list[T]:
    """Call `function(*args)` on each of `world_size` ranks and return their results, in rank order.

    Inside, `torch.distributed` is initialized with gloo. Arguments are passed by fork and may be anything; results are
    pickled. Output of a rank goes to standard error. Nothing outlives the call: on an exception or an interrupt, every
    rank is killed. Raises the ReshardError of a rank, or RankError with the tracebacks of the failed ranks, the
    earliest first, because the others fail as a consequence.
    """
    import_all()
    sys.stdout.flush()
    sys.stderr.flush()
    ranks: list[_Rank] = []
    with tempfile.TemporaryDirectory(prefix="reshard-ranks-") as folder:
        try:
            for number in range(world_size):
                ranks.append(_start(_answer, number, world_size, Path(folder) / "store", function, args))
            answers = _collect(ranks)
        finally:
            for rank in ranks:
                rank.process.kill()
                rank.process.join()
    failed = sorted(
        (number for number in answers if answers[number].failure),
        key=lambda number: answers[number].failed_at,
    )
    if failed and isinstance(first := answers[failed[0]].failure, ReshardError):
        raise first
    if failed:
        raise RankError(
            "\n".join(f"rank {number} of {world_size}: {answers[number].failure}" for number in failed)
        )
    return [answers[number].value for number in range(world_size)]


def import_all() -> None:
    """Import what every rank needs, before forking."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for module in _IMPORTS:
            importlib.import_module(module)


def _start(function: Callable[..., bytes], *args: Any) -> _Rank:
    """Fork a process that answers with what `function` returns."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_become_rank, args=(os.getpid(), theirs, function, args))
    process.start()
    theirs.close()
    return _Rank(process, ours)


def _collect(ranks: list[_Rank]) -> dict[int, _Answer]:
    """The answers by rank: of all, or if some fail, of those that answer soon after."""
    answers: dict[int, _Answer] = {}
    timeout = None
    while pending := {rank.pipe: number for number, rank in enumerate(ranks) if number not in answers}:
        ready = wait(pending, timeout)
        if not ready:
            break
        for number in sorted(number for pipe, number in pending.items() if pipe in ready):
            answers[number] = _receive(ranks[number])
            if answers[number].failure:
                timeout = _GRACE_SECONDS
    return answers


def _receive(rank: _Rank) -> _Answer:
    try:
        answer: _Answer = pickle.loads(rank.pipe.recv_bytes())
    except EOFError:
        rank.process.join()
        status = rank.process.exitcode
        return _Answer(None, f"the process ended without an answer (exit status {status})", time.monotonic())
    return answer


def _become_rank(parent: int, pipe: Connection, function: Callable[..., bytes], args: Any) -> None:
    """Answer, detached from the parent's terminal and standard output; but end when the parent ends for any reason."""
    gc.freeze()  # do not collect the parent's process group: its threads do not exist here
    end_with_parent(parent)
    os.dup2(2, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    pipe.send_bytes(function(*args))


def end_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent ends for any reason."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _answer(number: int, world_size: int, store: Path, function: Callable[..., Any], args: Any) -> bytes:
    """The pickled answer of a rank. Torch's own pickling for pipes would share memory, which ends with the rank."""
    import torch

    try:
        tempfile.tempdir = str(store.parent)  # ranks do not clean up; `run_ranks` removes its folder
        torch.set_num_threads(1)  # the parent's OpenMP threads did not survive the fork
        cpu_patches.enable()  # only here: the parent's torch stays unpatched
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{store}", rank=number, world_size=world_size
        )
        value = function(*args)
        torch.distributed.barrier()
        return pickle.dumps(_Answer(value))
    except ReshardError as error:
        return pickle.dumps(_Answer(None, error, time.monotonic()))
    except BaseException:
        return pickle.dumps(_Answer(None, traceback.format_exc(), time.monotonic()))
