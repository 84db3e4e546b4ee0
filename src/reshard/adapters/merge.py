"""Merge an adapter into the weights it was trained on: the same names, some weights computed when they are read."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from reshard.adapters.adapter import Adapter, LowRankPair
from reshard.adapters.adapter_settings import merge_problems
from reshard.adapters.embedding_and_head import HEAD, TOKEN_WEIGHTS, resize, untie
from reshard.adapters.merged_weights import MergedWeight, ShiftedBias, WeightDelta
from reshard.adapters.stacked_experts import ExpertStacks
from reshard.adapters.task_head import head_of, head_without_task
from reshard.algebra.dtypes import DType, castable
from reshard.algebra.tensors import Tensor
from reshard.algebra.views import View, concat
from reshard.base.errors import Problem, ReshardError, raise_all
from reshard.base.merged_problems import one_for_all
from reshard.formats import quantization

Types = Callable[[str, DType], DType]
_EXPERT = re.compile(r"\.experts\.\d+\.")


class MergeTarget(NamedTuple):
    """A weight [rows, columns] that a pair changes, or a stack with a pair for each; `scale` is alpha over r."""

    weight: str
    pairs: tuple[LowRankPair, ...]
    scale: float
    rounded: bool


def merge_adapter(
    adapter: Adapter, base: Mapping[str, Tensor], types: Types, *, tied: bool = False, turned: bool = False
) -> dict[str, Tensor]:
    """`base`, under Hub names, with the adapter merged. `types` returns the dtype of each weight of the result.

    `tied` says that a head in `base` is a copy of its embedding, `turned` is `Family.turned_pairs`. A head that was
    tied to the embedding becomes a separate weight if either is trained. Raises ReshardError listing every module that
    the base does not have, or has in another shape: the adapter belongs to another model.
    """
    _refuse(adapter, base)
    weights = {name: Tensor(types(name, tensor.dtype), tensor.view) for name, tensor in base.items()}
    problems = list(_trained_weight_problems(adapter, weights))
    _replace(adapter.base, weights, types)
    untie(adapter, weights)
    _replace(adapter.whole, weights, types)
    if head_of(adapter):
        weights.pop(HEAD, None)
    resize(adapter, base, weights, tied=tied or HEAD not in base)
    for module, target in targets(adapter, weights, turned=turned):
        if isinstance(target, Problem):
            problems.append(target)
            continue
        weight = weights[target.weight]
        weights[target.weight] = _merged_weight(weight, target, adapter)
        if adapter.pairs[module].bias:
            problems += _merge_bias(module, target, weights)
    raise_all(one_for_all(problems, adapter.pairs, "the adapter"))
    return weights


def _refuse(adapter: Adapter, base: Mapping[str, Tensor]) -> None:
    problems = list(merge_problems(adapter.settings))
    quantized, _ = quantization.find(base, None, "the base")
    if quantized:
        problems += quantized_base(quantized).problems
    raise_all(problems)


def quantized_base(quantized: quantization.Quantization, path: Path | None = None) -> ReshardError:
    """The error for a base whose weights cannot be computed from what is stored."""
    return ReshardError(
        "base-config-quantized",
        "the base is quantized",
        tensor=next(iter(quantized.weights), None),
        file=str(path) if path else None,
        rule="a merged weight is the sum of two numbers, and a quantized one is an index into a scale",
        found=str(quantized),
        remedy="pass the base that it was quantized from, in bfloat16 or float32: --base DIR",
    )


def _trained_weight_problems(adapter: Adapter, weights: Mapping[str, Tensor]) -> Iterator[Problem]:
    """Problems of fully trained weights that the base lacks, or has in another shape; embeddings may have grown."""
    head = head_of(adapter)
    for name, tensor in {**adapter.base, **adapter.whole}.items():
        weight = weights.get(name)
        if name in head:
            continue
        if weight is None and weights and name not in TOKEN_WEIGHTS:
            unmerged = head_without_task(name, tensor, adapter)
            yield unmerged or _misfit_problem(name, "a weight of that name", "none", tensor.file)
        elif (
            weight is not None
            and weight.shape[name in TOKEN_WEIGHTS :] != tensor.shape[name in TOKEN_WEIGHTS :]
        ):
            yield _misfit_problem(name, str(list(weight.shape)), str(list(tensor.shape)), tensor.file)


def _replace(by: Mapping[str, Tensor], weights: dict[str, Tensor], types: Types) -> None:
    for name, tensor in by.items():
        kind = weights[name].dtype if name in weights else types(name, tensor.dtype)
        weights[name] = Tensor(kind, tensor.view)


def targets(
    adapter: Adapter, weights: Mapping[str, Tensor], *, turned: bool
) -> Iterator[tuple[str, MergeTarget | Problem]]:
    """The weights that each module's pair changes, or why there are none."""
    stacks = ExpertStacks(weights, adapter, transposed=turned)
    for module, pair in adapter.pairs.items():
        for target in _targets(adapter, module, pair, weights, stacks):
            yield module, target


def _targets(
    adapter: Adapter, module: str, pair: LowRankPair, weights: Mapping[str, Tensor], stacks: ExpertStacks
) -> Iterator[MergeTarget | Problem]:
    """The weights that one pair changes: one, or those of each expert."""
    settings = adapter.settings
    if stacks.holds(module):
        stacked = stacks.parts(module, pair)
        if isinstance(stacked, Problem):
            yield stacked
            return
        if not stacked:
            yield _misfit_problem(module, "stacked experts of these sizes", _shapes(pair), pair.a.file)
        for parameter, weight, pairs in stacked:
            if castable(weights[weight].dtype):
                yield MergeTarget(weight, pairs, settings.scale(parameter, pairs[0].rank), rounded=True)
            else:
                yield _not_a_float(weight, weights[weight])
        return
    weight = next((name for name in _spellings(f"{module}.weight") if name in weights), "")
    if not weight:
        yield _misfit_problem(module, f"a weight {module}.weight", "none", pair.a.file)
        return
    shape, wanted = weights[weight].shape, (pair.b.shape[0], pair.a.shape[1])
    if shape not in (wanted, wanted[::-1]) or (pair.embedding and shape != wanted[::-1]):
        yield _misfit_problem(module, str(list(shape)), _shapes(pair), pair.a.file)
    elif not castable(weights[weight].dtype):
        yield _not_a_float(weight, weights[weight])
    else:
        named = any(f".{module}.weight".endswith(f".{parameter}") for parameter in settings.parameters)
        rounded = named or pair.embedding or settings.rounded or bool(_EXPERT.search(weight))
        yield MergeTarget(weight, (pair,), settings.scale(module, pair.rank), rounded)


def _spellings(name: str) -> tuple[str, ...]:
    """The possible names of a weight: transformers 5 calls every mixture `mlp`, but the Hub's Mixtral does not."""
    return (name, name.replace(".mlp.", ".block_sparse_moe."))


def _merged_weight(weight: Tensor, target: MergeTarget, adapter: Adapter) -> Tensor:
    """A weight, or each matrix of a stack, with its pair."""
    if len(weight.shape) == 2:
        return Tensor(weight.dtype, _sum(weight, target.pairs[0], target, adapter))
    matrices = (Tensor(weight.dtype, view) for view in weight.view.unstacked())
    sums = [_sum(matrix, pair, target, adapter) for matrix, pair in zip(matrices, target.pairs, strict=True)]
    return Tensor(weight.dtype, concat(sums).reshape(*weight.shape))


def _sum(weight: Tensor, pair: LowRankPair, target: MergeTarget, adapter: Adapter) -> View:
    out, width = pair.b.shape[0], pair.a.shape[1]
    straight = weight.shape == (out, width) and not pair.embedding
    if straight and not (adapter.settings.config.get("fan_in_fan_out") and out == width):
        left, right, by_column = pair.b, pair.a, False
    else:
        left, right, by_column = _transposed_tensor(pair.a), _transposed_tensor(pair.b), True
    rounded = target.rounded and pair.magnitude is None
    delta = WeightDelta(left, right, target.scale, rounded, pair.magnitude, by_column)
    return View.of(MergedWeight(weight, delta, weight.dtype), *weight.shape)


def _transposed_tensor(tensor: Tensor) -> Tensor:
    return Tensor(tensor.dtype, tensor.view.permute(1, 0))


def _merge_bias(module: str, target: MergeTarget, weights: dict[str, Tensor]) -> list[Problem]:
    """Merge the bias of lora_B into that of the module."""
    name = f"{target.weight.removesuffix('weight')}bias"
    bias = target.pairs[0].bias
    assert bias is not None
    if name not in weights:
        return [_misfit_problem(f"{module}.lora_B.bias", f"a bias {name}", "none", bias.file)]
    base = weights[name]
    shifted = ShiftedBias(base, bias, target.scale, base.dtype)
    weights[name] = Tensor(base.dtype, View.of(shifted, *base.shape))
    return []


def _shapes(pair: LowRankPair) -> str:
    return f"lora_A {list(pair.a.shape)} and lora_B {list(pair.b.shape)}"


def _misfit_problem(tensor: str, expected: str, found: str, file: str) -> Problem:
    return Problem(
        "adapter-misfits-base",
        "the adapter does not match the base",
        tensor=tensor,
        file=file,
        rule="each tensor of an adapter belongs to a module of the base",
        expected=expected,
        found=found,
        remedy="it was trained on another model: pass that one with --base DIR",
    )


def _not_a_float(name: str, tensor: Tensor) -> Problem:
    return Problem(
        "base-quantized",
        "the base is quantized",
        tensor=name,
        file=tensor.file,
        found=str(tensor.dtype),
        remedy="pass the base in bfloat16, float16 or float32: --base DIR",
    )
