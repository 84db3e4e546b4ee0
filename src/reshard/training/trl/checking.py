"""Check that a folder stores what was trained, by comparing the CRC32 of each tensor with that taken from memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from isal.isal_zlib import crc32

from reshard.algebra.tensors import Tensor, cells_of
from reshard.base.errors import Problem
from reshard.formats.huggingface import read_weights
from reshard.training.engine import Trained
from reshard.training.run import Run
from reshard.transfer.files import Files
from reshard.transfer.sources import Sources

WINDOW = 4 << 20
_REMEDY = "convert the checkpoint again (reshard export), and look at the disk if it differs again"


def differences(run: Run, trained: Trained, final: Path) -> list[Problem]:
    """A problem for each tensor that is missing, unexpected, or has other bytes. Does not need torch."""
    files = sorted(final.glob("*.safetensors"))
    tensors = {name: tensor for file in files for name, tensor in read_weights(file, Sources()).items()}
    return [*_names(trained, tensors, final), *_bytes(trained, tensors)]


def _names(trained: Trained, tensors: dict[str, Tensor], final: Path) -> Iterator[Problem]:
    for name in sorted(trained.digests.keys() - tensors.keys()):
        yield Problem(
            "trained-tensor-missing",
            "a trained tensor is missing",
            tensor=name,
            file=str(final),
            remedy=_REMEDY,
        )


def _bytes(trained: Trained, tensors: dict[str, Tensor]) -> Iterator[Problem]:
    files = Files()
    buffer = bytearray(WINDOW)
    for name in sorted(trained.digests.keys() & tensors.keys()):
        found = _crc32(files, tensors[name], buffer)
        if found != trained.digests[name]:
            yield Problem(
                "trained-tensor-differs",
                "a tensor differs from the trained one",
                tensor=name,
                file=tensors[name].file,
                rule="the CRC32 of its bytes in the memory of the run",
                expected=f"{trained.digests[name]:08x}",
                found=f"{found:08x}",
                remedy=_REMEDY,
            )
    files.close()


def _crc32(files: Files, tensor: Tensor, buffer: bytearray) -> int:
    """The CRC32 of a tensor in a safetensors file, where its bytes are contiguous."""
    storage = next(cells.storage for cells in cells_of(tensor.view))
    value = 0
    for begin in range(0, tensor.nbytes, WINDOW):
        window = memoryview(buffer)[: min(WINDOW, tensor.nbytes - begin)]
        files.read(storage.path, [(storage.offset + begin, window)])
        value = crc32(window, value)
    return value
