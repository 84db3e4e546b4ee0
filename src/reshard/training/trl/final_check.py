"""Check that a folder stores what was trained, by comparing the CRC32 of each tensor with that taken from memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from isal.isal_zlib import crc32

from reshard.algebra.tensors import Tensor, cells_of
from reshard.base.errors import Problem
from reshard.formats import open_checkpoint
from reshard.formats.huggingface import read_weights
from reshard.model.described_checkpoint import describe
from reshard.training.engine import Trained
from reshard.training.run import Run
from reshard.transfer.source_files import Sources
from reshard.transfer.thread_files import OpenFiles

T = TypeVar("T")
WINDOW_BYTES = 4 << 20


def differences(run: Run, trained: Trained, final: Path) -> list[Problem]:
    """A problem for each tensor that is missing or has other bytes. Does not need torch."""
    tensors = _read(final)
    if not run.lora:
        trained = replace(trained, digests=_on_hub(trained.checkpoint, trained.digests))
        tensors = _on_hub(final, tensors)
    reader, buffer = OpenFiles(), bytearray(WINDOW_BYTES)
    found = {name: _crc32(reader, tensors[name], buffer) for name in trained.digests.keys() & tensors.keys()}
    reader.close()
    return list(trained.differing(found, final, "its bytes in the memory of the run"))


def _read(folder: Path) -> dict[str, Tensor]:
    files = sorted(folder.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in read_weights(file, Sources()).items()}


def _on_hub(folder: Path, values: Mapping[str, T]) -> dict[str, T]:
    """Values by the Hub's names instead of those in the folder: transformers saves some vision towers under others."""
    hub = {_place(each): name for name, each in describe(open_checkpoint(folder)).checkpoint.tensors.items()}
    names = {name: hub.get(_place(tensor), name) for name, tensor in _read(folder).items()}
    return {names.get(name, name): value for name, value in values.items()}


def _place(tensor: Tensor) -> tuple[str, int]:
    storage = next(cells.storage for cells in cells_of(tensor.view))
    return str(storage.path), storage.offset


def _crc32(files: OpenFiles, tensor: Tensor, buffer: bytearray) -> int:
    """The CRC32 of a tensor in a safetensors file, where its bytes are contiguous."""
    storage = next(cells.storage for cells in cells_of(tensor.view))
    value = 0
    for begin in range(0, tensor.nbytes, WINDOW_BYTES):
        window = memoryview(buffer)[: min(WINDOW_BYTES, tensor.nbytes - begin)]
        files.read(storage.path, [(storage.offset + begin, window)])
        value = crc32(window, value)
    return value
