"""The backend `reshard` of vLLM's weight transfer: a rank of an engine gets the elements that it holds, and no others.

`vllm serve CKPT --load-format reshard --weight-transfer-config '{"backend": "reshard"}'`. What a parameter consists of
was recorded while the model was loaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from vllm.distributed.weight_transfer.base import (
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    WeightTransferEngine,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.attention import is_deferred_attention_layer

from reshard.live.vllm import recording_of, register
from reshard.live.vllm_layers import LayersOf
from reshard.live.weight_receiver import Invitation, WeightReceiver
from reshard.live.weight_sender import weight_sender


@dataclass
class ReshardUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """The number of a round."""

    number: int


class ReshardTransferEngine(WeightTransferEngine[Invitation, ReshardUpdateInfo]):  # type: ignore[misc]
    """Receives the elements of one rank of an engine."""

    init_info_cls = Invitation
    update_info_cls = ReshardUpdateInfo
    supports_draft_weight_update = False

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._receiver = WeightReceiver()

    def init_transfer_engine(self, init_info: Invitation) -> None:
        """Meet a trainer."""
        own = self.parallel_config
        rank = own.data_parallel_index * own.world_size + own.rank
        self._receiver.meet(init_info, recording_of(self.model), rank, own.world_size_across_dp, self.device)

    def start_weight_update(self) -> None:
        """Raise ReshardError unless a trainer is connected."""
        self._receiver.require()

    def receive_weights(self, update_info: ReshardUpdateInfo) -> None:
        """Receive all elements."""
        self._receiver.receive(LayersOf(self.model).filling)

    def finish_weight_update(self) -> None:
        """Let attention layers compute what they derive from their weights."""
        for layer in self.model.modules():
            if is_deferred_attention_layer(layer):
                layer.process_weights_after_loading(self.model_config.dtype)

    def shutdown(self) -> None:
        """Leave the trainer."""
        self._receiver.leave()


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


register()  # in a trainer, which loads no plugins, for who imports this
