"""Finite values that a narrower dtype cannot hold are refused: a conversion never makes one infinite."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import reshard
from reshard.algebra.dtypes import dtype
from reshard.base.errors import Problem, ReshardError
from reshard.transfer.elements import LARGEST_FINITE, Overflows, cast
from tests.commandline import reshard as command
from tests.genuine import quantized
from tests.test_resume import Death, content, dying
from tests.test_resume import small_windows as small_windows

Models = Callable[..., Path]
NORM, UP = "model.norm.weight", "model.layers.1.mlp.up_proj.weight"


def with_values(source: Path, out: Path, values: dict[str, list[float]]) -> Path:
    """The same folder, in which tensors begin with these values."""
    shutil.copytree(source, out)
    tensors = load_file(out / "model.safetensors")
    for name, first in values.items():
        tensors[name].view(-1)[: len(first)] = torch.tensor(first, dtype=torch.float64).to(
            tensors[name].dtype
        )
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return out


def refused(source: Path, out: Path, **options: Any) -> dict[str, Problem]:
    """The problems of a conversion, by tensor."""
    with pytest.raises(ReshardError) as raised:
        reshard.convert(source, out, **options)
    found = {str(problem.tensor): problem for problem in raised.value.problems}
    assert {problem.code for problem in found.values()} == {"values-overflow"}
    assert len(found) == len(raised.value.problems)
    return found


@pytest.fixture
def large(hf_model: Models, tmp_path: Path) -> Path:
    """In bfloat16: two weights that float16 cannot hold, one of them in the middle of values that are not finite."""
    source = hf_model("qwen3", dtype="bfloat16")
    values = {NORM: [70144.0], UP: [float("inf"), -131072.0, float("nan"), 65280.0, 3e38]}
    return with_values(source, tmp_path / "large", values)


def test_what_does_not_fit_is_told_and_the_destination_stays(large: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = ("convert", large, out, "--to", "hf", "--dtype", "float16")
    told = command(*words)
    assert told.code == 2 and not out.exists() and not list(tmp_path.glob(".out.*"))
    text = " ".join(told.err.split())
    assert f"tensor: {NORM}" in text and "at most 65504, the largest float16" in text
    assert "1 value in the output, the largest of magnitude 70144" in text
    assert "pass --dtype bfloat16 or --dtype float32, or leave out --dtype" in text
    assert "NaN" not in text
    problem = command(*words, "--json").json["problems"][0]
    assert problem["code"] == "values-overflow"

    reshard.convert(large, out, to="huggingface")
    before = content(out)
    assert command(*words, "--overwrite").code == 2
    assert content(out) == before


def test_what_the_source_has_is_no_overflow(large: Path, tmp_path: Path) -> None:
    """Each of the cures works. NaN and Inf of the source are reported, or refused with --strict."""
    for wanted in (None, "bfloat16", "float32"):
        report = reshard.convert(large, tmp_path / f"{wanted}", to="huggingface", dtype=wanted).report
        assert report and report.nonfinite == [UP]
    found = refused(large, tmp_path / "out", to="huggingface", dtype="float16")
    assert str(found[UP].found).startswith("2 values in the output, the largest of magnitude 3.00406e+38")
    with pytest.raises(ReshardError) as raised:
        reshard.convert(large, tmp_path / "out", to="huggingface", dtype="bfloat16", strict=True)
    assert [problem.code for problem in raised.value.problems] == ["tensor-not-finite"]
    infinite = with_values(large, tmp_path / "infinite", {NORM: [float("inf")], UP: [0.0] * 5})
    report = reshard.convert(infinite, tmp_path / "f16", to="huggingface", dtype="float16").report
    assert report and report.nonfinite == [NORM]


@pytest.mark.parametrize(
    ("to", "layout"),
    [("megatron", {"tp": 2, "pp": 2}), ("megatron-legacy", {"tp": 2}), ("dcp", {})],
)
def test_every_format_refuses(to: str, layout: dict[str, int], large: Path, tmp_path: Path) -> None:
    found = refused(large, tmp_path / "out", to=to, dtype="float16", **layout)
    assert len(found) == 2
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("stored", "wanted", "value", "remedy"),
    [
        ("float32", "float16", 65520.0, "pass --dtype bfloat16 or --dtype float32, "),
        ("float32", "bfloat16", 3.4e38, "pass --dtype float32, "),
        ("float64", "float32", 1e39, "keep float64: "),
        ("float64", "bfloat16", -1e300, "keep float64: "),
    ],
)
def test_every_dtype_refuses(
    stored: str, wanted: str, value: float, remedy: str, hf_model: Models, tmp_path: Path
) -> None:
    source = with_values(hf_model("qwen3", dtype=stored), tmp_path / "source", {UP: [value, -value]})
    found = refused(source, tmp_path / "out", to="huggingface", dtype=wanted)[UP]
    assert str(found.remedy).startswith(remedy) and str(found.expected).endswith(f"the largest {wanted}")
    assert found.found == f"2 values in the output, the largest of magnitude {abs(value):g}"
    below = with_values(hf_model("qwen3", dtype=stored), tmp_path / "below", {UP: [LARGEST_FINITE[wanted]]})
    assert reshard.convert(below, tmp_path / "fits", to="huggingface", dtype=wanted).report


def test_deepspeed_refuses_what_float32_cannot_hold(hf_model: Models, tmp_path: Path) -> None:
    """The user names no dtype: the format stores float32."""
    source = with_values(hf_model("qwen3", dtype="float64"), tmp_path / "source", {UP: [1e39]})
    assert refused(source, tmp_path / "out", to="deepspeed").keys() == {UP}


def test_weights_that_are_computed(hf_model: Models, tmp_path: Path) -> None:
    """A dequantized weight is computed in blocks, of which a rank may need a part: each value counts once."""
    source = quantized.fp8(hf_model("qwen3", dtype="bfloat16"), tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    tensors[f"{UP}_scale_inv"][0, 0] *= 1e6
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    scales = tensors[f"{UP}_scale_inv"].repeat_interleave(16, 0).repeat_interleave(16, 1)
    values = tensors[UP].float() * scales
    lost = values[values.to(torch.float16).isinf()].abs()
    for number, options in enumerate(({"to": "huggingface"}, {"to": "megatron", "tp": 2})):
        (problem,) = refused(source, tmp_path / f"{number}", dtype="float16", **options).values()
        assert problem.found == f"{len(lost):,} values in the output, the largest of magnitude {lost.max():g}"


def test_a_mapping_refuses_them_too(large: Path) -> None:
    weights = reshard.open(large, dtype="float16")
    with pytest.raises(ReshardError, match="would become infinite"):
        weights[NORM].numpy()
    with pytest.raises(ReshardError, match="would become infinite"):
        weights[NORM][0].raw()
    assert weights[NORM][1:].numpy().max() < 10
    assert weights["model.layers.0.mlp.up_proj.weight"].numpy().max() < 10


@pytest.mark.thorough
def test_a_resumed_run_refuses_what_both_runs_found(hf_model: Models, tmp_path: Path) -> None:
    """Counted once, wherever the first run was killed: no part is forgotten, none is counted again."""
    src, dst = tmp_path / "src", tmp_path / "dst"
    shutil.copytree(hf_model("qwen3"), src)
    tensors = load_file(src / "model.safetensors")
    for tensor in tensors.values():
        tensor.view(-1)[:: max(1, tensor.numel() // 3)] = 1e6
    save_file(tensors, src / "model.safetensors", metadata={"format": "pt"})
    options: dict[str, Any] = {"to": "huggingface", "dtype": "float16", "max_shard_size": "100KB"}
    expected = refused(src, dst, **options)
    assert expected.keys() == tensors.keys()
    notes: list[int] = []
    for at in range(5, 400, 23):
        status = dying(
            lambda: reshard.convert(src, dst, workers=2, **options), Death(at, forgets=bool(at % 2))
        )
        if status != 9:
            break
        again = refused(src, dst, on_resume=lambda note, done: notes.append(done), **options)
        assert again == expected, at
        assert not list(tmp_path.glob(".dst.*"))
    assert len([done for done in notes if done]) > 3


EDGES = [1.0, 65504.0, 65519.0, 65520.0, 3.3895e38, 3.3961e38, 3.3962e38, 3.4e38, 1e39, 1e300, 1e-300]
EDGES += [-edge for edge in EDGES] + [float("nan"), float("inf"), float("-inf")]


@pytest.mark.parametrize(("stored", "wanted"), product(LARGEST_FINITE, LARGEST_FINITE))
def test_casts_lose_what_torch_loses(stored: str, wanted: str) -> None:
    values = torch.tensor(EDGES, dtype=torch.float64).to(getattr(torch, stored))
    lost = values[values.isfinite() & values.to(getattr(torch, wanted)).isinf()].double().abs()
    raw = values.view(getattr(torch, f"uint{8 * values.itemsize}")).numpy()
    overflows = Overflows()
    cast(raw, dtype(stored), dtype(wanted), overflows)
    cast(raw[:0], dtype(stored), dtype(wanted), overflows)
    if not len(lost):
        assert overflows.overflow is None
    else:
        assert overflows.overflow == (len(lost), lost.max(), wanted)
