"""A package that extends reshard: with a family, and a format of one file with names of its own."""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterator
from dataclasses import replace
from pathlib import Path

from reshard.algebra.dtypes import dtype
from reshard.algebra.storage import Storage, StoredTensor
from reshard.algebra.tensors import Tensor
from reshard.families.architectures.llama import LLAMA
from reshard.families.dialect import Dialect
from reshard.families.dialects import torchtitan
from reshard.families.dims import Dims
from reshard.families.rules import Native, Rule
from reshard.folders import iterations
from reshard.folders.iterations import Iteration
from reshard.formats.checkpoint import Checkpoint, ModelDescription
from reshard.formats.contract import Format, Naming, Target, Writing
from reshard.transfer.plan import Block, OutputFile
from reshard.transfer.source_files import Sources

NAME = "toy"


def rules(dims: Dims) -> Iterator[Rule]:
    """The names of torchtitan, in capitals, with another name for layers."""
    for rule in torchtitan.llama(dims):
        yield replace(rule, view=rule.view.renamed(_called))


def _called(source: Hashable) -> Hashable:
    assert isinstance(source, Native)
    return source._replace(name=source.name.replace("layers.{layer}", "{layer}.LAYER").replace("tok", "TOK"))


FAMILY = replace(
    LLAMA, name=NAME, architecture="ToyForCausalLM", aliases={}, dialects={NAME: rules}, judged=()
)

INDEX, DATA = "toy.json", "toy.bin"


def detect(path: Path) -> bool:
    """Whether a folder has an index of tensors and their bytes."""
    return (path / INDEX).is_file()


def read(path: Path, sources: Sources, iteration: Iteration | None = None) -> Checkpoint:
    """The tensors, which are stored one after another."""
    iterations.refuse(path, iteration, "a toy folder")
    tensors = {}
    sources.open(path / DATA).close()  # from now on, it must not change
    for name, kind, shape, offset, nbytes in json.loads(sources.read(path / INDEX, 1 << 20)):
        strides = [1]
        for size in reversed(shape[1:]):
            strides.insert(0, strides[0] * size)
        storage = Storage(str(path / DATA), offset, nbytes)
        tensors[name] = Tensor.stored(StoredTensor(storage, dtype(kind), tuple(shape), tuple(strides)))
    return Checkpoint(path, NAME, Dialect(NAME), tensors, description=ModelDescription(path))


class ToyWriting(Writing):
    """The index, and the bytes of all tensors."""

    def files(self) -> list[OutputFile]:
        """The two files."""
        index, blocks, offset = [], [], 0
        for tensor in self.request.tensors:
            index.append((tensor.name, tensor.dtype.name, tensor.shape, offset, tensor.nbytes))
            blocks.append(Block.whole(tensor, offset))
            offset += tensor.nbytes
        return [OutputFile.of_bytes(INDEX, json.dumps(index).encode()), OutputFile(DATA, offset, blocks)]

    def notes(self) -> list[str]:
        """A setting of the package's own."""
        return [f"a toy of {len(self.request.tensors)} tensors"]


FORMAT = Format(NAME, "one file of bytes, and an index", detect, read, Target(ToyWriting, Naming((NAME,))))
