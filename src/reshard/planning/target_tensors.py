"""The tensors of a target: their names, their dtypes, and the logical tensors that they are made of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from math import prod

from reshard.algebra.dtypes import DType, castable, dtype, of_most_bytes
from reshard.algebra.tensors import Computed, Tensor
from reshard.base.errors import Problem, ReshardError, raise_all
from reshard.families import live_names
from reshard.families.binding import BoundTensor, DroppedElements
from reshard.families.rules import NEVER_READ
from reshard.families.transformers_5 import MemoryNames
from reshard.formats.contract import (
    HUB,
    KEEPS_ITS_DTYPE,
    KEPT_IN_FLOAT32,
    Naming,
    PlannedStates,
    Request,
)
from reshard.formats.optimizer import MASTER_STATE
from reshard.model import memory_names
from reshard.model.logical_tensors import LogicalTensor, LogicalTensors
from reshard.transfer.plan import Planned


def _no_such_dtype(wanted: str | None) -> ReshardError:
    return ReshardError(
        "dtype-not-convertible",
        "weights cannot be converted to this dtype",
        expected="float32, bfloat16 or float16; smaller types are values of --quantize",
        found=f"--dtype {wanted}",
        remedy="choose one of these with --dtype",
    )


Typed = Callable[[str, tuple[int, ...]], DType]
"""The dtype in which a format stores a tensor, by its name and shape there."""


class OutputTypes:
    """The dtype of each tensor of the output: the `wanted` one, or the stored one.

    Routers, and what engines load in float32 anyway, stay in float32 if the source has them so beside `weights` of
    which most are in 16 bits. In a source that is in float32 throughout, or of a format that has `widened` them, they
    are weights like all others.
    """

    def __init__(
        self, wanted: str | None, weights: Collection[LogicalTensor | Tensor] = (), *, widened: bool = False
    ) -> None:
        try:
            self.wanted = dtype(wanted) if wanted else None
        except KeyError:
            raise _no_such_dtype(wanted) from None
        if self.wanted and not castable(self.wanted):
            raise _no_such_dtype(wanted)
        self._weights, self._widened = weights, widened

    @cached_property
    def _stored(self) -> DType | None:
        """The dtype of most weights."""
        return of_most_bytes((each.dtype, each.nbytes) for each in self._weights) if self._weights else None

    @property
    def main(self) -> DType:
        """The dtype of most weights of the output."""
        return self.wanted or self._stored or dtype("float32")

    def of(self, name: str, stored: DType) -> DType:
        """The output dtype of tensor `name`."""
        if self.wanted is None or not castable(stored) or self._stays(name, stored):
            return stored
        return self.wanted

    def _stays(self, name: str, stored: DType) -> bool:
        if name.endswith(KEEPS_ITS_DTYPE):
            return True
        if stored.name != "float32" or self._widened or not KEPT_IN_FLOAT32.search(name):
            return False
        return self._stored is not None and self._stored.itemsize == 2


def recast(format: str, logical: LogicalTensors, types: OutputTypes) -> list[str]:
    """Notes on weights that are cast to the only dtype of a format, by the dtypes that they have."""
    stored = [(item.dtype, types.of(name, item.dtype)) for name, item in logical.tensors.items()]
    counted = Counter((before, after) for before, after in stored if before != after)
    wide = sum(
        item.dtype == types.wanted and not name.endswith(KEEPS_ITS_DTYPE)
        for name, item in logical.tensors.items()
    )
    back = _BACK_ROUNDED if wide else _EXACT_WAY_BACK
    if len(counted) > 1:
        back = ""
    return [_recast(format, *pair, number, back, wide) for pair, number in sorted(counted.items(), key=str)]


_EXACT_WAY_BACK = "; converted back with --dtype {before}, they are the same again, bit for bit"
_BACK_ROUNDED = "; --dtype {before} converts them back, bit for bit, but rounds the {wide} in {after} as well"


def _recast(format: str, before: DType, after: DType, number: int, back: str, wide: int) -> str:
    which = f"{number:,} tensor{'' if number == 1 else 's'} in {before}"
    if before.itemsize > after.itemsize:
        change = f"rounded; --to huggingface keeps {before}"
    else:
        restored = back.format(before=before, after=after, wide=f"{wide:,}")
        change = f"widened, which changes no value{restored}"
    return f"{format} stores weights in {after} only: {which} {'is' if number == 1 else 'are'} {change}"


@dataclass(frozen=True)
class TargetNames:
    """How a target names tensors: by `natives` if an engine has its own names, else as on the Hub, or by `live`.

    `left` are the logical tensors that have no place there, each with the rule for it.
    """

    natives: Mapping[str, BoundTensor] | None = None
    live: MemoryNames | None = None
    left: Mapping[str, str] = field(default_factory=dict)

    def dropped(self, logical: LogicalTensors) -> Counter[str]:
        """The bytes of tensors that have no place, by rule. Second copies of others are no bytes of their own."""
        copies = {replica.tensor for replica in logical.replicas if replica.equal}
        nbytes: Counter[str] = Counter()
        computed: dict[int, tuple[str, Computed]] = {}
        for name, rule in self.left.items():
            tensor = logical.tensors[name]
            if name not in copies and not (tensor.bound and tensor.bound.template.copy):
                sources = [piece.source for piece in logical.view(name).pieces]
                those = {id(each): (rule, each) for each in sources if isinstance(each, Computed)}
                computed.update(those)
                nbytes[rule] += 0 if those else tensor.nbytes
        for rule, source in computed.values():  # of a quantized weight, what is stored
            nbytes[rule] += sum(tensor.nbytes for tensor in source.inputs)
        return nbytes

    def tensors(
        self, logical: LogicalTensors, types: OutputTypes, typed: Typed | None = None
    ) -> list[Planned]:
        """All tensors of the target, whose dtypes are those of `typed`, if given.

        Raises ReshardError if it fuses tensors of different dtypes.
        """
        if self.natives is not None:
            return list(native_tensors(logical, self.natives, types, typed))
        kept = (tensor for tensor in _hub_tensors(logical, types) if tensor.name not in self.left)
        return memory_names.live_tensors(kept, self.live)

    def states(self, states: Mapping[str, LogicalTensors]) -> PlannedStates:
        """The states of its tensors. Raises ReshardError if only a part of a fused tensor has one."""
        natives = {state: self._complete_natives(logical) for state, logical in states.items()}
        problems = []
        for state, logical in states.items():
            for name, bound in (self.natives or {}).items():
                sources = sources_of(bound)
                if name not in (natives[state] or {}) and not sources.isdisjoint(logical.tensors):
                    problems.append(
                        Problem(
                            "optimizer-state-partial",
                            "a part of a tensor has an optimizer state, and the rest has none",
                            tensor=name,
                            rule=f"a fused tensor is trained as one parameter, with one {state}",
                            found=f"none for {', '.join(sorted(sources - logical.tensors.keys()))}",
                            remedy="leave out --with-optimizer: frozen and trained tensors cannot be fused",
                        )
                    )
        raise_all(problems)
        return {
            state: _named_with_state(
                state, replace(self, natives=natives[state]).tensors(logical, _types(state))
            )
            for state, logical in states.items()
        }

    def _complete_natives(self, logical: LogicalTensors) -> Mapping[str, BoundTensor] | None:
        """The tensors of an engine whose parts are all there."""
        if self.natives is None:
            return None
        return {name: b for name, b in self.natives.items() if sources_of(b) <= logical.tensors.keys()}


def _types(state: str) -> OutputTypes:
    return OutputTypes("float32" if state == MASTER_STATE else None)


def names_of(format: str, request: Request, logical: LogicalTensors, naming: Naming) -> TargetNames:
    """How a format names the tensors of a model. Raises ReshardError for tensors that it cannot store."""
    model = request.model
    if request.dialect == HUB or request.is_in_memory:
        name = model.family.name if model else None
        return TargetNames(live=live_names(request.config, name) if request.is_in_memory else None)
    leaves_out = naming.leaves_out
    rules_out = {name: leaves_out(request, name) for name in logical.tensors} if leaves_out else {}
    left = {name: rule for name, rule in rules_out.items() if rule}
    rules = naming.renames(request.config) if naming.renames else None
    if rules is not None:
        return TargetNames(live=MemoryNames(None, config=request.config, table=rules), left=left)
    binding = request.declared.binding(request.dialect)
    left |= dict.fromkeys(binding.unread.keys() & logical.tensors.keys(), NEVER_READ)
    raise_all(
        Problem(
            "tensor-has-no-place",
            f"{format} cannot store a tensor",
            tensor=name,
            rule="every tensor must have a place in the output; nothing is dropped silently",
            expected=f"a rule of its family for the names of {request.dialect}",
            remedy="choose another format with --to",
        )
        for name in logical.tensors
        if name not in binding.hf and name not in binding.copies and name not in left
    )
    return TargetNames(binding.native, left=left)


def _hub_tensors(logical: LogicalTensors, types: OutputTypes) -> Iterator[Planned]:
    """All logical tensors under their Hugging Face names."""
    for name, item in logical.tensors.items():
        if not types.wanted:
            logical.keep_exact(name, item.bound, item.dtype)
        yield Planned(name, types.of(name, item.dtype), item.shape, partial(logical.view, name))


def native_tensors(
    logical: LogicalTensors,
    natives: Mapping[str, BoundTensor],
    types: OutputTypes,
    typed: Typed | None = None,
) -> Iterator[Planned]:
    """All tensors of an engine. Raises ReshardError if it fuses tensors of different dtypes."""
    problems = []
    usual = Counter(item.dtype for item in logical.tensors.values()).most_common(1)[0][0]
    for name, bound in natives.items():
        sources = sources_of(bound)
        stored_dtypes = {logical.tensors[source].dtype for source in sources}
        wanted = {types.of(source, logical.tensors[source].dtype) for source in sources}
        wanted = wanted or {types.of(name, usual)}  # it is all zeros
        wanted = {typed(name, bound.shape)} if typed else wanted
        if len(wanted) > 1:
            problems.append(
                Problem(
                    "fused-dtypes-differ",
                    "tensors that are fused into one have different dtypes",
                    tensor=", ".join(sorted(sources)),
                    rule=f"{name} has one dtype",
                    found=", ".join(sorted(map(str, stored_dtypes))),
                    remedy="choose one for all: --dtype bfloat16",
                )
            )
            continue
        stored = stored_dtypes.pop() if len(stored_dtypes) == 1 else usual
        if not (types.wanted or typed):
            logical.keep_exact(name, bound, stored)
        yield Planned(name, wanted.pop(), bound.shape, partial(logical.native_view, name, bound, stored))
    raise_all(problems)


def sources_of(bound: BoundTensor) -> set[str]:
    """The names of the logical tensors that one is made of."""
    return {str(source) for source in bound.sources if not isinstance(source, DroppedElements)}


def _named_with_state(state: str, tensors: Iterable[Planned]) -> dict[str, Planned]:
    return {tensor.name: tensor._replace(name=f"{tensor.name} ({state})") for tensor in tensors}


def elements(tensors: Iterable[Planned]) -> int:
    """The number of elements of tensors."""
    return sum(tensor.dtype.elements(prod(tensor.shape)) for tensor in tensors)
