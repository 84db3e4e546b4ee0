"""CRC32s of byte ranges: combined in any order, in little memory, and reported as lost beyond that."""

from __future__ import annotations

import json
import pickle
import random
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
from hypothesis import given
from hypothesis import strategies as st

import reshard as api
from reshard.algebra.storage import Storage
from reshard.transfer import ledger, memory_budget
from reshard.transfer.journal import Journal, OutputIdentity
from reshard.transfer.ledger import BYTES_PER_RANGE, ByteRanges, Ledger, join

DATA = random.Random(0).randbytes(400)
IDENTITY = OutputIdentity("this version", "these sources", "these options")


def as_range(begin: int, end: int) -> tuple[int, int, int]:
    return begin, end, crc32(DATA[begin:end])


@given(st.lists(st.tuples(st.integers(0, 399), st.integers(1, 60)), max_size=40))
def test_ranges_come_in_any_order(spans: list[tuple[int, int]]) -> None:
    """Compared with a set of all bytes: adjacent ranges merge, with the right CRC32, and no byte is in two ranges."""
    ranges, there = ByteRanges(), set[int]()
    for begin, length in spans:
        end = min(begin + length, len(DATA))
        gaps = [at for first, last in ranges.gaps(begin, end) for at in range(first, last)]
        assert gaps == [at for at in range(begin, end) if at not in there]
        is_new = not there & set(range(begin, end))
        assert ranges.add(*as_range(begin, end)) == is_new
        there |= set(range(begin, end)) if is_new else set()
    edges = [at for at in range(len(DATA) + 1) if (at in there) != (at - 1 in there)]
    runs = list(zip(edges[::2], edges[1::2], strict=True))
    assert list(ranges) == [as_range(*run) for run in runs] and ranges.nbytes == len(there)
    assert ranges.checksum() == crc32(bytes(DATA[at] for at in sorted(there)))
    for begin, end in runs:
        assert ranges.checksum_of(begin, end) == crc32(DATA[begin:end])
        assert ranges.checksum_of(begin, end + 1) is None
    assert pickle.loads(pickle.dumps(ranges)) == ranges == ByteRanges(ranges.as_list())


def rows(count: int, length: int = 4, step: int = 16) -> Iterator[tuple[int, memoryview]]:
    """The reads of a row-parallel weight by one rank: a part of each row."""
    return ((at * step, memoryview(DATA)[:length]) for at in range(count))


def test_a_million_ranges_take_little() -> None:
    """A rank of Llama-3.1-405B at TP8 has read two million when the next one begins."""
    found, count = Ledger(every=True), 4_000
    storage = Storage("weights", 0, 1 << 40)
    tracemalloc.start()
    for begin, data in rows(count):
        found.record(storage, [(begin, data)])
    taken = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert len(found.passed["weights"]) == count and taken < 1.3 * count * BYTES_PER_RANGE + 10_000


@pytest.fixture
def source(tmp_path: Path) -> Storage:
    """A file with a CRC32 of its content after a header."""
    path = tmp_path / "source"
    path.write_bytes(b"head" + DATA)
    return Storage(str(path), 4, len(DATA), crc32(DATA))


@pytest.mark.parametrize("damaged", [False, True])
def test_of_too_many_those_of_one_file_are_lost(source: Storage, damaged: bool) -> None:
    """Others are kept; and a checksum recorded in the file is compared, though the file must be read again for that."""
    found, other = Ledger(every=True, most=8), Storage("other", 0, 100)
    if damaged:
        content = bytearray(Path(source.path).read_bytes())
        content[200] ^= 1
        Path(source.path).write_bytes(content)
    content = Path(source.path).read_bytes()[4:]
    told = found.record(other, [(0, memoryview(DATA)[:10])])
    for begin in range(0, 400, 40):
        join(told, found.record(source, [(begin, memoryview(content)[begin : begin + 10])]))
    assert {path: ranges.lost for path, ranges in found.passed.items()} == {source.path: True, "other": False}
    assert told == found.passed
    assert found.settle() == ([source] if damaged else [])
    found.complete({source.path: 404})
    assert found.passed[source.path].lost and list(found.passed["other"]) == [as_range(0, 10)]


def test_gaps_are_read_in_batches(source: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "READ_BYTES", 32)
    found = Ledger()
    for begin in range(0, 400, 20):
        found.record(source, [(begin, memoryview(DATA)[begin : begin + 7])])
    assert found.settle() == [] and found.is_right(source)


@pytest.mark.parametrize("lost_by", ["worker", "merging"])
def test_what_a_worker_lost_is_lost(source: Storage, lost_by: str) -> None:
    most = {"worker": (8, 2), "merging": (2, 8)}[lost_by]
    whole, part = Ledger(every=True, most=most[0]), Ledger(every=True, most=most[1])
    whole.record(source, [(100, memoryview(DATA)[100:110])])
    for begin in (0, 40, 80):
        part.record(source, [(begin, memoryview(DATA)[begin : begin + 10])])
    new = whole.merge(part.passed, {source.path: ByteRanges(part.passed[source.path].as_list())})
    assert new[source.path].lost and whole.passed[source.path].lost


def test_a_journal_keeps_what_is_lost_and_holds_no_second_copy(tmp_path: Path) -> None:
    def opened() -> Journal:
        found = Journal(IDENTITY)
        found.open(tmp_path / "journal", tmp_path, {}, {})
        return found

    first = opened()
    first.add({"passed": {"a": ByteRanges([as_range(0, 10)]), "b": ByteRanges([as_range(0, 10)])}})
    first.add({"passed": {"a": ByteRanges(None)}})
    first.add({"passed": {"a": ByteRanges([as_range(20, 30)])}})  # of a thread that was slower
    assert not first.progress.passed
    first.close()
    again = opened()
    again.close()
    assert again.progress.passed["a"].lost and list(again.progress.passed["b"]) == [as_range(0, 10)]


def test_the_record_says_nothing_of_a_file_whose_ranges_are_lost(
    hf_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The output is the same; files read in few pieces keep their CRC32."""

    def made(name: str) -> dict[str, Any]:
        out = tmp_path / name
        api.convert(hf_model("qwen3"), out, to="megatron-legacy", tp=4, workers=1)
        found: dict[str, Any] = json.loads((out / "reshard.json").read_text())
        return found

    kept = made("kept")
    monkeypatch.setattr(memory_budget, "LEDGER_BYTES", 6 * BYTES_PER_RANGE)
    monkeypatch.setattr(memory_budget, "LEAST_LEDGER", 6 * BYTES_PER_RANGE)
    lost = made("lost")
    assert kept["files"] == lost["files"]
    kept, lost = ({each["path"]: each for each in record["sources"]} for record in (kept, lost))
    assert kept.keys() == lost.keys() and all("crc32" in each for each in kept.values())
    without = {name for name, each in lost.items() if "crc32" not in each}
    assert without == {"model.safetensors"}
    assert lost["model.safetensors"].keys().isdisjoint({"read", "ranges"})
