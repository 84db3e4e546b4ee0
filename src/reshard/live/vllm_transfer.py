"""The backend `reshard` of vLLM's weight transfer: a rank of an engine gets the elements that it holds, and no others.

`vllm serve CKPT --load-format reshard --weight-transfer-config '{"backend": "reshard"}'`. What a parameter consists of
was recorded while the model was loaded. Layers that vLLM processes after loading (packed, quantized, fused) are filled
as they were then and processed again, by its own layerwise reload.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, ClassVar, NamedTuple

import torch
from vllm.distributed.weight_transfer.base import (
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.attention import is_deferred_attention_layer

from reshard.base.errors import Problem, ReshardError, raise_all
from reshard.exchange.messages import Message, messages
from reshard.exchange.transfer_plan import Transfer, unsent
from reshard.live.packing import unpack
from reshard.live.transfer_meeting import Meeting, mixed_weights
from reshard.live.vllm import recording_of
from reshard.live.vllm_layers import LayersOf
from reshard.live.weight_sender import weight_sender

AHEAD = 2
"""Buckets of which messages are in memory: one is filled from while the next is received."""


@dataclass
class ReshardInitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """Where a trainer is met, by how many engines, of which this is one."""

    host: str
    port: int
    trainer_ranks: int
    engines: int
    engine: int
    bucket: int
    timeout: float


@dataclass
class ReshardUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """The number of a round."""

    number: int


class ReshardTransferEngine(WeightTransferEngine[ReshardInitInfo, ReshardUpdateInfo]):  # type: ignore[misc]
    """Receives the elements of one rank of an engine."""

    init_info_cls = ReshardInitInfo
    update_info_cls = ReshardUpdateInfo
    supports_draft_weight_update = False

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._meeting: Meeting | None = None
        self._buckets: list[list[Message]] = []

    def init_transfer_engine(self, init_info: ReshardInitInfo) -> None:
        """Meet a trainer, which tells what it will send."""
        self.shutdown()
        recording = recording_of(self.model)
        own = self.parallel_config
        worker = own.data_parallel_index * own.world_size + own.rank
        meeting = Meeting.at(init_info.host, init_info.port, init_info.timeout)
        with meeting.sharing_errors("the trainer"):
            meeting.put(f"recording {init_info.engine} {worker}", recording.as_dict())
            meeting.put(f"ranks {init_info.engine}", own.world_size_across_dp)
            sizes = [meeting.take(f"ranks {each}") for each in range(init_info.engines)]
            first = init_info.trainer_ranks + sum(sizes[: init_info.engine])
            rank, ranks = first + worker, init_info.trainer_ranks + sum(sizes)
            transfers = [
                Transfer.of_dict(each)
                for sender in range(init_info.trainer_ranks)
                for each in meeting.take(f"sends {sender} {rank}")
            ]
            recording = replace(recording, rank=rank)
            raise_all(unsent([recording], transfers))
            self._buckets = _by_bucket(messages(transfers, {rank: recording}, init_info.bucket))
            meeting.connect(rank, ranks, self.device)
        self._meeting = meeting

    def start_weight_update(self) -> None:
        """Raise ReshardError unless a trainer is connected."""
        if self._meeting is None:
            raise ReshardError(
                "transfer-not-connected",
                "no trainer is connected to the engine, or the connection was lost",
                remedy="connect again: reshard.weight_sender",
            )

    def receive_weights(self, update_info: ReshardUpdateInfo) -> None:
        """Receive all elements. An error tells whether some parameters have new values."""
        meeting, self._meeting = self._meeting, None
        assert meeting is not None
        new: list[str] = []
        with meeting.sharing_errors("a rank of the trainer", lambda: _state(new)):
            self._receive(meeting, new)
        self._meeting = meeting

    def _receive(self, meeting: Meeting, new: list[str]) -> None:
        """Fill the parameters of one bucket while those of the next are received."""
        layers = LayersOf(self.model)
        ahead = deque[list[Incoming]]()
        for number in range(len(self._buckets)):
            for bucket in self._buckets[number + len(ahead) : number + AHEAD]:
                ahead.append([_begun(meeting, message) for message in bucket])
            _fill(layers, ahead.popleft(), meeting, new)

    def finish_weight_update(self) -> None:
        """Let attention layers compute what they derive from their weights."""
        for layer in self.model.modules():
            if is_deferred_attention_layer(layer):
                layer.process_weights_after_loading(self.model_config.dtype)

    def shutdown(self) -> None:
        """Leave the trainer."""
        if self._meeting is not None:
            self._meeting.leave()
            self._meeting = None


class Incoming(NamedTuple):
    """A message that is being received."""

    message: Message
    buffer: torch.Tensor
    work: Any


def _begun(meeting: Meeting, message: Message) -> Incoming:
    buffer = torch.empty(message.nbytes, dtype=torch.uint8, device=meeting.device)
    return Incoming(message, buffer, meeting.receive(buffer, message.sender))


def _fill(layers: LayersOf, received: Sequence[Incoming], meeting: Meeting, new: list[str]) -> None:
    """Wait for the messages of a bucket, and fill the parameters; their names are added to `new`."""
    for each in received:
        meeting.end(each.work)
    names = dict.fromkeys(transfer.parameter for each in received for transfer in each.message.transfers)
    new += names
    with layers.filling(list(names)) as parameters:
        for each in received:
            unpack(each.message, each.buffer, parameters)


def _by_bucket(sent: Sequence[Message]) -> list[list[Message]]:
    return [list(group) for _, group in groupby(sent, key=lambda message: message.bucket)]


def _state(new: Sequence[str]) -> list[Problem]:
    """What the engine has, after an update that failed."""
    if not new:
        return [
            Problem("transfer-weights-kept", "the engine still has its former weights", severity="warning")
        ]
    return [mixed_weights(f"{len(new)} parameters are new, or partly new")]


@dataclass
class ReshardTrainerInitInfo(TrainerInitInfo):  # type: ignore[misc]
    """The arguments of `reshard.weight_sender`, for vLLM's `WeightTransferTrainerFactory`."""

    backend: ClassVar[str] = "reshard"

    host: str | None = None
    bucket: int | str = "256MiB"
    timeout: float = 300


class ReshardTrainerEngine(TrainerWeightTransferEngine[ReshardTrainerInitInfo]):  # type: ignore[misc]
    """`reshard.weight_sender` as one of vLLM's own trainer engines. Its source is what `weight_source` returned."""

    init_info_cls = ReshardTrainerInitInfo

    @classmethod
    def trainer_init(
        cls, init_info: ReshardTrainerInitInfo, *, client: Any, source: Any = None
    ) -> ReshardTrainerEngine:
        """Connect; every rank of the trainer calls it."""
        engine = cls(client=client, source=source, is_sender=init_info.is_sender)
        engine.sender = weight_sender(
            source, client, host=init_info.host, bucket=init_info.bucket, timeout=init_info.timeout
        )
        return engine

    def send_weights(self) -> None:
        """Send the present weights."""
        self.sender.send()

    def shutdown(self) -> None:
        """Leave the engine."""
        self.sender.close()
