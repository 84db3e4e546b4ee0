"""Convert between tensor names in the memory of transformers 5 and the names on the Hub.

The state dict of a live model, which every engine that trains with transformers saves, has the names in memory. A
`MemoryNames` declares how they differ.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from reshard.algebra.tensors import Tensor
from reshard.algebra.views import View, assemble
from reshard.base.errors import Problem, raise_all
from reshard.base.later_imports import imported_later
from reshard.formats.checkpoint import Checkpoint
from reshard.formats.unique_names import under_new_names
from reshard.transfer.plan import Planned

with imported_later(__name__):
    from reshard.families.transformers_5 import ExpertNames, MemoryNames
    from reshard.formats import apply_renamings
    from reshard.formats.weight_operations import experts_differ, experts_missing


FUSED_GATE, FUSED_UP, FUSED_DOWN = "gate_up_proj", "up_proj", "down_proj"


# ------------------------------------------------------------------------------------- from memory to the Hub


def under_hub_names(checkpoint: Checkpoint, live: MemoryNames | None) -> Checkpoint:
    """The checkpoint with Hub names for tensors and states that have the names of a live model.

    Hub names are kept, and so are quantized weights. Raises ReshardError if a tensor is there both fused and
    separately.
    """
    if live is None or not checkpoint.has_hub_names or checkpoint.quantization:
        return checkpoint
    optimizer = checkpoint.optimizer.changed(lambda tensors: hub_tensors(tensors, live))
    return replace(checkpoint, tensors=hub_tensors(checkpoint.tensors, live), optimizer=optimizer)


def hub_tensors(tensors: Mapping[str, Tensor], live: MemoryNames) -> dict[str, Tensor]:
    """`tensors` of a live model under Hub names. Raises ReshardError listing those that occur twice."""
    if live.config is not None:
        planned = [Planned.of(n, t) for n, t in tensors.items()]
        renamed = apply_renamings.to_hub(planned, live.rules, live.config)
        tensors = {each.name: Tensor(each.dtype, each.source()) for each in renamed}
        return _stacked_tensors(tensors, live) if live.stacked else tensors
    tensors = _stacked_tensors(tensors, live) if live.stacked else _as_on_the_hub(tensors, live)
    return under_new_names(
        (name, hub, part) for name, tensor in tensors.items() for hub, part in _parts(live, name, tensor)
    )


def _as_on_the_hub(tensors: Mapping[str, Tensor], live: MemoryNames) -> dict[str, Tensor]:
    """The tensors with the axes of stacked experts in the order of the Hub.

    `save_pretrained` of transformers 5 writes a model that was not loaded from the Hub as it is in memory. Gate and up
    together are twice as wide as the input of down, in either order of axes, so the two shapes determine the order.
    """
    ordered = dict(tensors)
    for name, down in tensors.items() if live.transposed else ():
        prefix = name.removesuffix(FUSED_DOWN)
        gate = tensors.get(prefix + FUSED_GATE)
        if (
            name == prefix
            or not prefix.endswith(f".{live.transposed}.")
            or gate is None
            or (len(gate.shape), len(down.shape)) != (3, 3)
        ):
            continue
        if gate.shape[1] == 2 * down.shape[2]:
            swapped = {each: tensors[each] for each in (name, prefix + FUSED_GATE)}
            ordered |= {
                each: Tensor(tensor.dtype, tensor.view.permute(0, 2, 1)) for each, tensor in swapped.items()
            }
    return ordered


def _stacked_tensors(tensors: Mapping[str, Tensor], live: MemoryNames) -> dict[str, Tensor]:
    """The tensors with experts stacked where the Hub stacks them. Those of MTP layers are unchanged."""
    main, mtp = ({n: t for n, t in tensors.items() if n.startswith("mtp.") == is_mtp} for is_mtp in (0, 1))
    planned = [Planned.of(n, t) for n, t in main.items()]
    stacked = live_tensors(planned, MemoryNames(ExpertNames(live.stacked)))
    return {
        **{each.name: main.get(each.name) or Tensor(each.dtype, each.source()) for each in stacked},
        **mtp,
    }


def _parts(live: MemoryNames, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The Hub tensors that one tensor in memory contains."""
    experts = live.experts
    match = re.fullmatch(rf"(.*\b{re.escape(experts.module)}\.)(\w+)", name) if experts else None
    if experts is None or match is None or len(tensor.shape) != 3:
        yield live.to_hub(name), tensor
        return
    for index, view in enumerate(tensor.view.unstacked()):
        for projection, part in _projections(experts, match[2], view):
            yield live.to_hub(f"{match[1]}{index}.{projection}.weight"), Tensor(tensor.dtype, part)


def _projections(experts: ExpertNames, fused: str, view: View) -> Iterator[tuple[str, View]]:
    """The projections in one expert's part of a fused tensor."""
    if fused == FUSED_GATE and experts.gate:
        half = view.shape[0] // 2
        yield experts.gate, view[:half]
        yield experts.up, view[half:]
    else:
        yield (experts.down if fused == FUSED_DOWN else experts.up), view


# ------------------------------------------------------------------------------------- from the Hub to memory


def live_tensors(tensors: Iterable[Planned], live: MemoryNames | None) -> list[Planned]:
    """The tensors of the live model, made of those of the Hub; without a `MemoryNames`, the names are the same.

    Raises ReshardError naming experts that are missing, or that differ in dtype from those they are fused with.
    """
    if live is None:
        return list(tensors)
    if live.config is not None:
        return apply_renamings.applied(tensors, live.rules, live.config)
    result: dict[str, Planned] = {}
    stacks: dict[str, _FusedParts] = {}
    for tensor in tensors:
        name = live.to_live(tensor.name)
        place = _projection_position(live.experts, name) if live.experts else None
        if live.transposed and f".{live.transposed}." in name:
            result[name] = _swapped_axes(name, tensor)
        elif place is None:
            result[name] = Planned(name, tensor.dtype, tensor.shape, tensor.source)
        else:
            stack = stacks.setdefault(place.fused, _FusedParts(place.fused, place.halves))
            stack.parts[place.expert, place.half] = tensor
            result.setdefault(place.fused, tensor)  # keeps its position
    raise_all(problem for stack in stacks.values() for problem in stack.problems())
    return [stacks[name].planned() if name in stacks else tensor for name, tensor in result.items()]


def _swapped_axes(name: str, tensor: Planned) -> Planned:
    """Stacked experts with the axes of each swapped."""
    experts, *axes = tensor.shape
    return Planned(name, tensor.dtype, (experts, *reversed(axes)), lambda: tensor.source().permute(0, 2, 1))


class _ProjectionPosition(NamedTuple):
    """The position of an expert's projection: in the tensor `fused`, as one of `halves` parts of its expert."""

    fused: str
    expert: int
    half: int
    halves: int


def _projection_position(experts: ExpertNames, name: str) -> _ProjectionPosition | None:
    match = re.fullmatch(rf"(.*\b{re.escape(experts.module)}\.)(\d+)\.(\w+)\.weight", name)
    if match is None:
        return None
    prefix, expert, projection = match[1], int(match[2]), match[3]
    if projection == experts.down:
        return _ProjectionPosition(prefix + FUSED_DOWN, expert, 0, 1)
    if not experts.gate:
        return _ProjectionPosition(prefix + FUSED_UP, expert, 0, 1)
    return _ProjectionPosition(prefix + FUSED_GATE, expert, int(projection == experts.up), 2)


@dataclass
class _FusedParts:
    """The parts of one fused tensor, by expert and half."""

    name: str
    halves: int

    def __post_init__(self) -> None:
        self.parts: dict[tuple[int, int], Planned] = {}

    def problems(self) -> Iterator[Problem]:
        """Problems that prevent fusing."""
        experts = 1 + max(expert for expert, _ in self.parts)
        wanted = {(expert, half) for expert in range(experts) for half in range(self.halves)}
        kinds = {(part.dtype.name, part.shape) for part in self.parts.values()}
        if self.parts.keys() != wanted:
            missing = [expert for expert, _ in sorted(wanted - self.parts.keys())]
            yield experts_missing(self.name, experts, missing)
        elif len(kinds) > 1:
            yield experts_differ(self.name, sorted(kinds))

    def planned(self) -> Planned:
        """The fused tensor [E, halves · rows, columns]."""
        first = self.parts[0, 0]
        rows, columns = first.shape
        shape = (len(self.parts) // self.halves, self.halves * rows, columns)
        return Planned(self.name, first.dtype, shape, self._source(shape, rows, columns))

    def _source(self, shape: tuple[int, ...], rows: int, columns: int) -> Callable[[], View]:
        def compiled() -> View:
            boxes = (
                ((expert, half * rows, 0), part.source().reshape(1, rows, columns))
                for (expert, half), part in self.parts.items()
            )
            return assemble(shape, boxes)

        return compiled
