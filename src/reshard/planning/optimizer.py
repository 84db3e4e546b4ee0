"""Optimizer states: each has the shape and the place of its tensor, so a family's rules hold for it as they stand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from functools import partial

from reshard.algebra.dtypes import BY_NAME
from reshard.algebra.tensors import Tensor
from reshard.errors import Problem, ReshardError, listed
from reshard.families.binding import Bound, Dropped
from reshard.families.live import Live
from reshard.formats import fused
from reshard.formats.checkpoint import Checkpoint, States
from reshard.model.logical import Logical, LogicalTensors
from reshard.planning.common import KEEPS_ITS_DTYPE, Source, Types, hub_tensors, native_tensors
from reshard.transfer.plan import Planned

FLOAT32 = BY_NAME["float32"]
MOMENTS = ("exp_avg", "exp_avg_sq")
MASTERS = "fp32"
DROPPED = "optimizer states"
REPLACED = "weights replaced by their masters"

PlannedStates = dict[str, dict[str, Planned]]
"""For each state the planned tensors, by the name of the tensor that it belongs to."""


def refuse_unable(checkpoint: Checkpoint, target: str, able: Collection[str]) -> None:
    """Raise ReshardError if `target` holds no optimizer states, or if the source has none that can be carried."""
    leave_out = "leave out --with-optimizer to convert the weights alone"
    if target not in able:
        raise ReshardError(
            f"{target} holds no optimizer states",
            rule="--with-optimizer carries states where both sides keep one for each tensor",
            expected=f"--to {' or --to '.join(sorted(able))}",
            found=f"--to {target}",
            remedy=leave_out,
        )
    if not checkpoint.optimizer or not checkpoint.states.keys() >= {*MOMENTS}:
        raise ReshardError(
            "the checkpoint holds no optimizer states that can be carried",
            file=str(checkpoint.path),
            rule="--with-optimizer carries states that have the shape of their tensor",
            found="states that are bound to a layout" if checkpoint.dropped[DROPPED] else "no optimizer",
            remedy="; ".join([leave_out, *(note for note in checkpoint.notes if DROPPED in note)]),
        )


def with_masters(checkpoint: Checkpoint, dtype: str | None) -> Checkpoint:
    """The checkpoint with its masters for weights, where the output is wanted in float32: it has no others then."""
    if Types(dtype).wanted != FLOAT32 or MASTERS not in checkpoint.states:
        return checkpoint
    masters = checkpoint.states[MASTERS]
    others = {state: partial(checkpoint.states.__getitem__, state) for state in checkpoint.states}
    del others[MASTERS]
    replaced = sum(checkpoint.tensors[name].nbytes for name in masters if name in checkpoint.tensors)
    return replace(
        checkpoint,
        tensors={**checkpoint.tensors, **masters},
        states=States(others),
        dropped=still_dropped(checkpoint, [MASTERS]) + Counter({REPLACED: replaced}),
    )


def frozen_notes(source: Source) -> list[str]:
    """A note that names the tensors without states, if there are any: an engine that trains them will miss these."""
    checkpoint = source.checkpoint
    apart = (*KEEPS_ITS_DTYPE, *(["lm_head.weight"] if source.config.get("tie_word_embeddings") else []))
    stateful = checkpoint.states[MOMENTS[0]]
    frozen = sorted(name for name in checkpoint.tensors if name not in stateful and not name.endswith(apart))
    if not frozen:
        return []
    return [
        f"the optimizer has no states of {listed(frozen, 1)}: load them where the same tensors are frozen"
    ]


def with_step(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with the step of its optimizer for an iteration, where nothing else says which it is."""
    if isinstance(checkpoint.iteration, int) or not checkpoint.optimizer:
        return checkpoint
    return replace(checkpoint, iteration=checkpoint.optimizer.step or 0)


def _carried(checkpoint: Checkpoint) -> dict[str, Mapping[str, Tensor]]:
    """The states that reshard knows: those of Adam, and masters. Others (of AMSGrad, say) are dropped."""
    return {state: checkpoint.states[state] for state in (*MOMENTS, MASTERS) if state in checkpoint.states}


def logical_states(weights: LogicalTensors) -> dict[str, LogicalTensors]:
    """The logical tensors of each state, those of `weights` that have it: what is frozen has none.

    Every tensor with a state has a master: where none is stored, it is the weight itself in float32. Raises
    ReshardError listing every state that has no tensor, or another shape than its tensor.
    """
    checkpoint = weights.checkpoint
    states = _carried(checkpoint)
    problems = [each for state, found in states.items() for each in _misfits(state, found, checkpoint)]
    if problems:
        raise ReshardError(problems)
    stateful = {name for found in states.values() for name in found}
    masters = {name: tensor for name, tensor in checkpoint.tensors.items() if name in stateful}
    masters.update(states.get(MASTERS, {}))
    return {state: _of_state(weights, found) for state, found in {**states, MASTERS: masters}.items()}


def _misfits(state: str, tensors: Mapping[str, Tensor], checkpoint: Checkpoint) -> list[Problem]:
    return [
        Problem(
            f"an optimizer state ({state}) does not fit its tensor",
            tensor=name,
            file=tensor.file,
            rule="a state has the name and the shape of its tensor",
            expected=str(list(checkpoint.tensors[name].shape)) if name in checkpoint.tensors else "no state",
            found=str(list(tensor.shape)),
            remedy="the states are of another model: leave out --with-optimizer, or copy the checkpoint again",
        )
        for name, tensor in sorted(tensors.items())
        if name not in checkpoint.tensors or checkpoint.tensors[name].shape != tensor.shape
    ]


def _of_state(weights: LogicalTensors, tensors: Mapping[str, Tensor]) -> LogicalTensors:
    checkpoint = replace(weights.checkpoint, tensors=dict(tensors), replicas=[])
    found = {}
    for name, item in weights.tensors.items():
        sources = _sources(item.bound) if item.bound else {name}
        if sources <= tensors.keys():
            found[name] = Logical(tensors[min(sources)].dtype, item.shape, item.bound)
    return LogicalTensors(checkpoint, found)


def _sources(bound: Bound) -> set[str]:
    return {str(piece.source) for piece in bound.view.pieces if not isinstance(piece.source, Dropped)}


def native_states(states: Mapping[str, LogicalTensors], natives: Mapping[str, Bound]) -> PlannedStates:
    """The states of an engine's tensors. Raises ReshardError where only a part of a fused tensor has one."""
    problems = []
    result: PlannedStates = {}
    for state, logical in states.items():
        held = {}
        for name, bound in natives.items():
            missing = _sources(bound) - logical.tensors.keys()
            if not missing:
                held[name] = bound
            elif missing != _sources(bound):
                problems.append(_partly_frozen(state, name, missing))
        result[state] = _named(state, native_tensors(logical, held, _types(state)))
    if problems:
        raise ReshardError(problems)
    return result


def live_states(weights: LogicalTensors, live: Live | None) -> PlannedStates:
    """Adam's two moments by the names that tensors have in the memory of transformers."""
    found = logical_states(weights)
    return {
        moment: _named(moment, fused.live_tensors(hub_tensors(found[moment], None), live))
        for moment in MOMENTS
        if moment in found
    }


def _types(state: str) -> Types:
    return Types("float32" if state == MASTERS else None)


def _named(state: str, tensors: Iterable[Planned]) -> dict[str, Planned]:
    return {tensor.name: replace(tensor, name=f"{tensor.name} ({state})") for tensor in tensors}


def _partly_frozen(state: str, name: str, missing: set[str]) -> Problem:
    return Problem(
        "a part of a tensor has an optimizer state, and the rest has none",
        tensor=name,
        rule=f"a fused tensor is trained as a whole, and has one {state}",
        found=f"none for {', '.join(sorted(missing))}",
        remedy="leave out --with-optimizer: frozen and trained tensors cannot be fused",
    )


def still_dropped(checkpoint: Checkpoint, carried: Collection[str] | None = None) -> Counter[str]:
    """What the source leaves behind by rule, without the bytes of the states that are `carried`: all by default."""
    states = _carried(checkpoint)
    names = states.keys() if carried is None else states.keys() & set(carried)
    taken = sum(tensor.nbytes for state in names for tensor in states[state].values())
    return Counter(checkpoint.dropped) - Counter({DROPPED: taken})
