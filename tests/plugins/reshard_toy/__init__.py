"""What a package brings that reshard does not know: a family, and a format of one file."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from reshard.algebra.dtypes import dtype
from reshard.algebra.storage import Storage, StoredTensor
from reshard.algebra.tensors import Tensor
from reshard.families.architectures.llama import LLAMA
from reshard.formats import iterations
from reshard.formats.checkpoint import Checkpoint, Iteration
from reshard.formats.target import Format, Request, Target
from reshard.transfer.plan import Block, OutputFile
from reshard.transfer.sources import read_source

FAMILY = replace(LLAMA, name="toy", architecture="ToyForCausalLM", aliases={}, dialects={}, judged=())

INDEX, DATA = "toy.json", "toy.bin"


def detect(path: Path) -> bool:
    """Whether a folder holds an index of tensors and their bytes."""
    return (path / INDEX).is_file()


def read(path: Path, iteration: Iteration | None = None) -> Checkpoint:
    """The tensors, which lie one behind the other."""
    iterations.refuse(path, iteration, "a toy folder")
    tensors = {}
    for name, kind, shape, offset, nbytes in json.loads(read_source(path / INDEX, 1 << 20)):
        strides = [1]
        for size in reversed(shape[1:]):
            strides.insert(0, strides[0] * size)
        storage = Storage(str(path / DATA), offset, nbytes)
        tensors[name] = Tensor.stored(StoredTensor(storage, dtype(kind), tuple(shape), tuple(strides)))
    return Checkpoint(path, FORMAT.name, "hf", tensors, root=path)


def lay_out(request: Request) -> list[OutputFile]:
    """The index, and the bytes of all tensors."""
    index, blocks, offset = [], [], 0
    for tensor in request.tensors:
        index.append((tensor.name, tensor.dtype.name, tensor.shape, offset, tensor.nbytes))
        blocks.append(Block.whole(tensor, offset))
        offset += tensor.nbytes
    return [OutputFile.of_bytes(INDEX, json.dumps(index).encode()), OutputFile(DATA, offset, blocks)]


def notes(request: Request) -> list[str]:
    """A word of the package's own."""
    return [f"a toy of {len(request.tensors)} tensors"]


FORMAT = Format("toy", "one file of bytes, and an index", detect, read, Target(lay_out, notes=notes))
