"""A guard for running code: one explained error before a trap closes, and a diagnosis when one has.

import reshard.guard

reshard.guard.check(model, optimizer)          # after preparing, before the first step
with reshard.guard.explained():                # an exception inside comes with its cause and cure
    trainer.train()
trainer.add_callback(reshard.guard.callback()) # checks when training begins
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from reshard.errors import Problem, ReshardError

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

SHOWN = 5
"""Parameters that a message names; the rest are counted."""


def check(model: nn.Module, optimizer: Optimizer | None = None) -> None:
    """Raise one ReshardError with everything that is wrong with a model that is about to be trained.

    Looks at types, devices and identities only, never at values: milliseconds, whatever the size.
    """
    problems = [problem for rule in _RULES for problem in rule(model)]
    if optimizer is not None:
        problems += _optimizer(model, optimizer)
    if problems:
        raise ReshardError(problems)


def _dtensors(model: nn.Module) -> tuple[list[str], list[str]]:
    """The names of parameters that are DTensors, and of those that are plain."""
    from torch.distributed.tensor import DTensor

    sharded: list[str] = []
    plain: list[str] = []
    for name, parameter in model.named_parameters():
        (sharded if isinstance(parameter, DTensor) else plain).append(name)
    return sharded, plain


def _mixed(model: nn.Module) -> Iterator[Problem]:
    sharded, plain = _dtensors(model)
    if sharded and plain and not _data_parallel(model):
        yield Problem(
            "plain parameters beside DTensors",
            tensor=_some(plain if len(plain) <= len(sharded) else sharded),
            rule="all parameters of a model that is sharded are DTensors",
            found=f"{len(sharded)} DTensors, {len(plain)} plain parameters",
            remedy="shard the root module too (fully_shard(model)), or load with device_map=None: the first operation "
            "on both fails with `got mixed torch.Tensor and DTensor`",
        )


def _data_parallel(model: nn.Module) -> nn.Module | None:
    from torch.nn.parallel import DistributedDataParallel

    return next((module for module in model.modules() if isinstance(module, DistributedDataParallel)), None)


def _sharded_in_ddp(model: nn.Module) -> Iterator[Problem]:
    wrapped = _data_parallel(model)
    if wrapped is not None and (sharded := _dtensors(wrapped)[0]):
        yield Problem(
            "a sharded model lies in DistributedDataParallel",
            tensor=_some(sharded),
            rule="DDP holds a whole model on each rank",
            remedy="load with device_map=None and without tp_plan, or leave DDP out: FSDP2 is data parallel by itself",
        )


def _device_map(model: nn.Module) -> Iterator[Problem]:
    world = int(os.environ.get("WORLD_SIZE", "1") or 1)
    for name, module in model.named_modules():
        devices = set(map(str, (getattr(module, "hf_device_map", None) or {}).values()))
        if len(devices) > 1 and world > 1:
            yield Problem(
                "a device map spreads the model over devices in a run of several processes",
                tensor=name or type(module).__name__,
                found=f"hf_device_map over {', '.join(sorted(devices))}, WORLD_SIZE={world}",
                remedy="load with device_map=None, and shard with FSDP2 or ZeRO-3 what does not fit",
            )


def _meta(model: nn.Module) -> Iterator[Problem]:
    empty = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if empty:
        yield Problem(
            "parameters have no memory",
            tensor=_some(empty),
            found=f"{len(empty)} parameters on the meta device",
            remedy="model.to_empty(device=…) and load the weights, or call from_pretrained outside of a meta context",
        )


def _ties(model: nn.Module) -> Iterator[Problem]:
    config = getattr(model, "config", None)
    if not getattr(config, "tie_word_embeddings", False) or not hasattr(model, "get_input_embeddings"):
        return
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    if head is not None and table is not None and head.weight is not table.weight:
        yield Problem(
            "the head and the embedding are tied in the config, and two tensors in the model",
            tensor="lm_head.weight",
            rule="tie_word_embeddings is true",
            remedy="call model.tie_weights() after loading, and put both into one FSDP group",
        )


def _nothing_trainable(model: nn.Module) -> Iterator[Problem]:
    if not any(parameter.requires_grad for parameter in model.parameters()):
        yield Problem(
            "nothing is trainable",
            found=f"{sum(1 for _ in model.parameters())} parameters, none requires a gradient",
            remedy="pass is_trainable=True to PeftModel.from_pretrained, or unfreeze what is to be trained",
        )


_RULES = (_mixed, _sharded_in_ddp, _device_map, _meta, _ties, _nothing_trainable)


def _optimizer(model: nn.Module, optimizer: Optimizer) -> Iterator[Problem]:
    optimizer = getattr(optimizer, "optimizer", optimizer)  # accelerate wraps it
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    own = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    if held and own and not held & own:
        yield Problem(
            "the optimizer holds other tensors than the model",
            rule="the optimizer is made from the parameters of the model as it is trained",
            found=f"{len(held)} tensors in the optimizer, none of them among {len(own)} trainable parameters",
            remedy="shard or wrap the model first, then make the optimizer: else the weights never change",
        )


def _some(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


@contextmanager
def explained() -> Iterator[None]:
    """Attach the doctor's diagnosis to any exception that is raised inside. The exception stays the same."""
    try:
        yield
    except Exception as error:
        note = _diagnosis(error)
        if note and hasattr(error, "add_note"):
            error.add_note(note)
        elif note:  # Python 3.10
            error.args = (f"{error}\n{note}", *error.args[1:])
        raise


def _diagnosis(error: Exception) -> str:
    from reshard.doctor.logs import diagnose_text

    words = "".join(traceback.format_exception(error))
    known = [finding for finding in diagnose_text("this exception", words) if finding.id != "unknown-failure"]
    return "\n".join(
        f"reshard doctor: {finding.title.en} ({finding.id}, {finding.certainty})\n"
        f"why: {finding.cause.en}\ncure: {finding.cure.en}"
        for finding in known[:1]
    )


def callback() -> Any:
    """A TrainerCallback that checks the model and its optimizer when training begins."""
    from transformers import TrainerCallback

    class Guard(TrainerCallback):  # type: ignore[misc]
        """Checks what the Trainer has prepared."""

        def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            check(given["model"], given.get("optimizer"))

    return Guard()
