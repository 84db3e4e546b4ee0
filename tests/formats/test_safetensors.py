"""The tensors of a safetensors file follow one another, as the safetensors library demands."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors import SafetensorError, safe_open

from reshard.base.errors import ReshardError
from reshard.containers.safetensors import read_tensors
from reshard.transfer.source_files import Sources


def file_of(path: Path, **places: tuple[int, int]) -> Path:
    """A file of tensors of two float32 each, at these places of its data."""
    entries = {name: {"dtype": "F32", "shape": [2], "data_offsets": place} for name, place in places.items()}
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    data = bytes(max(end for _, end in places.values()))
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)
    return path


def test_tensors_that_follow_one_another_are_read(tmp_path: Path) -> None:
    path = file_of(tmp_path / "a.safetensors", a=(0, 8), b=(8, 16))
    assert list(read_tensors(path, Sources())) == ["a", "b"]


@pytest.mark.parametrize("second", [(4, 12), (12, 20), (0, 8)], ids=["overlap", "gap", "the same place"])
def test_tensors_that_overlap_or_leave_a_gap_are_refused(second: tuple[int, int], tmp_path: Path) -> None:
    path = file_of(tmp_path / "a.safetensors", a=(0, 8), b=second)
    with pytest.raises(SafetensorError):
        safe_open(path, "np")
    with pytest.raises(ReshardError) as refused:
        read_tensors(path, Sources())
    assert {problem.code for problem in refused.value.problems} == {"safetensors-entry-inconsistent"}
