"""Files of the real torch, hostile pickles, and damaged files."""

from __future__ import annotations

import argparse
import io
import os
import pathlib
import pickle
import zipfile
from collections import OrderedDict, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from reshard.algebra import dtypes
from reshard.algebra.storage import StoredTensor
from reshard.base.errors import ReshardError
from reshard.containers.torchfiles import pickles
from reshard.containers.torchfiles.read import ChunkReader, read_torch_file
from reshard.transfer.source_files import Sources
from tests.judges import of_type

QUICK = settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def saved(path: Path, content: Any, **options: Any) -> Path:
    torch.save(content, path, **options)
    return path


def raw(stored: StoredTensor) -> bytes:
    """The elements of a stored tensor, row by row, read from its file."""
    with open(stored.storage.path, "rb") as file:
        file.seek(stored.storage.offset)
        content = file.read(stored.storage.nbytes)
    size = stored.dtype.itemsize
    cells = np.frombuffer(content, np.dtype(f"V{size}"))[stored.start :]
    strides = [step * size for step in stored.strides]
    return np.lib.stride_tricks.as_strided(cells, stored.shape, strides).tobytes()


def elements(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def assert_same(stored: Any, tensor: torch.Tensor) -> None:
    assert isinstance(stored, StoredTensor)
    assert f"torch.{stored.dtype}" == str(tensor.dtype)
    assert stored.shape == tuple(tensor.shape)
    assert raw(stored) == elements(tensor)


@pytest.mark.parametrize("name", dtypes.BY_NAME)
def test_every_dtype(tmp_path: Path, name: str) -> None:
    tensor = of_type(torch.arange(24).reshape(2, 3, 4), name)
    assert_same(read_torch_file(saved(tmp_path / "x.pt", tensor), Sources()), tensor)


def test_views_and_strides(tmp_path: Path) -> None:
    base = torch.arange(60.0).reshape(5, 12)
    views = {
        "base": base,
        "rows": base[1:3],
        "columns": base[:, 3::2],
        "transposed": base.T,
        "expanded": base[:1].expand(4, 12),
        "scalar": base[2, 2],
        "empty": base[:0],
        "parameter": torch.nn.Parameter(base[4]),
    }
    content = read_torch_file(saved(tmp_path / "x.pt", views), Sources())
    for name, tensor in views.items():
        assert_same(content[name], tensor)
    assert len({id(stored.storage) for stored in content.values()}) == 1


def test_ties_share_a_storage_and_others_do_not(tmp_path: Path) -> None:
    tied = torch.ones(3, 3)
    content = read_torch_file(
        saved(tmp_path / "x.pt", {"a": tied, "b": tied, "c": torch.ones(3, 3)}), Sources()
    )
    assert content["a"].storage is content["b"].storage
    assert content["a"].storage != content["c"].storage


def test_state_dict_with_many_tensors_and_attributes(tmp_path: Path) -> None:
    model = torch.nn.ModuleDict({str(i): torch.nn.Linear(i % 5 + 1, 3) for i in range(80)})
    for parameter in model.parameters():
        parameter.tensor_model_parallel = True
    model["0"].weight.data.note = "a tensor with attributes of its own"
    wanted = model.state_dict(keep_vars=True)
    content = read_torch_file(saved(tmp_path / "x.pt", {"module": wanted}), Sources())["module"]
    assert isinstance(content, OrderedDict) and list(content) == list(wanted)
    for name, tensor in wanted.items():
        assert_same(content[name], tensor)


def test_crc_is_that_of_the_bytes(tmp_path: Path) -> None:
    stored = read_torch_file(saved(tmp_path / "x.pt", torch.arange(100)), Sources())
    with zipfile.ZipFile(tmp_path / "x.pt") as archive:
        assert stored.storage.crc32 == archive.getinfo("x/data/0").CRC


def test_plain_values_are_rebuilt(tmp_path: Path) -> None:
    content = {
        "args": argparse.Namespace(lr=1e-4, name="é", dtype=torch.bfloat16, none=None, big=1 << 70, neg=-5),
        "size": torch.Size([2, 3]),
        "path": pathlib.PurePosixPath("/a/b"),
        "set": {1, 2},
        "frozen": frozenset("ab"),
        "bytes": b"\x00\xff",
        "array": bytearray(b"xyz"),
        "complex": 1 + 2j,
        "range": range(1, 9, 2),
        "slice": slice(1, 2),
        "default": defaultdict(list, a=[1]),
        "nested": [({"x": (1, True, [])},)],
    }
    found = read_torch_file(saved(tmp_path / "x.pt", content), Sources())
    args = found.pop("args")
    assert isinstance(args, argparse.Namespace)
    assert vars(args) == {**vars(content.pop("args")), "dtype": dtypes.dtype("bfloat16")}
    assert found.pop("path") == "/a/b"
    content.pop("path")
    assert found == content
    assert found["default"].default_factory is None


def test_objects_of_frameworks_stay_data(tmp_path: Path) -> None:
    from megatron.core.transformer.enums import AttnBackend

    content = {
        "backend": AttnBackend.flash,
        "numpy": np.arange(3),
        "float": np.float64(1.5),
        "class": torch.nn.Linear,
        "layout": torch.strided,
    }
    found = read_torch_file(saved(tmp_path / "x.pt", content), Sources())
    assert all(isinstance(value, pickles.Opaque) for name, value in found.items() if name != "class")
    name = "megatron.core.transformer.enums.AttnBackend"
    assert (found["backend"].qualname, found["backend"].args[-1]) in (
        (name, AttnBackend.flash.value),
        ("builtins.getattr", "flash"),  # as Python pickles it before 3.11.4
    )
    assert found["numpy"].state[1] == (3,)
    assert issubclass(found["class"], pickles.Opaque) and found["class"].name == "Linear"


def test_archive_within_a_file(tmp_path: Path) -> None:
    tensors = [torch.arange(n + 1, dtype=torch.int16) for n in range(3)]
    blobs = []
    for tensor in tensors:
        buffer = io.BytesIO()
        torch.save(tensor, buffer)
        blobs.append(buffer.getvalue())
    path = tmp_path / "__0_0.distcp"
    path.write_bytes(b"".join(blobs))
    offsets = [sum(map(len, blobs[:i])) for i in range(3)]
    reader = ChunkReader(Sources())
    for tensor, blob, offset in zip(tensors, blobs, offsets, strict=True):
        whole = read_torch_file(path, Sources(), offset, len(blob))
        assert_same(whole, tensor)
        chunk = reader.read(path, offset, len(blob), dtypes.dtype("int16"), tuple(tensor.shape))
        assert chunk == whole
    with pytest.raises(
        ReshardError, match=r"does not match the metadata(.|\n)*int16 \[2\](.|\n)*int16 \[1\]"
    ):
        reader.read(path, 0, len(blobs[0]), dtypes.dtype("int16"), (2,))
    with pytest.raises(ReshardError, match=r"__0_0\.distcp"):
        reader.read(path, offsets[2], len(blobs[2]) + 1, dtypes.dtype("int16"), (3,))
    reader.close()


def test_non_contiguous_and_large_chunks(tmp_path: Path) -> None:
    tensor = torch.arange(6000.0).reshape(60, 100).T
    path = saved(tmp_path / "x.distcp", tensor)
    reader = ChunkReader(Sources())
    for _ in range(2):
        chunk = reader.read(path, 0, path.stat().st_size, dtypes.dtype("float32"), (100, 60))
        assert_same(chunk, tensor)
    reader.close()


def write_pickle(path: Path, data: bytes) -> Path:
    """A file as torch writes it, with the given pickle."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", data)
        archive.writestr("archive/data/0", b"\x00" * 64)
        archive.writestr("archive/version", b"3\n")
    return path


class Call:
    """Pickles as a call of `function`."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("protocol", [0, 2, 4])
@pytest.mark.parametrize(
    ("function", "name"),
    [
        (os.system, "posix.system"),
        (eval, "builtins.eval"),
        (exec, "builtins.exec"),
        (open, "io.open"),
        (__import__, "builtins.__import__"),
        (pickle.loads, "pickle.loads"),
        (os.path.join, "posixpath.join"),
    ],
)
@pytest.mark.parametrize("nest", [lambda call: call, lambda call: [{"a": (Call(set, [call]),)}]])
def test_dangerous_names_are_refused(
    tmp_path: Path, function: Any, name: str, protocol: int, nest: Any
) -> None:
    trap = tmp_path / "trap"
    hostile = nest(Call(function, f"touch {trap}"))
    path = write_pickle(tmp_path / "x.pt", pickle.dumps(hostile, protocol))
    with pytest.raises(
        ReshardError, match=f"refused to load _?{name} named by the pickle in .*x.pt"
    ) as error:
        read_torch_file(path, Sources())
    assert "nothing was executed" in str(error.value)
    assert not trap.exists()


def test_getattr_is_not_called(tmp_path: Path) -> None:
    data = pickle.dumps(Call(getattr, torch.nn.Linear, "__init__"), 2)
    found = read_torch_file(write_pickle(tmp_path / "x.pt", data), Sources())
    assert isinstance(found, pickles.Opaque) and found.qualname == "builtins.getattr"


def test_framework_functions_are_not_called(tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    data = b"\x80\x02ctorch.hub\nload\n" + pickle.dumps(str(trap), 2)[2:-1] + b"\x85R."
    found = read_torch_file(write_pickle(tmp_path / "x.pt", data), Sources())
    assert found.qualname == "torch.hub.load" and found.args == (str(trap),)
    other_codec = pickle.dumps("x", 2)[2:-1]
    data = b"\x80\x02c_codecs\nencode\n" + other_codec + b"X\x05\x00\x00\x00rot13\x86R."
    with pytest.raises(ReshardError, match="rot13"):
        read_torch_file(write_pickle(tmp_path / "y.pt", data), Sources())


TENSOR = (
    b"ctorch._utils\n_rebuild_tensor_v2\n((X\x07\x00\x00\x00storagectorch\nFloatStorage\n"
    b"X\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x10tQK\x00(K\x04K\x04t(K\x04K\x01t\x89}tR"
)
"""A float32 tensor of 4 × 4, in 64 bytes."""


def test_a_pickle_cannot_rewrite_what_it_is_handed(tmp_path: Path) -> None:
    assert_same(
        read_torch_file(write_pickle(tmp_path / "x.pt", b"\x80\x02" + TENSOR + b"."), Sources()),
        torch.zeros(4, 4),
    )
    longer = b"(NN(J\x00\x00\x00\x01t(K\x01tK\x00tb"
    with pytest.raises(ReshardError):
        read_torch_file(write_pickle(tmp_path / "x.pt", b"\x80\x02" + TENSOR + longer + b"."), Sources())
    poison = b"ctorch\nbfloat16\n](X\x01\x00\x00\x00xK\x09eb"
    with pytest.raises(ReshardError, match="rewrites"):
        read_torch_file(write_pickle(tmp_path / "x.pt", b"\x80\x02" + poison + b"."), Sources())
    assert dtypes.dtype("bfloat16").itemsize == 2
    poison = b"cargparse\nNamespace\n(N}X\x08\x00\x00\x00__init__K\x01stb."
    read_torch_file(write_pickle(tmp_path / "x.pt", b"\x80\x02" + poison), Sources())
    assert argparse.Namespace(a=1).a == 1


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"(K\x04K\x04t", b"(K\x05K\x04t"),
        (b"K\x00(", b"K\x01("),
        (b"K\x10t", b"K\x11t"),
        (b"(K\x04K\x01t", b"(K\x05K\x01t"),
        (b"(K\x04K\x01t", b"(K\x04J\xff\xff\xff\xfft"),
        (b"(K\x04K\x01t", b"(K\x04G@\x00\x00\x00\x00\x00\x00\x00t"),
        (b"X\x01\x00\x00\x000", b"X\x01\x00\x00\x001"),
        (b"FloatStorage", b"ComplexFloatStorage"),
        (b"FloatStorage", b"Linear"),
    ],
)
def test_a_tensor_that_does_not_fit_its_storage(tmp_path: Path, old: bytes, new: bytes) -> None:
    assert old in TENSOR
    path = write_pickle(tmp_path / "x.pt", b"\x80\x02" + TENSOR.replace(old, new) + b".")
    with pytest.raises(ReshardError, match=r"x\.pt"):
        read_torch_file(path, Sources())


def rezip(source: Path, target: Path, change: Any, compression: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w", compression) as new:
        for name in old.namelist():
            content = change(name, old.read(name))
            if content is not None:
                new.writestr(name, content)
    return target


def test_foreign_files_are_named_for_what_they_are(tmp_path: Path) -> None:
    tensor = torch.arange(1000.0)
    good = saved(tmp_path / "good.pt", tensor)
    legacy = saved(tmp_path / "legacy.pt", tensor, _use_new_zipfile_serialization=False)
    lfs = tmp_path / "lfs.bin"
    lfs.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n")
    empty, text = tmp_path / "empty.pt", tmp_path / "text.pt"
    empty.write_bytes(b"")
    text.write_text("hello")
    big = rezip(good, tmp_path / "big.pt", lambda name, old: b"big" if name.endswith("byteorder") else old)
    packed = rezip(good, tmp_path / "packed.pt", lambda name, old: old, zipfile.ZIP_DEFLATED)
    short = rezip(good, tmp_path / "short.pt", lambda name, old: old[:100] if "data/0" in name else old)
    lost = rezip(good, tmp_path / "lost.pt", lambda name, old: None if name.endswith("data/0") else old)
    no_pickle = rezip(good, tmp_path / "zip.pt", lambda name, old: None if name.endswith(".pkl") else old)
    for path, message in {
        legacy: "torch before 1.6",
        lfs: "git lfs pull",
        empty: "an empty file",
        text: "not a file of torch.save",
        big: "not little-endian",
        packed: "compressed",
        short: "shorter than its pickle says",
        lost: "no member data/0",
        no_pickle: "no member data.pkl",
        tmp_path / "missing.pt": "cannot be opened",
        tmp_path: "not a regular file",
    }.items():
        with pytest.raises(ReshardError, match=message) as error:
            read_torch_file(path, Sources())
        assert str(path) in str(error.value)


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    content = {"a": torch.arange(500.0), "b": [torch.ones(3, dtype=torch.int8), argparse.Namespace(x=1)]}
    return saved(tmp_path_factory.mktemp("sample") / "sample.pt", content)


@QUICK
@given(st.data())
def test_truncation_anywhere_is_an_error(sample: Path, tmp_path: Path, data: st.DataObject) -> None:
    content = sample.read_bytes()
    path = tmp_path / "cut.pt"
    path.write_bytes(content[: data.draw(st.integers(0, len(content) - 1))])
    with pytest.raises(ReshardError):
        read_torch_file(path, Sources())


@QUICK
@given(st.data())
def test_damage_anywhere_is_an_error_or_harmless(sample: Path, tmp_path: Path, data: st.DataObject) -> None:
    content = bytearray(sample.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path / "damaged.pt"
    path.write_bytes(content)
    try:
        found = read_torch_file(path, Sources())
    except ReshardError:
        return
    assert found["a"].shape == (500,)
    assert found["a"].storage.offset + found["a"].storage.nbytes <= len(content)


@QUICK
@given(st.data())
def test_mutated_pickles_raise_nothing_but_our_error(sample: Path, data: st.DataObject) -> None:
    with zipfile.ZipFile(sample) as archive:
        pickled = bytearray(archive.read("sample/data.pkl"))
    start = data.draw(st.integers(0, len(pickled)))
    pickled[start : start + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    try:
        pickles.loads(bytes(pickled), "x.pt", persistent_load=lambda key: key)
    except ReshardError as error:
        assert "x.pt" in str(error)


def test_a_flipped_byte_in_the_pickle_is_noticed(sample: Path, tmp_path: Path) -> None:
    content = bytearray(sample.read_bytes())
    at = content.index(b"cpu")
    content[at] ^= 1
    path = tmp_path / "flipped.pt"
    path.write_bytes(content)
    with pytest.raises(ReshardError, match=r"the bytes of data\.pkl do not match"):
        read_torch_file(path, Sources())
