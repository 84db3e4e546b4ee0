"""docs/scale.md has the results of the simulation for its stated costs."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import scale
from bench.models import FP8_BLOCKS, QWEN2_5_3B, make
from reshard.formats.options import ConversionOptions
from reshard.planning import plan_conversion

PAGE = Path(__file__).parents[1] / "docs/scale.md"
SMALL = {**QWEN2_5_3B, "num_hidden_layers": 4, "num_key_value_heads": 8, "vocab_size": 65536}
COSTS = scale.Costs(copied=2, cast=3, dequantized=4, file=0, block=0, begun=0, reported=0, merged=0)


def test_the_page_has_the_costs_that_are_used() -> None:
    lines = PAGE.read_text().splitlines()
    assert [line for line in scale.constants() if line not in lines] == []


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name", [name if "Llama" in name else pytest.param(name, marks=pytest.mark.slow) for name in scale.MODELS]
)
def test_the_page_has_the_times_that_are_simulated(name: str, tmp_path: Path) -> None:
    stated = [line for line in PAGE.read_text().splitlines() if line.startswith(f"| {name} | ")]
    assert stated[1:] == [*scale.table(name, tmp_path), scale.makespans(name, tmp_path)]


@pytest.mark.parametrize("quantized", [False, True])
def test_what_bounds_a_conversion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quantized: bool) -> None:
    model = make(tmp_path / "model", {**SMALL, **(FP8_BLOCKS if quantized else {})}, sparse=True)
    options = ConversionOptions(to="megatron", tp=2, no_tokenizer=True)
    plan = plan_conversion(model, options)
    monkeypatch.setattr(scale, "STORAGE", (0.001, 1e6))
    slow, fast = scale.Simulation(plan, COSTS, scale.Planning(0, 0)).cells(1)
    blocks = [block for file in plan.files for block in file.blocks]
    written = sum(block.nbytes for block in blocks)
    read = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    assert slow.bound == "storage"
    # Rows of a row-parallel weight are read on both ranks, with the gaps: a tenth of this model.
    assert (written + read) / 1e6 * 0.99 < slow.seconds < (written + read) / 1e6 * 1.35
    largest = max(block.nbytes for block in blocks) / 1e9 * COSTS.copied
    assert (fast.bound, fast.seconds) == ("one part", pytest.approx(largest))
    (planning, _) = scale.Simulation(plan, COSTS, scale.Planning(0, 1e6)).cells(1)
    assert planning.bound == "planning"
    assert planning.seconds == pytest.approx(1e6 + slow.seconds)


def test_workers_take_their_share_and_then_what_others_have_left() -> None:
    assert scale.makespan([3, 2, 2, 1], 2) == 5
    assert scale.makespan([1, 1, 1, 9], 2) == 10
    assert scale.makespan([4, 1, 1, 1, 1, 1], 2) == 5
