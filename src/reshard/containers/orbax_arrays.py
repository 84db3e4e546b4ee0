"""Chunks of the arrays in an Orbax container, decoded by tensorstore, as files with their elements in order.

`orbax://tmp/run/0/items/params.step/0.0` is the chunk 0, 0 of the array `params.step` in the folder `/tmp/run/0/items`.
A container stores arrays in zarr 2 or zarr 3, compressed, as files of its own or in a database of tensorstore (OCDBT).
A chunk that is read is decoded once, into a temporary file, because any order of reading must be fast: in a chunk of
many layers, the elements of one layer are far apart. Sources: orbax-checkpoint 0.12.8 and tensorstore 0.1.86.
"""

from __future__ import annotations

import atexit
import json
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, cached_property
from importlib import import_module
from itertools import count
from math import prod
from pathlib import Path
from threading import RLock
from typing import Any, NamedTuple

from reshard.base.errors import ReshardError
from reshard.base.later_imports import imported_later
from reshard.base.missing_packages import install_command
from reshard.stores import OpenFile, Stamp, open_file, registry
from reshard.stores.address import Address, StoreKind
from reshard.stores.file_info import FileInfo
from reshard.stores.local_store import LocalStore, local_path

with imported_later(__name__):
    from reshard.containers.zarr_arrays import places


PACKAGE = "tensorstore"
METADATA, DATABASE = "_METADATA", "manifest.ocdbt"
LARGE_CHUNK_BYTES = 256 << 20
"""Bytes of a chunk above which its parts are decoded one by one, if it has parts."""

_numbers = count()
_decoding = RLock()
"""One chunk is decoded at a time, so that memory for one is enough."""


class ArrayShape(NamedTuple):
    """The shapes of an array and of its chunks, and its dtype under numpy's name."""

    dtype: str
    itemsize: int
    shape: tuple[int, ...]
    chunk: tuple[int, ...]

    @property
    def counts(self) -> tuple[int, ...]:
        """The number of chunks along each axis."""
        return tuple(-(-size // step) for size, step in zip(self.shape, self.chunk, strict=True))

    def box(self, at: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The first element of a chunk, and its size. Those at the end of an axis may be smaller."""
        low = tuple(index * step for index, step in zip(at, self.chunk, strict=True))
        size = (min(step, end - first) for step, end, first in zip(self.chunk, self.shape, low, strict=True))
        return low, tuple(size)


class ArrayFolder:
    """One folder of arrays. What opens them raises ReshardError if tensorstore is missing, or cannot read them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._opened: dict[str, Any] = {}
        self._decoded: dict[tuple[str, tuple[int, ...]], Path] = {}

    @cached_property
    def _metadata(self) -> dict[str, Any]:
        metadata = json.loads(_content(self.folder / METADATA))
        return metadata if isinstance(metadata, dict) else {}

    @property
    def is_zarr3(self) -> bool:
        """Whether its arrays are in zarr 3."""
        return bool(self._metadata.get("use_zarr3"))

    @property
    def is_database(self) -> bool:
        """Whether its arrays are in OCDBT. Versions that do not say so have its manifest."""
        return bool(self._metadata.get("use_ocdbt", (self.folder / DATABASE).is_file()))

    @cached_property
    def _context(self) -> Any:
        limits = {"cache_pool": {"total_bytes_limit": 1 << 24}, "data_copy_concurrency": {"limit": 1}}
        return _package().Context(limits)

    @cached_property
    def keys(self) -> frozenset[str]:
        """The names of everything stored: of arrays, their metadata and chunks."""
        with _package_errors(self.folder, None):
            store = _package().KvStore.open(self.location(""), context=self._context).result()
            return frozenset(key.decode("utf-8", "replace") for key in store.list().result())

    def location(self, name: str) -> Any:
        """Where the parts of an array are, as tensorstore describes it; of everything for an empty name."""
        base = f"{self.folder.absolute().as_posix()}/"
        path = f"{name}/" if name else ""
        if not self.is_database:
            return {"driver": "file", "path": base + path}
        return {"driver": "ocdbt", "base": {"driver": "file", "path": base}, "path": path}

    def open(self, name: str) -> Any:
        """An array, as tensorstore opens it."""
        with _decoding, _package_errors(self.folder, name):
            if name not in self._opened:
                driver = "zarr3" if self.is_zarr3 else "zarr"
                # Without this, tensorstore reads chunks that are missing as zeros.
                spec = {"driver": driver, "kvstore": self.location(name), "fill_missing_data_reads": False}
                opening = _package().open(spec, read=True, open=True, context=self._context)
                self._opened[name] = opening.result()
            return self._opened[name]

    def is_plain(self, name: str) -> bool:
        """Whether an array is not compressed, so that its chunks can be read as they are."""
        file = self.folder / name / ".zarray"
        if self.is_database or self.is_zarr3 or not file.is_file():
            return False
        return b'"compressor":null' in _content(file).replace(b" ", b"")

    def array(self, name: str) -> ArrayShape:
        """An array, from its metadata."""
        opened = self.open(name)
        itemsize, layout = opened.dtype.numpy_dtype.itemsize, opened.chunk_layout
        chunk = tuple(layout.write_chunk.shape or ())
        if prod(chunk) * itemsize > LARGE_CHUNK_BYTES:
            chunk = tuple(layout.read_chunk.shape or ())
        return ArrayShape(opened.dtype.name, itemsize, tuple(opened.shape), chunk)

    def missing_chunks(self, name: str) -> list[str]:
        """The names of chunks that are not stored."""
        opened = self.open(name)
        steps = opened.chunk_layout.write_chunk.shape or ()
        counts = [-(-size // step) for size, step in zip(opened.shape, steps, strict=True)]
        return [key for at in places(counts) if (key := f"{name}/{self._key(at)}") not in self.keys]

    def _key(self, at: Sequence[int]) -> str:
        if self.is_zarr3:
            return "/".join(["c", *map(str, at)])
        return ".".join(map(str, at)) or "0"

    def modified(self, name: str) -> int:
        """When the container last changed, or the array in it, in nanoseconds."""
        metadata = "zarr.json" if self.is_zarr3 else ".zarray"
        mark = DATABASE if self.is_database else f"{name}/{metadata}"
        return (self.folder / mark).stat().st_mtime_ns

    def decoded(self, name: str, at: tuple[int, ...]) -> Path:
        """A temporary file with the elements of a chunk."""
        with _decoding:
            if (name, at) not in self._decoded:
                self._decoded[name, at] = self._decode(name, at)
            return self._decoded[name, at]

    def forget(self) -> None:
        """Remove the temporary files."""
        with _decoding:
            for path in self._decoded.values():
                path.unlink(missing_ok=True)
            self._decoded.clear()

    def _decode(self, name: str, at: tuple[int, ...]) -> Path:
        array = self.array(name)
        low, size = array.box(at)
        box = tuple(slice(first, first + n) for first, n in zip(low, size, strict=True))
        _check_space(prod(size) * array.itemsize)
        with _package_errors(self.folder, name):
            elements = self.open(name)[box].read(order="C").result()
        path = _scratch() / f"{next(_numbers)}"
        with path.open("wb") as file:
            elements.tofile(file)
        return path


class OrbaxStore(LocalStore):
    """The decoded chunks of one folder of arrays. It is never listed: readers know its arrays from its metadata."""

    kind = StoreKind(("orbax",), PACKAGE, "", "FOLDER/ARRAY/CHUNK")

    @classmethod
    def containing(cls, place: Address) -> OrbaxStore:
        return cls(place.url.rsplit("/", 2)[0])

    @cached_property
    def container(self) -> ArrayFolder:
        """What decodes it."""
        return ArrayFolder(local_path(self.url))

    def list_files(self, root: str, *, deep: bool) -> dict[str, FileInfo]:
        return {}

    def look_up(self, url: str) -> FileInfo | None:
        if not _CHUNK.fullmatch(url):
            return None  # somebody typed it
        name, at = _chunk_of(url)
        array = self.container.array(name)
        return FileInfo(array.itemsize * prod(array.box(at)[1]), self.container.modified(name))

    def opened(self, url: str, entry: FileInfo) -> OpenFile:
        return _OpenChunk(self.container, *_chunk_of(url), entry)


registry.register(OrbaxStore)


def open_arrays(folder: Path) -> ArrayFolder:
    """The arrays in a folder, as it is now; what was decoded of them before is removed."""
    store = OrbaxStore(OrbaxStore.inside(folder))
    before = registry.replace(store)
    if isinstance(before, OrbaxStore):
        before.container.forget()
    return store.container


def chunk_url(folder: Path, name: str, at: Sequence[int]) -> str:
    """The URL of a chunk of an array."""
    return f"{OrbaxStore.inside(folder)}/{name}/{'.'.join(map(str, at)) or 'all'}"


_CHUNK = re.compile(r"(?s).*/[^/]+/(\d+(\.\d+)*|all)")


def _chunk_of(url: str) -> tuple[str, tuple[int, ...]]:
    name, at = url.split("/")[-2:]
    return name, () if at == "all" else tuple(map(int, at.split(".")))


class _OpenChunk(OpenFile):
    """A chunk, open for reading; it is decoded when something is read."""

    def __init__(self, container: ArrayFolder, name: str, at: tuple[int, ...], entry: FileInfo) -> None:
        self._container, self._name, self._at, self._entry = container, name, at, entry
        self._file: OpenFile | None = None

    def stamp(self) -> Stamp:
        return self._entry.stamp()

    def _decoded(self) -> OpenFile:
        if self._file is None:
            self._file = open_file(self._container.decoded(self._name, self._at))
        return self._file

    def read(self, at: int, count: int) -> bytes:
        return self._decoded().read(at, count)

    def fill(self, parts: Iterable[tuple[int, memoryview]]) -> int | None:
        return self._decoded().fill(parts)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _content(path: Path) -> bytes:
    """The content of a file, whose name is in the error if it cannot be read."""
    with open_file(path) as file:
        return file.read(0, file.size)


@cache
def _scratch() -> Path:
    """A temporary folder of this process, which is removed when it ends."""
    folder = Path(tempfile.mkdtemp(prefix="reshard-orbax-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _check_space(nbytes: int) -> None:
    free = shutil.disk_usage(_scratch()).free
    if free < nbytes:
        raise ReshardError(
            "orbax-scratch-full",
            "the disk with temporary files is full",
            file=str(_scratch()),
            rule="chunks of Orbax are decoded into temporary files, which together are as large as the model",
            expected=f"{nbytes:,} bytes more",
            found=f"{free:,} bytes free",
            remedy="free some space there, or choose a folder on another disk: TMPDIR=/path/to/folder reshard …",
        )


@contextmanager
def _package_errors(folder: Path, name: str | None) -> Iterator[None]:
    """Turn the errors of tensorstore into those of reshard."""
    try:
        yield
    except (ValueError, NotImplementedError) as error:
        raise ReshardError(
            "orbax-array-unreadable",
            "tensorstore cannot read an array of an Orbax checkpoint",
            tensor=name,
            file=str(folder),
            found=" ".join(str(error).split("[tensorstore_spec=")[0].split())[:300],
            remedy="copy the checkpoint again from where it was saved, or use another step of the run",
        ) from error


def _package() -> Any:
    """The package. Raises ReshardError if it is not installed."""
    try:
        return import_module(PACKAGE)
    except ImportError as error:
        raise ReshardError(
            "orbax-package-missing",
            "reading an Orbax checkpoint needs tensorstore",
            rule="its arrays are compressed in formats that tensorstore decodes; JAX is not needed",
            found=str(error),
            remedy=f"install it: {install_command(PACKAGE)}",
        ) from error
