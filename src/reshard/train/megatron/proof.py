"""What is asserted of a run: the plan before the first step, that weights change, and what was trained in the end."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from typing import Any

from reshard.errors import Problem, ReshardError
from reshard.train.megatron.load import checksum, live_tensors
from reshard.train.megatron.lora import is_adapter
from reshard.train.megatron.setup import Trainee

SAMPLE = 4096
"""Elements of each parameter that are compared before and after the first step."""


def assert_plan(trainee: Trainee) -> str:
    """Hold what was built against what was asked for, and say in a line what it is. Raises ReshardError; collective."""
    import torch

    problems = [*_ranks(trainee), *_parameters(trainee), *_optimizer(trainee)]
    found: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(found, problems)
    together = [problem for each in found for problem in each]
    if together:
        raise ReshardError(together)
    counts: list[Any] = [None] * len(found)
    torch.distributed.all_gather_object(counts, _counts(trainee))
    held, trained = (max(each[index] for each in counts) for index in (0, 1))
    return (
        f"{len(found)} ranks, {trainee.run.spread}: {trainee.weights.parameters:,} parameters, at most {held:,} on a "
        f"rank, of which {trained:,} are trained"
    )


def _ranks(trainee: Trainee) -> Iterator[Problem]:
    import torch
    from megatron.core import parallel_state as ps

    spread, world = trainee.run.spread, torch.distributed.get_world_size()
    sizes = {
        "WORLD_SIZE": (int(os.environ.get("WORLD_SIZE", world)), world),
        "tensor parallel": (spread.tp, ps.get_tensor_model_parallel_world_size()),
        "pipeline parallel": (spread.pp, ps.get_pipeline_model_parallel_world_size()),
        "expert parallel": (spread.ep, ps.get_expert_model_parallel_world_size()),
        "context parallel": (spread.cp, ps.get_context_parallel_world_size()),
        "data parallel": (trainee.steps.replicas, ps.get_data_parallel_world_size()),
        "virtual stages": (spread.vpp, len(trainee.chunks)),
    }
    for name, (wanted, found) in sizes.items():
        if wanted != found:
            yield Problem(
                "the ranks are not spread as asked", rule=name, expected=str(wanted), found=str(found)
            )


def _counts(trainee: Trainee) -> tuple[int, int]:
    """Parameters on this rank, and those of them that are trained."""
    each = [parameter for chunk in trainee.chunks for parameter in chunk.parameters()]
    return sum(p.numel() for p in each), sum(p.numel() for p in each if p.requires_grad)


def _parameters(trainee: Trainee) -> Iterator[Problem]:
    wanted = sum(
        held.numel
        for index in range(len(trainee.chunks))
        for held in trainee.weights.of(trainee.at, index).values()
    )
    live = {
        (index, name): value
        for index, chunk in enumerate(trainee.chunks)
        for name, value in live_tensors(chunk).items()
    }
    found = sum(value.numel() for (_, name), value in live.items() if not is_adapter(name))
    if wanted != found:
        yield Problem(
            "the rank holds another number of parameters than planned",
            expected=f"{wanted:,}",
            found=f"{found:,}",
            remedy="this is a mistake in reshard: please report it with this message",
        )
    parameters = {
        (index, name): value
        for index, chunk in enumerate(trainee.chunks)
        for name, value in chunk.named_parameters()
    }
    empty = [name for (_, name), value in live.items() if value.is_meta]
    yield from _wrong(empty, "parameters have no memory", "every weight was read")
    lora = trainee.run.lora
    still = {
        (index, name)
        for index in range(len(trainee.chunks))
        for name, held in trainee.weights.of(trainee.at, index).items()
        if lora or held.tensor.name in trainee.weights.nowhere
    }
    frozen = [key[1] for key, value in parameters.items() if value.requires_grad == (key in still)]
    rule = "the adapters alone are trained" if lora else "every parameter is trained"
    yield from _wrong(frozen, "parameters are trained that should not be, or the other way round", rule)


def _wrong(names: list[str], message: str, rule: str) -> Iterator[Problem]:
    if names:
        some = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        yield Problem(message, tensor=some, rule=rule)


def _optimizer(trainee: Trainee) -> Iterator[Problem]:
    """The optimizer was made from the parameters that are trained, and holds all of them or this rank's share."""
    groups = trainee.optimizer.param_groups
    held = sum(parameter.numel() for group in groups for parameter in group["params"])
    trained = _counts(trainee)[1]
    least = (
        trained
        if not trainee.options.use_distributed_optimizer
        else math.ceil(trained / _replicas(trainee)) // 2
    )
    if held < min(least, 1) or (least and held == 0 and trained > _replicas(trainee)):
        yield Problem(
            "the optimizer holds no parameters",
            rule="the optimizer is made from the parameters of the model as it is trained",
            expected=f"{trained:,} over {_replicas(trainee)} ranks",
            found=f"{held:,}",
        )


def _replicas(trainee: Trainee) -> int:
    return trainee.steps.replicas * trainee.sizes.cp


class Change:
    """Whether the first step that has a learning rate changes the weights of every rank."""

    def __init__(self, trainee: Trainee) -> None:
        self._trainee = trainee
        self._before = self._sample()
        self._done = False

    def _sample(self) -> list[Any]:
        return [
            parameter.detach().reshape(-1)[:SAMPLE].clone()
            for chunk in self._trainee.chunks
            for parameter in chunk.parameters()
            if parameter.requires_grad
        ]

    def check(self, rate: float) -> None:
        """After a step with learning rate `rate`. Raises ReshardError; collective the first time the rate is not 0."""
        import torch

        if self._done or rate == 0:
            return
        self._done = True
        pairs = zip(self._before, self._sample(), strict=True)
        changed = torch.tensor(
            float(any(not torch.equal(before, after) for before, after in pairs)),
            device=torch.cuda.current_device(),
        )
        self._before = []
        torch.distributed.all_reduce(changed, op=torch.distributed.ReduceOp.MIN)
        if not bool(changed):
            raise ReshardError(
                "the weights of a rank did not change in the first step",
                rule="training changes weights",
                found=f"learning rate {rate:g}",
                remedy="raise --lr: in 16 bits small steps are lost in rounding; or train in float32 (--fp32)",
            )


def digests(trainee: Trainee) -> dict[str, int]:
    """CRC32s of all live shards of all ranks; of a run with LoRA those of the adapters. Collective.

    Raises ReshardError where ranks that should hold the same do not.
    """
    import torch

    own = {
        trainee.at.key(index, name): checksum(value)
        for index, chunk in enumerate(trainee.chunks)
        for name, value in live_tensors(chunk).items()
        if is_adapter(name) or not trainee.run.lora
    }
    found: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(found, own)
    together: dict[str, int] = {}
    unequal = [
        key for each in found for key, value in each.items() if together.setdefault(key, value) != value
    ]
    if unequal:
        raise ReshardError(
            [
                Problem(
                    "data parallel ranks hold different weights",
                    tensor=key,
                    rule="ranks that share no weights hold the same",
                    remedy="a rank missed an update: look at the log for the rank that differs, and resume",
                )
                for key in sorted(set(unequal))
            ]
        )
    return together
