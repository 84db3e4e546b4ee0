"""Which rank saved a chunk file of torch_dist: chunks do not record it, but seeds of random number states show it.

Megatron-Core seeds the generator of tensor parallelism with a number that increases with the tensor-parallel rank, to
which Megatron-LM adds 100 for each stage. A generator's state begins with its seed, on a GPU (16 bytes) and on a CPU.
Sources: `model_parallel_cuda_manual_seed` in megatron-core's `tensor_parallel/random.py`, `_set_random_seed` in
Megatron-LM's `training/initialize.py`; torch's `CUDAGeneratorImpl.cpp` and `CPUGeneratorImpl.cpp`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from reshard.algebra.storage import StoredTensor
from reshard.base.errors import Problem, ReshardError
from reshard.containers.dcp_metadata import DcpChunk
from reshard.containers.torchfiles.read import first_bytes, read_torch_file
from reshard.transfer.source_files import Sources

_KEY = re.compile(r"rng_state/shard_(\d+)\.(\d+)(?:\.(\d+))?_.*")
_SEEDS_PER_STAGE = 100


def exchanged(objects: Mapping[str, DcpChunk], sources: Sources) -> Iterator[Problem]:
    """Problems of the files whose random number states belong to other ranks than `.metadata` says.

    Frameworks may seed in any way: only the expected set of seeds in another order shows that files were swapped.
    """
    seeds_of: dict[int, dict[tuple[int, int], int]] = defaultdict(dict)
    chunks = {}
    for key, chunk in objects.items():
        if match := _KEY.fullmatch(key):
            stage, tensor, replica = int(match[1]), int(match[2]), int(match[3] or 0)
            chunks[replica, stage, tensor] = chunk
            if (seed := _seed(chunk, sources)) is not None:
                seeds_of[replica][stage, tensor] = seed
    for replica, seeds in seeds_of.items():
        for (stage, tensor), owner in seed_owners(seeds).items():
            if owner != (stage, tensor):
                yield Problem(
                    "megatron-seed-of-another-rank",
                    "a file belongs to another rank",
                    file=chunks[replica, stage, tensor].file,
                    rule="the seeds of random number states increase with tensor-parallel ranks and stages",
                    expected=f"the state of stage {stage}, tensor-parallel rank {tensor}",
                    found=f"that of stage {owner[0]}, tensor-parallel rank {owner[1]}",
                    remedy="the file was renamed: copy each rank's file again from where it was saved",
                    values={"stage": owner[0], "rank": owner[1]},
                )


def seed_owners(seeds: Mapping[tuple[int, int], int]) -> dict[tuple[int, int], tuple[int, int]]:
    """The (stage, tensor rank) that each seed belongs to; empty if the seeds are not consecutive in either scheme."""
    for step in (_SEEDS_PER_STAGE, 0):
        right = {place: place[0] * step + place[1] for place in seeds}
        low = min(seeds.values())
        if sorted(right.values()) == sorted(seed - low for seed in seeds.values()):
            if step:
                places = {offset: place for place, offset in right.items()}
                return {place: places[seed - low] for place, seed in seeds.items()}
            return {place: (place[0], seed - low) for place, seed in seeds.items()}
    return {}


def _seed(chunk: DcpChunk, sources: Sources) -> int | None:
    """The seed of tensor parallelism in a random number state; None if unreadable, which does not affect weights."""
    try:
        states: Any = read_torch_file(chunk.file, sources, chunk.offset, chunk.length)
        state = states[0][0]["rng_tracker_states"]["model-parallel-rng"]
    except (ReshardError, LookupError, TypeError):
        return None
    if not isinstance(state, StoredTensor) or state.nbytes not in (16, 5056):
        return None
    return int.from_bytes(first_bytes(state, 8), "little")
