"""Images filled with bytes are torch files: the real torch reads them, and they equal its own files."""

from __future__ import annotations

import argparse
import io
import os
import struct
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reshard.algebra import dtypes
from reshard.containers.torchfiles import write
from reshard.containers.torchfiles.pickles import Global, Opaque, Reduce, dumps, loads
from reshard.containers.torchfiles.read import read_torch_file
from reshard.containers.torchfiles.write import FileImage, NewTensor, image_bytes, layout_torch_file
from reshard.transfer.source_files import Sources
from tests.judges import of_type


def filled(image: FileImage, content: Mapping[Any, bytes]) -> bytes:
    """The file of an image with its slots written and its checksums patched."""
    file = bytearray(image.size)
    written = 0
    for offset, literal in image.literals:
        file[offset : offset + len(literal)] = literal
        written += len(literal)
    for slot in image.slots:
        assert slot.offset % 64 == 0
        file[slot.offset : slot.offset + slot.nbytes] = content[slot.key]
        written += slot.nbytes
        for at in slot.crc_at:
            assert file[at : at + 4] == b"\x00" * 4
            file[at : at + 4] = struct.pack("<I", zlib.crc32(content[slot.key]))
    assert written == image.size
    return bytes(file)


def example(name: str, *shape: int) -> torch.Tensor:
    return of_type(torch.arange(int(np.prod(shape))).reshape(shape), name)


def elements(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def new(key: Any, tensor: torch.Tensor) -> NewTensor:
    return NewTensor(key, dtypes.dtype(str(tensor.dtype)), tuple(tensor.shape))


def assert_equal(found: torch.Tensor, tensor: torch.Tensor) -> None:
    assert found.dtype == tensor.dtype and found.shape == tensor.shape
    assert found.stride() == tensor.stride() and not found.requires_grad
    assert elements(found) == elements(tensor)


@pytest.fixture
def state() -> dict[str, torch.Tensor]:
    tensors = {name: example(name, 3, 5) for name in dtypes.BY_NAME}
    return {
        **tensors,
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 4),
        "long": example("int8", 70_001),
    }


def test_torch_reads_every_dtype_in_every_way(tmp_path: Path, state: dict[str, torch.Tensor]) -> None:
    image = layout_torch_file({name: new(name, tensor) for name, tensor in state.items()})
    path = tmp_path / "model.pt"
    path.write_bytes(filled(image, {name: elements(tensor) for name, tensor in state.items()}))
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
    for found in (
        torch.load(path, weights_only=True),
        torch.load(path, weights_only=True, mmap=True),
        torch.load(io.BytesIO(path.read_bytes()), weights_only=True),
    ):
        assert list(found) == list(state)
        for name, tensor in state.items():
            assert_equal(found[name], tensor)


def test_torch_can_calculate_the_offsets(tmp_path: Path, state: dict[str, torch.Tensor]) -> None:
    """torch may compute the offsets of storages instead of reading the archive: reshard's are where it expects them."""
    image = layout_torch_file({name: new(name, tensor) for name, tensor in state.items()})
    path = tmp_path / "model.pt"
    path.write_bytes(filled(image, {name: elements(tensor) for name, tensor in state.items()}))
    with torch.utils.serialization.config.patch("load.calculate_storage_offsets", True):
        found = torch.load(path, weights_only=True, mmap=True)
    for name, tensor in state.items():
        assert_equal(found[name], tensor)


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("shape", [(2, 3), (0,), (), (1, 1, 4096)])
def test_the_archive_is_that_of_torch(monkeypatch: Any, name: str, shape: tuple[int, ...]) -> None:
    """Byte for byte, given torch's spelling of the pickle and the number that it derives from all checksums."""
    tensor = example(name, *shape)
    buffer = io.BytesIO()
    torch.save(tensor, buffer)
    with zipfile.ZipFile(buffer) as archive:
        pickled = archive.read("archive/data.pkl")
        identity = archive.read("archive/.data/serialization_id")
    monkeypatch.setattr(write._TorchPickler, "finish", lambda self: pickled)
    monkeypatch.setattr(write, "_serialization_id", lambda _: identity)
    image = layout_torch_file(new("x", tensor))
    assert filled(image, {"x": elements(tensor)}) == buffer.getvalue()


def test_ties_share_one_slot() -> None:
    tied = NewTensor("shared", dtypes.dtype("bf16"), (4, 2))
    image = layout_torch_file(OrderedDict(embedding=tied, head=tied))
    (slot,) = image.slots
    assert slot.shape == (4, 2) and slot.dtype == dtypes.dtype("bf16")
    found = torch.load(io.BytesIO(filled(image, {"shared": b"\x01" * 16})), weights_only=True)
    assert found["embedding"].data_ptr() == found["head"].data_ptr()
    with pytest.raises(ValueError, match="two tensors"):
        layout_torch_file([tied, NewTensor("shared", dtypes.dtype("bf16"), (4, 3))])


def test_what_megatron_keeps_beside_weights() -> None:
    from megatron.core.transformer.enums import AttnBackend

    backend = Global("megatron.core.transformer.enums", "AttnBackend")
    content = {
        "args": argparse.Namespace(params_dtype=dtypes.dtype("bf16"), lr=1e-4, backend=Reduce(backend, (1,))),
        "iteration": 7,
        "wide": [-1, 255, 256, 65535, 65536, -(1 << 31), 1 << 31, 1 << 80, -(1 << 80)],
        "values": (None, True, False, 1.5, "é\ud800", b"\x00\xff", (), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)),
        "set": {3, 1},
        "class": backend,
    }
    found = torch.load(io.BytesIO(image_bytes(layout_torch_file(content))), weights_only=False)
    args = vars(found.pop("args"))
    assert args == {"params_dtype": torch.bfloat16, "lr": 1e-4, "backend": AttnBackend(1)}
    assert found.pop("class") is AttnBackend
    assert found == {name: value for name, value in content.items() if name not in ("args", "class")}


def test_args_of_a_checkpoint_are_written_as_they_were_read(tmp_path: Path) -> None:
    import signal

    from megatron.core.transformer.enums import AttnBackend
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    args = argparse.Namespace(
        backend=AttnBackend.flash,
        exit_signal=signal.SIGTERM,
        dtype=torch.float16,
        betas=(0.9, 0.95),
        dataclass=ChunkStorageMetadata(torch.Size([1]), torch.Size([2])),
        counts=OrderedDict(a=[1]),
    )
    torch.save({"args": args}, tmp_path / "common.pt")
    read = read_torch_file(tmp_path / "common.pt", Sources())
    assert isinstance(read["args"].backend, Opaque)
    image = layout_torch_file(read)
    found = torch.load(io.BytesIO(image_bytes(image)), weights_only=False)["args"]
    assert vars(found) == vars(args)


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@settings(max_examples=100)
@given(PLAIN)
def test_plain_values_survive(value: Any) -> None:
    import pickle

    data = dumps(value)
    assert pickle.loads(data) == value
    assert loads(data, "x") == value


def test_what_cannot_be_written_is_refused() -> None:
    with pytest.raises(TypeError, match="ndarray"):
        layout_torch_file({"x": np.ones(2)})
    with pytest.raises(TypeError, match="nested class"):
        dumps(Global("m", "Outer.Inner"))
    with pytest.raises(ValueError, match="has tensors"):
        image_bytes(layout_torch_file(NewTensor(0, dtypes.dtype("fp32"), (1,))))


def test_more_than_4_gib_in_a_sparse_file(tmp_path: Path) -> None:
    """Sizes and offsets that need zip64, which torch maps without reading."""
    large = NewTensor("large", dtypes.dtype("uint8"), ((1 << 32) + 3,))
    small = NewTensor("small", dtypes.dtype("int64"), (2,))
    image = layout_torch_file({"large": large, "small": small})
    path = tmp_path / "large.pt"
    with open(path, "wb") as file:
        file.truncate(image.size)
        for offset, literal in image.literals:
            os.pwrite(file.fileno(), literal, offset)
        first, second = image.slots
        os.pwrite(file.fileno(), b"\x07", first.offset + first.nbytes - 1)
        os.pwrite(file.fileno(), struct.pack("<qq", 5, -6), second.offset)
        for at in second.crc_at:
            os.pwrite(file.fileno(), struct.pack("<I", zlib.crc32(struct.pack("<qq", 5, -6))), at)
    found = torch.load(path, weights_only=True, mmap=True)
    assert found["large"].numel() == (1 << 32) + 3
    assert found["large"][-1] == 7 and found["large"][0] == 0
    assert found["small"].tolist() == [5, -6]
    with zipfile.ZipFile(path) as archive:
        assert archive.read("archive/data/1") == struct.pack("<qq", 5, -6)
        assert archive.getinfo("archive/data/0").file_size == large.nbytes
    ours = read_torch_file(path, Sources())
    assert ours["small"].storage.offset == second.offset
    assert ours["large"].storage.offset == first.offset and ours["large"].storage.nbytes == large.nbytes


@pytest.mark.slow
def test_more_members_than_16_bits_count() -> None:
    image = layout_torch_file([NewTensor(i, dtypes.dtype("uint8"), (1,)) for i in range(65_600)])
    assert len(image.slots) == 65_600
    file = filled(image, {slot.key: bytes([slot.key % 251]) for slot in image.slots})
    reader = torch._C.PyTorchFileReader(io.BytesIO(file))
    assert len(reader.get_all_records()) == 65_600 + 6
    assert reader.get_record("data/65599") == bytes([65_599 % 251])


def test_a_repeated_element_is_stored_once_and_seen_everywhere() -> None:
    repeated = NewTensor("x", dtypes.dtype("float32"), (3, 5), repeated=True)
    image = layout_torch_file({"x": repeated})
    found = torch.load(io.BytesIO(image_bytes(image, {"x": np.float32(2).tobytes()})))["x"]
    assert found.shape == (3, 5)
    assert found.untyped_storage().nbytes() == 4
    assert torch.equal(found.view(-1), torch.full((15,), 2.0))
