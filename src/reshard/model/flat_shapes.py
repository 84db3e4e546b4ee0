"""Shapes of the parameters that FSDP1 saved flat, from the family and the config."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod

from reshard.algebra.dtypes import dtype
from reshard.algebra.tensors import Tensor
from reshard.algebra.views import View
from reshard.base.errors import Problem, ReshardError, raise_all
from reshard.base.merged_problems import one_for_all
from reshard.families.binding import Binding
from reshard.families.transformers_5 import MemoryNames
from reshard.formats.checkpoint import Checkpoint
from reshard.formats.flat_parameters import SAVE_SHARDED
from reshard.model import memory_names
from reshard.transfer.plan import Planned


def declared_shapes(binding: Binding, live: MemoryNames | None) -> dict[str, tuple[int, ...]]:
    """The shapes of a family's tensors, by their names on the Hub and in the live model."""
    hub = {name: bound.shape for name, bound in {**binding.copies, **binding.hf}.items()}
    any_type = dtype("float32")
    planned = [Planned(name, any_type, bound.shape, _nothing) for name, bound in binding.hf.items()]
    return hub | {tensor.name: tensor.shape for tensor in memory_names.live_tensors(planned, live)}


def _nothing() -> View:
    return View((0,), ())


def shaped(checkpoint: Checkpoint, shapes: Mapping[str, tuple[int, ...]]) -> Checkpoint:
    """The checkpoint with its flattened tensors reshaped. Raises ReshardError naming all whose sizes do not match."""
    problems = []
    tensors = dict(checkpoint.tensors)
    for name, tensor in checkpoint.tensors.items():
        shape = shapes.get(name)
        if shape is None or len(tensor.shape) != 1:
            continue
        if prod(shape) == tensor.view.numel:
            tensors[name] = Tensor(tensor.dtype, tensor.view.reshape(*shape))
        else:
            problems.append(_misfit_problem(name, tensor, shape))
    raise_all(one_for_all(problems, checkpoint.tensors, str(checkpoint.path)))
    return replace(checkpoint, tensors=tensors)


def _misfit_problem(name: str, tensor: Tensor, shape: tuple[int, ...]) -> Problem:
    return Problem(
        "flat-tensor-size-differs",
        "a flattened tensor does not have as many elements as the config says",
        tensor=name,
        file=tensor.file,
        rule="LOCAL_STATE_DICT stores no shapes, so they are computed from the config",
        expected=f"{prod(shape)} elements, {list(shape)}",
        found=f"{tensor.view.numel} elements",
        remedy="pass the config that belongs to these weights: --base DIR",
    )


def shapes_needed(checkpoint: Checkpoint, model_type: str | None, families: Sequence[str]) -> ReshardError:
    """The error for a checkpoint whose shapes are unknown."""
    no_config = "pass the Hugging Face folder that training started from (--base DIR)"
    undeclared = "if the model has the same architecture, pass --family NAME"
    return ReshardError(
        "flat-parameters-without-shapes",
        "the parameters are flat, and their shapes are unknown",
        file=str(checkpoint.path),
        rule="LOCAL_STATE_DICT stores no shapes, so they are computed from the config",
        expected=f"a config.json with a model_type of {', '.join(families)}",
        found=f"model_type {model_type}" if model_type else "no config.json that says which model this is",
        remedy=f"{undeclared if model_type else no_config}; or {SAVE_SHARDED}",
    )
