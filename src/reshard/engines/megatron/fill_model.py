"""Fill the live model of a rank: each rank reads only its own shards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import numpy as np
from isal.isal_zlib import crc32

from reshard.algebra.dtypes import dtype
from reshard.algebra.layout import Layout
from reshard.base.errors import Problem, ReshardError
from reshard.engines.megatron.weight_shards import Coordinates, ShardedWeights
from reshard.formats.sharding import Shard
from reshard.transfer.elements import RAW_DTYPES
from reshard.transfer.gather import Gatherer
from reshard.transfer.ledger import Ledger
from reshard.transfer.thread_files import OpenFiles


def place(layout: Layout) -> Coordinates:
    """The coordinates of this rank. Megatron makes expert groups even without experts; the layout then has size 1."""
    from megatron.core import parallel_state as ps

    return Coordinates(
        ps.get_tensor_model_parallel_rank(),
        ps.get_pipeline_model_parallel_rank(),
        ps.get_expert_model_parallel_rank(),
        ps.get_expert_tensor_parallel_rank() % layout.etp,
    )


def fill(chunks: list[Any], weights: ShardedWeights, at: Coordinates, ledger: Ledger | None = None) -> None:
    """Copy every weight of this rank. Raises ReshardError if model and plan differ in a name or a shape.

    `ledger` receives the checksums of what is read.
    """
    pairs = _checked_pairs(chunks, weights, at)
    with closing(OpenFiles()) as files:
        gatherer = Gatherer(files, ledger)
        for live, held in pairs:
            for name, tensor in live.items():
                _copy(held[name], tensor, gatherer)
                gatherer.take_passed()  # the ledger has these ranges, and no journal needs them
                # megatron-core marks what it initializes. Without the mark, a weight counts once in the gradient norm.
                whole = held[name].shape == held[name].tensor.shape
                tensor.tensor_model_parallel = not whole or ".experts." in name
                if held[name].tensor.name in weights.nowhere:
                    tensor.requires_grad_(False)


def check_planned(chunks: list[Any], weights: ShardedWeights, at: Coordinates) -> None:
    """Raise ReshardError if model and plan differ in a name or a shape."""
    _checked_pairs(chunks, weights, at)


def _checked_pairs(
    chunks: list[Any], weights: ShardedWeights, at: Coordinates
) -> list[tuple[dict[str, Any], dict[str, Shard]]]:
    """The tensors of each chunk, and the shards for them."""
    pairs = [(live_tensors(chunk), weights.of(at, index)) for index, chunk in enumerate(chunks)]
    if problems := [problem for live, held in pairs for problem in _differences(live, held)]:
        raise ReshardError(problems)
    return pairs


def live_tensors(chunk: Any) -> dict[str, Any]:
    """The parameters and buffers that a checkpoint of the model would contain, adapters included."""
    import torch

    return {
        name: value
        for name, value in chunk.state_dict(keep_vars=True).items()
        if torch.is_tensor(value) and not name.endswith("_extra_state")
    }


def _differences(live: dict[str, Any], held: dict[str, Shard]) -> Iterator[Problem]:
    for name in sorted(live.keys() | held.keys()):
        built = list(live[name].shape) if name in live else None
        planned = list(held[name].shape) if name in held else None
        if built != planned:
            yield Problem(
                "megatron-model-not-as-planned",
                "megatron-core's model differs from the planned one",
                tensor=name,
                expected=str(planned),
                found=str(built),
                remedy="build it from the arguments of these weights; if reshard built it, report this message",
            )


def _copy(held: Shard, tensor: Any, gatherer: Gatherer) -> None:
    """Read a shard into the memory of the live tensor, in its dtype."""
    import torch

    kind = dtype(str(tensor.dtype).removeprefix("torch."))
    target = tensor.detach()
    direct = target.device.type == "cpu" and target.is_contiguous()
    raw = raw_elements(target) if direct else np.empty(held.numel, RAW_DTYPES[kind.itemsize])
    gatherer.fill(held.source().pieces, kind, raw)
    if not direct:
        target.copy_(torch.from_numpy(raw.view(np.uint8)).view(target.dtype).view(target.shape))


def raw_elements(tensor: Any) -> Any:
    """The elements of a contiguous tensor on the CPU as integers of the same width, sharing its memory."""
    import torch

    return tensor.reshape(-1).view(torch.uint8).numpy().view(RAW_DTYPES[tensor.element_size()])


def checksum(tensor: Any) -> int:
    """The CRC32 of the bytes of a live tensor."""
    return int(crc32(raw_elements(tensor.detach().contiguous().cpu()).view(np.uint8).data))
