"""Assertions about a run: the plan before the first step, changing weights, and digests of the trained weights."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, NamedTuple

from reshard.base.errors import Problem, ReshardError, listed
from reshard.engines.megatron.fill_model import checksum, live_tensors
from reshard.training.engine_registry import final_dtype
from reshard.training.megatron.lora import is_adapter
from reshard.training.megatron.rank_setup import Trainee, gather_weights

SAMPLE_ELEMENTS = 4096
"""Elements of each parameter that are compared before and after the first step."""


class _Counts(NamedTuple):
    """Numbers of parameters on a rank: all, trained, this rank's share of the trained ones, and in its optimizer."""

    all: int
    trained: int
    share: float
    held: int


def assert_plan(trainee: Trainee) -> str:
    """Compare the built model with the request. Returns a line about it. Raises ReshardError; collective."""
    import torch

    own = [*_ranks(trainee), *_parameters(trainee)], _counts(trainee)
    found: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(found, own)
    problems = [problem for each, _ in found for problem in each]
    counts = [each for _, each in found]
    problems += _optimizer(counts)
    if problems:
        raise ReshardError(problems)
    held, trained = max(each.all for each in counts), max(each.trained for each in counts)
    return (
        f"{len(found)} ranks, {trainee.layout}: {trainee.weights.parameters:,} parameters, at most {held:,} on a "
        f"rank, of which {trained:,} are trained"
    )


def _ranks(trainee: Trainee) -> Iterator[Problem]:
    import torch
    from megatron.core import parallel_state as ps

    layout, world = trainee.run.layout, torch.distributed.get_world_size()
    sizes = {
        "WORLD_SIZE": (int(os.environ.get("WORLD_SIZE", world)), world),
        "tensor parallel": (layout.tp, ps.get_tensor_model_parallel_world_size()),
        "pipeline parallel": (layout.pp, ps.get_pipeline_model_parallel_world_size()),
        "expert parallel": (layout.ep, ps.get_expert_model_parallel_world_size()),
        "context parallel": (layout.cp, ps.get_context_parallel_world_size()),
        "data parallel": (trainee.steps.replicas, ps.get_data_parallel_world_size()),
        "virtual stages": (layout.vpp, len(trainee.chunks)),
    }
    for name, (wanted, found) in sizes.items():
        if wanted != found:
            yield Problem(
                "ranks-not-as-asked",
                "the parallel layout is not the requested one",
                rule=name,
                expected=str(wanted),
                found=str(found),
            )


def _counts(trainee: Trainee) -> _Counts:
    from megatron.core import parallel_state as ps

    each = [parameter for chunk in trainee.chunks for parameter in chunk.parameters()]
    trained = [parameter for parameter in each if parameter.requires_grad]
    experts = sum(p.numel() for p in trained if not getattr(p, "allreduce", True))
    dense = sum(p.numel() for p in trained) - experts
    copies = expert_copies = 1
    if trainee.options.use_distributed_optimizer:
        copies = ps.get_data_parallel_world_size(with_context_parallel=True)
        expert_copies = ps.get_expert_data_parallel_world_size()
    held = sum(p.numel() for group in trainee.optimizer.param_groups for p in group["params"])
    return _Counts(
        sum(p.numel() for p in each), dense + experts, dense / copies + experts / expert_copies, held
    )


def _optimizer(counts: list[_Counts]) -> list[Problem]:
    """Problems unless the optimizer was made from the trained parameters, and its ranks hold each of them once."""
    expected, held = round(sum(each.share for each in counts)), sum(each.held for each in counts)
    if expected == held:
        return []
    return [
        Problem(
            "optimizer-parameters-differ",
            "the optimizer's parameters are not the trained ones",
            rule="the optimizer must be created from the parameters of the trained model",
            expected=f"{expected:,} over all ranks",
            found=f"{held:,}",
            remedy="this is a bug in reshard: please report it with this message",
        )
    ]


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
            "rank-parameter-count-differs",
            "the rank has a different number of parameters than planned",
            expected=f"{wanted:,}",
            found=f"{found:,}",
            remedy="this is a bug in reshard: please report it with this message",
        )
    parameters = {
        (index, name): value
        for index, chunk in enumerate(trainee.chunks)
        for name, value in chunk.named_parameters()
    }
    empty = [name for (_, name), value in live.items() if value.is_meta]
    yield from _wrong(
        empty, "parameters-without-memory", "parameters have no memory", "every weight was read"
    )
    lora = trainee.run.lora
    still = {
        (index, name)
        for index in range(len(trainee.chunks))
        for name, held in trainee.weights.of(trainee.at, index).items()
        if lora or held.tensor.name in trainee.weights.nowhere
    }
    frozen = [key[1] for key, value in parameters.items() if value.requires_grad == (key in still)]
    rule = "the adapters alone are trained" if lora else "every parameter is trained"
    yield from _wrong(
        frozen,
        "trained-parameters-differ",
        "parameters are trained that should not be, or the other way round",
        rule,
    )


def _wrong(names: list[str], code: str, message: str, rule: str) -> Iterator[Problem]:
    if names:
        yield Problem(code, message, tensor=listed(names, 5), rule=rule)


class WeightChange:
    """Checks that the first step with a learning rate changes the weights of every rank."""

    def __init__(self, trainee: Trainee) -> None:
        self._trainee = trainee
        self._before = self._sample()
        self._done = False

    def _sample(self) -> list[Any]:
        return [
            parameter.detach().reshape(-1)[:SAMPLE_ELEMENTS].clone()
            for chunk in self._trainee.chunks
            for parameter in chunk.parameters()
            if parameter.requires_grad
        ]

    def check(self, rate: float) -> None:
        """Check after a step with learning rate `rate`. Raises ReshardError; collective at the first rate above 0."""
        import torch

        if self._done or rate == 0:
            return
        self._done = True
        gather_weights(self._trainee)
        pairs = zip(self._before, self._sample(), strict=True)
        changed = torch.tensor(
            float(any(not torch.equal(before, after) for before, after in pairs)),
            device=torch.cuda.current_device(),
        )
        self._before = []
        torch.distributed.all_reduce(changed, op=torch.distributed.ReduceOp.MIN)
        if not bool(changed):
            raise ReshardError(
                "rank-weights-unchanged",
                "the weights of a rank did not change in the first step",
                rule="training must change the weights",
                found=f"learning rate {rate:g}",
                remedy="raise --lr: in 16 bits, small steps are lost to rounding; or train in float32 (--fp32)",
            )


def digests(trainee: Trainee) -> dict[str, int]:
    """CRC32s of all live shards of all ranks, in the dtype of `final`; with LoRA those of the adapters. Collective.

    Raises ReshardError if ranks that should have equal shards do not.
    """
    import torch

    dtype = final_dtype(trainee.run)
    own = {
        trainee.at.key(index, name): checksum(value.to(getattr(torch, dtype)) if dtype else value)
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
                    "data-parallel-weights-differ",
                    "data-parallel ranks have different weights",
                    tensor=key,
                    rule="ranks that should have different weights have the same",
                    remedy="a rank missed an update: find the rank that differs in the log, and resume",
                )
                for key in sorted(set(unequal))
            ]
        )
    return together
