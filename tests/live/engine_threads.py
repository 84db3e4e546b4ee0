"""Engines whose ranks are threads of a trainer's rank, and what ranks of megatron-core send to them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import distributed

import reshard
from reshard.algebra.layout import Layout
from reshard.exchange.engine_recording import EngineRecording, read_recordings
from reshard.live.weight_receiver import Invitation, WeightReceiver
from tests.exchange.memory import loaded
from tests.genuine.mcore import models
from tests.genuine.mcore.models import build_model
from tests.live.rounds import Counted

BUCKET = 40_000


class ThreadedEngine:
    """The methods of vLLM's clients, for ranks that have these recordings. `fail` is called before each bucket."""

    def __init__(
        self, recordings: Sequence[EngineRecording], fail: Callable[[], None] = lambda: None
    ) -> None:
        self.recordings, self._fail = recordings, fail
        self.receivers = [WeightReceiver() for _ in recordings]
        self.versions: list[str | None] = []
        self.memory = [
            {
                name: torch.full((each.view.numel,), torch.nan, dtype=getattr(torch, each.dtype.name))
                for name, each in recording.parameters.items()
            }
            for recording in recordings
        ]

    def _on_each(self, do: Callable[[int], None]) -> None:
        with ThreadPoolExecutor(len(self.receivers)) as threads:
            list(threads.map(do, range(len(self.receivers))))

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Meet the trainer."""
        invitation, ranks, cpu = Invitation(**init_info), len(self.receivers), torch.device("cpu")
        self._on_each(lambda r: self.receivers[r].meet(invitation, self.recordings[r], r, ranks, cpu))

    def start_weight_update(self) -> None:
        """Be ready."""
        for each in self.receivers:
            each.require()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive."""

        @contextmanager
        def filling(rank: int, names: Sequence[str]) -> Iterator[dict[str, torch.Tensor]]:
            self._fail()
            yield {name: self.memory[rank][name] for name in names}

        self._on_each(lambda r: self.receivers[r].receive(lambda names: filling(r, names)))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Note the name of the weights."""
        self.versions.append(weight_version)

    def shutdown_weight_transfer_engine(self) -> None:
        """Leave."""
        for each in self.receivers:
            each.leave()


def check(engine: ThreadedEngine, hub: dict[str, torch.Tensor]) -> None:
    """Assert that the engine has what its loaders would have made of the tensors of the Hub."""
    numbers = {name: tensor.float().numpy() for name, tensor in hub.items()}
    for recording, memory in zip(engine.recordings, engine.memory, strict=True):
        for name, values in loaded(recording, numbers).items():
            np.testing.assert_array_equal(memory[name].float().numpy(), values, err_msg=name)


def sent_twice(
    base: Path, recordings: Path, copies: int, args: dict[str, Any], layout: Layout, dtype: torch.dtype
) -> tuple[int, int, dict[str, int]]:
    """Send two rounds to some engines.

    The bytes that this rank sends, the most in its memory for that, and the size of an element of each tensor.
    """
    models.initialize(layout, seed=0)
    chunks: list[Any] = build_model(args, layout, dtype=dtype)
    source = reshard.weight_source(chunks, base=base)
    engines = [ThreadedEngine(read_recordings(recordings)) for _ in range(copies)]
    sender = reshard.weight_sender(source, engines, bucket=BUCKET, timeout=60, host="127.0.0.1")
    counted = Counted()
    for number in range(2):
        with torch.no_grad():
            for chunk in chunks:
                for parameter in chunk.parameters():
                    parameter.copy_(parameter + number)
        with counted.counting():
            sender.send(f"round {number}")
        hub = {name: tensor.clone() for name, tensor in source}
        if distributed.get_rank() == 0:
            for engine in engines:
                check(engine, hub)
                assert engine.versions[-1] == f"round {number}"
    sender.close()
    return sender.nbytes, counted.most, {name: tensor.itemsize for name, tensor in hub.items()}


Errors = list[tuple[str, str | None]]


def failed(
    case: str, base: Path, recordings: Path, args: dict[str, Any], layout: Layout
) -> tuple[Errors, list[Errors]]:
    """The problems of this rank, and those of engines, if something is wrong on the last rank or in an engine."""
    models.initialize(layout, seed=0)
    chunks: list[Any] = build_model(args, layout)
    read = read_recordings(recordings)
    if case == "computes":
        read[-1] = replace(read[-1], loaded=("model.norm.weight",))
    calls = iter(range(100))
    engine = _Noting(read, (lambda: next(calls) > 3 and 1 / 0) if case == "engine" else lambda: None)
    try:
        source = reshard.weight_source(chunks, base=base)
        if case == "silent":
            engine.init_weight_transfer_engine = lambda init_info: None  # type: ignore[method-assign]
        sender = reshard.weight_sender(
            source, engine, timeout=2 if case == "silent" else 60, bucket=BUCKET, host="127.0.0.1"
        )
        if case == "unused":
            engine.shutdown_weight_transfer_engine()
        sender.send()
    except reshard.ReshardError as error:
        return _told(error), engine.errors
    return [], engine.errors


class _Noting(ThreadedEngine):
    """An engine that keeps the errors of its ranks."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.errors: list[Errors] = []

    def _on_each(self, do: Callable[[int], None]) -> None:
        def noting(rank: int) -> None:
            try:
                do(rank)
            except reshard.ReshardError as error:
                self.errors.append(_told(error))
                raise

        super()._on_each(noting)


def _told(error: reshard.ReshardError) -> Errors:
    return [(problem.code, problem.found) for problem in error.problems]
