"""Megatron-Core's zarr checkpoints (`--dist-ckpt-format zarr`): an array of zarr for each key of torch_dist.

    iter_0000002/ or weights/    metadata.json ({"sharded_backend": "zarr"}), common.pt
        <key>/                   .zarray, and a file for each chunk: `0.1.0`
        <key>/                   shard_0.1_2.2.pt …: an object that is not a tensor, of each rank

Keys, and what `common.pt` contains, are those of torch_dist. NeMo 1 and the first releases of NeMo 2 saved so by
default. `metadata.json` is written last. Sources: `dist_checkpointing/strategies/zarr.py` and `tensorstore.py` of
megatron-core 0.3 to 0.15.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from reshard.algebra.storage import StoredTensor
from reshard.base.errors import Problem, ReshardError, raise_all
from reshard.containers import zarr_arrays
from reshard.containers.dcp_metadata import DcpChunk, DcpMetadata, DcpTensor
from reshard.containers.file_names import ZARRAY
from reshard.containers.zarr_arrays import ZarrArray
from reshard.folders import iterations
from reshard.folders.allowed_paths import check_open
from reshard.folders.iterations import Iteration
from reshard.formats.checkpoint import Checkpoint
from reshard.formats.detection import ZARR
from reshard.formats.megatron.common_state import ReadChunk, read_common
from reshard.formats.megatron.stacked_keys import SavedIteration, checkpoint_of, not_a_weight, unprefixed
from reshard.transfer.source_files import Sources


def open_checkpoint(path: Path, sources: Sources, iteration: Iteration | None = None) -> Checkpoint:
    """Open the tracked (or the requested) iteration. Raises ReshardError naming all that is missing or damaged."""
    folder, step = iterations.choose(path, iteration)
    inside = sorted(child for child in folder.iterdir() if child.is_dir())
    for each in inside:
        check_open(each)
    contents = {each.name: _array(each, sources) for each in inside if _is_array(each)}
    raise_all(problem for each in contents.values() if isinstance(each, list) for problem in each)
    arrays = {key: array for key, array in contents.items() if isinstance(array, ZarrArray)}
    saved = SavedIteration(
        ZARR,
        unprefixed(arrays),
        dict(_objects(inside)),
        read_common(folder, sources, DcpMetadata({}, {})),
        partial(_reading, sources),
    )
    return checkpoint_of(folder, step, saved, sources)


def _array(folder: Path, sources: Sources) -> ZarrArray | list[Problem]:
    """The array in a folder, or its problems: none if it is not a weight, which nothing else needs."""
    try:
        return zarr_arrays.read_array(folder, sources)
    except ReshardError as error:
        return [] if not_a_weight(folder.name) else list(error.problems)


def _is_array(folder: Path) -> bool:
    return (folder / ZARRAY).is_file() or bool(zarr_arrays.chunk_names(folder))


def _objects(folders: list[Path]) -> Iterator[tuple[str, DcpChunk]]:
    """The objects that are not tensors, under the keys that torch_dist has for them."""
    for folder in folders:
        for path in folder.glob("shard_*.pt"):
            yield f"{folder.name}/{path.stem}", DcpChunk((), (), str(path), 0, path.stat().st_size)


@contextmanager
def _reading(sources: Sources, stored: Mapping[str, DcpTensor]) -> Iterator[ReadChunk]:
    """Each chunk is a file. Raises ReshardError listing those that are missing or have another size."""
    arrays = {key: array for key, array in stored.items() if isinstance(array, ZarrArray)}
    lacking = (zarr_arrays.missing_chunks_problem(key, array) for key, array in arrays.items())
    problems = [problem for problem in lacking if problem]
    problems += [
        problem for array in arrays.values() for problem in zarr_arrays.size_problems(array, sources)
    ]
    raise_all(problems)

    def read(tensor: DcpTensor, chunk: DcpChunk) -> StoredTensor:
        assert isinstance(tensor, ZarrArray)
        return zarr_arrays.read_chunk(tensor, chunk)

    yield read
