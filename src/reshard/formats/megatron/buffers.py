"""The distributed optimizer as Megatron-LM saves it by default, `dp_reshardable`: flat buffers without names.

Each tensor-parallel rank of each stage has a buffer for each virtual chunk and dtype; under expert parallelism, experts
have an optimizer and buffers of their own. A buffer has the parameters of its modules in reverse, each at a multiple of
64 elements. Buckets cut it between parameters.

    [chained_<0, or 1 for experts>.]optimizer.distributed.dp_group_idx_<rank>.gbuf_idx_<buffer>
        .dtype_(<of the parameters>, <of the gradients>).bucket_idx_<n>.{param,exp_avg,exp_avg_sq}

The order is computed (`parameter_order.py`), must fit the buckets and the pieces that data-parallel ranks stored, and
is proven before anything is written: rounded masters are the weights, and modules that could be exchanged differ.
Sources: `distributed/param_and_grad_buffer.py`, `optimizer/distrib_optimizer.py` and `optimizer/__init__.py` of
megatron-core 0.15 to 0.20.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations
from typing import Any, NamedTuple

from reshard.algebra.dtypes import castable
from reshard.algebra.layout import Layout, SavedLayout
from reshard.algebra.split_vectors import SplitVector
from reshard.algebra.tensors import Replica, Tensor
from reshard.algebra.views import View, concat
from reshard.base.errors import ReshardError
from reshard.containers.dcp_metadata import DcpTensor
from reshard.formats.megatron.common_state import Reading
from reshard.formats.megatron.mcore import is_carried, is_gated, place_of, split_of, stages_of
from reshard.formats.megatron.optimizer_states import rounding
from reshard.formats.megatron.parameter_order import (
    UnorderedError,
    exchangeable,
    position_of,
    spellings,
    ungrouped,
)
from reshard.formats.megatron.rank_states import MegatronRank, RankStates
from reshard.formats.optimizer import OptimizerStates
from reshard.formats.sharding import Shard, TensorShards
from reshard.stores import as_path
from reshard.transfer.plan import Planned

STATE_KEYS = {"fp32": "param", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
"""The name of each state in the keys of buckets."""

_MASTERS = STATE_KEYS["fp32"]
_BUCKET = re.compile(
    r"(?:chained_(\d+)\.)?optimizer\.distributed\.dp_group_idx_(\d+)\.gbuf_idx_(\d+)"
    rf"\.dtype_\(torch\.\w+, torch\.\w+\)\.bucket_idx_(\d+)\.({'|'.join(STATE_KEYS.values())})"
)
_NOT_TRAINED = ".router.expert_bias"
"""Ending of the name of a buffer of a module, which is not a parameter."""

COPIES_AND_PADDING = "copies and padding of optimizer states"

_ALIGNED = 64
_REMEDY = (
    "leave out --with-optimizer to convert the weights alone; states that Megatron-LM saves with "
    "dist_ckpt_optim_fully_reshardable have names"
)


class _BufferKey(NamedTuple):
    """Whether a buffer is that of experts, the index of its rank, and its number there."""

    experts: bool
    rank: int
    number: int

    def __str__(self) -> str:
        chained = "chained_1." if self.experts else ""
        return f"{chained}optimizer.distributed.dp_group_idx_{self.rank}.gbuf_idx_{self.number}"


class _RankParameter(NamedTuple):
    """A parameter of a rank: its key in the state dict there, its shard, and which of the shards that is."""

    key: str
    shard: Shard
    at: int

    @property
    def is_expert(self) -> bool:
        return place_of(self.shard.tensor.name).expert is not None


class _BucketSegment(NamedTuple):
    """The elements of a parameter: from `start` of a bucket."""

    parameter: _RankParameter
    bucket: tuple[_BufferKey, int]
    start: int


class _MisfitError(Exception):
    """The buffers do not have the parameters of the model: what was expected of `key`, and what was found."""

    def __init__(self, key: str, expected: str, found: str) -> None:
        super().__init__(key)
        self.key, self.expected, self.found = key, expected, found


_Fitting = tuple[dict[_BufferKey, list[_RankParameter]], list[_BucketSegment]]
"""The parameters of each buffer in the order of the modules, and their segments."""

_Lines = dict[tuple[_BufferKey, int], SplitVector]
"""Buckets of one state as vectors, by buffer and number."""

_Buckets = Mapping[_BufferKey, Mapping[int, tuple[str, DcpTensor]]]
"""Keys and tensors of buckets, by buffer and number."""


def buckets_of(stored: Mapping[str, DcpTensor]) -> dict[str, _Buckets]:
    """The buckets among the tensors of a checkpoint, by state; empty if there are none."""
    buckets: defaultdict[str, dict[_BufferKey, dict[int, tuple[str, DcpTensor]]]] = defaultdict(dict)
    matches = {key: match for key in stored if (match := _BUCKET.fullmatch(key))}
    first = min((int(match[1] or 0) for match in matches.values()), default=0)  # after that of Muon
    for key, match in matches.items():
        tensor = stored[key]
        if len(tensor.shape) == 1:
            link, group, number, bucket, state = match.groups()
            buffer = _BufferKey(int(link or 0) != first, int(group), int(number))
            buckets[state].setdefault(buffer, {})[int(bucket)] = key, tensor
    return dict(buckets)


@dataclass(frozen=True)
class OptimizerBuffers:
    """The `buckets` of a checkpoint by state, as the states of its `weights`.

    `args` are Megatron-LM's, as far as they are recorded; `reading` finds the elements of the buckets. `elsewhere` are
    the matrices that Muon updates, experts among them.
    """

    buckets: Mapping[str, _Buckets]
    weights: Mapping[str, Tensor]
    elsewhere: Collection[str]
    saved: SavedLayout
    args: Mapping[str, Any]
    reading: Reading
    _read: dict[str, _Lines] = field(default_factory=dict)

    def states(self) -> OptimizerStates:
        """All states, looked up on first use."""
        states = (state for state, key in STATE_KEYS.items() if key in self.buckets)
        return OptimizerStates(states, self.state)

    def spare(self, nbytes: int) -> int:
        """How many of the optimizer's `nbytes` are not the states of weights."""
        numel = sum(tensor.view.numel for name, tensor in self.weights.items() if self._has(name))
        firsts = (next(iter(next(iter(buckets.values())).values()))[1] for buckets in self.buckets.values())
        return max(0, nbytes - sum(numel * each.dtype.itemsize for each in firsts))

    def _has(self, name: str) -> bool:
        """Whether the buffers have the states of a weight."""
        return _is_trained(name) and name not in self.elsewhere

    def state(self, state: str) -> dict[str, Tensor]:
        """One state by the names of the weights. Raises ReshardError if the order of the buffers is unknown.

        Of a state that several ranks have, it is the first one's, as in Megatron-Core's other kinds of sharding.
        """
        (_, segments), lines = self._fitting, self._lines(STATE_KEYS[state])
        by_name: dict[str, TensorShards] = {}
        for segment in segments:
            parameter = segment.parameter
            name = parameter.shard.tensor.name
            split = split_of(name, is_gated(self.args))
            ranks = self._layout.etp if parameter.is_expert else self._layout.tp
            shards = by_name.setdefault(name, TensorShards(split, ranks if split else 1))
            shards.by_rank.setdefault(parameter.at if split else 0, _cut(lines, segment))
        return {name: shards.joined() for name, shards in by_name.items()}

    def proof(self) -> list[Replica]:
        """The comparisons that prove the order: all masters with the weights, and modules with their like."""
        (_, segments), lines = self._fitting, self._lines(_MASTERS)
        rounded = [_rounded(segment.parameter.shard, _cut(lines, segment)) for segment in segments]
        return [*rounded, *self._told_apart()]

    def _told_apart(self) -> Iterator[Replica]:
        seen = set()
        for parameters in self._fitting[0].values():
            for group in exchangeable([(each.key, each.shard.numel) for each in parameters]):
                for pair in combinations(group, 2):
                    first, second = ([parameters[index].shard for index in module] for module in pair)
                    names = tuple(shard.tensor.name for shard in (*first, *second))
                    if names not in seen:
                        seen.add(names)
                        yield _told_apart(first, second)

    # -------------------------------------------------------------------------------------- the order

    @cached_property
    def _layout(self) -> Layout:
        """The layout, with the layers of each stage. Raises _MisfitError if the buffers are those of other ranks."""
        layout = self.saved.complete()
        ranks = {(buffer.experts, buffer.rank) for buffer in self._masters}
        expert_buffers = sum(experts for experts, _ in ranks)
        experts = len({place_of(name).expert for name in self.weights} - {None})
        if len(ranks) - expert_buffers != layout.pp * layout.tp:
            wanted = f"those of {layout.pp * layout.tp} ranks"
            raise _MisfitError(
                "optimizer.distributed", wanted, f"those of {len(ranks) - expert_buffers} ranks"
            )
        if (
            (expert_buffers > 0) != (layout.ep > 1 and not self.elsewhere)
            or expert_buffers % (layout.ep * layout.etp)
            or experts % layout.ep
        ):
            wanted = f"those of {experts} experts on {layout.ep * layout.etp} ranks of each stage"
            raise _MisfitError("chained_1.optimizer.distributed", wanted, f"those of {expert_buffers} ranks")
        return replace(layout, stages=stages_of(self.args, layout))

    @property
    def _masters(self) -> _Buckets:
        return self.buckets.get(_MASTERS, {})

    @cached_property
    def _fitting(self) -> _Fitting:
        """What fits the buckets, of the ways in which modules are arranged. Raises ReshardError if none does."""
        misfits = []
        for spelling in spellings(self.args):
            fitting = self._tried(*spelling)
            if not isinstance(fitting, _MisfitError):
                return fitting
            misfits.append(fitting)
        raise _unreadable(misfits[0])

    def _tried(self, transformer_engine: bool, grouped: bool) -> _Fitting | _MisfitError:
        try:
            parameters = dict(self._ordered(transformer_engine, grouped))
            return parameters, [*self._placed(parameters)]
        except _MisfitError as misfit:
            return misfit
        except ReshardError as error:  # Megatron-Core has no ranks of this model or layout
            return _MisfitError(error.problems[0].message, "a model and a layout of Megatron-Core", "others")

    def _ordered(
        self, transformer_engine: bool, grouped: bool
    ) -> Iterator[tuple[_BufferKey, list[_RankParameter]]]:
        """The parameters of each buffer, in the order of the modules."""
        layout = self._layout
        states = self._rank_states(transformer_engine)
        has_expert_buffers = layout.ep > 1 and not self.elsewhere
        for group in range(layout.pp * layout.tp):
            pp, tp = divmod(group, layout.tp)
            etp = tp if layout.etp == layout.tp else 0
            chunks = [
                [each for each in parameters if self._has(each.shard.tensor.name)]
                for chunk in range(layout.vpp)
                for parameters in [_chunk_parameters(states, MegatronRank(tp, pp), etp, chunk)]
            ]
            if has_expert_buffers:
                chunks = [
                    [each for each in chunk_parameters if not each.is_expert] for chunk_parameters in chunks
                ]
            yield from _buffers(False, group, chunks, grouped)
        for group in range(layout.pp * layout.ep * layout.etp if has_expert_buffers else 0):
            pp, part = divmod(group, layout.ep * layout.etp)
            ep, etp = divmod(part, layout.etp)
            chunks = [
                _chunk_parameters(states, MegatronRank(0, pp, ep), etp, chunk) for chunk in range(layout.vpp)
            ]
            chunks = [[each for each in chunk_parameters if each.is_expert] for chunk_parameters in chunks]
            yield from _buffers(True, group, chunks, grouped)

    def _rank_states(self, transformer_engine: bool) -> RankStates:
        """The state dicts of all ranks. What is outside the language model is not trained, or does not fit."""
        trained = {name: tensor for name, tensor in self.weights.items() if _is_trained(name)}
        places = [place_of(name) for name in trained]
        layers = {stack: [p.layer or 0 for p in places if p.stack == stack] for stack in ("decoder", "mtp")}
        counted = {
            "num_layers": 1 + max(layers["decoder"], default=0),
            "mtp_num_layers": 1 + max(layers["mtp"], default=-1),
            "num_experts": 1 + max((p.expert for p in places if p.expert is not None), default=-1),
            "untie_embeddings_and_output_weights": "output_layer.weight" in trained,
        }
        planned = [Planned.of(*each) for each in trained.items()]
        return RankStates(planned, {**self.args, **counted}, self._layout, transformer_engine, least=0)

    def _placed(self, parameters: Mapping[_BufferKey, list[_RankParameter]]) -> Iterator[_BucketSegment]:
        """The segment of each parameter. Raises _MisfitError if the buckets do not consist of exactly these."""
        buckets = self._masters
        for buffer in sorted(parameters.keys() ^ buckets.keys()):
            wanted = len(parameters.get(buffer, ()))
            raise _MisfitError(str(buffer), f"{wanted} parameters", f"{len(buckets.get(buffer, ()))} buckets")
        for buffer, buffer_parameters in parameters.items():
            yield from _walked(buffer, buffer_parameters, buckets[buffer])

    def _lines(self, state: str) -> _Lines:
        """The buckets of a state as vectors. Raises ReshardError if they are not those of the masters."""
        if state in self._read:
            return self._read[state]
        buckets, masters = self.buckets.get(state, {}), self._masters
        vectors: dict[tuple[_BufferKey, int], DcpTensor] = {}
        for buffer, numbered in masters.items():
            for number, (key, bucket) in numbered.items():
                own, tensor = buckets.get(buffer, {}).get(number, (key.removesuffix(_MASTERS) + state, None))
                if tensor is None or tensor.shape != bucket.shape or not _is_complete(tensor):
                    raise _unreadable(_MisfitError(own, f"{bucket.shape[0]} elements", _amount(tensor)))
                if _pieces(tensor) != _pieces(bucket):
                    raise _unreadable(_MisfitError(own, "pieces like those of the masters", "others"))
                vectors[buffer, number] = tensor
        stored = dict(each for numbered in buckets.values() for each in numbered.values())
        with self.reading(stored) as read:
            lines = {
                place: SplitVector([read(tensor, chunk) for chunk in sorted(tensor.chunks)])
                for place, tensor in vectors.items()
            }
        self._read[state] = lines
        return lines


def _is_trained(name: str) -> bool:
    return not is_carried(name) and not name.endswith(_NOT_TRAINED)


def _chunk_parameters(states: RankStates, rank: MegatronRank, etp: int, chunk: int) -> list[_RankParameter]:
    """The parameters of one virtual chunk of a rank."""
    parameters = (
        _RankParameter(key, shard, rank.tp) for key, shard in states.state(rank, chunk, etp).items()
    )
    return [each._replace(at=etp) if each.is_expert else each for each in parameters]


def _buffers(
    experts: bool, group: int, chunks: Sequence[Sequence[_RankParameter]], grouped: bool
) -> Iterator[tuple[_BufferKey, list[_RankParameter]]]:
    """The buffers of a rank: one for each virtual chunk and dtype, numbered in the order of the modules."""
    number = 0
    for parameters in chunks:
        named = parameters if grouped else [each._replace(key=ungrouped(each.key)) for each in parameters]
        try:
            ordered = sorted(named, key=lambda each: position_of(each.key))
        except UnorderedError as unknown:
            raise _MisfitError(
                unknown.key, "a module with a known place in the order", unknown.part
            ) from None
        for dtype in dict.fromkeys(each.shard.dtype for each in ordered):
            yield _BufferKey(experts, group, number), [each for each in ordered if each.shard.dtype == dtype]
            number += 1


def _walked(
    buffer: _BufferKey, parameters: Sequence[_RankParameter], buckets: Mapping[int, tuple[str, DcpTensor]]
) -> Iterator[_BucketSegment]:
    """The segments of parameters in the buckets of their buffer. Raises _MisfitError where one has none.

    Every segment begins and ends where a piece does. A bucket ends with its last parameter, or with the padding before
    the next one.
    """
    number, end = -1, 0
    size, cuts, key = 0, frozenset[int](), str(buffer)
    for parameter in reversed(parameters):
        start = -(-end // _ALIGNED) * _ALIGNED
        if size in (end, start):
            number, start = number + 1, 0
            key, bucket = buckets.get(number, (key, None))
            size, cuts = (bucket.shape[0], _cuts(bucket)) if bucket else (0, frozenset())
        end = start + parameter.shard.numel
        if not {start, end} <= cuts:
            name = parameter.shard.tensor.name
            raise _MisfitError(key, f"elements {start} to {end} for {name}", f"other pieces, {size} elements")
        yield _BucketSegment(parameter, (buffer, number), start)
    if size not in (end, -(-end // _ALIGNED) * _ALIGNED) or number + 1 != len(buckets):
        raise _MisfitError(
            key, f"{end} elements in {number + 1} buckets", f"{size} elements in {len(buckets)}"
        )


def _cuts(bucket: DcpTensor) -> frozenset[int]:
    """Where the pieces of a bucket begin and end."""
    low = {chunk.offsets[0] for chunk in bucket.chunks}
    return frozenset(low | {chunk.offsets[0] + chunk.sizes[0] for chunk in bucket.chunks})


def _is_complete(bucket: DcpTensor) -> bool:
    """Whether the pieces of a bucket are adjacent, from its beginning to its end."""
    end = 0
    for chunk in sorted(bucket.chunks):
        if chunk.offsets != (end,):
            return False
        end += chunk.sizes[0]
    return bucket.shape == (end,)


def _pieces(bucket: DcpTensor) -> list[tuple[int, int, str]]:
    """The pieces of a bucket, with the rank that wrote each: `__<rank>_<n>.distcp`."""
    return sorted(
        (chunk.offsets[0], chunk.sizes[0], as_path(chunk.file).name.rpartition("_")[0])
        for chunk in bucket.chunks
    )


def _amount(bucket: DcpTensor | None) -> str:
    if bucket is None:
        return "none"
    return f"{sum(chunk.sizes[0] for chunk in bucket.chunks)} elements in {len(bucket.chunks)} pieces"


def _cut(lines: _Lines, segment: _BucketSegment) -> Tensor:
    """The state of a shard."""
    line, shard = lines[segment.bucket], segment.parameter.shard
    pieces = tuple(line.cut(segment.start, segment.start + shard.numel))
    return Tensor(line.dtype, View(shard.shape, pieces))


def _rounded(shard: Shard, masters: Tensor) -> Replica:
    """The comparison of a shard with its masters, which Megatron rounds into it after each step."""
    if not castable(masters.dtype):
        raise _unreadable(_MisfitError(shard.tensor.name, "masters that are floats", str(masters.dtype)))
    return rounding(
        shard.tensor.name,
        Tensor(shard.dtype, shard.source()),
        masters,
        f"the optimizer states are of another step, or in an unknown order: {_REMEDY}",
    )


def _told_apart(first: Sequence[Shard], second: Sequence[Shard]) -> Replica:
    """The comparison of two modules that fit in each other's place."""
    return Replica(
        first[0].tensor.name,
        _in_a_row(first),
        _in_a_row(second),
        "buffers have no names: only weights that differ prove which states belong to which",
        f"save when these weights have been trained longer, or {_REMEDY}",
        "optimizer-order-unproven",
        "the order of the optimizer states cannot be proven, because two weights are equal",
        equal=False,
    )


def _in_a_row(shards: Sequence[Shard]) -> Tensor:
    views = [shard.source().reshape(shard.numel) for shard in shards]
    return Tensor(shards[0].dtype, concat(views))


def _unreadable(misfit: _MisfitError) -> ReshardError:
    return ReshardError(
        "optimizer-order-unknown",
        "the optimizer states cannot be assigned to weights",
        tensor=misfit.key,
        rule="buffers (dp_reshardable) consist of the parameters of the ranks, in the order of the modules",
        expected=misfit.expected,
        found=misfit.found,
        remedy=_REMEDY,
    )
