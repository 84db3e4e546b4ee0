"""Arrays of zarr 2 without compression: a folder of `.zarray`, and a file for each chunk.

`.zarray` is JSON with the shape of the array and of its chunks, which all have the same size: those at the end of an
axis are padded. `2.0.1` is the chunk with these numbers along the axes; the only chunk of an array without axes is `0`.
Chunks may be left out if they only contain the `fill_value`; megatron-core writes all of them. tensorstore adds the
dtype "bfloat16", which numpy does not have. Sources: the specification of zarr 2, and arrays that zarr 2.18 wrote.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from math import prod
from pathlib import Path
from typing import Any

from reshard.algebra.dtypes import BY_NAME, DType
from reshard.algebra.storage import Storage, StoredTensor
from reshard.base.errors import UNUSABLE, Problem, ReshardError, listed, type_and_message
from reshard.base.plain_json import json_of
from reshard.containers.dcp_metadata import DcpChunk, DcpTensor
from reshard.containers.file_names import ZARRAY
from reshard.containers.torchfiles.untrusted import shape_of
from reshard.transfer.source_files import Sources

MAX_ZARRAY_BYTES = 1 << 20
"""Most bytes of `.zarray`, which takes a few hundred."""

MISSING_NAMED = 8
"""Number of missing chunks that an error names."""

DTYPES = {"bfloat16": BY_NAME["bfloat16"], "|b1": BY_NAME["bool"]} | {
    f"{'|' if size == 1 else '<'}{kind}{size}": BY_NAME[f"{name}{8 * size}"]
    for kind, name, sizes in (("f", "float", (2, 4, 8)), ("i", "int", (1, 2, 4, 8)), ("u", "uint", (1,)))
    for size in sizes
}
UNCOMPRESSED: Mapping[str, tuple[Any, ...]] = {
    "zarr_format": (2,),
    "compressor": (None,),
    "filters": (None, []),
    "order": ("C",),
    "dimension_separator": (None, "."),
}
"""The values with which a chunk is the bytes of its elements, in row-major order."""

_CHUNK = re.compile(r"\d{1,18}(\.\d{1,18})*")


@dataclass
class ZarrArray(DcpTensor):
    """An array with the chunks that it has; `grid` is the shape of a chunk as stored, which may be padded."""

    folder: Path
    grid: tuple[int, ...]


def chunk_names(folder: Path) -> list[str]:
    """The names of the chunk files of an array, and of anything else that is called so."""
    return sorted(path.name for path in folder.iterdir() if _CHUNK.fullmatch(path.name))


def read_array(folder: Path, sources: Sources) -> ZarrArray:
    """The array in a folder, from `.zarray` and the names of its chunks.

    Raises ReshardError if `.zarray` is missing or damaged, and for arrays whose bytes are not those of the elements.
    """
    metadata = _read_zarray(folder, sources)
    for key, plain in UNCOMPRESSED.items():
        if metadata.get(key) not in plain:
            raise _unsupported_error(folder, key, f"{key} {plain[0]}", metadata.get(key))
    dtype = DTYPES.get(metadata["dtype"]) if isinstance(metadata.get("dtype"), str) else None
    if dtype is None:
        raise _unsupported_error(folder, "dtype", f"one of {', '.join(DTYPES)}", metadata.get("dtype"))
    try:
        shape, grid = shape_of(metadata["shape"]), shape_of(metadata["chunks"])
        if len(shape) != len(grid) or 0 in grid:
            raise ValueError(f"chunks of {list(grid)} in a shape of {list(shape)}")
    except UNUSABLE as error:
        raise _unreadable_error(folder, type_and_message(error)) from error
    return ZarrArray(dtype, shape, list(_chunks(folder, dtype, shape, grid)), folder, grid)


def _read_zarray(folder: Path, sources: Sources) -> dict[str, Any]:
    """The content of `.zarray`."""
    try:
        metadata = json_of(sources.read(folder / ZARRAY, MAX_ZARRAY_BYTES))
    except OSError as error:
        raise _unreadable_error(folder, error.strerror or "it cannot be read") from None
    except ValueError as error:
        raise _unreadable_error(folder, type_and_message(error)) from None
    if not isinstance(metadata, dict):
        raise _unreadable_error(folder, reprlib.repr(metadata))
    return metadata


def _chunks(folder: Path, dtype: DType, shape: tuple[int, ...], grid: tuple[int, ...]) -> Iterator[DcpChunk]:
    """The chunks that have files, with the boxes of the array that they contain."""
    nbytes = prod(grid) * dtype.itemsize
    for name in chunk_names(folder):
        at = tuple(map(int, name.split("."))) if shape else ()
        low = tuple(index * size for index, size in zip(at, grid, strict=False))
        if len(at) != len(shape) or any(first >= size for first, size in zip(low, shape, strict=True)):
            continue
        size = tuple(min(n, end - first) for n, end, first in zip(grid, shape, low, strict=True))
        yield DcpChunk(low, size, str(folder / name), 0, nbytes)


def missing_chunks_problem(key: str, array: ZarrArray) -> Problem | None:
    """The problem of an array that lacks chunks; None if all are there."""
    counts = [-(-size // step) for size, step in zip(array.shape, array.grid, strict=True)]
    lacking = prod(counts) - len(array.chunks)
    if not lacking:
        return None
    there = {chunk.offsets for chunk in array.chunks}
    names = (
        ".".join(map(str, at)) or "0"
        for at in places(counts)
        if tuple(index * step for index, step in zip(at, array.grid, strict=True)) not in there
    )
    named = list(islice(names, MISSING_NAMED))
    more = f" and {lacking - len(named)} more" if lacking > len(named) else ""
    return Problem(
        "zarr-chunks-missing",
        "files of an array are missing",
        tensor=key,
        file=str(array.folder),
        rule="every chunk of an array has a file, named after its numbers along the axes",
        expected=f"{prod(counts)} chunks of {list(array.grid)} for {list(array.shape)}",
        found=f"{len(array.chunks)}: without {listed(named, MISSING_NAMED)}{more}",
        remedy="copy the folder again from where it was saved; if the files of a rank are on its own node, gather them",
    )


def places(counts: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """The places in a grid one after another. There may be more than fit in memory."""
    steps = [prod(counts[axis + 1 :]) for axis in range(len(counts))]
    for number in range(prod(counts)):
        yield tuple(number // step % count for step, count in zip(steps, counts, strict=True))


def size_problems(array: ZarrArray, sources: Sources) -> Iterator[Problem]:
    """Problems of the chunks whose files have another size. Notes all files as sources."""
    for chunk in array.chunks:
        with sources.open(chunk.file) as file:
            size = file.size
        if size != chunk.length:
            yield Problem(
                "zarr-chunk-size-differs",
                "a file of an array has another size than its chunk",
                file=chunk.file,
                rule="all chunks of an array have the same size",
                expected=f"{chunk.length:,} bytes for {array.dtype} {list(array.grid)}",
                found=f"{size:,} bytes",
                remedy="copy or download the file again",
            )


def read_chunk(array: ZarrArray, chunk: DcpChunk) -> StoredTensor:
    """The elements of a chunk in its file, without the padding."""
    strides = tuple(prod(array.grid[axis + 1 :]) for axis in range(len(array.grid)))
    return StoredTensor(Storage(chunk.file, 0, chunk.length), array.dtype, chunk.sizes, strides)


def _unreadable_error(folder: Path, found: str) -> ReshardError:
    return ReshardError(
        "zarr-array-unreadable",
        "the description of an array cannot be read",
        tensor=folder.name,
        file=str(folder / ZARRAY),
        expected="JSON with the shape, the dtype and the chunks of the array",
        found=found,
        remedy="copy it again from where it was saved, with its hidden files (cp -r FOLDER, not FOLDER/*)",
    )


def _unsupported_error(folder: Path, key: str, expected: str, found: Any) -> ReshardError:
    return ReshardError(
        "zarr-array-unsupported",
        "an array is stored in a way that megatron-core does not write",
        tensor=folder.name,
        file=str(folder / ZARRAY),
        rule=f"the {key} of an array of megatron-core",
        expected=expected,
        found=f"{key} {reprlib.repr(found)}",
        remedy="write the arrays again without compression, with zarr 2: "
        "zarr.create(..., compressor=None, fill_value=None, write_empty_chunks=True)",
    )
