"""The operations of transformers, mlx-lm and LitGPT, on weights between the Hub and memory, as views.

Every operation takes tensors by the pattern of names that found them, and returns tensors by pattern. `inverse` is its
direction on the way from memory to the Hub. Source: `core_model_loading.py` of transformers 5.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from math import ceil, prod
from typing import Any, NamedTuple

from reshard.algebra.dtypes import dtype
from reshard.algebra.tensors import Cells, Tensor
from reshard.algebra.views import View, concat
from reshard.base.errors import Problem
from reshard.families.renaming import Operation
from reshard.families.rules import plus
from reshard.formats.stepped_tensor import changed
from reshard.transfer.plan import ZERO, Planned

Tensors = dict[str, list[Planned]]
"""Tensors by pattern, in the order of their names."""


_BY_TRANSFORMERS = "load it with from_pretrained of transformers, and save its state_dict with dcp.save"


class UnfitError(Exception):
    """A rule of transformers that the tensors do not fit, in words.

    `missing` are the numbers that a list lacks, and `count` is its length; `kinds` are the dtypes and shapes of
    tensors that would be joined. With a `remedy`, the tensors are as they should be, but cannot be converted.
    """

    def __init__(
        self,
        why: str,
        *,
        missing: Sequence[int] = (),
        count: int = 0,
        kinds: Iterable[tuple[Any, ...]] = (),
        remedy: str = "the checkpoint is incomplete, or of another model than config.json describes (--base DIR)",
    ) -> None:
        super().__init__(why)
        self.missing, self.count, self.kinds, self.remedy = missing, count, sorted(kinds), remedy

    def problem(self, name: str) -> Problem:
        """The problem of the tensor called `name`, which cannot be made."""
        if self.missing:
            return experts_missing(name, self.count, self.missing)
        if self.kinds:
            return experts_differ(name, self.kinds)
        return Problem(
            "tensors-misfit-names-in-memory",
            "tensors cannot be converted between the Hub and memory as transformers does it",
            tensor=name,
            rule="transformers joins and splits tensors when it loads a model, and undoes it when it saves one",
            found=str(self),
            remedy=self.remedy,
        )


def experts_missing(name: str, count: int, missing: Sequence[int]) -> Problem:
    """The problem of a list of experts with gaps."""
    return Problem(
        "experts-missing",
        "experts of a layer are missing",
        tensor=name,
        rule="the live model stores all experts of a layer in one tensor",
        expected=f"experts 0 to {count - 1}",
        found=f"no {', '.join(map(str, missing[:8]))}",
        remedy="the checkpoint is incomplete: copy it again from where it was saved",
    )


def experts_differ(name: str, kinds: Sequence[tuple[Any, ...]]) -> Problem:
    """The problem of experts that are not alike; `kinds` are the dtypes and shapes that they have."""
    return Problem(
        "experts-differ",
        "experts that are fused into one tensor differ in dtype or shape",
        tensor=name,
        rule="the live model stores all experts of a layer in one tensor",
        found=", ".join(f"{dtype} {list(shape)}" for dtype, shape in kinds),
        remedy="choose one dtype for all: --dtype bfloat16",
    )


class OperationContext(NamedTuple):
    """The patterns of a rule on both sides of an operation, and the config of the model."""

    before: Sequence[str]
    after: Sequence[str]
    config: Mapping[str, Any]

    def size(self, key: str, subconfig: str | None = None, default: int | None = None) -> int:
        """A number in the config, or in a config within it; `default` if it is not there."""
        inner = self.config.get(subconfig) if subconfig else None
        text = inner if isinstance(inner, dict) else self.config.get("text_config", self.config)
        value = text.get(key, self.config.get(key))
        value = default if value is None else value
        if not isinstance(value, int) or value < 1:
            raise UnfitError(f"config.json has no usable {key}")
        return value


def convert(tensors: Tensors, operations: Sequence[Operation], context: OperationContext) -> Tensors:
    """The tensors after all operations. Raises UnfitError."""
    for operation in operations:
        known = OPERATIONS.get(operation["name"])
        if known is None:
            name = operation["name"]
            raise UnfitError(f"the operation {name} of transformers is not known", remedy=_BY_TRANSFORMERS)
        tensors = known(tensors, operation, context)
    return tensors


def _changed_tensor(tensor: Planned, shape: Sequence[int], change: Callable[[View], View]) -> Planned:
    """A tensor whose elements are those of another, moved by `change` when its view is needed."""
    source = tensor.source
    return Planned(tensor.name, tensor.dtype, tuple(shape), lambda: change(source()))


def _reshape(tensor: Planned, shape: Sequence[int]) -> Planned:
    return _changed_tensor(tensor, shape, lambda view: view.reshape(*shape))


def _of_all(patterns: Sequence[str], tensors: Tensors) -> list[list[Planned]]:
    """The tensors of each pattern."""
    if lacking := [each for each in patterns if each not in tensors]:
        raise UnfitError(f"no tensor is named {lacking[0]}")
    return [tensors[each] for each in patterns]


def _only_tensor(tensors: Tensors) -> Planned:
    planned = [each for group in tensors.values() for each in group]
    if len(planned) != 1:
        raise UnfitError(f"one tensor is expected, not {len(planned)}")
    return planned[0]


def _joined_tensor(parts: Sequence[Planned], axis: int, *, is_stack: bool = False) -> Planned:
    """Tensors as one: along an axis, or along a new one."""
    first = parts[0]
    if is_stack:
        parts = [_reshape(each, (*each.shape[:axis], 1, *each.shape[axis:])) for each in parts]
    kinds = {(each.dtype.name, *each.shape[:axis], *each.shape[axis + 1 :]) for each in parts}
    if len(kinds) > 1:
        raise UnfitError(
            "tensors to be joined differ", kinds={(each.dtype.name, each.shape) for each in parts}
        )
    shape = list(parts[0].shape)
    shape[axis] = sum(each.shape[axis] for each in parts)
    sources = [each.source for each in parts]
    return Planned(first.name, first.dtype, tuple(shape), lambda: concat([each() for each in sources], axis))


def _piece(tensor: Planned, axis: int, begin: int, size: int) -> Planned:
    """A range of an axis."""
    shape = (*tensor.shape[:axis], size, *tensor.shape[axis + 1 :])
    index = (*[slice(None)] * axis, slice(begin, begin + size))
    return _changed_tensor(tensor, shape, lambda view: view[index])


def _cut_tensor(tensor: Planned, axis: int, parts: int, *, is_last_smaller: bool = False) -> list[Planned]:
    """As many equal parts of an axis, which must divide, unless the last part may be smaller, as for `torch.chunk`."""
    rows = tensor.shape[axis] if axis < len(tensor.shape) else 1
    size = -(-rows // parts)
    if not size or size * parts - rows >= (size if is_last_smaller else 1):
        raise UnfitError(
            f"{tensor.name} {list(tensor.shape)} cannot be divided into {parts} parts along axis {axis}"
        )
    return [_piece(tensor, axis, begin, min(size, rows - begin)) for begin in range(0, rows, size)]


def _slices(tensor: Planned, axis: int) -> list[Planned]:
    """The parts along an axis, without it."""
    if axis == 0:
        return _rows(tensor)
    rest = (*tensor.shape[:axis], *tensor.shape[axis + 1 :])
    return [_reshape(part, rest) for part in _cut_tensor(tensor, axis, tensor.shape[axis])]


def _numbered_names(pattern: str, count: int) -> list[str]:
    return [pattern.replace("*", str(index)) for index in range(count)]


def _by_number(pattern: str, parts: Sequence[Planned]) -> Tensors:
    return {name: [part] for name, part in zip(_numbered_names(pattern, len(parts)), parts, strict=True)}


def _chunk(tensors: Tensors, operation: Operation, context: OperationContext) -> Tensors:
    """One tensor cut into equal parts, or the reverse. As many as the config says may leave less for the last."""
    if operation.get("inverse"):
        return _concatenate(tensors, {**operation, "inverse": False}, context)
    names = list(context.after)
    if attribute := operation.get("num_shards_attribute"):
        names = _numbered_names(names[0], context.size(attribute))
    tensor, axis = _only_tensor(tensors), operation.get("dim", 0)
    parts = _cut_tensor(tensor, axis, len(names), is_last_smaller=bool(attribute))
    return {name: [part] for name, part in zip(names, parts, strict=True)}


def _split(tensors: Tensors, operation: Operation, context: OperationContext) -> Tensors:
    """One tensor cut into parts of the sizes that their modules have, or the reverse."""
    if operation.get("inverse"):
        return _concatenate(tensors, {**operation, "inverse": False}, context)
    tensor, axis, begin = _only_tensor(tensors), operation.get("dim", 0), 0
    result: Tensors = {}
    for target in context.after:
        size = _rows_of(target, context)
        result[target] = [_piece(tensor, axis, begin, size)]
        begin += size
    if begin != tensor.shape[axis]:
        raise UnfitError(f"{tensor.name} {list(tensor.shape)} has not {begin} rows, as config.json says")
    return result


def _rows_of(module: str, context: OperationContext) -> int:
    """The rows of a projection by its name, from the sizes in the config."""
    last = module.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2]
    if last in ("q_proj", "k_proj", "v_proj"):
        heads = context.size("num_attention_heads")
        head = context.size("head_dim", default=context.size("hidden_size") // heads)
        return head * (heads if last == "q_proj" else context.size("num_key_value_heads", default=heads))
    if last not in ("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b"):
        raise UnfitError(f"the rows of {module} are not known from config.json")
    heads = context.size("linear_num_value_heads")
    value = heads * context.size("linear_value_head_dim")
    key = context.size("linear_num_key_heads") * context.size("linear_key_head_dim")
    return {"in_proj_qkv": 2 * key + value, "in_proj_z": value}.get(last, heads)


def _concatenate(tensors: Tensors, operation: Operation, context: OperationContext) -> Tensors:
    """Tensors joined in the order of their patterns, or the reverse."""
    if operation.get("inverse"):
        return _chunk(tensors, {**operation, "inverse": False}, context)
    parts = [each for group in _of_all(context.before, tensors) for each in group]
    return {context.after[0]: [_joined_tensor(parts, operation.get("dim", 0))]}


def _merge(tensors: Tensors, operation: Operation, context: OperationContext) -> Tensors:
    """The tensors of each pattern stacked, or the reverse."""
    axis = operation.get("dim", 0)
    if operation.get("inverse"):
        return _unstacked(tensors, axis, context)
    is_last = len(context.before) == 1
    for parts in tensors.values():
        _refuse_gaps(parts)
    lengths = {len(parts) for parts in tensors.values()}
    if len(lengths) > 1 or not set(context.before) <= tensors.keys():
        raise UnfitError(
            "some projections of experts are missing", missing=[min(lengths)], count=max(lengths)
        )
    return {
        (context.after[0] if is_last else pattern): [_joined_tensor(parts, axis, is_stack=True)]
        for pattern, parts in tensors.items()
    }


def _refuse_gaps(parts: Sequence[Planned]) -> None:
    """Raise UnfitError unless the numbers in which names differ are all from 0 on."""
    columns = zip(*(part.name.split(".") for part in parts), strict=True)
    numbers = next((column for column in columns if len({*column}) > 1), ())
    present = {int(number) for number in numbers}
    count = 1 + max(present, default=0)
    if missing := sorted({*range(count)} - present) if present else []:
        raise UnfitError("a list has gaps", missing=missing, count=count)


def _unstacked(tensors: Tensors, axis: int, context: OperationContext) -> Tensors:
    result: Tensors = {}
    for pattern, parts in tensors.items():
        target = context.after[0] if len(tensors) == 1 else pattern
        result |= _by_number(target, _slices(parts[0], axis))
    return result


def _rows(tensor: Planned) -> list[Planned]:
    """The parts along the first axis. They may be thousands, so their views are made together."""

    @lru_cache(maxsize=1)
    def views() -> list[View]:
        return list(tensor.source().unstacked())

    return [
        Planned(tensor.name, tensor.dtype, tensor.shape[1:], lambda index=index: views()[index])  # type: ignore[misc]
        for index in range(tensor.shape[0])
    ]


def _transposed_tensor(tensor: Planned, one: int, other: int) -> Planned:
    order = list(range(len(tensor.shape)))
    order[one], order[other] = order[other], order[one]
    return _changed_tensor(tensor, [tensor.shape[axis] for axis in order], lambda view: view.permute(*order))


def _transpose(tensors: Tensors, operation: Operation, context: OperationContext) -> Tensors:
    """Two axes swapped: the same in both directions."""
    tensor = _transposed_tensor(_only_tensor(tensors), operation.get("dim0", 0), operation.get("dim1", 1))
    return {context.after[0] if len(context.after) == 1 else context.before[0]: [tensor]}


def _swapped_halves(tensor: Planned, axis: int, sizes: tuple[int, int]) -> Planned:
    """An axis split in two, which are swapped and merged again."""
    order = list(range(len(tensor.shape) + 1))
    order[axis], order[axis + 1] = axis + 1, axis
    return _changed_tensor(
        tensor, tensor.shape, lambda view: view.split(axis, *sizes).permute(*order).reshape(*tensor.shape)
    )


def _interleave(tensors: Tensors, operation: Operation, context: OperationContext) -> Tensors:
    """Even and odd places of an axis put after each other, or the reverse."""
    tensor, axis = _only_tensor(tensors), operation.get("dim", 0)
    half, rest = divmod(tensor.shape[axis], 2)
    if rest:
        raise UnfitError(f"{tensor.name} {list(tensor.shape)} has an odd axis {axis}")
    sizes = (2, half) if bool(operation.get("inverse")) else (half, 2)
    return {context.after[0]: [_swapped_halves(tensor, axis, sizes)]}


def _permute_for_rope(tensors: Tensors, operation: Operation, context: OperationContext) -> Tensors:
    """The rows of each head: pairs that are rotated together, next to each other on the Hub, put half a head apart.

    `heads` is the key of their number; transformers only has tensors with as many as queries.
    """
    wanted = operation.get("permute_layer_names")
    is_inner = len(context.before) > 1 or len(context.after) > 1
    heads = context.size(operation.get("heads", "num_attention_heads"), operation.get("subconfig_key"))
    result: Tensors = {}
    for pattern, parts in tensors.items():
        is_wanted = wanted is None or any(name in pattern for name in wanted)
        permuted = (
            [_rotated_rows(each, heads, inverse=bool(operation.get("inverse"))) for each in parts]
            if is_wanted
            else parts
        )
        result[pattern if is_inner else context.after[0]] = permuted
    return result


def _rotated_rows(tensor: Planned, heads: int, *, inverse: bool) -> Planned:
    half, rest = divmod(tensor.shape[0], 2 * heads)
    if rest:
        raise UnfitError(f"{tensor.name} {list(tensor.shape)} cannot be divided into {heads} heads")
    pair = (2, half) if inverse else (half, 2)
    inner = tensor.shape[1:]

    def turn(view: View) -> View:
        order = (0, 2, 1, *range(3, 3 + len(inner)))
        return view.reshape(heads, *pair, *inner).permute(*order).reshape(*tensor.shape)

    return _changed_tensor(tensor, tensor.shape, turn)


def _flatten(tensors: Tensors, operation: Operation, context: OperationContext) -> Tensors:
    """The kernel of a three-dimensional convolution as a matrix, or the reverse."""
    tensor = _only_tensor(tensors)
    rows = tensor.shape[0]
    inner = (operation["in_channels"], *operation["kernel_size"])
    shape = (rows, *inner) if operation.get("inverse") else (rows, prod(tensor.shape[1:]))
    if prod(shape) != prod(tensor.shape):
        raise UnfitError(f"{tensor.name} {list(tensor.shape)} is no kernel {list(inner)}")
    return {context.after[0]: [_reshape(tensor, shape)]}


def _experts_of_two_kinds(tensors: Tensors, operation: Operation, context: OperationContext) -> Tensors:
    """The experts of a layer, those for text before those for images, stacked by kind; or the reverse."""
    stack, join = operation.get("stack_dim", 0), operation.get("concat_dim", 1)
    groups = _of_all(context.before, tensors)
    result: Tensors = {}
    if operation.get("inverse"):
        cut = [_cut_tensor(group[0], join, len(context.after)) for group in groups]
        for index, pattern in enumerate(context.after):
            result |= _by_number(pattern, [each for parts in cut for each in _slices(parts[index], stack)])
        return result
    for index, pattern in enumerate(context.after):
        halves = []
        for group in groups:
            size = ceil(len(group) / len(context.after))
            halves.append(_joined_tensor(group[index * size : (index + 1) * size], stack, is_stack=True))
        result[pattern] = [_joined_tensor(halves, join)]
    return result


def _unpad(tensors: Tensors, operation: Operation, context: OperationContext) -> Tensors:
    """A head with a row for each token, filled up with zeros on the Hub to the rows of the embedding."""
    tensor = _only_tensor(tensors)
    rows = context.size("vocab_size" if operation.get("inverse") else "unpadded_vocab_size")
    more = rows - tensor.shape[0]
    if more < 0:
        raise UnfitError(
            f"{tensor.name} {list(tensor.shape)} has more rows than the {rows} of the model in memory",
            remedy=_BY_TRANSFORMERS,
        )
    if not more:
        return {context.after[0]: [tensor]}
    rest = tensor.shape[1:]

    def filled(view: View) -> View:
        zeros = View.of(Cells(ZERO, tensor.dtype), more * prod(rest))
        return concat([view, zeros.reshape(more, *rest)], 0)

    return {context.after[0]: [_changed_tensor(tensor, (rows, *rest), filled)]}


def _merge_queries(tensors: Tensors, operation: Operation, context: OperationContext) -> Tensors:
    """The queries [layers, 4, hidden] of query, key, value and MLP, which the Hub has in two tensors."""
    if operation.get("inverse"):
        tensor = _only_tensor(tensors)
        parts = [_piece(tensor, 1, at, 1) for at in range(4)]
        flat = (2 * tensor.shape[0], *tensor.shape[2:])
        pairs = [_joined_tensor([parts[0], parts[3]], 1), _joined_tensor(parts[1:3], 1)]
        names = zip(context.after, pairs, strict=True)
        return {name: [_reshape(pair, flat)] for name, pair in names}
    pairs = [group[0] for group in _of_all(context.before, tensors)]
    halves = [_reshape(each, (each.shape[0] // 2, 2, *each.shape[1:])) for each in pairs]
    outer = [_piece(halves[0], 1, at, 1) for at in range(2)]
    return {context.after[0]: [_joined_tensor([outer[0], halves[1], outer[1]], 1)]}


def _plain_experts(tensors: Tensors, operation: Operation, context: OperationContext) -> Tensors:
    """Experts that may be quantized on the Hub: those that are not, as they are."""
    if len(tensors) > 1:
        raise UnfitError(
            "the experts are quantized in a format that reshard cannot read", remedy=_BY_TRANSFORMERS
        )
    return {context.after[0]: [_only_tensor(tensors)]}


def _channels_last(tensors: Tensors, operation: Operation, context: OperationContext) -> Tensors:
    """A convolution's kernel [out, in, …] as [out, …, in], or the reverse."""
    tensor = _only_tensor(tensors)
    axes = list(range(len(tensor.shape)))
    order = [0, axes[-1], *axes[1:-1]] if operation.get("inverse") else [0, *axes[2:], 1]
    shape = [tensor.shape[axis] for axis in order]
    return {context.after[0]: [_changed_tensor(tensor, shape, lambda view: view.permute(*order))]}


def _add(tensors: Tensors, operation: Operation, context: OperationContext) -> Tensors:
    """A number added to each element, rounded once to the tensor's own dtype; or subtracted."""
    tensor = _only_tensor(tensors)
    by = -operation["by"] if operation.get("inverse") else operation["by"]
    kind = tensor.dtype if tensor.dtype.itemsize > 2 else dtype("float32")  # it may be stored in more bits

    def added(view: View) -> View:
        return changed(tensor.name, Tensor(kind, view), plus(by))

    return {context.after[0]: [_changed_tensor(tensor, tensor.shape, added)]}


def _absorb_latent(tensors: Tensors, operation: Operation, context: OperationContext) -> Tensors:
    """The projection of the latent to keys and values of all heads, by head, that of keys transposed; the reverse."""
    heads, keys = context.size("num_attention_heads"), context.size("qk_nope_head_dim")
    values, latent = context.size("v_head_dim"), context.size("kv_lora_rank")
    shapes = {"keys": (heads, latent, keys), "values": (heads, values, latent)}
    if operation.get("inverse"):
        first, second = (group[0] for group in _of_all(context.before, tensors))
        if [first.shape, second.shape] != [*shapes.values()]:
            raise UnfitError(
                f"{first.name} {list(first.shape)} is not {list(shapes['keys'])}, as config.json says"
            )
        joined = _joined_tensor([_transposed_tensor(first, 1, 2), second], 1)
        flat = (heads * (keys + values), latent)
        return {context.after[0]: [_reshape(joined, flat)]}
    tensor, by_head = _only_tensor(tensors), (heads, keys + values, latent)
    if prod(tensor.shape) != prod(by_head):
        raise UnfitError(f"{tensor.name} {list(tensor.shape)} is not {list(by_head)}, as config.json says")
    split = _reshape(tensor, by_head)
    parts = [_transposed_tensor(_piece(split, 1, 0, keys), 1, 2), _piece(split, 1, keys, values)]
    return {name: [part] for name, part in zip(context.after, parts, strict=True)}


def _ungroup_heads(tensors: Tensors, operation: Operation, context: OperationContext) -> Tensors:
    """The rows of queries, keys and values by groups of heads, put after each other by kind; or the reverse."""
    tensor = _only_tensor(tensors)
    heads = context.size("num_attention_heads")
    groups = context.size("num_key_value_heads", default=heads)
    size, rest = divmod(tensor.shape[0], heads + 2 * groups)
    if rest or heads % groups:
        raise UnfitError(
            f"{tensor.name} {list(tensor.shape)} cannot be divided into {heads} heads in {groups} groups"
        )
    each, inner = (heads // groups, 1, 1), tensor.shape[1:]
    bounds = [0, each[0], each[0] + 1, each[0] + 2]

    def by_kind(view: View) -> View:
        whole = view.reshape(groups, sum(each), size, *inner)
        parts = [whole[:, begin:end] for begin, end in pairwise(bounds)]
        return concat([part.reshape(groups * (part.shape[1]) * size, *inner) for part in parts], 0)

    def by_group(view: View) -> View:
        parts = [
            view[begin * groups * size : end * groups * size].reshape(groups, end - begin, size, *inner)
            for begin, end in pairwise(bounds)
        ]
        return concat(parts, 1).reshape(*tensor.shape)

    change = by_group if operation.get("inverse") else by_kind
    return {context.after[0]: [_changed_tensor(tensor, tensor.shape, change)]}


OPERATIONS: dict[str, Callable[[Tensors, Operation, OperationContext], Tensors]] = {
    "Chunk": _chunk,
    "Concatenate": _concatenate,
    "MergeModulelist": _merge,
    "Transpose": _transpose,
    "Interleave": _interleave,
    "PermuteForRope": _permute_for_rope,
    "Conv3dToLinear": _flatten,
    "ErnieFuseAndSplitTextVisionExperts": _experts_of_two_kinds,
    "Split": _split,
    "Inkling2UnpadVocab": _unpad,
    "Inkling2LoopMergeMessageQueries": _merge_queries,
    "Inkling2LoopDequantizeExperts": _plain_experts,
    "ChannelsLast": _channels_last,
    "Add": _add,
    "AbsorbLatent": _absorb_latent,
    "UngroupHeads": _ungroup_heads,
}
"""By their names in transformers; three are those of mlx-lm, and the last one of LitGPT."""
