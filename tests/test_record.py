"""A folder is checked against the digests that were taken while its bytes passed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

import reshard as api
from reshard.transfer import digests
from reshard.transfer.digests import Digest, digest_of
from tests.bad_input.damage import converted, cut, find, flip
from tests.commandline import listing, reshard


def expected(content: bytes, cell: int) -> str:
    parts = [xxhash.xxh3_128_digest(content[at : at + cell]) for at in range(0, len(content), cell)]
    return xxhash.xxh3_128_hexdigest(b"".join(parts))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_bytes_may_pass_in_any_order_and_some_not_at_all(tmp_path_factory, data) -> None:
    size = data.draw(st.sampled_from([0, 1, 99, 100, 101, 1000, 1234]))
    content = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8).tobytes()
    path = tmp_path_factory.mktemp("digest") / "file"
    path.write_bytes(content)
    cuts = sorted({0, size, *data.draw(st.lists(st.integers(0, size), max_size=12))})
    spans = data.draw(st.permutations(list(pairwise(cuts))))
    skipped = data.draw(st.integers(0, len(spans)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(digests, "CELL", 100)
        patch.setattr(digests, "SPAN", 300)
        digest = Digest(size)
        for begin, end in spans[skipped:]:
            digest.add(memoryview(content)[begin:end], begin)
        if size > 10:
            path.write_bytes(content[:5] + b"late" + content[9:])
            digest.drop(5, 4)
        found = digest.finish(path, lambda: False)
        assert found == digest_of(path, lambda count: None, lambda: False)
    assert found == expected(path.read_bytes(), 100)


@pytest.fixture
def written(hf_model: Callable[..., Path], tmp_path: Path) -> Path:
    converted(hf_model("qwen3"), tmp_path / "dst", "--to", "megatron", "--tp", 4)
    return tmp_path / "dst"


def spoil(folder: Path, how: str) -> dict[str, str]:
    """Change a folder; what `verify` says of its files."""
    first, second = find(folder, "__1_0.distcp"), find(folder, "__2_0.distcp")
    if how == "flipped":
        flip(first, first.stat().st_size // 2)
        return {"release/__1_0.distcp": "has other bytes than were written"}
    if how == "swapped":
        first.rename(folder / "aside")
        second.rename(first)
        (folder / "aside").rename(second)
        return {
            "release/__1_0.distcp": "has the content of release/__2_0.distcp",
            "release/__2_0.distcp": "has the content of release/__1_0.distcp",
        }
    if how == "missing":
        first.unlink()
        return {"release/__1_0.distcp": "is missing"}
    if how == "cut":
        size = first.stat().st_size
        cut(first, 0.5)
        return {"release/__1_0.distcp": f"has {size // 2:,} bytes and not {size:,}"}
    (folder / "release" / "alien").touch()
    return {"release/alien": "was not written with the others"}


@pytest.mark.parametrize("how", ["flipped", "swapped", "missing", "cut", "foreign"])
def test_whatever_changed_is_found_by_name_without_the_source(written: Path, how: str) -> None:
    result = reshard("verify", written)
    assert result.code == 0 and result.out.startswith("unchanged: 13 files, "), result
    assert api.verify(written)
    faults = spoil(written, how)
    if how == "swapped":
        assert find(written, "__1_0.distcp").stat().st_size == find(written, "__2_0.distcp").stat().st_size
    found = reshard("verify", written, "--json")
    assert found.code == 1 and found.json["equal"] is False
    assert {fault["file"]: fault["message"] for fault in found.json["faults"]} == faults
    assert all(f"{file} {message}\n" in reshard("verify", written).out for file, message in faults.items())


def test_a_folder_without_a_record_is_told(written: Path) -> None:
    for content in (
        None,
        "[]",
        '{"files": ["config.json"]}',
        '{"files": {"../x": {"bytes": 1, "digest": ""}}}',
    ):
        (written / "reshard.json").unlink(missing_ok=True)
        if content:
            (written / "reshard.json").write_text(content)
        result = reshard("verify", written)
        assert result.code == 2 and "Traceback" not in result.err
    result = reshard("verify", written, "--logits")
    assert result.code == 2 and "name B" in result.err


def test_a_disk_that_gives_other_bytes_is_found_before_anything_is_published(
    hf_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    src, dst, pwrite = Path(shutil.copytree(hf_model("qwen3"), tmp_path / "src")), tmp_path / "dst", os.pwrite
    before = listing(tmp_path)

    def faulty(descriptor: int, data: Any, offset: int) -> int:
        content = bytearray(data)
        content[len(content) // 2] ^= len(content) > 50_000
        return pwrite(descriptor, content, offset)

    monkeypatch.setattr(os, "pwrite", faulty)
    result = reshard("convert", src, dst, "--to", "huggingface", "--verify")
    assert result.code == 2 and "the disk gives other bytes than were written" in result.err
    assert "model.safetensors" in result.err and listing(tmp_path) == before
    assert reshard("convert", src, dst, "--to", "huggingface").code == 0
    assert reshard("verify", dst).code == 1
    monkeypatch.undo()
    assert reshard("convert", src, dst, "--to", "huggingface", "--verify", "--overwrite").code == 0
    assert reshard("verify", dst).code == 0
