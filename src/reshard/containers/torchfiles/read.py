"""Read torch.save files without torch: tensors become places in the file, and no code is run.

Such a file is a zip of stored members, `<root>/data.pkl` and `<root>/data/<key>`, alone in a file or nested in a
`.distcp` file. Sources: `torch/serialization.py`, PKWARE's APPNOTE, and files that torch wrote.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import lru_cache, partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from reshard.algebra.dtypes import BY_NAME, BY_STORAGE, DType
from reshard.algebra.storage import Storage, StoredTensor
from reshard.base.errors import ReshardError
from reshard.containers.torchfiles.pickles import Immutable, Opaque, loads, opaque_class
from reshard.containers.torchfiles.untrusted import shape_of, sizes
from reshard.containers.torchfiles.zip_archive import EDGE_BYTES, FileWindow, ZipArchive, damaged_file, edges
from reshard.stores import MAX_HEADS_BYTES, OpenFile, fetch_ahead, is_remote, open_file
from reshard.transfer.source_files import Sources
from reshard.transfer.thread_files import OpenFiles

MAX_OPEN = 64
"""Maximum number of files that a `ChunkReader` keeps open."""

CHUNKS_AHEAD = MAX_HEADS_BYTES // (2 * EDGE_BYTES)
"""Number of chunks in a store whose ends a `ChunkReader` fetches at once."""

NESTED_CLASSES = ("ProcessGroupState",)
"""Nested classes whose instances occur in checkpoints: this one, in `ShardedTensor`."""


def read_torch_file(
    path: str | Path,
    sources: Sources,
    offset: int = 0,
    length: int | None = None,
    file: OpenFile | None = None,
) -> Any:
    """The content that `torch.save` wrote to `path`, with a `StoredTensor` for each tensor.

    The archive is at bytes `offset` to `offset + length` of the file (to its end, by default); `file` is that file, if
    the caller has it open. Tensors that share a storage share a `Storage`, whose offset counts from the start of the
    file. Objects of the frameworks' classes are `pickles.Opaque`. Raises ReshardError for a damaged or foreign file,
    and for a pickle with names that are not allowed.
    """
    if file is None:
        with _open(path, sources) as own:
            return read_torch_file(path, sources, offset, length, own)
    size = file.size - offset if length is None else length
    archive = ZipArchive(FileWindow(file, str(path), offset, size))
    return load_pickle(archive.read("data.pkl"), archive.window.name, archive.storage)


def read_dict(
    path: Path, sources: Sources, code: str, message: str, remedy: str, expected: str = "a dict of tensors"
) -> dict[Any, Any]:
    """The dict in a torch.save file. Raises ReshardError with `message` if it contains something else."""
    content = read_torch_file(path, sources)
    if not isinstance(content, dict):
        kind = type(content).__name__
        raise ReshardError(code, message, file=str(path), expected=expected, found=kind, remedy=remedy)
    return content


def scalar(tensor: StoredTensor) -> float:
    """The value of a one-element tensor, such as the step of an optimizer. Raises ValueError for any other."""
    if tensor.numel != 1:
        raise ValueError(f"{list(tensor.shape)} where one number is expected")
    return float(np.frombuffer(first_bytes(tensor, tensor.dtype.itemsize), tensor.dtype.name)[0])


def first_bytes(tensor: StoredTensor, most: int) -> bytes:
    """The first bytes of a tensor, at most `most` of them."""
    with open_file(tensor.storage.path) as file:
        at = tensor.storage.offset + tensor.start * tensor.dtype.itemsize
        return file.read(at, min(most, tensor.nbytes))


class ChunkReader:
    """Reads single tensors in `.distcp` files, and keeps recently used files open. Close it when done.

    `coming` are the chunks that will be read, as (file, offset, length) and in that order: for files in a store, the
    headers of many are fetched at once.
    """

    def __init__(self, sources: Sources, coming: Iterable[tuple[str, int, int]] = ()) -> None:
        self._files = OpenFiles(MAX_OPEN, partial(_open, sources=sources))
        self._coming = (each for each in coming if is_remote(each[0]))
        self._ahead = 0

    def read(
        self, path: str | Path, offset: int, length: int, dtype: DType, shape: tuple[int, ...]
    ) -> StoredTensor:
        """The only tensor at bytes `offset` to `offset + length` of `path`.

        Makes two short reads, and unpickles only if no chunk with the same pickle has been read before. Raises
        ReshardError like `read_torch_file`, and if the tensor does not have the given `dtype` and `shape`.
        """
        self._look_ahead()
        archive = ZipArchive(FileWindow(self._files.file(str(path)), str(path), offset, length))
        pickled = archive.read("data.pkl")
        try:
            key, tensor = _single_tensor(pickled)
        except ReshardError:
            key, tensor = _single_tensor.__wrapped__(pickled, archive.window.name)  # names the file
        if tensor.dtype != dtype or tensor.shape != shape:
            raise ReshardError(
                "chunk-contradicts-metadata",
                "a chunk does not match the metadata",
                file=archive.window.name,
                expected=f"{dtype} {list(shape)}",
                found=f"{tensor.dtype} {list(tensor.shape)}",
                remedy="the files belong to different checkpoints: copy all of them again",
            )
        return replace(tensor, storage=archive.storage(key, tensor.storage.nbytes))

    def close(self) -> None:
        """Close all files."""
        self._files.close()

    def _look_ahead(self) -> None:
        if not self._ahead and (chunks := list(islice(self._coming, CHUNKS_AHEAD))):
            fetch_ahead(edge for chunk in chunks for edge in edges(*chunk))
            self._ahead = len(chunks)
        self._ahead = max(0, self._ahead - 1)


@lru_cache(maxsize=4096)
def _single_tensor(pickled: bytes, name: str = "") -> tuple[str, StoredTensor]:
    """The key and description of the only tensor in a pickle; its storage is a placeholder."""
    keys = []

    def storage(key: str, nbytes: int) -> Storage:
        keys.append(key)
        return Storage("", 0, nbytes)

    tensor = load_pickle(pickled, name, storage)
    if not isinstance(tensor, StoredTensor):
        raise damaged_file(
            name, "chunk-without-tensor", "a chunk does not contain a tensor", found=type(tensor).__name__
        )
    return keys[0], tensor


def _open(path: str | Path, sources: Sources) -> OpenFile:
    try:
        return sources.open(path)
    except OSError as error:
        raise ReshardError(
            "file-not-openable",
            "a file cannot be opened",
            file=str(path),
            found=error.strerror,
            remedy="check the disk or file server, then run the same command again",
        ) from error


class _StorageClass(NamedTuple):
    """A class such as `torch.FloatStorage`; `dtype` is None for `UntypedStorage`."""

    dtype: DType | None


class _TypedStorage(NamedTuple):
    """A storage that a pickle refers to, with the element type of its class."""

    storage: Storage
    dtype: DType | None


_STORAGE_CLASSES = {f"torch.{name}": _StorageClass(dtype) for name, dtype in BY_STORAGE.items()} | {
    "torch.UntypedStorage": _StorageClass(None),
    "torch.storage.UntypedStorage": _StorageClass(None),
}


def load_pickle(pickled: bytes, file: str, storage: Callable[[str, int], Storage]) -> Any:
    """Unpickle the `data.pkl` of `file`; `storage(key, nbytes)` finds the storages that it refers to."""
    return _Rebuilder(file, storage).load(pickled)


class _Rebuilder:
    """Replacements for the functions of `torch._utils` that rebuild tensors; these leave tensors on disk."""

    def __init__(self, file: str, storage: Callable[[str, int], Storage]) -> None:
        self._file = file
        self._storage = storage
        self._sealed = Immutable()
        self._subclassed = opaque_class("torch._tensor", "_rebuild_from_type_v2")
        self._seen: dict[tuple[str, int], Storage] = {}

    def load(self, pickled: bytes) -> Any:
        functions: dict[str, Any] = {
            "torch._utils._rebuild_tensor": self._tensor,
            "torch._utils._rebuild_tensor_v2": self._tensor,
            "torch._utils._rebuild_tensor_v3": self._tensor_v3,
            "torch._utils._rebuild_parameter": self._parameter,
            "torch._utils._rebuild_parameter_with_state": self._parameter,
            "torch._tensor._rebuild_from_type_v2": self._from_type,
            "builtins.getattr": self._attribute,
        }
        return loads(
            pickled,
            self._file,
            rebuild=_STORAGE_CLASSES | functions,
            persistent_load=self._persistent,
            sealed=self._sealed,
        )

    def _persistent(self, reference: Any) -> _TypedStorage:
        """The storage for ("storage", storage class, key, device, elements), as `torch.save` refers to one.

        The key is the name of its file in the archive, and an integer if LitGPT's `incremental_save` wrote it.
        """
        kind, storage_class, key, _, count = reference
        if isinstance(storage_class, type) and issubclass(storage_class, Opaque):
            raise self._unsupported(storage_class.name)
        if kind != "storage" or not isinstance(storage_class, _StorageClass) or type(key) not in (str, int):
            raise ValueError(f"a persistent object {reprlib.repr(reference)}")
        dtype = storage_class.dtype
        nbytes = sizes((count,))[0] * (dtype.itemsize if dtype else 1)
        place = str(key), nbytes
        if place not in self._seen:
            self._seen[place] = self._sealed.add(self._storage(*place))
        return _TypedStorage(self._seen[place], dtype)

    def _tensor(self, typed: _TypedStorage, start: int, shape: Any, strides: Any, *rest: Any) -> StoredTensor:
        if typed.dtype is None:
            raise ValueError("a tensor without an element type")
        return self._strided(typed.storage, typed.dtype, start, shape, strides)

    def _tensor_v3(
        self,
        typed: _TypedStorage,
        start: int,
        shape: Any,
        strides: Any,
        grad: bool,
        hooks: Any,
        dtype: Any,
        *rest: Any,
    ) -> StoredTensor:
        if isinstance(dtype, type) and issubclass(dtype, Opaque):
            raise self._unsupported(dtype.name)
        return self._strided(typed.storage, dtype, start, shape, strides)

    def _strided(self, storage: Storage, dtype: DType, start: int, shape: Any, strides: Any) -> StoredTensor:
        shape, strides, (end,) = shape_of(shape), shape_of(strides), sizes((start,))
        if 0 not in shape:
            end += 1 + sum((size - 1) * step for size, step in zip(shape, strides, strict=True))
        if end * dtype.itemsize > storage.nbytes:
            raise damaged_file(
                self._file,
                "torch-storage-too-short-for-tensor",
                "a storage is shorter than its tensor",
                expected=f"{end * dtype.itemsize} bytes for {dtype} {list(shape)}",
                found=f"{storage.nbytes} bytes",
            )
        tensor: StoredTensor = self._sealed.add(StoredTensor(storage, dtype, shape, strides, start))
        return tensor

    @staticmethod
    def _parameter(tensor: Any, *rest: Any) -> Any:
        if not isinstance(tensor, StoredTensor | Opaque):
            raise ValueError(f"a parameter of a {type(tensor).__name__}")
        return tensor

    def _from_type(self, function: Any, kind: Any, args: Any, state: Any) -> Any:
        """A tensor of a subclass, or with attributes: the tensor if its data are plain, or else its parts."""
        if type(args) is not tuple:
            raise ValueError(f"arguments in a {type(args).__name__}")
        tensor = function(*args)
        if isinstance(tensor, StoredTensor):
            return tensor
        return self._subclassed(function, kind, args, state)

    @staticmethod
    def _attribute(owner: Any, name: str) -> Any:
        """`getattr(owner, name)`, which protocol 2 uses for a nested class, or a member of an enum."""
        if isinstance(owner, type) and issubclass(owner, Opaque) and name in NESTED_CLASSES:
            return opaque_class(owner.module, f"{owner.name}.{name}")
        return opaque_class("builtins", "getattr")(owner, name)

    def _unsupported(self, name: str) -> ReshardError:
        return damaged_file(
            self._file,
            "torch-dtype-unknown",
            "a tensor has unknown element type",
            expected=f"one of {', '.join(BY_NAME)}",
            found=name,
            remedy="convert the tensor, or remove it from the checkpoint",
        )
