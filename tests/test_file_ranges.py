"""Any range of a planned file, computed: the same bytes that `convert` writes, for as few bytes read."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import reshard
from reshard.base.errors import ReshardError
from reshard.formats.options import ConversionOptions
from reshard.planning import plan_conversion
from reshard.transfer.file_ranges import FileRanges
from reshard.transfer.memory_budget import shared
from reshard.transfer.plan import Plan

SMALL = {"to": "huggingface", "max_shard_size": "300KB", "no_tokenizer": True}


def opened(source: Path, **options: object) -> tuple[Plan, FileRanges]:
    """The plan of a conversion to a Hugging Face folder, and ranges of its files."""
    plan = plan_conversion(source, replace(ConversionOptions(), **{**SMALL, **options}))
    return plan, FileRanges(plan, shared(2, 64 << 20, plan.need, plan.sources.paths))


def read(ranges: FileRanges, path: str, begin: int, end: int) -> tuple[bytes, int]:
    """A range of a file, and the bytes that were read for it."""
    parts = ranges.parts(path, begin, end)
    windows = [part.read(window) for part in parts for window in part.windows()]
    return b"".join(data for data, _ in windows), sum(nbytes for _, nbytes in windows)


LAYOUTS = {
    "megatron": {"to": "megatron", "tp": 2, "pp": 2, "ep": 2, "etp": 1},
    "rank files": {"to": "megatron-legacy", "tp": 2, "pp": 2, "ep": 2, "etp": 1},
    "fsdp": {"to": "fsdp-ranks", "dp": 4},
    "mlx": {"to": "mlx"},
}


@pytest.fixture(scope="module")
def moe(hf_model: Callable[..., Path]) -> Path:
    return hf_model("qwen3_moe")


@pytest.fixture(scope="module", params=LAYOUTS)
def source(request: pytest.FixtureRequest, moe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ranges") / "run"
    reshard.convert(moe, path, no_tokenizer=True, **LAYOUTS[request.param])
    return path


@pytest.mark.parametrize("options", [{}, {"dtype": "float16"}, {"quantize": "fp8"}], ids=str)
def test_ranges_are_what_convert_writes(source: Path, options: dict[str, str], tmp_path: Path) -> None:
    plan, ranges = opened(source, **options)
    reshard.convert(source, tmp_path / "out", **{**SMALL, **options})
    chosen = random.Random(0)
    for file in (each for each in plan.files if each.path != "reshard.json"):
        written = (tmp_path / "out" / file.path).read_bytes()
        assert read(ranges, file.path, 0, file.size)[0] == written
        for _ in range(30):
            begin = chosen.randrange(file.size)
            end = min(file.size, begin + chosen.choice([1, 2, 7, 1000, 100_000]))
            assert read(ranges, file.path, begin, end)[0] == written[begin:end]


def test_ranges_cost_no_more_reads_than_the_file(source: Path) -> None:
    plan, ranges = opened(source)
    file = max(plan.files, key=lambda each: each.size)
    whole = read(ranges, file.path, 0, file.size)[1]
    places = [file.size * part // 16 for part in range(17)]
    parts = sum(read(ranges, file.path, *pair)[1] for pair in itertools.pairwise(places))
    assert whole <= file.size
    assert parts <= whole + 16 * 16


def test_a_source_that_changes_ends_the_answer(moe: Path, tmp_path: Path) -> None:
    reshard.convert(moe, tmp_path / "run", to="megatron", no_tokenizer=True)
    plan, ranges = opened(tmp_path / "run")
    file = max(plan.files, key=lambda each: each.size)
    first, *_, last = ranges.parts(file.path, 0, file.size)[0].windows() * 2
    (part,) = ranges.parts(file.path, 0, file.size)[:1]
    part.windows()
    part.read(first)
    for each in (tmp_path / "run").rglob("*.distcp"):
        os.utime(each, ns=(1, 1))
    with pytest.raises(ReshardError, match="changed while it was read"):
        part.read(last)


def test_damage_is_noticed_before_the_last_bytes(moe: Path, tmp_path: Path) -> None:
    reshard.convert(moe, tmp_path / "run", to="megatron", no_tokenizer=True)
    storages = sorted((tmp_path / "run").rglob("*.distcp"))
    content = bytearray(storages[0].read_bytes())
    content[len(content) // 2] ^= 1
    storages[0].write_bytes(content)
    plan, ranges = opened(tmp_path / "run")
    with pytest.raises(ReshardError, match="changed since they were written"):
        for file in plan.files:
            read(ranges, file.path, 0, file.size)


def test_a_value_that_becomes_infinite_is_not_handed_out(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    save_file({"weight": np.full((4, 4), 1e30, np.float32)}, tmp_path / "model/model.safetensors")
    (tmp_path / "model/config.json").write_text('{"model_type": "nobody_has_this"}')
    plan, ranges = opened(tmp_path / "model", dtype="float16")
    with pytest.raises(ReshardError, match="infinite"):
        read(ranges, "model.safetensors", 0, plan.files[0].size)


def test_a_closed_file_is_opened_again(source: Path) -> None:
    plan, ranges = opened(source)
    file = max(plan.files, key=lambda each: each.size)
    before = read(ranges, file.path, 0, 5000)
    ranges.close()
    assert read(ranges, file.path, 0, 5000) == before
