"""Metadata of the real torch and megatron-core is read; they load reshard's."""

from __future__ import annotations

import dataclasses
import pickle
import sys
import types
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint import FileSystemReader, metadata
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from reshard.algebra import dtypes
from reshard.algebra.storage import StoredTensor
from reshard.base.errors import ReshardError
from reshard.containers.dcp_metadata import DcpChunk, DcpMetadata, DcpTensor, read_metadata, write_metadata
from reshard.containers.torchfiles.read import ChunkReader, read_torch_file
from reshard.containers.torchfiles.write import NewTensor, image_bytes, layout_torch_file
from reshard.transfer.source_files import Sources
from tests.judges import of_type

QUICK = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def elements(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def raw(stored: StoredTensor) -> bytes:
    with open(stored.storage.path, "rb") as file:
        file.seek(stored.storage.offset)
        content = file.read(stored.storage.nbytes)
    assert zlib.crc32(content) == stored.storage.crc32
    return content


@pytest.fixture(scope="module")
def genuine(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A folder that `dcp.save` wrote, and the saved values, by flattened key."""
    folder = tmp_path_factory.mktemp("dcp")
    tensors = {name: of_type(torch.arange(6).reshape(2, 3), name) for name in dtypes.BY_NAME}
    state = {"model": tensors, "scalar": torch.tensor(1.5), "step": 3, "options": {"lr": 0.1}}
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    flat = {f"model.{name}": tensor for name, tensor in tensors.items()}
    return folder, {**flat, "scalar": state["scalar"], "step": 3, "options.lr": 0.1}


def test_reads_what_dcp_save_wrote(genuine: tuple[Path, dict[str, Any]]) -> None:
    folder, state = genuine
    found = read_metadata(folder / ".metadata", Sources())
    assert found.tensors.keys() | found.objects.keys() == state.keys()
    assert found.planner_data is not None
    assert found.planner_data["model.int64"] == ("model", "int64")
    reader = ChunkReader(Sources())
    for key, tensor in found.tensors.items():
        assert f"torch.{tensor.dtype}" == str(state[key].dtype) and tensor.shape == tuple(state[key].shape)
        (chunk,) = tensor.chunks
        assert chunk.offsets == (0,) * len(tensor.shape) and chunk.sizes == tensor.shape
        stored = reader.read(chunk.file, chunk.offset, chunk.length, tensor.dtype, chunk.sizes)
        assert raw(stored) == elements(state[key])
    reader.close()
    for key, entry in found.objects.items():
        assert read_torch_file(entry.file, Sources(), entry.offset, entry.length) == state[key]


def test_writes_the_same_tables_as_torch(genuine: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = genuine
    theirs = pickle.loads((folder / ".metadata").read_bytes())
    found = read_metadata(folder / ".metadata", Sources())
    for chunks in [*(tensor.chunks for tensor in found.tensors.values())]:
        chunks[:] = [chunk._replace(file=Path(chunk.file).name) for chunk in chunks]
    found.objects = {key: chunk._replace(file=Path(chunk.file).name) for key, chunk in found.objects.items()}
    ours = pickle.loads(write_metadata(found))
    assert type(ours) is metadata.Metadata
    assert ours.state_dict_metadata == theirs.state_dict_metadata
    assert ours.storage_data == theirs.storage_data
    assert ours.planner_data == theirs.planner_data


def written(folder: Path) -> dict[str, torch.Tensor]:
    """Write a checkpoint of two sharded tensors and an object by hand; returns the tensors."""
    tensors = {
        "layers.weight": torch.arange(2 * 6 * 4, dtype=torch.bfloat16).reshape(2, 6, 4),
        "norm": torch.linspace(0, 1, 5),
    }
    boxes = {
        "layers.weight": [((i, j, 0), (1, 3, 4)) for i in range(2) for j in (0, 3)],
        "norm": [((0,), (5,))],
    }
    files: dict[str, bytearray] = {"__0_0.distcp": bytearray(), "__1_0.distcp": bytearray()}
    result = DcpMetadata({}, {})
    for key, tensor in tensors.items():
        dtype = dtypes.dtype(str(tensor.dtype))
        result.tensors[key] = DcpTensor(dtype, tuple(tensor.shape), [])
        for number, (low, sizes) in enumerate(boxes[key]):
            part = elements(tensor[tuple(slice(a, a + n) for a, n in zip(low, sizes, strict=True))])
            image = layout_torch_file(NewTensor(None, dtype, sizes))
            name = f"__{number % 2}_0.distcp"
            begin = len(files[name])
            files[name] += bytes(image.size)
            for offset, literal in image.literals:
                files[name][begin + offset : begin + offset + len(literal)] = literal
            (slot,) = image.slots
            files[name][begin + slot.offset : begin + slot.offset + slot.nbytes] = part
            for at in slot.crc_at:
                files[name][begin + at : begin + at + 4] = zlib.crc32(part).to_bytes(4, "little")
            result.tensors[key].chunks.append(DcpChunk(low, sizes, name, begin, image.size))
    image = layout_torch_file([{"step": 3}])  # megatron-core wraps an object in a list
    result.objects["state/shard_0_1"] = DcpChunk(
        (), (), "__0_0.distcp", len(files["__0_0.distcp"]), image.size
    )
    files["__0_0.distcp"] += b"".join(literal for _, literal in image.literals)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    (folder / ".metadata").write_bytes(write_metadata(result))
    return tensors


def test_torch_loads_what_we_wrote(tmp_path: Path) -> None:
    tensors = written(tmp_path)
    wanted: dict[str, Any] = {key: torch.zeros_like(tensor) for key, tensor in tensors.items()}
    wanted["state/shard_0_1"] = None
    dcp.load(wanted, storage_reader=FileSystemReader(tmp_path), no_dist=True)
    assert wanted["state/shard_0_1"] == [{"step": 3}]
    for key, tensor in tensors.items():
        assert torch.equal(wanted[key], tensor)
    everything: dict[str, Any] = {}
    planner = _EmptyStateDictLoadPlanner()
    _load_state_dict(everything, storage_reader=FileSystemReader(tmp_path), planner=planner, no_dist=True)
    assert everything.keys() == wanted.keys()


def test_megatron_core_loads_what_we_wrote(tmp_path: Path) -> None:
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor

    tensors = written(tmp_path)
    (tmp_path / "metadata.json").write_text(
        '{"sharded_backend": "torch_dist", "sharded_backend_version": 1,'
        ' "common_backend": "torch", "common_backend_version": 1}'
    )
    (tmp_path / "common.pt").write_bytes(image_bytes(layout_torch_file({"iteration": 5})))
    wanted = {
        key: ShardedTensor.from_rank_offsets(key, torch.zeros_like(tensor)) for key, tensor in tensors.items()
    }
    state: Any = ShardedObject("state", None, (1,), (0,))
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        found = dist_checkpointing.load({**wanted, "state": state}, str(tmp_path))
    finally:
        torch.distributed.destroy_process_group()
    assert found["iteration"] == 5 and found["state"] == {"step": 3}
    for key, tensor in tensors.items():
        assert torch.equal(found[key], tensor)


def test_metadata_of_other_versions_is_read(genuine: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    """Older torch lacks fields, newer has more; megatron-core's save plans name its own classes."""
    folder, _ = genuine
    for file in folder.glob("*.distcp"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    content = pickle.loads((folder / ".metadata").read_bytes())
    name = "megatron.core.dist_checkpointing.strategies.torch"
    module = types.ModuleType(name)
    module.MCoreMetadata = type("MCoreMetadata", (), {"__module__": name})
    module.MCoreSavePlan = type("MCoreSavePlan", (), {"__module__": name})
    real = sys.modules.get(name)
    sys.modules[name] = module
    try:
        plan = module.MCoreSavePlan()
        plan.items = [metadata.MetadataIndex("x", (0,), 1)]
        old = module.MCoreMetadata()
        old.__dict__.update(content.__dict__, all_local_plans=[plan], planner_data=None)
        for field in ("storage_meta", "version"):
            del old.__dict__[field]
        (tmp_path / ".metadata").write_bytes(pickle.dumps(old))
    finally:
        sys.modules.pop(name)
        if real is not None:
            sys.modules[name] = real
    found = read_metadata(tmp_path / ".metadata", Sources())
    assert found.tensors.keys() == read_metadata(folder / ".metadata", Sources()).tensors.keys()
    assert found.planner_data is None


def test_missing_and_short_files_are_all_listed(tmp_path: Path) -> None:
    written(tmp_path)
    (tmp_path / "__1_0.distcp").unlink()
    short = tmp_path / "__0_0.distcp"
    short.write_bytes(short.read_bytes()[:-1])
    with pytest.raises(ReshardError) as error:
        read_metadata(tmp_path / ".metadata", Sources())
    assert [Path(problem.file or "").name for problem in error.value.problems] == [
        "__0_0.distcp",
        "__1_0.distcp",
    ]
    assert error.value.problems[0].message == "a file of the checkpoint was cut short"
    assert error.value.problems[1].message == "a file of the checkpoint is missing"


def test_a_missing_metadata_file_says_how_it_gets_lost(tmp_path: Path) -> None:
    with pytest.raises(ReshardError, match=r"cp -r FOLDER"):
        read_metadata(tmp_path / ".metadata", Sources())


@QUICK
@given(st.data())
def test_truncated_metadata_is_an_error(
    genuine: tuple[Path, dict[str, Any]], tmp_path: Path, data: st.DataObject
) -> None:
    content = (genuine[0] / ".metadata").read_bytes()
    path = tmp_path / ".metadata"
    path.write_bytes(content[: data.draw(st.integers(0, len(content) - 1))])
    with pytest.raises(ReshardError):
        read_metadata(path, Sources())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda info: dataclasses.replace(info, relative_path="../x"), "not below the folder"),
        (lambda info: dataclasses.replace(info, relative_path="/etc/passwd"), "not below the folder"),
        (lambda info: dataclasses.replace(info, offset=-1), "sizes are expected"),
        (lambda info: dataclasses.replace(info, length="9"), "sizes are expected"),
        (lambda info: dataclasses.replace(info, length=1 << 60), "cut short"),
        (lambda info: dataclasses.replace(info, transform_descriptors=["zstd"]), "stored transformed"),
        (lambda info: None, "does not locate a chunk"),
    ],
)
def test_places_that_cannot_be(
    genuine: tuple[Path, dict[str, Any]], tmp_path: Path, change: Any, message: str
) -> None:
    for file in genuine[0].glob("*.distcp"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    content = pickle.loads((genuine[0] / ".metadata").read_bytes())
    index = metadata.MetadataIndex("model.int64", (0, 0))
    content.storage_data[index] = change(content.storage_data[index])
    (tmp_path / ".metadata").write_bytes(pickle.dumps(content))
    with pytest.raises(ReshardError, match=message):
        read_metadata(tmp_path / ".metadata", Sources())


def test_tables_that_disagree(genuine: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    for file in genuine[0].glob("*.distcp"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    content = pickle.loads((genuine[0] / ".metadata").read_bytes())
    del content.storage_data[metadata.MetadataIndex("model.int64", (0, 0))]
    del content.storage_data[metadata.MetadataIndex("step")]
    (tmp_path / ".metadata").write_bytes(pickle.dumps(content))
    with pytest.raises(ReshardError) as error:
        read_metadata(tmp_path / ".metadata", Sources())
    assert {problem.tensor for problem in error.value.problems} == {"model.int64", "step"}
    content.state_dict_metadata["model.int32"].chunks[0].sizes = torch.Size([2, 4])
    (tmp_path / ".metadata").write_bytes(pickle.dumps(content))
    with pytest.raises(ReshardError, match="outside the tensor's shape"):
        read_metadata(tmp_path / ".metadata", Sources())


def test_a_hostile_metadata_file_is_refused(tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    (tmp_path / ".metadata").write_bytes(
        b"cposix\nsystem\n(X%c\x00\x00\x00touch %btR." % (6 + len(str(trap)), str(trap).encode())
    )
    with pytest.raises(ReshardError, match=r"refused to load posix\.system"):
        read_metadata(tmp_path / ".metadata", Sources())
    assert not trap.exists()


def test_every_record_is_a_class_of_torch(tmp_path: Path) -> None:
    written(tmp_path)
    found = FileSystemReader(tmp_path).read_metadata()
    infos = found.storage_data.values()
    assert all(type(info) is _StorageInfo and info.transform_descriptors is None for info in infos)
    assert sum(info.length for info in infos) == sum(
        file.stat().st_size for file in tmp_path.glob("*.distcp")
    )
    entry = found.state_dict_metadata["layers.weight"]
    assert entry.properties == metadata.TensorProperties(torch.bfloat16)
    assert type(entry.size) is torch.Size and type(entry.chunks[0].offsets) is torch.Size
