"""Run a function on several ranks: forked gloo processes, so that nothing is imported again."""

from __future__ import annotations

import gc
import os
import socket
import sys
import traceback
from collections.abc import Callable
from multiprocessing import get_context
from typing import Any

import torch.distributed as dist


def on_ranks(world: int, function: Callable[..., None], *args: Any) -> None:
    """Call `function(rank, *args)` on `world` ranks, in a default process group. Raises their errors."""
    context = get_context("fork")
    errors = context.SimpleQueue()
    port = _free_port()
    ranks = [
        context.Process(target=_rank, args=(rank, world, port, errors, function, args))
        for rank in range(world)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(timeout=120)
    failed = [rank for rank, process in enumerate(ranks) if process.exitcode != 0]
    for process in ranks:
        process.kill()
    if failed:
        raise RuntimeError(
            f"ranks {failed} failed:\n" + (errors.get() if not errors.empty() else "no answer")
        )


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def _forget_the_parent() -> None:
    """Drop state that a fork must not use: process groups, whose threads do not exist; accelerate's state."""
    gc.freeze()
    if "accelerate" in sys.modules:
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state(reset_partial_state=True)


def _rank(rank: int, world: int, port: int, errors: Any, function: Callable[..., None], args: Any) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    try:
        _forget_the_parent()
        dist.init_process_group("gloo")
        function(rank, *args)
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        errors.put(traceback.format_exc())
        os._exit(1)
    os._exit(0)
