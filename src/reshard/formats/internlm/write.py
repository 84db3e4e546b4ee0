"""Write InternEvo's files: the shards of each tensor-parallel rank of each stage, and the config that builds the model.

Source: what `load_model_checkpoint` of InternEvo 0.4.9 asks for, and `partition_uniform` in `solver/pipeline_utils.py`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

from reshard.algebra.layout import Layout
from reshard.algebra.views import View
from reshard.errors import ReshardError
from reshard.formats.internlm.config import CONFIG
from reshard.formats.internlm.internevo import EMBEDDINGS, HEADS, place_of, split_of
from reshard.formats.sharding import Split, shard
from reshard.formats.torchfiles.write import NewTensor, image_bytes, layout_torch_file
from reshard.transfer.plan import Block, OutputFile, Planned


class _Shard(NamedTuple):
    """What a rank's file holds of one tensor: the key of a slot of its image."""

    tensor: Planned
    source: Callable[[], View]

    def __hash__(self) -> int:
        return id(self.source)


def lay_out(
    tensors: list[Planned], config: Mapping[str, Any], layout: Layout, layers: int
) -> list[OutputFile]:
    """A file for each rank, and `model_config.pt` with `config`. Raises ReshardError if the layers do not divide."""
    places = stages(layout, layers)
    held: dict[int, list[tuple[str, Planned]]] = {}
    for tensor in tensors:
        stage, key = _place(tensor.name, places, layout)
        held.setdefault(stage, []).append((key, tensor))
    files = [
        _rank_file(f"model_tp{tp}_pp{stage}.pt", held[stage], tp, layout.tp)
        for stage in range(layout.pp)
        for tp in range(layout.tp)
    ]
    return [*files, OutputFile.of_bytes(CONFIG, image_bytes(layout_torch_file(dict(config))))]


def stages(layout: Layout, layers: int) -> list[tuple[int, int, range]]:
    """Which layers lie where: (stage, chunk, layers). What does not divide over the stages goes to the last ones.

    Raises ReshardError if the chunks are not equal, or another distribution was asked for: InternEvo knows only this.
    """
    each = layers // layout.vpp
    if layers % layout.vpp or each < layout.pp:
        raise ReshardError(
            f"{layers} layers do not divide over the pipeline",
            rule="the chunks of InternEvo (--vpp) have the same number of layers, and each stage has some of each",
            expected=f"a multiple of {layout.vpp}, and at least {layout.vpp * layout.pp}",
            found=f"{layers} layers, --pp {layout.pp} --vpp {layout.vpp}",
            remedy="choose another --pp or --vpp",
        )
    counts = [
        each // layout.pp + (stage >= layout.pp - each % layout.pp) for stage in range(layout.pp)
    ] * layout.vpp
    if layout.stages and list(layout.stages) != counts:
        raise ReshardError(
            "InternEvo distributes layers itself",
            rule="what does not divide goes to the last stages",
            expected=",".join(map(str, counts)),
            found=f"--stages {','.join(map(str, layout.stages))}",
            remedy="leave out --stages",
        )
    result, first = [], 0
    for index, count in enumerate(counts):
        result.append((index % layout.pp, index // layout.pp, range(first, first + count)))
        first += count
    return result


def _place(name: str, places: list[tuple[int, int, range]], layout: Layout) -> tuple[int, str]:
    """The stage that holds a tensor, and its key there."""
    place = place_of(name)
    stage, chunk, key = layout.pp - 1, layout.vpp - 1, name
    if place.layer is not None:
        layer = place.layer
        stage, chunk, held = next(part for part in places if layer in part[2])
        key = place.name(layer - held.start)
    elif name in EMBEDDINGS:
        stage, chunk = 0, 0
    prefix = f"{chunk}." if layout.vpp > 1 else ""
    return stage, f"{prefix}model.{key}"


def split_of_new(name: str) -> Split | None:
    """How tensor parallelism cuts a tensor: the embedding by its columns (`embed_split_hidden`), the head by rows."""
    if name in EMBEDDINGS:
        return Split(1)
    return Split(0) if name in HEADS else split_of(place_of(name).module, weight_parallel=False)


def _rank_file(path: str, held: list[tuple[str, Planned]], tp: int, ranks: int) -> OutputFile:
    content = OrderedDict(_shards(held, tp, ranks))
    image = layout_torch_file(content)
    blocks = [
        Block(
            slot.key.tensor.name, slot.key.tensor.dtype, slot.shape, slot.key.source, slot.offset, slot.crc_at
        )
        for slot in image.slots
    ]
    return OutputFile(path, image.size, blocks, lambda: iter(image.literals))


def _shards(held: list[tuple[str, Planned]], tp: int, ranks: int) -> Iterator[tuple[str, NewTensor]]:
    """What one rank has of the tensors of its stage; the bias behind a sum over ranks only the first one has."""
    for key, tensor in held:
        split, shape, source = split_of_new(tensor.name), list(tensor.shape), tensor.source
        if split is None and tensor.name.endswith("bias") and tp > 0:
            continue
        if split and ranks > 1:
            shape[split.axis] //= ranks
            source = partial(_sharded, tensor, split, tp, ranks)
        yield key, NewTensor(_Shard(tensor, source), tensor.dtype, tuple(shape))


def _sharded(tensor: Planned, split: Split, tp: int, ranks: int) -> View:
    return shard(tensor.source(), split, tp, ranks)
