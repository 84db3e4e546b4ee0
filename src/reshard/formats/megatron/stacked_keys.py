"""Megatron-Core's distributed checkpoints, whatever stores their chunks: keys that stack layers and experts.

A key such as `decoder.layers.mlp.linear_fc1.weight` has all layers along its first axis, and those of experts the
experts along the next. Chunks are boxes of such tensors. `torch_dist.py` and `zarr.py` locate the chunks.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from reshard.algebra.dtypes import DType
from reshard.algebra.tensors import Replica, Tensor
from reshard.algebra.views import View, assemble
from reshard.base.errors import Problem, raise_all
from reshard.containers.dcp_metadata import DcpChunk, DcpTensor
from reshard.families.dialect import MEGATRON
from reshard.folders import iterations
from reshard.folders.iterations import Iteration
from reshard.formats.checkpoint import Checkpoint, ModelDescription
from reshard.formats.copied_files import CopyFinder
from reshard.formats.dropped import OTHER_OBJECTS, RANDOM_STATES, rule_of
from reshard.formats.megatron import nemo, nemo_1
from reshard.formats.megatron.buffers import COPIES_AND_PADDING, OptimizerBuffers, buckets_of
from reshard.formats.megatron.common_state import OBJECTS_READ, ReadChunk, Reading
from reshard.formats.megatron.hybrid_layers import gpt_args, gpt_name, is_of_pairs
from reshard.formats.megatron.mcore import (
    BELOW,
    MegatronPosition,
    is_carried,
    layers_by_window,
    layout_of,
    name_of,
    unfused,
)
from reshard.formats.megatron.optimizer_states import (
    NOT_PORTABLE,
    portable_states,
    read_optimizer,
    roundings,
    split_key,
    with_groups,
)
from reshard.formats.megatron.writers import engine_of, recorded_args
from reshard.formats.optimizer import (
    MOMENTUM,
    OPTIMIZER_STATES,
    Adam,
    OptimizerContents,
    OptimizerStates,
    united,
)
from reshard.formats.options import HYBRID
from reshard.formats.state_dict_names import prefix_of, split_front
from reshard.formats.unique_names import under_new_names
from reshard.transfer.source_files import Sources

NOT_WEIGHTS = (
    (re.compile(r"(chained_\d+\.)?optimizer\b.*"), OPTIMIZER_STATES),
    (re.compile(r"rng_state\b.*"), RANDOM_STATES),
    (re.compile(r"rerun_state_machine_state\b.*"), "rerun state machine"),
    (re.compile(r".*\._extra_state\b.*"), "Transformer Engine extra states"),
)


@dataclass(frozen=True)
class SavedIteration:
    """The content of an iteration folder: tensors under Megatron-Core's keys, objects, and what is common to all ranks.

    `swapped` finds files of other ranks by what they contain beside weights. `kind` tells apart the variants of a
    format. `optimizer` finds the optimizer's data in what is common; `left_out` says why its states are not read.
    """

    format: str
    tensors: Mapping[str, DcpTensor]
    objects: Mapping[str, DcpChunk]
    common: Mapping[str, Any]
    reading: Reading
    swapped: Callable[[], Iterable[Problem]] = tuple
    kind: str = ""
    optimizer: Callable[[Mapping[str, Any]], Adam | None] = read_optimizer
    left_out: str = NOT_PORTABLE


def checkpoint_of(
    folder: Path, step: Iteration | None, saved: SavedIteration, sources: Sources
) -> Checkpoint:
    """The checkpoint in an iteration folder. Raises ReshardError listing the tensors with missing chunks."""
    args = recorded_args(folder, sources, saved.common)
    is_hybrid = is_of_pairs(args)
    args = gpt_args(args) if is_hybrid else args
    read = partial(_StackedReader, reading=saved.reading, is_hybrid=is_hybrid, args=args)
    weights, dropped = _weights_of(saved.tensors, saved.objects)
    reader = read(weights)
    tensors = reader.tensors()
    layout, portable = layout_of(args), portable_states(saved.tensors)
    states = named = OptimizerStates(portable, lambda state: read(portable[state]).tensors())
    common = saved.common
    of_muon = states[MOMENTUM].keys() if MOMENTUM in states else ()
    buffers = OptimizerBuffers(buckets_of(saved.tensors), tensors, of_muon, layout, args, saved.reading)
    if buffers.buckets:
        states, common = united(states, buffers.states()), with_groups(common, saved.objects, sources)
        spare = buffers.spare(dropped[OPTIMIZER_STATES])
        dropped += Counter({COPIES_AND_PADDING: spare, OPTIMIZER_STATES: -spare})
    adam = saved.optimizer(common) if states else None
    unread = [saved.left_out] if dropped[OPTIMIZER_STATES] and not adam else []
    proof = partial(_proof, buffers, tensors, named)
    return Checkpoint(
        path=folder,
        format=saved.format,
        dialect=replace(MEGATRON, engine=engine_of(folder, common, tensors)),
        tensors=tensors,
        description=ModelDescription(
            iterations.config_folder(folder), tokenizers=tuple(_tokenizer_folders(folder)), args=args
        ),
        layout=layout,
        iteration=step,
        optimizer=OptimizerContents(states, adam, proof, is_ordered=bool(buffers.buckets)),
        dropped=dropped,
        problems=reader.copies.problems() or [*saved.swapped()],
        notes=[*iterations.renamed_note(folder, common.get("iteration")), *unread],
        variant=HYBRID if is_hybrid else saved.kind or _kind_of_keys(reader),
    )


def _proof(buffers: OptimizerBuffers, weights: Mapping[str, Tensor], named: OptimizerStates) -> list[Replica]:
    """The comparisons that prove states in buffers, and those with names."""
    return [*(buffers.proof() if buffers.buckets else ()), *roundings(weights, named)]


def _kind_of_keys(reader: _StackedReader) -> str:
    return "one key for each layer" if reader.per_layer else "stacked"


def _tokenizer_folders(folder: Path) -> Iterator[Path]:
    """The folders with the tokenizer of an iteration: Megatron-Bridge's, NeMo 2's, and NeMo 1's own folder."""
    yield from (
        each
        for each in (folder / "tokenizer", folder.parent / nemo.CONTEXT / nemo.TOKENIZER)
        if each.is_dir()
    )
    if (folder.parent / nemo_1.CONFIG_FILE).is_file():
        yield folder.parent


_ANCHORS = ("embedding.word_embeddings.weight", "output_layer.weight", "decoder.layers.")
"""Beginnings of the keys of weights."""


def unprefixed(stored: Mapping[str, DcpTensor]) -> dict[str, DcpTensor]:
    """The tensors under Megatron-Core's keys, which are below `module.` in NeMo 2, and below `model.` in NeMo 1.

    The keys of states contain those of their weights, with the same prefix.
    """
    prefix = prefix_of((key for key in stored if not not_a_weight(key)), _ANCHORS).removesuffix(BELOW)
    if not prefix:
        return dict(stored)
    return under_new_names((key, _key_without(prefix, key), tensor) for key, tensor in stored.items())


def _key_without(prefix: str, key: str) -> str:
    """A key without a prefix of the weight's name in it."""
    state, weight = split_key(key)
    front, rest = split_front(weight)
    return state + front + rest.removeprefix(prefix)


def _weights_of(
    stored: Mapping[str, DcpTensor], objects: Mapping[str, DcpChunk]
) -> tuple[dict[str, DcpTensor], Counter[str]]:
    """The weights by key, and the bytes of everything else by rule."""
    weights: dict[str, DcpTensor] = {}
    dropped: Counter[str] = Counter()
    for key, tensor in stored.items():
        rule = not_a_weight(key)
        if rule:
            dropped[rule] += tensor.nbytes
        else:
            weights[key] = tensor
    for key, entry in objects.items():
        if key not in OBJECTS_READ:
            dropped[not_a_weight(key) or OTHER_OBJECTS] += entry.length
    return weights, dropped


def not_a_weight(key: str) -> str | None:
    """The rule by which the tensor or object under a key is dropped; None for a weight."""
    return rule_of(key, NOT_WEIGHTS)


_KEY = re.compile(r"(decoder|mtp)\.layers\.(?:(\d+)\.)?(.*)")
_EXPERT_KEY = re.compile(r"(.*mlp\.experts)\.experts\.(?:(\d+)\.)?(.*)")
_HALVES = {"_w": 0, "_v": 1}
"""Suffixes of the gate and the up half, if a checkpoint stores them as separate tensors."""


class _StackedKey(NamedTuple):
    """A key of the checkpoint: its tensor, the leading axes that it stacks, which half it is, and what wraps it.

    Names with `wrappers` in front are refused, or stripped.
    """

    place: MegatronPosition
    stacks_layers: bool
    stacks_experts: bool
    half: int | None
    wrappers: str


def _parse(key: str) -> _StackedKey:
    wrappers, key = split_front(key)
    key = key.removeprefix(BELOW)
    half = None if is_carried(key) else _HALVES.get(key[-2:])
    key = key if half is None else key[:-2]
    match = _KEY.fullmatch(key)
    if not match:
        return _StackedKey(MegatronPosition(key), False, False, half, wrappers)
    stack, layer, module = match.groups()
    expert = _EXPERT_KEY.fullmatch(module)
    index = int(expert[2]) if expert and expert[2] else None
    if expert:
        module = f"{expert[1]}.{expert[3]}"
    place = MegatronPosition(unfused(module), stack, int(layer) if layer else None, index)
    return _StackedKey(place, layer is None, expert is not None and index is None, half, wrappers)


class _StackedReader:
    """Collects the chunks of all keys, those of weights or of states of weights, under the names of complete tensors.

    A model that `is_hybrid` has the names of the GPTModel that computes the same. The `args` tell which layers
    a key stacks that only some layers have.
    """

    def __init__(
        self,
        stored: Mapping[str, DcpTensor],
        reading: Reading,
        is_hybrid: bool,
        args: Mapping[str, Any],
    ) -> None:
        self.copies = CopyFinder()
        self._named = gpt_name if is_hybrid else str
        self._args = args
        self.per_layer = False
        self._parts: dict[str, list[tuple[tuple[int, ...], View]]] = {}
        self._shapes: dict[str, tuple[DType, tuple[int, ...]]] = {}
        with reading(stored) as read:
            for key, tensor in stored.items():
                self._add(key, tensor, read)

    def _add(self, key: str, tensor: DcpTensor, read: ReadChunk) -> None:
        """Add all chunks of one key, split into the layers and experts that it stacks."""
        parsed = _parse(key)
        lead = parsed.stacks_layers + parsed.stacks_experts
        self.per_layer |= parsed.place.stack == "decoder" and not parsed.stacks_layers
        inner = tensor.shape[lead:]
        shape = inner if parsed.half is None else (2 * inner[0], *inner[1:])
        layers = dict(enumerate(layers_by_window(self._args, parsed.place.part)))
        for chunk in tensor.chunks:
            stored = read(tensor, chunk)
            self.copies.add(chunk.file, key, chunk.offsets, stored)
            view = Tensor.stored(stored).view
            alone = prod(chunk.sizes[:lead]) == 1
            low = list(chunk.offsets[lead:])
            if parsed.half:
                low[0] += inner[0]
            for index in product(*map(range, chunk.sizes[:lead])):
                at = [first + i for first, i in zip(chunk.offsets, index, strict=False)]
                place = parsed.place
                if parsed.stacks_experts:
                    place = place._replace(expert=at[-1])
                if parsed.stacks_layers:
                    place = place._replace(layer=layers.get(at[0], at[0]))
                name = parsed.wrappers + self._named(name_of(place))
                self._shapes[name] = tensor.dtype, shape
                self._parts.setdefault(name, []).append(
                    (tuple(low), view.reshape(*chunk.sizes[lead:]) if alone else view[index])
                )

    def tensors(self) -> dict[str, Tensor]:
        """All tensors, complete. Raises ReshardError listing those with missing chunks."""
        problems, result = [], {}
        for name, (dtype, shape) in self._shapes.items():
            parts = self._parts[name]
            elements = sum(part.numel for _, part in parts)
            repeated = len({low for low, _ in parts}) < len(parts)
            if elements != prod(shape) or repeated:
                problems.append(
                    Problem(
                        "torch-dist-chunks-missing"
                        if elements < prod(shape)
                        else "torch-dist-chunks-overlap",
                        "chunks of a tensor are missing" if elements < prod(shape) else "chunks overlap",
                        tensor=name,
                        rule="the chunks of a tensor cover it exactly",
                        expected=f"{prod(shape)} elements of {list(shape)}",
                        found=f"{elements} elements in {len(parts)} chunks",
                        remedy="the checkpoint is incomplete: copy it again from where it was saved",
                    )
                )
            whole = parts[0][1] if len(parts) == 1 and parts[0][1].shape == shape else assemble(shape, parts)
            result[name] = Tensor(dtype, whole)
        raise_all(problems)
        return result
