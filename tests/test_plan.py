"""Plans: every element is copied exactly once, and models far larger than memory are planned from headers."""

from __future__ import annotations

import gc
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from bench.models import DEEPSEEK_V3, make
from reshard.algebra.dtypes import dtype
from reshard.algebra.layout import Layout
from reshard.algebra.tensors import Cells
from reshard.algebra.views import Piece, View, covered, overlaps
from reshard.base.errors import ReshardError
from reshard.commands.coverage import prove
from reshard.formats import open_checkpoint
from reshard.formats.options import ConversionOptions
from reshard.planning import plan_conversion
from reshard.transfer.plan import ZERO, Block, OutputFile, Plan, Planned
from tests.genuine.huggingface import make_model

LAYOUTS = {
    "qwen2_tied": Layout(tp=2, pp=2, vpp=2),
    "qwen3_moe": Layout(tp=2, pp=2, ep=2, etp=1),
    "deepseek_v3_mtp": Layout(tp=2, pp=3, ep=4, etp=2),
}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("back", [False, True])
def test_every_element_is_read_once_and_written_once(tmp_path: Path, name: str, back: bool) -> None:
    import reshard

    source = make_model(name, tmp_path / "hf")
    if back:
        reshard.convert(source, tmp_path / "mc", to="megatron", tp=2, pp=2, ep=1)
        source = tmp_path / "mc"
    layout = Layout() if back else LAYOUTS[name]
    plan = plan_conversion(
        source, ConversionOptions(to="huggingface" if back else "megatron", **layout.as_dict())
    )
    used: dict[Cells, list[Piece]] = defaultdict(list)
    for file in plan.files:
        for block in file.blocks:
            view = block.source()
            assert view.shape == block.shape
            assert covered(view) == view.numel
            assert overlaps(view) is None
            is_companion = block.name == file.path
            for piece in view.pieces:
                assert isinstance(piece.source, Cells)
                if piece.source.storage is not ZERO and not is_companion:
                    used[piece.source].append(piece)
    read = Counter[str]()
    for cells, pieces in used.items():
        seen = View((cells.storage.nbytes // cells.dtype.itemsize,), tuple(p.swapped("") for p in pieces))
        if not name.endswith("mtp"):  # there the Hub stores embedding and head twice
            assert overlaps(seen) is None, "an element is used twice"
            read["elements"] += covered(seen)
    checkpoint = open_checkpoint(source)
    if not name.endswith("mtp"):
        padding = plan.dropped.get("vocabulary padding", 0) // 4
        assert read["elements"] + padding == checkpoint.parameters


@pytest.mark.slow
def test_a_model_of_671_billion_parameters_is_planned_from_headers(tmp_path: Path) -> None:
    model = make(tmp_path / "v3", DEEPSEEK_V3, sparse=True)
    on_disk = sum(path.stat().st_blocks * 512 for path in model.iterdir())
    assert on_disk < 100e6, "the files are sparse: nothing but headers can have been read"
    layout = Layout(tp=8, pp=16, ep=64, etp=1)
    plan = plan_conversion(model, ConversionOptions(to="megatron", **layout.as_dict(), no_tokenizer=True))
    assert plan.parameters > 671e9
    assert plan.nbytes > 1.34e12
    ranks = [file for file in plan.files if file.path.endswith(".distcp")]
    # A stage of dense layers alone has files for its tensor-parallel ranks only.
    assert 15 * 64 < len(ranks) <= 16 * 64
    sizes = [file.size for file in ranks]
    assert max(sizes) < 6e9
    assert "3, 4, 4" in " ".join(plan.notes), "61 layers on 16 stages are spread unevenly, and that is said"
    checkpoint = open_checkpoint(model)
    found = prove(plan, checkpoint)
    assert found, found.faults
    # Layer 61, which predicts more tokens, stores embedding and head again.
    assert found.source.copies == 2 * DEEPSEEK_V3["vocab_size"] * DEEPSEEK_V3["hidden_size"]
    assert found.source.elements == checkpoint.parameters == found.source.used + found.source.copies
    assert found.target.elements == found.source.used + found.target.zeros


def test_the_audit_names_what_does_not_add_up() -> None:
    bf16 = dtype("bfloat16")
    tensor = Planned("w", bf16, (4, 4), lambda: View.of("s", 4, 4))

    def plan(*blocks: Block) -> Plan:
        return Plan("a", "b", [OutputFile("f", 32, list(blocks))], 1, 16, {}, [], [])

    half = Block("w", bf16, (2, 4), tensor.source, 0)
    with pytest.raises(ReshardError, match="found: 0 bytes"):
        plan().audit([tensor])
    with pytest.raises(ReshardError, match="16 bytes"):
        plan(half).audit([tensor])
    with pytest.raises(ReshardError, match="bytes 8 to 24"):
        plan(half, Block("w", bf16, (2, 4), tensor.source, 8)).audit([tensor])
    with pytest.raises(ReshardError, match="bytes 24 to 40"):
        plan(half, Block("w", bf16, (2, 4), tensor.source, 24)).audit([tensor])
    plan(half, Block("w", bf16, (2, 4), tensor.source, 16)).audit([tensor])


@pytest.mark.parametrize(
    ("layers", "pp", "stages"),
    [(61, 16, (3, *[4] * 14, 2)), (5, 4, (2, 1, 1, 1)), (7, 2, (4, 3)), (8, 4, ()), (10, 3, (3, 4, 3))],
)
def test_layers_that_do_not_divide_are_spread(layers: int, pp: int, stages: tuple[int, ...]) -> None:
    layout = Layout(pp=pp).over(layers)
    assert layout.stages == stages
    assert sum(len(chunk) for _, _, chunk in layout.chunks(layers)) == layers


def test_virtual_stages_interleave() -> None:
    chunks = Layout(pp=2, vpp=2).chunks(8)
    assert chunks == [(0, 0, range(2)), (1, 0, range(2, 4)), (0, 1, range(4, 6)), (1, 1, range(6, 8))]
    with pytest.raises(ReshardError, match="cannot be divided"):
        Layout(pp=2, vpp=2).chunks(6)
    with pytest.raises(ReshardError, match="cannot be divided"):
        Layout(pp=2, stages=(3, 4)).chunks(6)


def test_no_garbage_is_looked_for_while_planning(tmp_path: Path) -> None:
    source = make_model("llama", tmp_path / "hf")
    seen: list[bool] = []
    plan_conversion(source, ConversionOptions(to="megatron"), lambda step: seen.append(gc.isenabled()))
    assert seen and not any(seen) and gc.isenabled()
    with pytest.raises(ReshardError):
        plan_conversion(source, ConversionOptions(to="megatron", tp=3))
    assert gc.isenabled()
