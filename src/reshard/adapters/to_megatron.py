"""Convert adapters of the Hub's projections to adapters of Megatron-Core's linears, with the names of Megatron-Bridge.

Megatron-Bridge gives every linear that it adapts one pair of the same rank: `linear_in` [r, in] and `linear_out` [out,
r], with the rows of a fused linear in the order of its weight. Projections that share lora_A become such a pair
unchanged. Others become blocks of one pair whose rank is the sum of theirs, with zeros between a projection and the
lora_A of another:

    linear_in = [A_q; A_k; A_v]        linear_out = the linear's rows of [B_q 0 0; 0 B_k 0; 0 0 B_v]

Zeros also pad pairs of a lower rank, and represent projections that the adapter does not change. Source: `peft/lora.py`
and `peft/utils.py` of Megatron-Bridge 0.3.1.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping
from itertools import pairwise
from typing import NamedTuple

from reshard.adapters.adapter import Adapter, LowRankPair
from reshard.adapters.adapter_settings import merge_problems
from reshard.adapters.from_megatron import rows_like
from reshard.algebra.dtypes import dtype
from reshard.algebra.tensors import Cells, Tensor
from reshard.algebra.views import View, concat
from reshard.base.errors import Problem, raise_all
from reshard.base.merged_problems import one_for_all
from reshard.families.binding import Binding, BoundTensor
from reshard.transfer.plan import ZERO

Same = Callable[[Tensor, Tensor], bool]
_ADAPTED = re.compile(
    r"decoder\.layers\.\d+\.(?:self_attention\.linear_(?:qkv|proj)|mlp\.linear_fc[12])\.weight"
)
_ANY = dtype("uint8")
_BLANK = View.of(Cells(ZERO, _ANY), 1 << 62)


class LinearChange(NamedTuple):
    """An adapter's change of one linear: the pairs of the projections in it, by the names of their weights."""

    bound: BoundTensor
    pairs: Mapping[str, LowRankPair]
    shared: bool
    """Whether all its pairs have the same lora_A."""

    @property
    def rank(self) -> int:
        """The rank needed for all its pairs."""
        ranks = [pair.rank for pair in self.pairs.values()]
        return ranks[0] if self.shared else sum(ranks)

    def linear_in(self, rank: int) -> View:
        """[rank, in], padded with zeros."""
        blocks = [pair.a.view for pair in self.pairs.values()][: 1 if self.shared else None]
        return concat([*blocks, zeros(rank - self.rank, blocks[0].shape[1])])

    def linear_out(self, rank: int) -> View:
        """[out, rank], padded with zeros."""
        columns, at = {}, 0
        for hub, pair in self.pairs.items():
            rows = pair.b.shape[0]
            blocks = [zeros(rows, at), pair.b.view, zeros(rows, rank - at - pair.rank)]
            columns[hub] = concat(blocks, axis=1)
            at += 0 if self.shared else pair.rank

        def below(source: Hashable) -> View:
            return columns.get(str(source), _BLANK)

        return rows_like(self.bound.view, rank).through(below)


def zeros(rows: int, columns: int) -> View:
    """A matrix of zeros, of any dtype."""
    return View.of(Cells(ZERO, _ANY), rows, columns)


def linears(adapter: Adapter, binding: Binding, same: Same) -> dict[str, LinearChange]:
    """The adapted linears by Megatron-Core's names. `same` returns whether two tensors have the same values.

    Raises ReshardError listing everything that Megatron-Bridge cannot store: modules of other kinds, tensors besides
    the pairs, strengths that differ, linears that are adapted only in some layers; and pairs that do not fit the base.
    """
    problems = [*merge_problems(adapter.settings), *_pair_problems(adapter, binding), *_uneven(adapter)]
    problems += [_no_place(name, "a weight that was trained without LoRA") for name in adapter.whole]
    changes = _linear_changes(adapter, binding, same)
    problems += _gaps(changes, binding)
    raise_all(one_for_all(problems, [*adapter.pairs, *binding.native], "the adapter"))
    return changes


def _linear_changes(adapter: Adapter, binding: Binding, same: Same) -> dict[str, LinearChange]:
    pairs = {f"{module}.weight": pair for module, pair in adapter.pairs.items()}
    result = {}
    for native, bound in binding.native.items():
        sources = sorted(bound.view.pieces, key=lambda piece: piece.at)
        changed = {
            hub: pairs[hub] for hub in dict.fromkeys(str(piece.source) for piece in sources) if hub in pairs
        }
        if changed:
            shared = all(same(one.a, other.a) for one, other in pairwise(changed.values()))
            result[native.removesuffix(".weight")] = LinearChange(bound, changed, shared)
    return result


def _pair_problems(adapter: Adapter, binding: Binding) -> Iterator[Problem]:
    for module, pair in adapter.pairs.items():
        bound = binding.hf.get(f"{module}.weight")
        natives = {str(piece.source) for piece in bound.view.pieces} if bound else set()
        if pair.embedding or not natives or not all(map(_ADAPTED.fullmatch, natives)):
            yield _no_place(module, ", ".join(sorted(natives)) or "no weight of the base")
        elif pair.magnitude is not None:
            yield _no_place(module, "DoRA's magnitudes")
        elif pair.bias is not None:
            yield _no_place(module, "a bias of lora_B (lora_bias)")
        elif bound and bound.shape != (pair.b.shape[0], pair.a.shape[1]):
            yield Problem(
                "megatron-adapter-misfits-base",
                "the adapter does not match the base",
                tensor=module,
                rule="lora_A is [r, in] and lora_B is [out, r] of a weight [out, in]",
                expected=str(list(bound.shape)),
                found=f"lora_A {list(pair.a.shape)} and lora_B {list(pair.b.shape)}",
                remedy="it was trained on another model: pass that one with --base DIR",
            )


def _no_place(tensor: str, found: str) -> Problem:
    return Problem(
        "megatron-bridge-adapter-unsupported",
        "an adapter of Megatron-Bridge cannot store this",
        tensor=tensor,
        rule="it is a pair of each linear_qkv, linear_proj, linear_fc1 or linear_fc2 of the decoder, experts aside",
        found=found,
        remedy="merge the adapter into its base: --merge --base DIR",
    )


def _uneven(adapter: Adapter) -> Iterator[Problem]:
    """Problems of modules whose strength (alpha/r) differs from that of most."""
    scales = {module: adapter.settings.scale(module, pair.rank) for module, pair in adapter.pairs.items()}
    usual = Counter(scales.values()).most_common(1)[0][0]
    for module, scale in scales.items():
        if scale != usual:
            yield Problem(
                "adapter-strengths-differ",
                "the modules are adapted with different strengths",
                tensor=module,
                rule="an adapter of Megatron-Bridge has one alpha and one rank for all its linears",
                expected=f"alpha/r {usual:g}, as most have",
                found=f"alpha/r {scale:g}",
                remedy="merge the adapter into its base: --merge --base DIR",
            )


def _gaps(changes: Mapping[str, LinearChange], binding: Binding) -> Iterator[Problem]:
    """Problems of linears without a pair, if others with the same name have one."""
    adapted = targets(changes)
    for native in binding.native:
        linear, _, kind = native.rpartition(".")
        if kind == "weight" and linear not in changes and linear.rpartition(".")[2] in adapted:
            yield Problem(
                "adapter-covers-some-linears",
                "some linears of a name are adapted, and others are not",
                tensor=linear,
                rule="Megatron-Bridge adapts all linears of a name, and stacks their pairs into one tensor",
                expected="a pair of lora_A and lora_B for one of its projections",
                remedy="merge the adapter into its base: --merge --base DIR",
            )


def targets(changes: Mapping[str, LinearChange]) -> list[str]:
    """The adapted linears, as in `target_modules` of Megatron-Bridge."""
    return sorted({linear.rpartition(".")[2] for linear in changes})
