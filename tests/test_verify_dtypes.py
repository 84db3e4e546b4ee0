"""`verify` compares the values of tensors whose dtypes differ, and says how far they are equal."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from threading import Event

import pytest
import torch
from safetensors.torch import load_file, save_file

import reshard
from reshard.transfer.compare import WINDOW_BYTES, Comparer
from reshard.transfer.memory_budget import shared
from tests.commandline import reshard as command

Models = Callable[..., Path]
UP = "model.layers.1.mlp.up_proj.weight"


def edit(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    """Change the tensors of a folder that reshard wrote."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def cast(source: Path, out: Path, wanted: str) -> Path:
    reshard.convert(source, out, to="huggingface", dtype=wanted)
    return out


@pytest.mark.thorough
def test_deepspeed_widens_and_both_commands_say_so(hf_model: Models, tmp_path: Path) -> None:
    source, there, back = hf_model("qwen3", dtype="bfloat16"), tmp_path / "there", tmp_path / "back"
    told = command("convert", source, there, "--to", "deepspeed")
    note = (
        "deepspeed stores weights in float32 only: 47 tensors in bfloat16 are widened, which changes no value"
    )
    assert told.code == 0 and note in " ".join(told.err.split()) and "--dtype bfloat16" in told.err
    line = "the values are equal, the dtypes differ: 47 tensors, bfloat16 in A and float32 in B\n"
    result = command("verify", source, there)
    assert (result.code, result.out) == (1, line)
    found = command("verify", source, there, "--json").json
    assert (found["equal"], found["values"], found["tensors"]) == (False, "equal", 47)
    assert {row["values"] for row in found["differences"]} == {"equal"}

    reshard.convert(there, back, dtype="bfloat16")
    assert reshard.verify(source, back).equal

    told = command("convert", hf_model("qwen3"), tmp_path / "same", "--to", "deepspeed")
    assert "stores weights in" not in told.err
    asked = ("--to", "deepspeed", "--dtype", "float32")
    assert "stores weights in" not in command("convert", source, tmp_path / "asked", *asked).err


def test_deepspeed_rounds_float64_and_says_so(hf_model: Models, tmp_path: Path) -> None:
    source, there = hf_model("qwen3", dtype="float64"), tmp_path / "there"
    edit(cast(source, tmp_path / "thirds", "float64"), lambda tensors: tensors[UP].div_(3))
    told = command("convert", tmp_path / "thirds", there, "--to", "deepspeed")
    assert "47 tensors in float64 are rounded; --to huggingface keeps float64" in " ".join(told.err.split())
    found = reshard.verify(tmp_path / "thirds", there)
    assert not found and found.values == "rounded"
    assert {row.tensor: row.values for row in found.rows}[UP] == "equal after rounding to float32"


@pytest.mark.core("float32-bfloat16", "float64-float32")
@pytest.mark.parametrize(
    ("stored", "wanted"),
    [("float32", "bfloat16"), ("float32", "float16"), ("float64", "float32"), ("float16", "bfloat16")],
)
def test_what_is_rounded_is_told_from_what_differs(
    stored: str, wanted: str, hf_model: Models, tmp_path: Path
) -> None:
    source = edit(
        cast(hf_model("qwen3"), tmp_path / "source", stored),
        lambda tensors: tensors[UP].copy_(
            torch.linspace(-1, 1, tensors[UP].numel(), dtype=torch.float64).view_as(tensors[UP])
        ),
    )
    out = cast(source, tmp_path / "out", wanted)
    for a, b in ((source, out), (out, source)):
        found = reshard.verify(a, b)
        assert not found and found.values == "rounded" and found.tensors == 47 and not found.different
        assert {row.tensor: row.values for row in found.rows}[UP] == f"equal after rounding to {wanted}"
        assert f"equal after rounding to {wanted}, the dtypes differ: " in command("verify", a, b).out
        assert f"equal after rounding to {wanted}" in found._repr_html_()

    edit(out, lambda tensors: tensors[UP].view(-1)[:3].add_(0.5))
    found = reshard.verify(source, out)
    assert found.values == "different"
    (row,) = found.different
    assert (row.tensor, row.kind, row.values) == (UP, "dtype and values", None)
    assert row.a.startswith(f"{stored} ") and row.differ and row.largest == pytest.approx(0.5, abs=0.01)
    result = command("verify", source, out)
    assert result.code == 1 and result.out.startswith("different: 1 tensor; 47 were compared\n")
    assert "the dtypes differ: " in result.out
    command("verify", source, out, "--html", tmp_path / "page.html")
    assert "dtype; the values are equal" in (tmp_path / "page.html").read_text()


def test_numbers_that_are_none_are_equal_and_an_overflow_is_not(hf_model: Models, tmp_path: Path) -> None:
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors[UP].view(-1)[:3] = torch.tensor([torch.nan, torch.inf, -torch.inf])

    source = edit(cast(hf_model("qwen3"), tmp_path / "source", "bfloat16"), spoil)
    out = cast(source, tmp_path / "out", "float32")
    assert reshard.verify(source, out).values == "equal"
    edit(out, lambda tensors: tensors[UP].view(-1)[:2].fill_(3.4e38))  # bfloat16 would make it Inf
    assert [row.tensor for row in reshard.verify(source, out).different] == [UP]
    edit(source, lambda tensors: tensors[UP].view(-1)[0].fill_(torch.inf))
    assert [row.tensor for row in reshard.verify(out, source).different] == [UP]


def test_a_part_in_another_dtype_is_counted_apart(hf_model: Models, tmp_path: Path) -> None:
    source = hf_model("qwen3", dtype="bfloat16")

    def widen(tensors: dict[str, torch.Tensor]) -> None:
        tensors.update({name: each.float() for name, each in tensors.items() if name.endswith("norm.weight")})

    out = edit(cast(source, tmp_path / "out", "bfloat16"), widen)
    count = sum(name.endswith("norm.weight") for name in load_file(out / "model.safetensors"))
    result = command("verify", source, out)
    assert result.code == 1
    assert f"{count} tensors, bfloat16 in A and float32 in B" in result.out
    assert f"equal: {47 - count} tensors, bit for bit" in result.out
    told = command("convert", out, tmp_path / "zero", "--to", "deepspeed").err
    assert f"{47 - count} tensors in bfloat16 are widened" in " ".join(told.split())


def test_the_first_element_that_differs_is_counted_from_the_beginning_of_the_tensor(tmp_path: Path) -> None:
    count = WINDOW_BYTES // 4
    values = torch.arange(3 * count, dtype=torch.float32)
    save_file({"w": values}, tmp_path / "a.safetensors")
    values[2 * count + 5 :: 7] += 1
    save_file({"w": values}, tmp_path / "b.safetensors")
    a, b = (reshard.open(tmp_path / f"{name}.safetensors").tensors["w"] for name in "ab")
    comparer = Comparer(Event(), shared(1, 1 << 30))
    assert comparer.difference(a, b) == (len(range(2 * count + 5, 3 * count, 7)), 1.0, 2 * count + 5)
    comparer.close()
