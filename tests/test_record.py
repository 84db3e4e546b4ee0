"""A folder is checked against digests computed while its bytes were written."""

from __future__ import annotations

import json
import os
import shutil
import zlib
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
from reshard.transfer import digests, ledger
from reshard.transfer.digests import FileDigest, digest_of
from tests.bad_input.damage import converted, cut, find, flip
from tests.commandline import listing, reshard


def expected(content: bytes, cell: int) -> str:
    parts = [xxhash.xxh3_128_digest(content[at : at + cell]) for at in range(0, len(content), cell)]
    return xxhash.xxh3_128_hexdigest(b"".join(parts))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_bytes_may_pass_in_any_order_and_some_change_at_the_end(tmp_path_factory, data) -> None:
    size = data.draw(st.sampled_from([0, 1, 99, 100, 101, 1000, 1234]))
    content = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8).tobytes()
    path = tmp_path_factory.mktemp("digest") / "file"
    path.write_bytes(content)
    cuts = sorted({0, size, *data.draw(st.lists(st.integers(0, size), max_size=12))})
    spans = data.draw(st.permutations(list(pairwise(cuts))))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(digests, "CELL_BYTES", 100)
        patch.setattr(digests, "READ_BYTES", 300)
        digest = FileDigest(size)
        for begin, end in spans:
            digest.add(memoryview(content)[begin:end], begin)
        at = data.draw(st.integers(0, size - 4)) if size > 10 else None
        if at is not None:
            digest.patch(path, [(at, b"late")])
            path.write_bytes(content[:at] + b"late" + content[at + 4 :])
        assert digest.finish() == digest_of(path)
        assert digest.finish() == expected(path.read_bytes(), 100)


def test_no_digest_is_made_of_what_the_disk_returns(tmp_path: Path) -> None:
    """Only of what was written: otherwise a damaged file would match its own record."""
    path, content = tmp_path / "file", b"w" * 300
    path.write_bytes(content)
    digest = FileDigest(300)
    digest.add(memoryview(content)[:200], 0)
    with pytest.raises(RuntimeError, match="not added to its digest"):
        digest.finish()
    digest.add(memoryview(content)[200:], 200)
    flip(path, 77)
    with pytest.raises(OSError, match="other bytes than were written"):
        digest.patch(path, [(7, b"late")])


@pytest.fixture
def written(hf_model: Callable[..., Path], tmp_path: Path) -> Path:
    converted(hf_model("qwen3"), tmp_path / "dst", "--to", "megatron", "--tp", 4)
    return tmp_path / "dst"


def sources_of(written: Path) -> dict[str, dict[str, Any]]:
    return {each["path"]: each for each in json.loads((written / "reshard.json").read_text())["sources"]}


def test_each_source_has_the_crc32_of_the_whole_file(hf_model: Callable[..., Path], tmp_path: Path) -> None:
    src = hf_model("qwen3")
    converted(src, tmp_path / "mc", "--to", "megatron", "--tp", 4)
    converted(tmp_path / "mc", tmp_path / "hf")
    for folder, written in ((src, tmp_path / "mc"), (tmp_path / "mc", tmp_path / "hf")):
        found = sources_of(written)
        assert len(found) > 5 and any(name.endswith((".distcp", ".safetensors")) for name in found)
        for name, each in found.items():
            content = (folder / name).read_bytes()
            assert (each["read"], each["bytes"]) == (len(content), len(content)) and "ranges" not in each
            assert each["crc32"] == f"{zlib.crc32(content):08x}", name
    converted(src, tmp_path / "unchecked", "--to", "megatron", "--no-checksum")
    assert not any("crc32" in each for each in sources_of(tmp_path / "unchecked").values())


def test_a_source_that_was_read_in_part_says_so(
    hf_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger, "MAX_UNREAD_BYTES", 0)
    monkeypatch.setattr(ledger, "MAX_UNREAD_DIVISOR", 1 << 40)
    src = hf_model("qwen3")
    converted(src, tmp_path / "mc", "--to", "megatron", "--tp", 4)
    converted(tmp_path / "mc", tmp_path / "hf")
    content = (src / "model.safetensors").read_bytes()
    header = 8 + int.from_bytes(content[:8], "little")
    found = sources_of(tmp_path / "mc")["model.safetensors"]
    assert found["ranges"] == [[header, len(content)]] and found["read"] == len(content) - header
    assert found["crc32"] == f"{zlib.crc32(content[header:]):08x}"
    for name, each in sources_of(tmp_path / "hf").items():
        content = (tmp_path / "mc" / name).read_bytes()
        ranges = each.get("ranges", [[0, len(content)]])
        assert each["read"] == sum(end - begin for begin, end in ranges)
        assert each["crc32"] == f"{zlib.crc32(b''.join(content[b:e] for b, e in ranges)):08x}", name
        assert not name.endswith(".distcp") or 0.5 < each["read"] / each["bytes"] < 1


def spoil(folder: Path, how: str) -> dict[str, str]:
    """Change a folder, and return the messages of `verify` about its files."""
    first, second = find(folder, "__1_0.distcp"), find(folder, "__2_0.distcp")
    if how == "flipped":
        flip(first, first.stat().st_size // 2)
        return {"release/__1_0.distcp": "has changed bytes"}
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
    if how == "edited":
        record = folder / "reshard.json"
        record.write_bytes(record.read_bytes().replace(b'"tp": 4', b'"tp": 2'))
        return {"reshard.json": "was modified after it was written"}
    if how == "all":
        return {
            name: told
            for each in ("edited", "foreign", "missing")
            for name, told in spoil(folder, each).items()
        }
    (folder / "release" / "alien").touch()
    return {"release/alien": "is not part of the output"}


@pytest.mark.parametrize("how", ["flipped", "swapped", "missing", "cut", "foreign", "edited", "all"])
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
    assert result.code == 2 and "pass the other one too" in result.err


def test_a_read_that_gives_fewer_bytes_is_no_other_content(
    hf_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """File servers and signals can cause short reads: a read may return fewer bytes than requested."""
    pread, preadv = os.pread, os.preadv
    monkeypatch.setattr(os, "pread", lambda fd, size, offset: pread(fd, min(size, 1000), offset))
    monkeypatch.setattr(os, "preadv", lambda fd, parts, offset: preadv(fd, [parts[0][:1000]], offset))
    src, dst, back = hf_model("qwen3"), tmp_path / "dst", tmp_path / "back"
    assert reshard("convert", src, dst, "--to", "megatron-legacy", "--tp", "2", "--verify").code == 0
    assert reshard("verify", dst).code == 0
    assert reshard("convert", dst, back).code == 0
    monkeypatch.undo()
    assert reshard("verify", dst).code == 0 and reshard("verify", src, back).code == 0


def test_a_record_of_another_kind_is_not_taken_for_damage(written: Path) -> None:
    path = written / "reshard.json"
    record = json.loads(path.read_text())
    path.write_text(json.dumps({**record, "digest": "BLAKE3", "reshard": "9.0"}))
    result = reshard("verify", written)
    assert result.code == 2 and "unknown kind of digest" in result.err
    assert "BLAKE3, written by reshard 9.0" in result.err and "Traceback" not in result.err


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
    assert result.code == 2 and "the disk returns different bytes from those written" in result.err
    assert "model.safetensors" in result.err and listing(tmp_path) == before
    assert reshard("convert", src, dst, "--to", "huggingface").code == 0
    assert reshard("verify", dst).code == 1
    monkeypatch.undo()
    assert reshard("convert", src, dst, "--to", "huggingface", "--verify", "--overwrite").code == 0
    assert reshard("verify", dst).code == 0
