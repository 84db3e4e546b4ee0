"""A trainer of which this process is a rank: where its tensors are, and what the ranks tell one another."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from reshard.algebra.dtypes import BY_NAME
from reshard.base.errors import Problem, ReshardError, raise_all
from reshard.exchange.trainer import Trainer

if TYPE_CHECKING:
    import torch

    from reshard.live.packing import TensorKey


@dataclass(frozen=True)
class LiveTrainer:
    """The trainer, and what returns the tensors in the memory of this rank as they are now."""

    trainer: Trainer
    memory: Callable[[], Mapping[TensorKey, torch.Tensor]]
    form: Mapping[TensorKey, str]

    def held(self) -> Mapping[TensorKey, torch.Tensor]:
        """The tensors of this rank; collective. Raises ReshardError if those of a rank have other forms than before."""
        held = self.memory()
        require_alike("as when the source was made", on_all_ranks(lambda: forms(held) == self.form))
        return held

    @cached_property
    def device(self) -> torch.device:
        """The device of its tensors."""
        import torch

        return next((each.device for each in self.memory().values()), torch.device("cpu"))


def forms(held: Mapping[TensorKey, torch.Tensor]) -> dict[TensorKey, str]:
    """Dtype and shape of each tensor."""
    return {key: f"{tensor.dtype} {list(tensor.shape)}" for key, tensor in held.items()}


def not_plain(tensors: Mapping[str, torch.Tensor]) -> Iterator[Problem]:
    """A problem for each tensor whose elements are not in memory as they are."""
    for key, tensor in tensors.items():
        kind, of = type(tensor.detach()).__name__, str(tensor.dtype).removeprefix("torch.")
        if kind != "Tensor" or tensor.is_meta or of not in BY_NAME:
            yield Problem(
                "weight-source-tensor-not-plain",
                "a tensor of the trainer has no elements in memory of its own",
                tensor=key,
                found=f"{kind} of {of} on {tensor.device}",
                rule="quantized tensors and Megatron-Core's in FSDP have their elements elsewhere",
                remedy="keep the parameters in bfloat16, in memory, and those of Megatron-Core outside of FSDP",
            )


def trainer_rank() -> int:
    """The global rank of this process."""
    distributed = _distributed()
    return distributed.get_rank() if distributed else 0


def _distributed() -> Any:
    """torch.distributed if this process is a rank; one that has not imported it is none."""
    module = sys.modules.get("torch.distributed")
    return module if module and module.is_initialized() else None


def on_all_ranks(make: Callable[[], Any]) -> list[Any]:
    """What `make` returns on each rank. Raises the ReshardError of any rank on all."""
    distributed = _distributed()
    try:
        answer = make()
    except ReshardError as error:
        answer = error
    answers = [answer]
    if distributed:
        answers *= distributed.get_world_size()
        distributed.all_gather_object(answers, answer)
    raise_all(dict.fromkeys(each for answer in answers for each in getattr(answer, "problems", ())))
    return answers


def require_alike(what: str, answers: Iterable[bool]) -> None:
    """Raise ReshardError with the ranks that answer False."""
    raise_all(
        Problem(
            "weight-source-ranks-differ",
            "the model of a rank is not that of the trainer",
            expected=f"names, shapes, dtypes, layout and config {what}",
            found=f"others on rank {rank}",
            remedy="build the model in the same way on all ranks, and make a new source if it changes",
        )
        for rank, answer in enumerate(answers)
        if not answer
    )
