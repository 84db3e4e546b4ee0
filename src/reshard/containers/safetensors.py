"""The safetensors container: eight bytes of header length, a JSON header, tensors.

Source of the format: the README of the safetensors project. A reader must refuse tensors that overlap,
leave gaps or end beyond the file; there is no checksum, so sizes are all that can be checked.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

from reshard.algebra.dtypes import BY_SAFETENSORS, DType
from reshard.algebra.storage import Storage
from reshard.algebra.tensors import Cells, Tensor
from reshard.algebra.views import View
from reshard.base.errors import UNUSABLE, Problem, ReshardError, raise_all
from reshard.base.plain_json import json_kind, json_of
from reshard.containers.torchfiles.untrusted import shape_of, sizes
from reshard.transfer.plan import Block, OutputFile, Planned
from reshard.transfer.source_files import Sources

HEADER_LIMIT = 100_000_000
"""Longer headers are refused, as the safetensors library does."""


def read_header(path: Path, sources: Sources) -> tuple[dict[str, Any], dict[str, Any], int]:
    """The header of a file without its `__metadata__`, these, and the offset at which its data begins.

    Raises ReshardError if the file is cut short or not a safetensors file.
    """
    with sources.open(path) as file:
        size = file.size
        first = file.read(0, 8)
        length = int.from_bytes(first, "little") if size >= 8 else 0
        if first == b"version ":
            raise _broken(path, "weights", "a Git LFS pointer", "fetch the content with `git lfs pull`")
        if not 2 <= length <= min(HEADER_LIMIT, size - 8):
            if first[:1] == b"<" and first.isascii():  # any length whose last byte is 60 begins like this
                raise _broken(
                    path,
                    "weights",
                    "a web page",
                    "the server answered with a page, often because a login is required: download the file again",
                )
            raise _broken(
                path, "a header that fits in the file", f"{length} bytes of header in {size} bytes of file"
            )
        raw = file.read(8, length)
    try:
        header = json_of(raw)
    except ValueError as error:
        raise _broken(path, "a JSON header", str(error)) from None
    if not isinstance(header, dict):
        raise _broken(path, "a JSON object", json_kind(header))
    metadata = header.pop("__metadata__", None)
    return header, metadata if isinstance(metadata, dict) else {}, 8 + length


def read_tensors(path: Path, sources: Sources) -> dict[str, Tensor]:
    """All tensors of a file. Raises ReshardError like `read_file`."""
    return read_file(path, sources)[0]


def read_file(path: Path, sources: Sources) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """All tensors of a file, and its metadata. Raises ReshardError listing every entry that does not fit."""
    header, metadata, begin = read_header(path, sources)
    file = str(path)
    available = path.stat().st_size - begin
    tensors: dict[str, Tensor] = {}
    problems: list[Problem] = []
    spans: list[tuple[int, int, str]] = []
    for name, entry in header.items():
        try:
            dtype = BY_SAFETENSORS[entry["dtype"]]
            shape = _in_items(dtype, shape_of(entry["shape"]))
            first, last = sizes(entry["data_offsets"])
        except UNUSABLE:
            problems.append(
                _entry(path, name, "a known dtype, a shape and data_offsets", reprlib.repr(entry))
            )
            continue
        spans.append((first, last, name))
        nbytes = prod(shape) * dtype.itemsize
        if last - first != nbytes:
            problems.append(
                _entry(path, name, f"{nbytes} bytes for {dtype} {list(shape)}", f"{last - first} bytes")
            )
            continue
        storage = Storage(file, begin + first, nbytes)
        tensors[name] = Tensor(dtype, View.of(Cells(storage, dtype), *shape))
    end = 0
    for first, last, name in sorted(spans):
        if first != end:
            problems.append(_entry(path, name, f"data from byte {end}", f"data from byte {first}"))
        end = max(end, last)
    if end != available and not problems:
        problems.append(
            Problem(
                "safetensors-file-truncated" if end > available else "safetensors-file-too-long",
                "the file is cut short" if end > available else "the file is longer than its tensors",
                file=str(path),
                rule="the tensors of a safetensors file cover it exactly",
                expected=f"{begin + end} bytes",
                found=f"{begin + available} bytes",
                remedy="copy or download the file again",
            )
        )
    raise_all(problems)
    return tensors, metadata


OF_TORCH = {"format": "pt"}
"""Metadata without which transformers 4 refuses a file."""


def header_bytes(
    tensors: Iterable[tuple[str, DType, tuple[int, ...]]], metadata: Mapping[str, str] = OF_TORCH
) -> tuple[bytes, dict[str, int]]:
    """The first bytes of a file with `tensors` in this order, and the file offset of each tensor."""
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name, dtype, shape in tensors:
        size = prod(shape) * dtype.itemsize
        entry = {"dtype": dtype.safetensors, "shape": _in_elements(dtype, shape)}
        header[name] = {**entry, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # data is aligned to eight bytes
    begin = 8 + len(text)
    offsets = {
        name: begin + entry["data_offsets"][0] for name, entry in header.items() if name != "__metadata__"
    }
    return len(text).to_bytes(8, "little") + text, offsets


def _in_items(dtype: DType, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape in items of a tensor of `shape` in elements. Raises ValueError if rows end inside a byte."""
    return shape if dtype.bits is None or not shape else (*shape[:-1], dtype.items(shape[-1]))


def _in_elements(dtype: DType, shape: tuple[int, ...]) -> list[int]:
    return list(shape) if dtype.bits is None or not shape else [*shape[:-1], dtype.elements(shape[-1])]


def _broken(
    path: Path, expected: str, found: str, remedy: str = "copy or download the file again"
) -> ReshardError:
    return ReshardError(
        "safetensors-incomplete",
        "incomplete safetensors file",
        file=str(path),
        expected=expected,
        found=found,
        remedy=remedy,
    )


def _entry(path: Path, name: str, expected: str, found: str) -> Problem:
    return Problem(
        "safetensors-entry-inconsistent",
        "an entry of a safetensors header is inconsistent",
        tensor=name,
        file=str(path),
        expected=expected,
        found=found,
        remedy="the file is damaged or was written by a faulty tool: copy or write it again",
    )


def output_file(path: str, tensors: Sequence[Planned], metadata: Mapping[str, str] = OF_TORCH) -> OutputFile:
    """A file with complete tensors, in this order."""
    header, offsets = header_bytes(((t.name, t.dtype, t.shape) for t in tensors), metadata)
    blocks = [Block.whole(tensor, offsets[tensor.name]) for tensor in tensors]
    size = len(header) + sum(tensor.nbytes for tensor in tensors)
    return OutputFile(path, size, blocks, lambda: iter([(0, header)]))
