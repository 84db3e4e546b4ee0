"""Weights of a checkpoint into the parameters of a torch module, which may be sharded over ranks."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from reshard.algebra.dtypes import BY_NAME, DType, castable
from reshard.algebra.tensors import Replica, Tensor
from reshard.base.errors import Problem, ReshardError
from reshard.base.merged_problems import one_for_all
from reshard.commands.lazy import as_torch
from reshard.commands.streaming import ReadOptions, place, read
from reshard.commands.weights import Weights
from reshard.live.fillable import not_in_place, sharded_otherwise
from reshard.model.model_sizes import is_mtp
from reshard.transfer.compare import unequal_replicas
from reshard.transfer.elements import RAW_DTYPES
from reshard.transfer.memory_budget import shared
from reshard.transfer.plan import Planned
from reshard.transfer.prefetch import WantedTensor

if TYPE_CHECKING:
    import torch

WRAPPER_PREFIX = re.compile(
    r"(?<![^.])(?:_orig_mod|module|_fsdp_wrapped_module|_checkpoint_wrapped_module)\."
)
"""What torch.compile, DDP, FSDP1 and activation checkpointing put into the names of a module's tensors."""


class LoadedTensors(NamedTuple):
    """What was loaded: the number of tensors, the bytes that they have here, and those that were read for them.

    More bytes are read than filled for a part of each row of a matrix: gaps of less than 32 KiB are not worth a read of
    their own. `left_out` are tensors of layers for multi-token prediction, if the module has none. `kept` are tensors
    that keep their values, because the class of the transformers model says that checkpoints may lack them.
    """

    tensors: int
    nbytes: int
    read: int
    left_out: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()


class _LocalTensor(NamedTuple):
    """A tensor of the module, the names that it has there, and the slices of the complete tensor that it holds."""

    target: torch.Tensor
    names: tuple[str, ...]
    box: tuple[slice, ...] | None = None

    @property
    def local(self) -> torch.Tensor:
        """The memory to fill: of a sharded tensor, this rank's part."""
        local: torch.Tensor = self.target.to_local() if self.box else self.target
        return local.detach()


def load_into(module: torch.nn.Module, weights: Weights, how: ReadOptions) -> LoadedTensors:
    """Fill all parameters and persistent buffers of a module. Raises ReshardError naming all that do not fit.

    Of a DTensor, only this rank's part is read. Values are cast to the dtype of the module's tensor.
    """
    file = str(weights.checkpoint.path)
    if problems := [*sharded_otherwise(module, file)]:  # before it gathers all of them for its state_dict
        raise ReshardError(problems)
    places = _places(module)
    planned = _planned_by_name(places, weights)
    names = {name for each in places for name in each.names}
    beyond = {name for name in planned.keys() - names if is_mtp(name, weights.plan.request.model)}
    planned = {name: each for name, each in planned.items() if name not in beyond}
    saved = [(each.names[0], each.target) for each in places]
    problems = [*_on_meta(module, file), *not_in_place(module, saved, file)]
    if problems := [*problems, *_differences(module, places, planned, file)]:
        raise ReshardError(one_for_all(problems, names | planned.keys(), file))
    fills = {name: each for each in places if (name := _name_in(each, planned)) is not None}
    if unequal := unequal_replicas([*_tied_replicas(places, planned)], shared(how.workers, how.memory)):
        raise ReshardError(unequal)
    wanted = [_wanted_part(planned[name], each) for name, each in fills.items()]
    wanted.sort(key=lambda each: place(each.tensor))
    counts: list[int] = []
    with telling_what_changed(len(wanted), counts, file):
        for name, raw in read(weights, wanted, how, counts.append):
            local = fills[name].local
            if not is_direct(local):
                local.copy_(as_torch(name, raw.reshape(tuple(local.shape)), _dtype_of(local), None))
    filled = sum(each.tensor.nbytes for each in wanted)
    kept = [each.names[0] for each in places if _name_in(each, planned) is None]
    return LoadedTensors(len(wanted), filled, sum(counts), tuple(sorted(beyond)), tuple(kept))


@contextmanager
def telling_what_changed(tensors: int, filled: Sequence[int], file: str) -> Iterator[None]:
    """Add to an error that `tensors` may have been overwritten before it was found, unless `filled` is empty."""
    try:
        yield
    except ReshardError as error:
        if not filled:
            raise
        changed = Problem(
            "live-module-overwritten",
            "the module must not be used: its tensors were overwritten before the damage was found",
            file=file,
            rule="tensors are filled while they are read, and a checksum is known when all its bytes were read",
            found=f"up to {tensors} tensors have new values",
            remedy="load another checkpoint into the module, or build it again",
        )
        raise ReshardError([*error.problems, changed]) from None


def _places(module: torch.nn.Module) -> list[_LocalTensor]:
    """The tensors of a module that a checkpoint has, each once, whatever the number of its names."""
    import torch

    names: dict[int, list[str]] = {}
    tensors: dict[int, torch.Tensor] = {}
    for name, value in module.state_dict(keep_vars=True).items():
        if torch.is_tensor(value):
            tensors[id(value)] = value
            names.setdefault(id(value), []).append(WRAPPER_PREFIX.sub("", name))
    return [_LocalTensor(value, tuple(names[key]), _box(value)) for key, value in tensors.items()]


def _box(tensor: torch.Tensor) -> tuple[slice, ...] | None:
    """The part of a DTensor that this rank holds; None for a plain tensor."""
    if not hasattr(tensor, "device_mesh"):
        return None
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset as local_box

    shape, offset = local_box(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(slice(at, at + size) for at, size in zip(offset, shape, strict=True))


def _planned_by_name(places: Collection[_LocalTensor], weights: Weights) -> Mapping[str, Planned]:
    """The tensors of the checkpoint under the names of the module: those of the Hub, or those in memory."""
    names = {name for each in places for name in each.names}
    as_hub = weights.plan.by_name
    as_live = {each.name: each for each in weights.in_memory()}
    return max(as_live, as_hub, key=lambda each: len(names & each.keys()) - len(each.keys() - names))


def _name_in(target: _LocalTensor, planned: Mapping[str, Planned]) -> str | None:
    return next((name for name in target.names if name in planned), None)


def _tied_replicas(places: Collection[_LocalTensor], planned: Mapping[str, Planned]) -> Iterator[Replica]:
    """The tensors of the checkpoint that are one tensor in the module, and so must be equal."""
    for each in places:
        for first, other in pairwise(planned[name] for name in each.names if name in planned):
            yield Replica(
                other.name,
                Tensor(first.dtype, first.source()),
                Tensor(other.dtype, other.source()),
                f"the module ties it to {first.name}, so both have the same values",
                "build the module without tying them: set tie_word_embeddings to false in its config",
                "live-tied-tensors-differ",
                "tensors that are one in the module have different values in the checkpoint",
            )


def _on_meta(module: torch.nn.Module, file: str) -> Iterator[Problem]:
    """A problem for each tensor without memory, also for buffers that no checkpoint has."""
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    for name, tensor in tensors.items():
        if tensor.is_meta:
            yield Problem(
                "live-tensor-on-meta",
                "a tensor of the module is on the meta device, and has no memory",
                tensor=name,
                file=file,
                rule="weights are copied into memory of the module; buffers that no checkpoint has must be computed",
                remedy="build the module on a device, or use reshard.from_pretrained",
            )


def _differences(
    module: torch.nn.Module, places: Collection[_LocalTensor], planned: Mapping[str, Planned], file: str
) -> Iterator[Problem]:
    """A problem for each tensor that only one side has, or that has another shape."""
    missing = _ignored(module, "_keys_to_ignore_on_load_missing")
    unexpected = _ignored(module, "_keys_to_ignore_on_load_unexpected")
    names = {name for each in places for name in each.names}
    for each in places:
        name = _name_in(each, planned)
        if name is None and not any(map(missing, each.names)):
            yield Problem(
                "live-tensor-not-in-checkpoint",
                "the checkpoint lacks a tensor of the module, which would keep the values that it has",
                tensor=each.names[0],
                file=file,
                remedy="build the module from the config that belongs to these weights",
            )
        elif name is not None and planned[name].shape != tuple(each.target.shape):
            yield Problem(
                "live-tensor-shape-differs",
                "a tensor has another shape in the module than in the checkpoint",
                tensor=name,
                file=file,
                expected=str(list(each.target.shape)),
                found=str(list(planned[name].shape)),
                remedy="build the module from the config that belongs to these weights",
            )
        elif name is not None and not _fits(planned[name].dtype, _dtype_of(each.target)):
            yield Problem(
                "live-tensor-dtype-differs",
                "a tensor cannot be cast to the dtype that it has in the module",
                tensor=name,
                file=file,
                expected=str(each.target.dtype).removeprefix("torch."),
                found=planned[name].dtype.name,
                remedy="make it a float tensor in the module: .float()"
                if castable(planned[name].dtype)
                else 'dequantize the weights: pass dtype="bfloat16"',
            )
    for name in planned.keys() - names:
        if not unexpected(name):
            yield Problem(
                "live-tensor-not-in-module",
                "the module lacks a tensor of the checkpoint",
                tensor=name,
                file=file,
                remedy="build the module from the config that belongs to these weights",
            )


def _ignored(module: torch.nn.Module, attribute: str) -> Callable[[str], bool]:
    """Whether transformers ignores a name: its classes list patterns of such names."""
    patterns = [re.compile(each) for each in getattr(module, attribute, None) or ()]
    return lambda name: any(pattern.search(name) is not None for pattern in patterns)


def _fits(stored: DType, wanted: DType) -> bool:
    return bool(stored == wanted) or (castable(stored) and castable(wanted))


def _dtype_of(tensor: torch.Tensor) -> DType:
    name = str(tensor.dtype).removeprefix("torch.")
    return BY_NAME.get(name) or DType(name, tensor.dtype.itemsize, "", None)


def _wanted_part(planned: Planned, target: _LocalTensor) -> WantedTensor:
    """The part of a tensor that the module holds, read into its memory if that is possible."""
    local = target.local
    view = planned.source()
    tensor = Tensor(_dtype_of(local), view[target.box] if target.box else view)
    return WantedTensor(planned.name, tensor, raw_elements(local) if is_direct(local) else None)


def is_direct(tensor: torch.Tensor) -> bool:
    """Whether threads can write to the memory of a tensor."""
    import torch

    return bool(tensor.device == torch.device("cpu") and tensor.is_contiguous())


def raw_elements(tensor: torch.Tensor) -> Any:
    """The elements of a contiguous tensor on the CPU as integers of the same width, sharing its memory."""
    import torch

    return tensor.reshape(-1).view(torch.uint8).numpy().view(RAW_DTYPES[tensor.element_size()])
