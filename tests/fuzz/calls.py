"""The calls under test: functions that users call, or the ones directly behind them."""

from __future__ import annotations

import io
import json
import shlex
import zipfile
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any
from zlib import crc32

import reshard
from reshard.algebra.storage import StoredTensor
from reshard.base.errors import ReshardError
from reshard.cli import main
from reshard.containers.safetensors import read_tensors
from reshard.containers.torchfiles.read import read_torch_file
from reshard.runs.doctor.python_api import doctor
from reshard.runs.guard.data.data_files import check_records
from reshard.runs.guard.data.records import SHAPES_OF_METHOD
from reshard.stores.registry import is_url, parse_address
from reshard.stores.web import WebStore
from reshard.transfer.leftovers import recover, remove_unfinished, set_aside, unfinished
from reshard.transfer.source_files import Sources
from reshard.transfer.unfinished_marker import parsed_marker
from tests.fuzz.seeds import DATA, copied

Take = Callable[[bytes], None]
Open = Callable[[Path], Take]
"""Makes a function that takes inputs, in an empty folder."""
BASE = DATA / "peers" / "bridge" / "base-mistral"


def directly(call: Callable[[bytes], object]) -> Open:
    """Call with the bytes themselves."""

    def take(data: bytes) -> None:
        call(data)

    return lambda folder: take


def alone(name: str, call: Callable[[Path], object]) -> Open:
    """Write the input to a file of this name, and call with its path."""

    def opened(folder: Path) -> Take:
        def take(data: bytes) -> None:
            (folder / name).write_bytes(data)
            call(folder / name)

        return take

    return opened


def checkpoint(path: Path, **options: Any) -> None:
    """Inspect a checkpoint, and plan its conversion without writing."""
    reshard.inspect(path)
    reshard.convert(path, path.parent / "out", dry_run=True, no_tokenizer=True, **options)


def to_megatron(path: Path) -> None:
    """The same with a Hugging Face folder, which is converted to another format."""
    checkpoint(path, to="megatron", tp=2)


def to_gguf(path: Path) -> None:
    """The same with a Hugging Face folder, whose tokenizer becomes metadata."""
    checkpoint(path, to="gguf")


def to_hub(path: Path) -> None:
    """The same with a folder of another format, whose metadata may be all that describes it."""
    checkpoint(path, to="huggingface")


def to_ranks(path: Path) -> None:
    """The same with files of FSDP's ranks and their optimizer, for other ranks."""
    checkpoint(path, to="fsdp-ranks", dp=3, with_optimizer=True)


def as_gguf(folder: Path) -> Path:
    """A folder with one GGUF file."""
    reshard.convert(BASE, folder, to="gguf")
    return folder


def merged(path: Path) -> None:
    """The same with an adapter."""
    checkpoint(path, base=DATA / "megatron_lora" / "base-llama", merge=True)


def replaced(folder: Path) -> None:
    """Check a folder against its record, then ask whether it may be replaced."""
    with suppress(ReshardError):
        reshard.verify(folder)
    reshard.convert(BASE, folder, to="huggingface", overwrite=True, dry_run=True)


def file_of(
    source: str,
    name: str,
    call: Callable[[Path], object] = checkpoint,
    put: Callable[[bytes], Callable[[bytes], bytes]] = lambda original: lambda data: data,
) -> Open:
    """Replace a file, found by a pattern, in a copy of a folder of tests/data, and call with the folder.

    `put(original)` makes the file's content from an input.
    """
    return in_copy(lambda folder: copied(source, folder), name, call, put)


def in_copy(
    make: Callable[[Path], Path],
    name: str,
    call: Callable[[Path], object] = checkpoint,
    put: Callable[[bytes], Callable[[bytes], bytes]] = lambda original: lambda data: data,
) -> Open:
    """The same in a folder that `make` makes; a file that does not exist is added."""

    def opened(folder: Path) -> Take:
        made = make(folder / "src")
        file = next(made.glob(name), made / name)
        packed = put(file.read_bytes() if file.exists() else b"")

        def take(data: bytes) -> None:
            file.write_bytes(packed(data))
            call(made)

        return take

    return opened


def pickled(original: bytes) -> Callable[[bytes], bytes]:
    """A torch archive with another pickle in it, so that inputs only mutate the pickle."""
    with zipfile.ZipFile(io.BytesIO(original)) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}

    def pack(data: bytes) -> bytes:
        out = io.BytesIO()
        with zipfile.ZipFile(out, "w") as archive:
            for name, content in members.items():
                archive.writestr(name, data if name.endswith("/data.pkl") else content)
        return out.getvalue()

    return pack


def sharded(folder: Path) -> Path:
    """A Hugging Face folder with an index."""
    reshard.convert(BASE, folder, to="huggingface", max_shard_size="20kB")
    return folder


def adapter(folder: Path) -> Path:
    """An adapter in PEFT's format."""
    base = DATA / "megatron_lora" / "base-llama"
    reshard.convert(DATA / "megatron_lora" / "swift-tp2", folder, to="peft", base=base, no_tokenizer=True)
    return folder


def content_of(make: Callable[[Path], Path], name: str, folder: Path) -> list[bytes]:
    """The content of one file of the folder that `make` makes."""
    return [next(make(folder / "seed").glob(name)).read_bytes()]


def safetensors_as_its_library(path: Path) -> None:
    """Files that reshard reads, the safetensors library reads too, with the same offsets."""
    from safetensors import SafetensorError, safe_open

    ours = read_tensors(path, Sources())
    try:
        with safe_open(path, "numpy") as file:
            theirs = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            shapes = {name: each.get_shape() for name, each in theirs.items()}
    except SafetensorError as error:
        raise AssertionError(f"read, and not by the library: {error}") from error
    assert shapes.keys() == ours.keys()
    for name, tensor in ours.items():
        assert tensor.dtype.bits is not None or list(tensor.shape) == shapes[name], name


def torch_file_as_torch(path: Path) -> None:
    """If torch loads a file too, the tensors are the same."""
    import torch

    ours = read_torch_file(path, Sources())
    try:
        theirs = torch.load(path, weights_only=True)
    except Exception:  # it refuses what we keep as inert data, and what is damaged
        return
    _compare(ours, theirs, 0)


def _compare(ours: Any, theirs: Any, depth: int) -> None:
    import torch

    if isinstance(theirs, torch.Tensor) and isinstance(ours, StoredTensor) and not theirs.is_quantized:
        assert list(ours.shape) == list(theirs.shape), "another shape"
        assert str(theirs.dtype) == f"torch.{ours.dtype.name}", "another dtype"
        if theirs.layout is torch.strided and theirs.numel() < 1 << 20:
            assert list(ours.strides) == list(theirs.stride()) or theirs.numel() < 2, "other strides"
            assert ours.start == theirs.storage_offset(), "another offset"
    elif isinstance(theirs, dict) and isinstance(ours, dict) and depth < 20:
        assert len(ours) == len(theirs), "other keys"
        for key in ours.keys() & theirs.keys():
            _compare(ours[key], theirs[key], depth + 1)
    elif isinstance(theirs, (list, tuple)) and isinstance(ours, (list, tuple)) and depth < 20:
        assert len(ours) == len(theirs), "another length"
        for one, other in zip(ours, theirs, strict=True):
            _compare(one, other, depth + 1)


def journal(folder: Path) -> Take:
    """The journal of an unfinished run, each line with its checksum, found at the destination."""
    run = folder / ".dst.partial-0123abcd"
    (run / "output").mkdir(parents=True)
    (run / "output" / "model.safetensors").write_bytes(bytes(4096))

    def take(data: bytes) -> None:
        lines = (b"%08x %s\n" % (crc32(line), line) for line in data.split(b"\n"))
        (run / "journal").write_bytes(b"".join(lines))
        for each in unfinished(folder / "dst"):
            json.dumps(each.as_dict())
        assert not set_aside(folder / "dst")
        remove_unfinished(folder / "dst", 1e9)
        recover(folder / "dst")
        (run / "output").mkdir(parents=True, exist_ok=True)

    return take


def arguments(folder: Path) -> Take:
    """Command-line arguments after a source and a destination; nothing is written."""

    def take(data: bytes) -> None:
        try:
            words = shlex.split(data.decode("utf-8", "replace").replace("\0", ""))
        except ValueError:
            return
        out, err = io.StringIO(), io.StringIO()
        with redirect_stdout(out), redirect_stderr(err):
            try:
                main(["convert", str(BASE), str(folder / "dst"), *words, "--dry-run"])
            except SystemExit as stopped:
                assert stopped.code in (0, 1, 2), stopped.code
        assert "a bug in reshard" not in err.getvalue(), err.getvalue()

    return take


def marker(data: bytes) -> None:
    """The files that reshard keeps in a bucket during an upload."""
    found = parsed_marker(data)
    if found:
        json.dumps([sorted(found.names), found.written, found.anywhere, found.identity])


def url(data: bytes) -> None:
    """The URL of a store, whose user, password and query must never be shown."""
    text = data.decode("utf-8", "replace")
    if is_url(text):
        place = parse_address(text)
        assert not place.userinfo or f"//{place.userinfo}@" not in place.url
        if place.scheme not in WebStore.kind.schemes:
            assert not place.query


def diagnosed(path: Path) -> None:
    """The doctor detects a file's kind by its suffix."""
    doctor(path)


def data(name: str) -> Open:
    """A data file with this name, whose records are checked for each method."""

    def opened(folder: Path) -> Take:
        def take(content: bytes) -> None:
            path = folder / name
            path.write_bytes(content)
            for method in SHAPES_OF_METHOD:
                with suppress(ReshardError):
                    check_records(path, method)

        return take

    return opened
