"""Logical tensors: the tensors of any checkpoint under their Hugging Face names, common to all formats."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

from reshard.algebra.dtypes import DType, dtype
from reshard.algebra.tensors import Cells, Replica, Tensor
from reshard.algebra.views import View
from reshard.base.errors import Problem, raise_all
from reshard.base.later_imports import imported_later
from reshard.base.merged_problems import one_for_all
from reshard.families import live_names
from reshard.families.binding import Binding, BoundTensor, DroppedElements
from reshard.families.dialect import HUB
from reshard.families.rules import NEVER_READ, ReversibleStep
from reshard.formats.checkpoint import Checkpoint
from reshard.formats.contract import HEAD
from reshard.formats.quantization import QuantizedWeight
from reshard.model.resolve import ResolvedCheckpoint
from reshard.transfer.plan import ZERO

with imported_later(__name__):
    from reshard.formats.stepped_tensor import changed, rounding


class LogicalTensor(NamedTuple):
    """One logical tensor. `bound` refers to the native tensors that contain it; None if it is stored unchanged."""

    dtype: DType
    shape: tuple[int, ...]
    bound: BoundTensor | None

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


class LogicalTensors:
    """All logical tensors of a checkpoint. Views are compiled on demand.

    `are_weights` is false for optimizer states that are not weights, to which nothing is added.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        tensors: Mapping[str, LogicalTensor],
        copies: Sequence[Replica] = (),
        are_weights: bool = True,
    ) -> None:
        self.checkpoint = checkpoint
        self.tensors = tensors
        self.replicas = [*checkpoint.replicas, *copies]
        self.are_weights = are_weights

    def view(self, name: Hashable) -> View:
        """The elements of a logical tensor, as a view over `Cells`."""
        if isinstance(name, DroppedElements):
            return View((1 << 62,), View.of(Cells(ZERO, _ANY), 1 << 62).pieces)
        logical = self.tensors[str(name)]
        if logical.bound is None:
            return self.checkpoint.tensors[str(name)].view
        return self._changed_view(str(name), logical.bound, logical.dtype, self._native)

    def change(self, name: str) -> ReversibleStep | None:
        """What `view` does to each stored element, before it is rounded to the tensor's dtype."""
        bound = self.tensors[name].bound
        return bound.change if bound and self.are_weights else None

    def stored_view(self, name: str) -> View:
        """The same as `view`, unchanged."""
        bound = self.tensors[name].bound
        return bound.view.through(self._native) if bound else self.view(name)

    def native_view(self, name: str, bound: BoundTensor, dtype: DType) -> View:
        """The view of an engine's tensor `name`, made of logical tensors of `dtype`."""
        return self._changed_view(name, bound, dtype, self.view)

    def keep_exact(self, name: str, bound: BoundTensor | None, dtype: DType) -> None:
        """Check before anything is written that `bound.change` loses nothing, unless the engine rounds itself.

        `name` is a logical tensor, or an engine's tensor made of logical tensors.
        """
        if bound is None or not bound.change or bound.change.rounds or not self.are_weights:
            return
        below = self._native if name in self.tensors else self.view
        rounded = rounding(name, Tensor(dtype, bound.view.through(below)), bound.change)
        self.replicas += [rounded] if rounded else []

    def _native(self, name: Hashable) -> View:
        return self.checkpoint.tensors[str(name)].view

    def _changed_view(
        self, name: str, bound: BoundTensor, dtype: DType, below: Callable[[Hashable], View]
    ) -> View:
        view = bound.view.through(below)
        if bound.change is None or not self.are_weights:
            return view
        return changed(name, Tensor(dtype, view), bound.change)


_ANY = dtype("uint8")


def logical_tensors(source: ResolvedCheckpoint) -> LogicalTensors:
    """The logical tensors of a checkpoint, after checking that each exists, is complete and has the right shape.

    Without a model, the names of a Hugging Face checkpoint are used unchanged, and its config tells whether its head
    is tied to its embedding. Raises ReshardError listing every tensor that is missing, unknown, or of another shape.
    """
    checkpoint, model = source.checkpoint, source.model
    if model is None:
        copies = _tied_replicas(checkpoint, source.config)
        kept = _as_stored(checkpoint)
        if not checkpoint.quantization:  # a quantized copy was rounded on its own
            kept = {name: each for name, each in kept.items() if name not in {copy.tensor for copy in copies}}
        return LogicalTensors(checkpoint, kept, copies)
    binding = model.binding(checkpoint.dialect.rules)
    if checkpoint.has_hub_names:
        _check(checkpoint, binding.hf, {**binding.copies, **binding.unread})
        if checkpoint.quantization:  # its parts keep their names
            return LogicalTensors(checkpoint, _as_stored(checkpoint), [*_copies(checkpoint, binding)])
        logical = {
            name: LogicalTensor(checkpoint.tensors[name].dtype, bound.shape, None)
            for name, bound in (*binding.written(), *binding.unread.items())
            if name in checkpoint.tensors  # copies are optional, and so is what nothing reads
        }
        spare = _spare_replicas(checkpoint, {*binding.hf, *binding.copies, *binding.unread})
        return LogicalTensors(checkpoint, logical, [*_copies(checkpoint, binding), *spare])
    _check(checkpoint, binding.native, {})
    logical = {}
    for name, bound in binding.written():
        native = next(bound.sources)
        logical[name] = LogicalTensor(checkpoint.tensors[str(native)].dtype, bound.shape, bound)
    return LogicalTensors(
        checkpoint,
        logical,
        [
            *_zeros(checkpoint, binding),
            *_repeats(checkpoint, binding),
            *_spare_replicas(checkpoint, binding.native),
        ],
    )


def _as_stored(checkpoint: Checkpoint) -> dict[str, LogicalTensor]:
    return {
        name: LogicalTensor(tensor.dtype, tensor.shape, None) for name, tensor in checkpoint.tensors.items()
    }


def _zeros(checkpoint: Checkpoint, binding: Binding) -> Iterator[Replica]:
    """An engine's tensors without an equivalent on the Hub, which must therefore be zeros if anything reads them."""
    for name, bound in binding.native.items():
        reason = next(bound.sources)
        if not isinstance(reason, DroppedElements) or reason.reason == NEVER_READ:
            continue
        if all(source == reason for source in bound.sources):
            yield _must_be_zeros(
                name, checkpoint.tensors[name], f"{reason.reason}: they can be left out if they are zeros"
            )


def _repeats(checkpoint: Checkpoint, binding: Binding) -> Iterator[Replica]:
    """What an engine stores in several places, of which the Hub has one."""

    def stored(bound: BoundTensor) -> Tensor:
        native = checkpoint.tensors[str(next(bound.sources))]
        return Tensor(native.dtype, bound.view.through(lambda name: checkpoint.tensors[str(name)].view))

    rule = "the engine repeats these elements, of which a model on the Hub has one each"
    remedy = "training changed each place by itself: no model of its family on the Hub computes the same"
    for name, bound in binding.repeats:
        yield Replica(name, stored(binding.hf[name]), stored(bound), rule, remedy)


def _spare_replicas(checkpoint: Checkpoint, declared: Collection[str]) -> list[Replica]:
    """Tensors that a tool added and the family does not have."""
    rule = "the family has no such tensor: it can be left out if it is zeros"
    names = (checkpoint.spare & checkpoint.tensors.keys()).difference(declared)
    return [_must_be_zeros(name, checkpoint.tensors[name], rule) for name in sorted(names)]


def _must_be_zeros(name: str, tensor: Tensor, rule: str) -> Replica:
    zeros = View.of(Cells(ZERO, tensor.dtype), tensor.view.numel).reshape(*tensor.shape)
    return Replica(
        name,
        Tensor(tensor.dtype, zeros),
        tensor,
        rule,
        "the model was trained with them, and no model of its family on the Hub has them",
        "spare-tensor-not-zero",
    )


def _tied_replicas(checkpoint: Checkpoint, config: Mapping[str, Any]) -> list[Replica]:
    """Weights of an undeclared family that are others under a second name, if its config says that they are tied."""
    live = live_names(config)
    pairs = {live.to_hub(again): live.to_hub(name) for again, name in live.tied.items()} if live else {}
    if not pairs and config.get("tie_word_embeddings") is True:
        pairs = dict.fromkeys([HEAD], next(iter(checkpoint.tensors.keys() & HUB.embeddings), HEAD))
    tensors = checkpoint.tensors
    return [
        _tied_copy(name, tensors[name], again, tensors[again])
        for again, name in pairs.items()
        if again != name
        and again in tensors
        and name in tensors
        and tensors[again].shape == tensors[name].shape
    ]


def _tied_copy(name: str, first: Tensor, again: str, second: Tensor) -> Replica:
    return Replica(
        again,
        first,
        second,
        f"tie_word_embeddings is true in config.json, so {again} must be equal to {name}",
        "if the head has values of its own, set tie_word_embeddings to false in config.json",
        "tied-head-differs",
    )


def _copies(checkpoint: Checkpoint, binding: Binding) -> Iterator[Replica]:
    """Tensors of a Hugging Face checkpoint that duplicate others."""
    quantized = checkpoint.quantization.weights.keys() if checkpoint.quantization else set()
    for name in sorted(checkpoint.tensors.keys() & binding.copies.keys()):
        native = next(binding.copies[name].sources)
        original = next(binding.native[str(native)].sources)
        if not quantized.isdisjoint((name, str(original))):
            continue  # each was rounded on its own
        first, second = checkpoint.tensors[str(original)], checkpoint.tensors[name]
        if name == HEAD:
            yield _tied_copy(str(original), first, name, second)
        else:
            yield Replica(name, first, second, f"this is a second copy of {original}")


def _head_missing(checkpoint: Checkpoint, name: str) -> Problem:
    return Problem(
        "untied-head-missing",
        "the output head is missing",
        tensor=name,
        file=str(checkpoint.path),
        rule="tie_word_embeddings is false in config.json: the head has weights of its own",
        remedy="if the model's head is tied to its embedding, set tie_word_embeddings to true in config.json; else the "
        "checkpoint is incomplete: copy it again, or take the head from its base: --fill-from DIR",
    )


def _head_of_its_own(name: str, tensor: Tensor) -> Problem:
    return Problem(
        "head-not-tied",
        "config.json says that the output head is tied, but the checkpoint has one of its own",
        tensor=name,
        file=tensor.file,
        rule="tie_word_embeddings is true in config.json: the head is the embedding",
        found=f"{tensor.dtype} {list(tensor.shape)}",
        remedy="set tie_word_embeddings to false in config.json, as the model was trained",
    )


def _has_shape(tensor: Tensor, weight: QuantizedWeight | None, shape: tuple[int, ...]) -> bool:
    """Whether a tensor, or the quantized weight in it, has this shape."""
    return weight.fits(tensor, shape) if weight else tensor.shape == shape


def _unknown_problem(name: str, tensor: Tensor) -> Problem:
    description = f"{tensor.dtype} {list(tensor.shape)}"
    if ".linear_q_proj.layer_norm_" in name:
        return Problem(
            "norm-before-queries",
            "megatron-core trained the model with a norm that models of its family do not have",
            tensor=name,
            file=tensor.file,
            rule="megatron-core 0.19 with --qk-layernorm normalizes the inputs of queries that are not compressed "
            "(q_lora_rank is null) once more, which nobody who loads the Hub's model does",
            found=description,
            remedy="train with megatron-core 0.18 or earlier: weights trained with 0.19 are those of another model",
        )
    return Problem(
        "tensor-unknown",
        "a tensor is unknown",
        tensor=name,
        file=tensor.file,
        rule="every tensor of the checkpoint must be declared by the family; nothing is dropped silently",
        found=description,
        remedy="the config describes another model: pass the one that training started from (--base DIR), or the "
        "right family (--family)",
    )


def _check(
    checkpoint: Checkpoint, wanted: Mapping[str, BoundTensor], optional: Mapping[str, BoundTensor]
) -> None:
    quantization = checkpoint.quantization
    if quantization and not quantization.weights:
        return  # the mapping from its tensors to weights is unknown
    have = quantization.whole(checkpoint.tensors) if quantization else checkpoint.tensors
    problems = []
    incomplete = quantization.incomplete if quantization else frozenset()
    head = HEAD if checkpoint.has_hub_names else checkpoint.dialect.head
    for name in sorted(wanted.keys() - have.keys() - incomplete):
        problems.append(
            _head_missing(checkpoint, name)
            if name == head
            else Problem(
                "tensor-missing",
                "a tensor is missing",
                tensor=name,
                file=str(checkpoint.path),
                rule="every tensor that the family declares is in the checkpoint",
                expected=str(list(wanted[name].shape)),
                remedy="the checkpoint is incomplete, or of another family (--family)",
            )
        )
    added = (
        () if quantization else have.keys() - wanted.keys() - optional.keys() - checkpoint.spare
    )  # for example, some tools add biases
    problems += [
        _head_of_its_own(name, have[name]) if name == head else _unknown_problem(name, have[name])
        for name in sorted(added)
    ]
    weights = quantization.weights if quantization else {}
    shapes = {name: bound.shape for name, bound in {**optional, **wanted}.items() if name in have}
    for name in sorted(n for n, shape in shapes.items() if not _has_shape(have[n], weights.get(n), shape)):
        shape = shapes[name]
        transposed = have[name].shape == shape[::-1]
        problems.append(
            Problem(
                "tensor-transposed" if transposed else "tensor-shape-differs",
                "a tensor is transposed" if transposed else "a tensor has the wrong shape",
                tensor=name,
                file=have[name].file,
                rule="the family and the config determine the shape of each tensor",
                expected=str(list(shape)),
                found=str(list(have[name].shape)),
                remedy="the tool that wrote it swapped the axes: write it again as [out, in]"
                if transposed
                else "pass the config that belongs to these weights: --base DIR",
            )
        )
    raise_all(one_for_all(problems, have.keys() | wanted.keys(), str(checkpoint.path)))
