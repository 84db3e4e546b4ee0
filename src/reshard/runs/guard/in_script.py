"""Checks of a running model: an explained error before a known failure, and a diagnosis of others."""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from reshard.base.errors import Problem, ReshardError, listed, raise_all
from reshard.runs.checks.device_maps import misplaced

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

MAX_PARAMETERS = 5
"""Parameters that a message names; others are only counted."""


def check(
    model: nn.Module | Iterable[nn.Module], optimizer: Optimizer | Iterable[Optimizer] | None = None
) -> None:
    """Raise one ReshardError with everything that is wrong with a model before training.

    `model` can be a list of parts, as in pipeline stages, and `optimizer` a list of optimizers. Only types, devices and
    identities are checked, never values, so a thousand parameters take milliseconds.
    """
    whole, optimizers = _given(model, optimizer)
    parameters = _parameters(whole)
    problems = [problem for rule in _RULES for problem in rule(whole, parameters)]
    problems += _optimizer(parameters, optimizers)
    raise_all(problems)


def _given(model: object, optimizer: object) -> tuple[nn.Module, list[Any]]:
    """The model as one module, and the optimizers as a list. Raises ReshardError for other types."""
    from torch import nn

    parts = list(model) if isinstance(model, list | tuple) and model else [model]
    several = list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer]
    optimizers = [each for each in several if each is not None]
    no_model = [("a model", "a torch.nn.Module", each) for each in parts if not isinstance(each, nn.Module)]
    wrong = no_model + [
        ("an optimizer", "a torch.optim.Optimizer", each)
        for each in optimizers
        if not hasattr(each, "param_groups")
    ]
    if wrong:
        raise ReshardError(
            Problem(
                "guard-argument-wrong",
                f"this is not {what}",
                expected=f"{expected}, or a list of some",
                found=type(given).__name__,
                remedy="call guard.check(model, optimizer)",
            )
            for what, expected, given in wrong
        )
    return parts[0] if len(parts) == 1 else nn.ModuleList(parts), optimizers


@dataclass(frozen=True)
class _Parameter:
    """A parameter, the module that owns it, whether it is sharded, and whether it is inside an FSDP2 module."""

    name: str
    value: nn.Parameter
    module: nn.Module
    is_sharded: bool
    in_fsdp: bool


def _parameters(model: nn.Module) -> list[_Parameter]:
    """All parameters, each once, named as by `named_parameters`."""
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

    parameters: list[_Parameter] = []
    seen: set[int] = set()
    visited: set[int] = set()

    def visit(module: nn.Module, prefix: str, in_fsdp: bool) -> None:
        if id(module) in visited:
            return
        visited.add(id(module))
        in_fsdp = in_fsdp or isinstance(module, FSDPModule)
        for name, value in module._parameters.items():
            if value is not None and id(value) not in seen:
                seen.add(id(value))
                parameters.append(
                    _Parameter(prefix + name, value, module, isinstance(value, DTensor), in_fsdp)
                )
        for name, child in module._modules.items():
            if child is not None:
                visit(child, f"{prefix}{name}.", in_fsdp)

    visit(model, "", False)
    return parameters


def _mixed(model: nn.Module, parameters: list[_Parameter]) -> Iterator[Problem]:
    """Plain parameters mixed with DTensors, unless that is intended.

    It is intended for parameters that FSDP2 was told to ignore, for frozen ones outside of FSDP2, and for the norms of
    a tensor-parallel model, whose sharded modules have hooks that convert inputs to DTensors and results back.
    """
    sharded = [each for each in parameters if each.is_sharded]
    plain = [each for each in parameters if not each.is_sharded and each.value.requires_grad]
    if not sharded or not plain or _data_parallel(model):
        return
    if any(each.in_fsdp for each in sharded):
        wrong = [each for each in plain if not each.in_fsdp or _ADAPTER.search(each.name)]
        remedy = "shard the root module too (fully_shard(model)), and after adapters are added"
    else:
        wrong = [] if all(_has_hooks(each.module) for each in sharded) else plain
        remedy = (
            "load with device_map=None, or shard with fully_shard or parallelize_module, which convert inputs"
        )
    if wrong:
        yield Problem(
            "guard-mixed-parameters",
            "plain parameters mixed with DTensors",
            tensor=listed(
                [each.name for each in (wrong if len(wrong) <= len(sharded) else sharded)], MAX_PARAMETERS
            ),
            rule="in a sharded model, all trained parameters must be sharded",
            found=f"{len(sharded)} DTensors, {len(wrong)} trained plain parameters",
            remedy=f"{remedy}: else the first operation on both fails with `got mixed torch.Tensor and DTensor`, and "
            "gradients of plain parameters are not reduced",
        )


_ADAPTER = re.compile(r"\blora_|\bmodules_to_save\b")


def _has_hooks(module: nn.Module) -> bool:
    """Whether hooks prepare the inputs of a module with sharded weights, as in tensor parallelism."""
    return bool(module._forward_pre_hooks) or "forward" in vars(module)


def _data_parallel(model: nn.Module) -> nn.Module | None:
    from torch.nn.parallel import DistributedDataParallel

    return next((module for module in model.modules() if isinstance(module, DistributedDataParallel)), None)


def _sharded_in_ddp(model: nn.Module, parameters: list[_Parameter]) -> Iterator[Problem]:
    wrapped = _data_parallel(model)
    if wrapped is not None and any(each.is_sharded for each in parameters):
        inside = set(map(id, wrapped.parameters()))
        sharded = [each.name for each in parameters if each.is_sharded and id(each.value) in inside]
        if sharded:
            yield Problem(
                "guard-sharded-in-ddp",
                "a sharded model is wrapped in DistributedDataParallel",
                tensor=listed(sharded, MAX_PARAMETERS),
                rule="DDP keeps a complete model on each rank",
                remedy="load with device_map=None and without tp_plan, or leave DDP out: FSDP2 is data parallel by "
                "itself",
            )


def _device_map(model: nn.Module, parameters: list[_Parameter]) -> Iterator[Problem]:
    processes = _world_size()
    return misplaced(model, processes) if processes > 1 else iter(())


def _world_size() -> int:
    """Size of the process group, or of the launcher's if there is no group yet."""
    from torch import distributed

    if distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_world_size())
    value = os.environ.get("WORLD_SIZE", "")
    return int(value) if value.isdecimal() else 1


def _ties(model: nn.Module, parameters: list[_Parameter]) -> Iterator[Problem]:
    while (inner := model._modules.get("module")) is not None:
        model = inner  # DDP, DeepSpeed
    if getattr(model, "all_tied_weights_keys", None) == {}:
        return  # this class ties nothing, whatever its config says
    config = getattr(model, "config", None)
    if not getattr(config, "tie_word_embeddings", False) or not hasattr(model, "get_input_embeddings"):
        return
    both = [
        getattr(part, "weight", None)
        for part in (model.get_output_embeddings(), model.get_input_embeddings())
    ]
    own = {id(each.value) for each in parameters}
    if all(id(each) in own for each in both) and both[0] is not both[1]:
        copied = any(_ADAPTER.search(each.name) and id(each.value) in map(id, both) for each in parameters)
        yield Problem(
            "guard-tied-twice",
            "the head and the embedding are tied in the config, but are two tensors in the model",
            tensor="lm_head.weight",
            rule="tie_word_embeddings is true",
            remedy="LoraConfig(ensure_weight_tying=True) keeps what modules_to_save copies tied; or untie them in the "
            "config: tie_word_embeddings=False"
            if copied
            else "call model.tie_weights() after loading, and put both into one FSDP group",
        )


def _nothing_trainable(model: nn.Module, parameters: list[_Parameter]) -> Iterator[Problem]:
    if not any(each.value.requires_grad for each in parameters):
        yield Problem(
            "guard-nothing-trainable",
            "nothing is trainable",
            found=f"{len(parameters)} parameters, none requires a gradient",
            remedy="pass is_trainable=True to PeftModel.from_pretrained, or unfreeze the parameters to train",
        )


_RULES = (_mixed, _sharded_in_ddp, _device_map, _ties, _nothing_trainable)
_OWN_COPIES = ("deepspeed", "megatron", "apex", "fairscale", "transformer_engine")
"""Packages whose optimizers keep copies of the parameters, and write them back themselves."""


def _optimizer(parameters: list[_Parameter], optimizers: list[Any]) -> Iterator[Problem]:
    """Optimizers that update other tensors than the model's: none of the model's, or others of the same shape."""
    held: dict[int, Any] = {}
    for optimizer in optimizers:
        chain = [optimizer]
        while (inner := getattr(chain[-1], "optimizer", None)) is not None:
            chain.append(inner)  # accelerate wraps it
        if any(type(each).__module__.split(".")[0] in _OWN_COPIES for each in chain):
            return
        held.update((id(value), value) for group in chain[-1].param_groups for value in group["params"])
    own = {id(each.value): each for each in parameters if each.value.requires_grad}
    foreign = [tuple(value.shape) for key, value in held.items() if key not in own and value.requires_grad]
    known, shapes = {id(each.value) for each in parameters}, set(foreign)
    missing = [each for key, each in own.items() if key not in held and tuple(each.value.shape) in shapes]
    if held and own and not held.keys() & known:
        missing = list(own.values())
    if missing:
        yield Problem(
            "guard-optimizer-tensors-differ",
            "the optimizer's parameters are not the model's",
            tensor=listed([each.name for each in missing], MAX_PARAMETERS),
            rule="the optimizer must be created from the parameters of the final, wrapped model",
            found=f"{len(foreign)} of {len(held)} tensors in the optimizer are not the model's, and it lacks "
            f"{len(missing)} trainable parameters",
            remedy="shard or wrap the model first, then make the optimizer: else the weights never change",
        )


@contextmanager
def explained() -> Iterator[None]:
    """Add the doctor's diagnosis as a note to any exception raised inside. The exception stays the same."""
    try:
        yield
    except ReshardError:
        raise  # already explained
    except Exception as error:
        note = ""
        with suppress(Exception):  # a failing diagnosis must not hide the exception
            note = _diagnosis(error)
        if note and hasattr(error, "add_note"):
            error.add_note(note)
        elif note:  # Python 3.10
            error.args = (f"{error}\n{note}", *error.args[1:])
        raise


def _diagnosis(error: Exception) -> str:
    from reshard.base.languages import locale_language
    from reshard.runs.checks.finding import UNKNOWN
    from reshard.runs.checks.phrases import aside
    from reshard.runs.doctor.log_diagnosis import diagnose_text

    trace = "".join(traceback.format_exception(error))
    known = [each for each in diagnose_text("this exception", trace) if each.certainty != UNKNOWN]
    language = locale_language()
    why, cure = {"en": ("why: ", "fix: "), "zh": ("原因：", "解法：")}[language]
    return "\n".join(
        f"reshard doctor: {finding.message.of(language)} {aside(finding).of(language)}\n"
        f"{why}{finding.rule.of(language)}\n{cure}{finding.remedy.of(language)}"
        for finding in known[:1]
    )
