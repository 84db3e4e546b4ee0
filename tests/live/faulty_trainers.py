"""A rank of megatron-core that sends weights to a server while something goes wrong.

`python -m tests.live.faulty_trainers CASE URL FOLDER BASE RANK RANKS`; it writes its problems to `FOLDER/CASE-RANK`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import distributed

import reshard
from reshard.algebra.layout import Layout
from reshard.oracle.megatron.load_weights import load_weights
from tests.genuine.mcore import cpu_patches, models
from tests.genuine.mcore.models import build_model

SMALL = 4_000
"""Bytes of a bucket: many messages, so that something is lost between two of them."""


def main(case: str, url: str, folder: str, base: str, rank: int, ranks: int) -> None:
    """Connect and send once."""
    told: list[Any] = []
    distributed.init_process_group("gloo", f"file://{folder}/{case}.group", rank=rank, world_size=ranks)
    cpu_patches.enable()
    layout, start = Layout(tp=ranks), reshard.open(Path(folder) / "start").checkpoint
    models.initialize(layout, seed=0)
    chunks: list[Any] = build_model(dict(start.description.args), layout, dtype=torch.bfloat16)
    load_weights(chunks, start.path)
    url, _, server = url.partition(" ")
    try:
        sender = reshard.weight_sender(
            reshard.weight_source(chunks, base=base), url, bucket=SMALL, timeout=60
        )
        if rank == ranks - 1:
            spoil(sender, case, server)
        sender.send()
        sender.close()
    except reshard.ReshardError as error:
        told = [(problem.code, problem.found) for problem in error.problems]
    (Path(folder) / f"{case}-{rank}").write_text(json.dumps(told))
    os._exit(0)  # whatever threads still wait for a server


def spoil(sender: Any, case: str, server: str) -> None:
    """Before its fifth message this rank is killed, kills the server, or is slow."""
    meeting, send = sender._meeting, sender._meeting.send
    numbers = iter(range(10_000))

    def spoiled(*given: Any) -> Any:
        if next(numbers) == 4:
            if case == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if case == "engine":
                os.killpg(int(server), signal.SIGKILL)
            if case == "slow":
                time.sleep(5)
        return send(*given)

    meeting.send = spoiled


if __name__ == "__main__":
    case, url, folder, base, rank, ranks = sys.argv[1:]
    main(case, url, folder, base, int(rank), int(ranks))
