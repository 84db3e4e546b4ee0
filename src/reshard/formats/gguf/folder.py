"""Read GGUF files of llama.cpp: one, or all parts of a split one, whose tensors are plain or in blocks."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from reshard.algebra.dtypes import dtype
from reshard.algebra.storage import Storage
from reshard.algebra.tensors import Cells, Tensor
from reshard.algebra.views import View
from reshard.base.errors import Problem, ReshardError, listed, raise_all
from reshard.base.merged_problems import one_for_all
from reshard.codecs.gguf_blocks import UINT8, BlockElements, gguf_package
from reshard.codecs.gguf_types import READABLE_TYPES
from reshard.families.dialects.gguf import GGUF
from reshard.folders import iterations
from reshard.folders.iterations import Iteration
from reshard.formats import detection
from reshard.formats.checkpoint import Checkpoint, ModelDescription
from reshard.formats.gguf import container
from reshard.formats.gguf.config_of_metadata import config_of, recorded_by
from reshard.formats.gguf.container import COPY_AGAIN, GgufContent, TensorInfo
from reshard.formats.gguf.value_types import Metadata
from reshard.transfer.source_files import Sources

SPLIT_FILE = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
"""The name of a part of a split file: `model-00001-of-00003.gguf`."""
SPLIT_NUMBER, SPLIT_COUNT, SPLIT_TENSORS = "split.no", "split.count", "split.tensors.count"
PLAIN_TYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "F64": "float64"}
ROPE_TENSORS = re.compile(r"rope_(freqs|factors_long|factors_short)\.weight")
"""Tensors that follow from the rope of config.json."""
DROPPED_FREQUENCIES = "rotary frequencies"
DIVISORS, MOST_DIVISORS = "rope_freqs.weight", 1 << 16
"""What llama3 scaling divides each rotary frequency by, and most of its bytes."""


def open_checkpoint(path: Path, sources: Sources, iteration: Iteration | None = None) -> Checkpoint:
    """Open a file with all its parts, or the only one in a folder. Raises ReshardError."""
    iterations.refuse(path, iteration, "a GGUF file")
    first = _only(path) if path.is_dir() else path
    files = _parts(first)
    contents = {file: container.read(file, sources) for file in files}
    metadata = next(iter(contents.values())).metadata
    _check_split(contents)
    _refuse_others(metadata, first)
    infos = [(name, file, info) for file, each in contents.items() for name, info in each.infos.items()]
    divisors = _divisors(infos, sources)
    raise_all(
        one_for_all(
            [*_unknown(infos), *_repeated_problems(infos)], [name for name, _, _ in infos], str(first)
        )
    )
    tensors = {name: _tensor(file, info) for name, file, info in infos}
    frequencies = [name for name in tensors if ROPE_TENSORS.fullmatch(name)]
    dropped = Counter({DROPPED_FREQUENCIES: sum(tensors.pop(name).nbytes for name in frequencies)})
    counted = Counter(info.kind.name for _, _, info in infos)
    blocks = sum(not info.kind.is_plain for _, _, info in infos)
    if blocks:
        gguf_package()
    return Checkpoint(
        path=path,
        format=detection.GGUF,
        dialect=GGUF,
        tensors=tensors,
        description=ModelDescription(
            first.parent,
            config=_implied(metadata, infos, divisors),
            recorded=recorded_by(metadata, frequencies, divisors),
        ),
        dropped=+dropped,
        variant=", ".join(f"{kind} × {count}" for kind, count in counted.most_common()),
        notes=[*_dtype_notes(blocks, counted), *_about(metadata)],
    )


def _divisors(infos: Sequence[tuple[str, Path, TensorInfo]], sources: Sources) -> list[float] | None:
    """What the rotary frequencies are divided by, if the file has it."""
    for name, file, info in infos:
        if name == DIVISORS and info.kind.name == "F32" and info.nbytes <= MOST_DIVISORS:
            with sources.open(file) as opened:
                return [float(each) for each in np.frombuffer(opened.read(info.offset, info.nbytes), "<f4")]
    return None


def _implied(
    metadata: Metadata, infos: Sequence[tuple[str, Path, TensorInfo]], divisors: list[float] | None
) -> dict[str, Any] | None:
    """The config.json that the metadata imply, if they determine one."""
    shapes = {name: info.shape for name, _, info in infos}
    return None if DIVISORS in shapes and not divisors else config_of(metadata, shapes, divisors)


def _dtype_notes(blocks: int, counted: Counter[str]) -> list[str]:
    halves = next((PLAIN_TYPES[kind] for kind in ("BF16", "F16") if counted[kind] > counted["F32"]), None)
    if halves:
        return [
            f"norms and routers are in float32, as llama.cpp stores them; --dtype {halves} converts them back"
        ]
    if not blocks:
        return []
    return [
        f"{blocks} quantized tensors are dequantized to float32; --dtype bfloat16 makes them half as large"
    ]


def _about(metadata: Metadata) -> list[str]:
    """What the metadata say about the model."""
    titles = [
        str(metadata[f"general.{key}"].value)
        for key in ("architecture", "name")
        if f"general.{key}" in metadata
    ]
    return [f"general.architecture and name: {', '.join(titles)}"] if titles else []


def _only(folder: Path) -> Path:
    """The file in a folder, or the first part of it. Raises ReshardError if there are several."""
    files = sorted(folder.glob("*.gguf"))
    names = {
        match["stem"] if (match := SPLIT_FILE.fullmatch(file.name)) else file.stem: file
        for file in files[::-1]
    }
    if len(names) > 1:
        raise ReshardError(
            "gguf-several-files",
            "the folder has several GGUF files",
            file=str(folder),
            found=listed([file.name for file in files], 5),
            remedy=f"pass one of them: {files[0]}",
        )
    return files[0]


def _parts(path: Path) -> list[Path]:
    """All parts of the file at `path`. Raises ReshardError naming those that are missing."""
    match = SPLIT_FILE.fullmatch(path.name)
    if match is None:
        return [path]
    count = int(match["count"])
    parts = [
        path.with_name(f"{match['stem']}-{number:05d}-of-{count:05d}.gguf") for number in range(1, count + 1)
    ]
    if missing := [part.name for part in parts if not part.is_file()]:
        raise ReshardError(
            "gguf-split-missing",
            "parts of a split GGUF file are missing",
            file=str(path),
            rule="the name of a part says how many there are, and all are read",
            expected=f"{count} files {match['stem']}-*-of-{count:05d}.gguf",
            found=f"{count - len(missing)}, without {listed(missing, 5)}",
            remedy="copy or download the missing files",
        )
    return parts


def _check_split(contents: Mapping[Path, GgufContent]) -> None:
    """Raise ReshardError if the parts say that they are others, or that there are more."""
    tensors = sum(len(content.infos) for content in contents.values())
    for number, (file, content) in enumerate(contents.items()):
        stated = {
            key: content.metadata[key].value
            for key in (SPLIT_NUMBER, SPLIT_COUNT, SPLIT_TENSORS)
            if key in content.metadata
        }
        right = {SPLIT_NUMBER: number, SPLIT_COUNT: len(contents), SPLIT_TENSORS: tensors}
        is_alone = len(contents) == 1 and not stated.get(SPLIT_COUNT)
        if not is_alone and stated != right:
            raise ReshardError(
                "gguf-split-differs",
                "the parts of a split GGUF file do not belong together",
                file=str(file),
                rule="each part says its number, how many there are, and how many tensors they have",
                expected=_pairs(right),
                found=_pairs(stated) or "none of this",
                remedy="give the parts the names with which they were written (NAME-00001-of-00003.gguf), and "
                "copy those that are missing",
            )


def _pairs(values: Mapping[str, object]) -> str:
    return ", ".join(f"{key} {value}" for key, value in values.items())


def _refuse_others(metadata: Metadata, path: Path) -> None:
    """Raise ReshardError for a file that contains no language model."""
    kind = metadata.get("general.type")
    if kind and kind.value != "model":
        raise ReshardError(
            "gguf-not-a-model",
            "this GGUF file contains no language model",
            file=str(path),
            expected="general.type model",
            found=f"general.type {kind.value}",
            remedy="pass the file of the model"
            if kind.value == "mmproj"
            else "convert the adapter or the data that it was made from",
        )


def _unknown(infos: Sequence[tuple[str, Path, TensorInfo]]) -> Iterator[Problem]:
    """A problem for each tensor of a type that cannot be read."""
    known = {kind.number for kind in READABLE_TYPES}
    for name, file, info in infos:
        if info.kind.number not in known and info.kind.name not in PLAIN_TYPES:
            yield Problem(
                "gguf-type-unsupported",
                "a tensor of a GGUF file has a type that is not read",
                tensor=name,
                file=str(file),
                expected=", ".join(kind.name for kind in READABLE_TYPES),
                found=info.kind.name,
                remedy="convert the model that it was made from, or let llama-quantize write it in one of these types",
            )


def _repeated_problems(infos: Sequence[tuple[str, Path, TensorInfo]]) -> Iterator[Problem]:
    """A problem for each tensor that is in several parts."""
    for name, count in Counter(name for name, _, _ in infos).items():
        if count > 1:
            files = listed([file.name for other, file, _ in infos if other == name], 5)
            yield Problem(
                "gguf-tensor-repeated",
                "a tensor is in several parts of a split GGUF file",
                tensor=name,
                file=files,
                remedy=COPY_AGAIN,
            )


def _tensor(file: Path, info: TensorInfo) -> Tensor:
    """A tensor: its elements as they are stored, or computed from its blocks."""
    storage = Storage(str(file), info.offset, info.nbytes)
    if info.kind.name in PLAIN_TYPES:
        plain = dtype(PLAIN_TYPES[info.kind.name])
        return Tensor(plain, View.of(Cells(storage, plain), *info.shape))
    stored = Tensor(UINT8, View.of(Cells(storage, UINT8), info.nbytes))
    source = BlockElements(stored, info.kind)
    return Tensor(source.dtype, View.of(source, *info.shape))
