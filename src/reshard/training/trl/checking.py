"""Check that a folder stores what was trained, by comparing the CRC32 of each tensor with that taken from memory."""

from __future__ import annotations

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


def differences(run: Run, trained: Trained, final: Path) -> list[Problem]:
    """A problem for each tensor that is missing or has other bytes. Does not need torch."""
    files = sorted(final.glob("*.safetensors"))
    tensors = {name: tensor for file in files for name, tensor in read_weights(file, Sources()).items()}
    reader, buffer = Files(), bytearray(WINDOW)
    found = {name: _crc32(reader, tensors[name], buffer) for name in trained.digests.keys() & tensors.keys()}
    reader.close()
    return list(trained.differing(found, final, "its bytes in the memory of the run"))


def _crc32(files: Files, tensor: Tensor, buffer: bytearray) -> int:
    """The CRC32 of a tensor in a safetensors file, where its bytes are contiguous."""
    storage = next(cells.storage for cells in cells_of(tensor.view))
    value = 0
    for begin in range(0, tensor.nbytes, WINDOW):
        window = memoryview(buffer)[: min(WINDOW, tensor.nbytes - begin)]
        files.read(storage.path, [(storage.offset + begin, window)])
        value = crc32(window, value)
    return value
