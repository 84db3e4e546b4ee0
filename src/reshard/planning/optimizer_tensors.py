"""Optimizer states: each has the shape and position of its tensor, so a family's rules apply to it unchanged."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace

from reshard.algebra.dtypes import BY_NAME
from reshard.algebra.tensors import Tensor
from reshard.base.errors import Problem, ReshardError, raise_all
from reshard.formats import written
from reshard.formats.checkpoint import Checkpoint
from reshard.formats.contract import Format
from reshard.formats.optimizer import MASTER_STATE, MOMENTS, MOMENTUM, OPTIMIZER_STATES
from reshard.model.logical_tensors import LogicalTensor, LogicalTensors
from reshard.planning.target_tensors import OutputTypes, sources_of

FLOAT32 = BY_NAME["float32"]
REPLACED = "weights replaced by their masters"


def refuse_unable(checkpoint: Checkpoint, format: Format) -> None:
    """Raise ReshardError if a format cannot store optimizer states, or if the source has none that can be converted."""
    leave_out = "leave out --with-optimizer to convert the weights alone"
    able = sorted(name for name, target in written().items() if target.states)
    if format.name not in able:
        raise ReshardError(
            "format-without-optimizer",
            f"{format.name} cannot store optimizer states",
            rule="--with-optimizer needs one state per tensor in both formats",
            expected=f"--to {' or --to '.join(able)}",
            found=f"--to {format.name}",
            remedy=leave_out,
        )
    if checkpoint.optimizer.adam is None or not checkpoint.optimizer.states.keys() >= {*MOMENTS}:
        raise ReshardError(
            "optimizer-states-missing",
            "the checkpoint contains no optimizer states that can be converted",
            file=str(checkpoint.path),
            rule="--with-optimizer converts states that have the shape of their tensor",
            found="states that are bound to a layout"
            if checkpoint.dropped[OPTIMIZER_STATES]
            else "no optimizer",
            remedy="; ".join([leave_out, *(note for note in checkpoint.notes if OPTIMIZER_STATES in note)]),
        )
    if MOMENTUM in checkpoint.optimizer.states and MOMENTUM not in written()[format.name].states:
        muons = sorted(name for name, target in written().items() if MOMENTUM in target.states)
        raise ReshardError(
            "format-without-muon",
            f"{format.name} cannot store the states of Muon",
            file=str(checkpoint.path),
            rule="Muon has one momentum for each matrix, and Adam the states of all other weights",
            expected=f"--to {' or --to '.join(muons)}",
            found=f"--to {format.name}",
            remedy=leave_out,
        )


def with_masters(checkpoint: Checkpoint, dtype: str | None) -> Checkpoint:
    """The checkpoint with its masters as weights, if the output is in float32: it then needs no separate masters."""
    if OutputTypes(dtype).wanted != FLOAT32 or MASTER_STATE not in checkpoint.optimizer.states:
        return checkpoint
    masters = checkpoint.optimizer.states[MASTER_STATE]
    replaced = sum(checkpoint.tensors[name].nbytes for name in masters if name in checkpoint.tensors)
    return replace(
        checkpoint,
        tensors={**checkpoint.tensors, **masters},
        optimizer=checkpoint.optimizer.without(MASTER_STATE),
        dropped=Counter(checkpoint.dropped)
        - carried(checkpoint, [MASTER_STATE])
        + Counter({REPLACED: replaced}),
    )


def logical_states(weights: LogicalTensors) -> dict[str, LogicalTensors]:
    """The logical tensors of each state, for those of `weights` that have it: frozen ones have none.

    Every tensor with a state has a master: if none is stored, it is the weight itself in float32. Raises ReshardError
    listing every state without a tensor, or with a shape that differs from its tensor's.
    """
    checkpoint = weights.checkpoint
    states = checkpoint.optimizer.supported_states
    raise_all(each for state, tensors in states.items() for each in _misfits(state, tensors, checkpoint))
    stateful = {name for tensors in states.values() for name in tensors}
    masters = {name: tensor for name, tensor in checkpoint.tensors.items() if name in stateful}
    masters.update(states.get(MASTER_STATE, {}))
    return {
        state: _of_state(weights, tensors, is_master=state == MASTER_STATE)
        for state, tensors in {**states, MASTER_STATE: masters}.items()
    }


def _misfits(state: str, tensors: Mapping[str, Tensor], checkpoint: Checkpoint) -> list[Problem]:
    return [
        Problem(
            "optimizer-state-shape-differs",
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


def _of_state(weights: LogicalTensors, tensors: Mapping[str, Tensor], *, is_master: bool) -> LogicalTensors:
    checkpoint = replace(weights.checkpoint, tensors=dict(tensors), replicas=[])
    logical = {}
    for name, item in weights.tensors.items():
        sources = sources_of(item.bound) if item.bound else {name}
        if sources <= tensors.keys():
            logical[name] = LogicalTensor(tensors[min(sources)].dtype, item.shape, item.bound)
    return LogicalTensors(checkpoint, logical, are_weights=is_master)


def carried(checkpoint: Checkpoint, states: Collection[str]) -> Counter[str]:
    """The bytes of states that are not dropped, because they are converted."""
    supported = checkpoint.optimizer.supported_states
    converted = (supported[state] for state in supported.keys() & set(states))
    return Counter(
        {OPTIMIZER_STATES: sum(tensor.nbytes for tensors in converted for tensor in tensors.values())}
    )
