"""Assert that the run is as requested, when everything is prepared and after the first step.

A plan that is silently ignored is the costliest failure, because training continues: DDP instead of FSDP, one process
instead of eight, an optimizer with other tensors than the model's.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from reshard import guard
from reshard.base.errors import Problem, ReshardError, listed, when
from reshard.checks.device_maps import misplaced
from reshard.guard.in_script import MAX_PARAMETERS
from reshard.training.collectives import anywhere, everyone
from reshard.training.divergence import own_shard
from reshard.training.run import Run
from reshard.training.trl.rank_device import world_size

WRAPPER_CLASSES = {
    "ddp": "DistributedDataParallel",
    "fsdp2": "FSDPModule",
    "zero2": "DeepSpeedEngine",
    "zero3": "DeepSpeedEngine",
}
ADAPTER_PARTS = ("lora_", "modules_to_save", "trainable_tokens")
"""Parts of the names of an adapter's parameters."""
SAMPLE_ELEMENTS = 256
"""Elements of each trained tensor that are compared to see whether it changed."""


def assert_plan(run: Run, trainer: Any) -> None:
    """Compare the prepared trainer with the request. Raises one ReshardError, the same on every rank."""
    problems = [
        *_world(trainer),
        *_wrapper(run, trainer),
        *_spread(run, trainer.model, "the model"),
        *_trainable(run, trainer),
        *_head(run, trainer),
        *misplaced(trainer.model, world_size(), trainer.accelerator.device),
        *_frozen(run, trainer),
        *_guarded(run, trainer),
    ]
    if found := dict.fromkeys(problem for _, those in everyone(problems) for problem in those):
        raise ReshardError(found)


def _world(trainer: Any) -> list[Problem]:
    asked = int(os.environ.get("WORLD_SIZE", "1"))
    found = trainer.accelerator.num_processes
    return when(
        not asked == found == world_size(),
        "processes-missing",
        "fewer ranks are running than processes were started",
        rule="all processes of the launcher must be ranks of one group",
        expected=f"{asked} ranks",
        found=f"{found} in accelerate, {world_size()} in torch.distributed",
        remedy="start them with torchrun or reshard: `accelerate launch --cpu` starts one process only",
    )


def _is_shared(run: Run) -> bool:
    """Whether groups of tensor-parallel ranks shard the model by FSDP2."""
    return run.parallel == "tp" and world_size() > run.layout.tp


def _wrapper(run: Run, trainer: Any) -> list[Problem]:
    kind = run.parallel
    asked = "FSDPModule" if _is_shared(run) else WRAPPER_CLASSES.get(kind)
    if kind == "ddp" and world_size() == 1:
        asked = None  # one process has no others to share with
    bases = {base.__name__ for base in type(trainer.model_wrapped).__mro__}
    found = [name for name in dict.fromkeys(WRAPPER_CLASSES.values()) if name in bases]
    return when(
        found != ([asked] if asked else []),
        "model-not-wrapped",
        "the model is not wrapped as planned",
        expected=f"{asked or 'no wrapper'} (--parallel {kind})",
        found=", ".join(found) or type(trainer.model_wrapped).__name__,
        remedy="unset the variables of accelerate (ACCELERATE_*, FSDP_*) and look at the versions: reshard doctor; "
        "on a CPU, FSDP2 and tensor parallelism need at least two processes",
    )


def _spread(run: Run, model: Any, whose: str) -> list[Problem]:
    """A problem if parameters are not sharded where the plan shards them, or sharded where it does not."""
    is_sharded = {
        name: isinstance(each, DTensor) or hasattr(each, "ds_id") for name, each in model.named_parameters()
    }
    sharded = [name for name, split in is_sharded.items() if split]
    plain = [name for name, split in is_sharded.items() if not split]
    kind = run.parallel
    if kind in ("ddp", "zero2"):
        wrong, words = sharded, "complete parameters, none sharded"
    elif kind in ("fsdp2", "zero3"):
        wrong, words = plain, "sharded parameters only"
    elif _is_shared(run):
        wrong, words = plain, "parameters sharded over the tensor parallel ranks, and over their groups"
    else:
        wrong, words = [] if sharded else plain, "parameters sharded over the tensor parallel ranks"
    return when(
        wrong,
        "parameters-not-as-planned",
        f"the parameters of {whose} are not placed as planned",
        tensor=listed(wrong, MAX_PARAMETERS),
        expected=f"{words} (--parallel {kind})",
        found=f"{len(sharded)} sharded, {len(plain)} whole",
        remedy="load with device_map=None and without tp_plan; shard with --parallel alone",
    )


def _trainable(run: Run, trainer: Any) -> list[Problem]:
    names = {name: parameter.requires_grad for name, parameter in trainer.model.named_parameters()}
    wrong = [name for name, trained in names.items() if trained != (not run.lora or _of_adapter(name))]
    return when(
        wrong,
        "trainable-parameters-differ",
        "the trainable parameters are not the planned ones",
        tensor=listed(wrong, MAX_PARAMETERS),
        expected="adapters only" if run.lora else "all parameters",
        found=f"{sum(names.values())} of {len(names)} trainable",
        remedy="freeze parameters only with --lora",
    )


def _of_adapter(name: str) -> bool:
    return any(part in name for part in ADAPTER_PARTS) and ".original_module." not in name


def _head(run: Run, trainer: Any) -> list[Problem]:
    """A problem if a head is trained with an adapter under FSDP2: TRL 1.16 gathers it outside of its FSDP group.

    `full_tensor()` then gives each rank the gradient of its own samples only, and they are never summed.
    """
    head = trainer.model.get_output_embeddings() if run.lora and run.parallel == "fsdp2" else None
    trained = [name for name, each in head.named_parameters() if each.requires_grad] if head else []
    return when(
        trained,
        "fsdp2-head-not-averaged",
        "FSDP2 does not average the gradient of a head that is trained with an adapter",
        tensor=", ".join(trained),
        rule="the gradient of a weight must cover the samples of all ranks",
        found="the head in lora_modules_to_save or lora_target_modules, with --parallel fsdp2",
        remedy="do not train the head, use --parallel ddp or zero3, or leave out --lora to train all weights",
    )


def _frozen(run: Run, trainer: Any) -> Iterator[Problem]:
    """Check that a reference model or a teacher is sharded like the model, and separate from it."""
    own = {id(parameter) for parameter in trainer.model.parameters()}
    for name, whose in (("ref_model", "the reference model"), ("teacher_model", "the teacher")):
        if (frozen := getattr(trainer, name, None)) is None:
            continue
        yield from _spread(run, frozen, whose)
        yield from misplaced(frozen, world_size(), trainer.accelerator.device, whose)
        yield from when(
            any(id(parameter) in own for parameter in frozen.parameters()),
            "reference-model-shared",
            f"{whose} is the model itself",
            rule="it must keep its initial weights",
            remedy="use TRL 1.16 or later",
        )


def _guarded(run: Run, trainer: Any) -> list[Problem]:
    """Problems found by `reshard.guard`, except of device maps, and of plain tensors that transformers leaves."""
    try:
        guard.check(trainer.model_wrapped, trainer.optimizer)
    except ReshardError as error:
        known = ["guard-device-map", *(["guard-mixed-parameters"] if run.parallel == "tp" else [])]
        return [each for each in error.problems if each.code not in known]
    return []


class WeightChange:
    """Detects whether weights change, by elements of each trained tensor copied before the first step."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._before = self._sample()

    def _sample(self) -> list[Any]:
        return [_elements(parameter) for parameter in self._model.parameters() if parameter.requires_grad]

    def assert_moved(self) -> None:
        """Raise ReshardError on each rank if no weight of any rank changed."""
        after = self._sample()
        moved = any(not torch.equal(old, new) for old, new in zip(self._before, after, strict=True))
        if anywhere(moved):
            return
        raise ReshardError(
            "weights-unchanged",
            "the weights did not change in the first step",
            rule="an optimizer that was created before sharding updates other tensors",
            found=f"{len(self._before)} trained tensors, all as before",
            remedy="raise learning_rate if it is tiny (in bfloat16 small updates vanish: dtype float32); otherwise "
            "look at the versions with reshard doctor",
        )


def _elements(parameter: Any) -> Any:
    """Up to `SAMPLE_ELEMENTS` elements of this rank's shard of a parameter, evenly spaced, copied to host memory."""
    flat = own_shard(parameter).reshape(-1)
    return flat[:: max(flat.numel() // SAMPLE_ELEMENTS, 1)].cpu().clone()
