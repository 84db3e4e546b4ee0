"""Tensors that are spread over safetensors files, which torch's HuggingFaceStorageWriter saves with `save_distributed`.

    shard-00002-model-00001-of-00003.safetensors     rank 2's parts of the tensors of the first of three files

`DCP_SHARDING_INFO` in the metadata of a header is JSON with the offsets of each part. Neither the shapes of complete
tensors nor the number of ranks are recorded. Source: `hf_storage.py`, `_hf_utils.py` and
`_consolidate_hf_safetensors.py` in `torch/distributed/checkpoint` of torch 2.13.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from reshard.algebra.tensors import Tensor
from reshard.algebra.views import assemble, overlaps
from reshard.base.errors import UNUSABLE, Problem, ReshardError, type_and_message
from reshard.base.plain_json import json_of
from reshard.containers.torchfiles.untrusted import MAX_NUMBER, shape_of

RANK_PREFIX = re.compile(r"shard-(\d+)-(?=model-)")
"""How the name of a rank's file begins."""

_KEY = "DCP_SHARDING_INFO"


class TensorSlice(NamedTuple):
    """A tensor of one file, and its offsets in the complete tensor; None if the file does not say that it is a part."""

    tensor: Tensor
    low: tuple[int, ...] | None


def parts_in(
    file: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]
) -> dict[str, TensorSlice]:
    """The tensors of one file as parts. Raises ReshardError if the offsets cannot be read."""
    if _KEY not in metadata:
        return {name: TensorSlice(tensor, None) for name, tensor in tensors.items()}
    try:
        recorded = json_of(metadata[_KEY].encode())
        return {
            name: TensorSlice(tensor, _offsets(recorded, name, tensor)) for name, tensor in tensors.items()
        }
    except UNUSABLE as error:
        raise ReshardError(
            "part-offsets-unreadable",
            "the offsets of parts of tensors cannot be read",
            file=str(file),
            rule=f"{_KEY} in the metadata has the offsets of each tensor",
            found=type_and_message(error),
            remedy="copy the file again from where it was saved",
        ) from None


def _offsets(recorded: Any, name: str, tensor: Tensor) -> tuple[int, ...]:
    low = shape_of(recorded[name]["saved_offsets"])
    if len(low) != len(tensor.shape):
        raise ValueError(f"{list(low)} in {name}, which has {len(tensor.shape)} axes")
    if prod(_end(TensorSlice(tensor, low))) >= MAX_NUMBER:
        raise ValueError(f"{list(low)} in {name}")
    return low


def joined_parts(name: str, parts: list[TensorSlice]) -> Tensor | Problem:
    """The complete tensor; a problem if its parts leave gaps, overlap, or are not parts of one tensor."""
    first, *others = parts
    for part in others:
        if first.low is None or part.low is None:
            return _repeated_problem(name, first.tensor, part.tensor)
        if (part.tensor.dtype, len(part.low)) != (first.tensor.dtype, len(first.low)):
            return Problem(
                "parts-unlike",
                "the parts of a tensor do not belong together",
                tensor=name,
                file=part.tensor.file,
                expected=f"{first.tensor.dtype} with {len(first.tensor.shape)} axes, as in {first.tensor.file}",
                found=f"{part.tensor.dtype} with {len(part.tensor.shape)} axes",
                remedy="copy the files of one save into a folder of their own, and pass that",
            )
    if not others and not any(first.low or ()):
        return first.tensor
    shape = tuple(map(max, zip(*map(_end, parts), strict=True)))
    whole = assemble(shape, [(part.low or (), part.tensor.view) for part in parts])
    stored = sum(part.tensor.view.numel for part in parts)
    if stored != whole.numel or overlaps(whole):
        return _incomplete_problem(name, shape, stored, parts)
    return Tensor(first.tensor.dtype, whole)


def _end(part: TensorSlice) -> tuple[int, ...]:
    return tuple(low + size for low, size in zip(part.low or (), part.tensor.shape, strict=True))


def _repeated_problem(name: str, first: Tensor, other: Tensor) -> Problem:
    return Problem(
        "tensor-in-two-files",
        "a tensor is in more than one file",
        tensor=name,
        file=other.file,
        rule="every tensor is in one shard",
        found=f"the same name in {first.file}",
        remedy="two saves are mixed: copy the files of the one that you want into a folder of their own, and pass "
        "that; delete nothing, since names do not tell which files belong together",
    )


def _incomplete_problem(name: str, shape: tuple[int, ...], stored: int, parts: list[TensorSlice]) -> Problem:
    missing = stored < prod(shape)
    return Problem(
        "parts-missing" if missing else "parts-overlap",
        "parts of a tensor are missing" if missing else "parts of a tensor overlap",
        tensor=name,
        file=parts[-1].tensor.file,
        rule="the files of all ranks together have each element of a tensor once",
        expected=f"{prod(shape)} elements of {list(shape)}",
        found=f"{stored} elements in {len(parts)} files",
        remedy="copy the files of all ranks (shard-*.safetensors) again from where they were saved",
    )


def part_alone(path: Path) -> Iterator[Problem]:
    """A problem if `path` is one rank's file, and others are beside it."""
    if path.is_file() and RANK_PREFIX.match(path.name) and len(list(path.parent.glob("shard-*-model-*"))) > 1:
        yield Problem(
            "part-alone",
            "this file has only its rank's parts of the tensors",
            file=str(path),
            rule="the files of all ranks are read together",
            remedy="pass the folder",
        )


def notes(files: Iterable[Path]) -> list[str]:
    """What users should know of files with parts: their number is not recorded, and transformers cannot load them."""
    ranks = {match[1] for file in files if (match := RANK_PREFIX.match(file.name))}
    if not ranks:
        return []
    return [
        f"the tensors are put together from the files of {len(ranks)} rank{'s' * (len(ranks) > 1)}, which do not "
        "record how many there were; transformers cannot load them as they are"
    ]
