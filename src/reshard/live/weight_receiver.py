"""One rank of an engine: it meets the ranks of a trainer, and receives the elements that it holds."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import groupby

import torch

from reshard.base.errors import Problem, ReshardError, raise_all
from reshard.exchange.engine_recording import EngineRecording
from reshard.exchange.messages import Message, messages
from reshard.exchange.transfer_plan import Transfer, unsent
from reshard.live.packing import unpack
from reshard.live.transfer_meeting import Meeting, mixed_weights

AHEAD = 2
"""Buckets of which messages are in memory: one is filled from while the next is received."""

Filling = Callable[[Sequence[str]], AbstractContextManager[dict[str, torch.Tensor]]]
"""Opens parameters, by their names, for new elements; when its block ends, the engine uses these."""


@dataclass
class Invitation:
    """Where a trainer is met, by how many engines, and which of them this is."""

    host: str
    port: int
    trainer_ranks: int
    engines: int
    engine: int
    bucket: int
    timeout: float


class WeightReceiver:
    """The connection of an engine's rank, number `rank` of `ranks`, to a trainer."""

    def __init__(self) -> None:
        self._meeting: Meeting | None = None
        self._buckets: list[list[Message]] = []

    def meet(
        self, invitation: Invitation, recording: EngineRecording, rank: int, ranks: int, device: torch.device
    ) -> None:
        """Meet a trainer, which tells what it will send. Raises ReshardError unless that is all that was recorded."""
        self.leave()
        engine, senders = invitation.engine, invitation.trainer_ranks
        meeting = Meeting.at(invitation.host, invitation.port, invitation.timeout)
        with meeting.sharing_errors("the trainer"):
            meeting.put(f"recording {engine} {rank}", recording.as_dict())
            meeting.put(f"ranks {engine}", ranks)
            sizes = [meeting.take(f"ranks {each}") for each in range(invitation.engines)]
            own = replace(recording, rank=senders + sum(sizes[:engine]) + rank)
            told = (each for sender in range(senders) for each in meeting.take(f"sends {sender} {own.rank}"))
            transfers = [Transfer.of_dict(each) for each in told]
            raise_all(unsent([own], transfers))
            sent = messages(transfers, {own.rank: own}, invitation.bucket)
            self._buckets = [list(group) for _, group in groupby(sent, key=lambda message: message.bucket)]
            meeting.connect(own.rank, senders + sum(sizes), device)
        self._meeting = meeting

    def require(self) -> None:
        """Raise ReshardError unless a trainer is connected."""
        if self._meeting is None:
            raise ReshardError(
                "transfer-not-connected",
                "no trainer is connected to the engine, or the connection was lost",
                remedy="connect again: reshard.weight_sender",
            )

    def receive(self, filling: Filling) -> None:
        """Receive all elements. An error tells whether some parameters have new values, and ends the connection."""
        self.require()
        meeting, self._meeting = self._meeting, None
        assert meeting is not None
        new: list[str] = []
        with meeting.sharing_errors("a rank of the trainer", lambda: _state(new)):
            ahead = deque[list[int]]()
            for number, bucket in enumerate(self._buckets):
                for each in self._buckets[number + len(ahead) : number + AHEAD]:
                    ahead.append([_begun(meeting, message) for message in each])
                _fill(filling, bucket, [meeting.end(begun) for begun in ahead.popleft()], new)
        self._meeting = meeting

    def leave(self) -> None:
        """End the connection."""
        if self._meeting is not None:
            self._meeting.leave()
            self._meeting = None


def _begun(meeting: Meeting, message: Message) -> int:
    buffer = torch.empty(message.nbytes, dtype=torch.uint8, device=meeting.device)
    return meeting.receive(buffer, message.sender)


def _fill(
    filling: Filling, bucket: Sequence[Message], received: Sequence[torch.Tensor], new: list[str]
) -> None:
    """Fill the parameters of a bucket; their names are added to `new`."""
    names = dict.fromkeys(transfer.parameter for message in bucket for transfer in message.transfers)
    new += names
    with filling(list(names)) as parameters:
        for message, buffer in zip(bucket, received, strict=True):
            unpack(message, buffer, parameters)


def _state(new: Sequence[str]) -> list[Problem]:
    """What the engine has, after an update that failed."""
    if not new:
        return [
            Problem("transfer-weights-kept", "the engine still has its former weights", severity="warning")
        ]
    return [mixed_weights(f"{len(new)} parameters are new, or partly new")]
