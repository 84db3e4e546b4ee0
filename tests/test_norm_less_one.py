"""The norm of a delta net, which Megatron-Core stores minus one: exact, refused, or rounded on request."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.state_dict import get_state_dict
from transformers import AutoModelForCausalLM

import reshard
from reshard.base.errors import ReshardError
from tests.commandline import reshard as command
from tests.judges import assert_same_tensors, tensors_of
from tests.test_optimizer import values

Models = Callable[..., Path]
NORM = "model.layers.2.linear_attn.norm.weight"


@pytest.fixture
def folder(hf_model: Models, tmp_path: Path) -> Path:
    """Qwen3-Next in bfloat16, with one norm element that bfloat16 cannot store minus one."""
    source = hf_model("qwen3_next", dtype="bfloat16")
    copy = tmp_path / "hub"
    copy.mkdir()
    for file in source.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    tensors = load_file(source / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("linear_attn.norm.weight"):
            tensors[name] = tensor.clamp(min=0.5)
    tensors[NORM][3] = 0.1
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    return copy


def test_what_less_one_is_rounded_is_refused_before_anything_is_written(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ReshardError) as raised:
        reshard.convert(folder, tmp_path / "megatron", to="megatron")
    (problem,) = raised.value.problems
    assert "out_norm" in str(problem.tensor) and "layers.2" in str(problem.tensor)
    assert problem.found == "1 of 12 elements differ, the first is element 3"
    assert "--dtype" in str(problem.remedy)
    assert not (tmp_path / "megatron").exists()
    # mcore-bridge stores it as it is.
    reshard.convert(folder, tmp_path / "swift", to="megatron", engine="mcore-bridge")
    assert reshard.verify(tmp_path / "swift", folder).equal


def test_rounding_is_asked_for_by_dtype_and_float32_loses_nothing(folder: Path, tmp_path: Path) -> None:
    reshard.convert(folder, tmp_path / "rounded", to="megatron", dtype="bfloat16")
    found = reshard.verify(tmp_path / "rounded", folder)
    assert [row.tensor for row in found.rows] == [NORM]
    reshard.convert(folder, tmp_path / "wide", to="megatron", dtype="float32")
    reshard.convert(tmp_path / "wide", tmp_path / "back", dtype="bfloat16")
    assert_same_tensors(tensors_of(tmp_path / "back"), tensors_of(folder))


def trained_to(folder: Path, value: float, out: Path) -> Path:
    """A bfloat16 checkpoint of Megatron-Core with a norm element of `value`, finer than bfloat16 near one."""
    tensors = {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}
    tensors[NORM][3] = value
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    reshard.convert(folder, out, to="megatron", dtype="bfloat16")
    return out


def test_verify_names_a_norm_that_the_hub_rounded(folder: Path, tmp_path: Path) -> None:
    trained = trained_to(folder, 1.001, tmp_path / "trained")
    reshard.convert(trained, tmp_path / "hub again", dtype="bfloat16")
    reshard.convert(folder, tmp_path / "swift", to="megatron", engine="mcore-bridge", dtype="bfloat16")
    for sides in ((trained, tmp_path / "hub again"), (tmp_path / "swift", trained)):
        found = reshard.verify(*sides)
        (row,) = found.rounded
        assert found.equal and (row.tensor, row.kind) == (NORM, "rounded sum")
        assert (row.differ, row.elements) == (1, 12)
        assert row.largest == torch.tensor(0.001).bfloat16().double().item()
    shown = command("verify", trained, tmp_path / "hub again")
    words = " ".join(shown.out.split())
    assert shown.code == 0 and "equal but for rounding:" in words
    assert f"{NORM} is rounded: 1 of 12 elements, largest difference 0.000999" in words
    assert "stores changed, rounded: 1 (largest difference 0.000999)" in words
    assert "quantizing" not in words
    (row,) = command("verify", trained, tmp_path / "hub again", "--json").json["rounded"]
    assert row["tensor"] == NORM


def test_verify_sees_what_two_norms_less_one_differ_by(folder: Path, tmp_path: Path) -> None:
    """Though plus one, in bfloat16, they would be the same."""
    one = trained_to(folder, 1.001, tmp_path / "one")
    other = trained_to(folder, 1.0012, tmp_path / "other")
    assert [(row.tensor, row.kind) for row in reshard.verify(one, other).rows] == [(NORM, "values")]
    reshard.convert(one, tmp_path / "cut", to="megatron", tp=2)
    found = reshard.verify(one, tmp_path / "cut")
    assert found.equal and not found.rounded


def test_a_trained_norm_that_the_hub_would_round_is_refused_too(folder: Path, tmp_path: Path) -> None:
    trained, other = trained_to(folder, 1.001, tmp_path / "trained"), tmp_path / "other"
    with pytest.raises(ReshardError, match="a norm cannot be stored plus one without rounding") as raised:
        reshard.convert(trained, tmp_path / "hub again")
    assert NORM in str(raised.value)
    reshard.convert(trained, other, to="megatron", tp=2)  # which changes no value
    name = "decoder.layers.2.self_attention.out_norm.weight"
    first, second = (reshard.open(each).tensors[name] for each in (trained, other))
    assert first.shape == second.shape
    reshard.convert(trained, tmp_path / "a", dtype="float32")
    reshard.convert(other, tmp_path / "b", dtype="float32")
    assert_same_tensors(tensors_of(tmp_path / "a"), tensors_of(tmp_path / "b"))
    assert tensors_of(tmp_path / "a")[NORM][3] == 1 + torch.tensor(0.001).bfloat16().float()


def stepped(source: Path, out: Path) -> Path:
    """A checkpoint of torch, after one step of AdamW in float32 with invented gradients."""
    draw = torch.Generator().manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for weight in model.parameters():
        weight.grad = torch.randn(weight.shape, generator=draw)
    optimizer.step()
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=out, no_dist=True)
    (out / "config.json").write_bytes((source / "config.json").read_bytes())
    return out


def test_masters_are_stored_less_one_and_moments_as_they_are(hf_model: Models, tmp_path: Path) -> None:
    run = stepped(hf_model("qwen3_next"), tmp_path / "checkpoint-1")
    options = {"with_optimizer": True, "no_tokenizer": True}
    reshard.convert(run, tmp_path / "megatron", to="megatron", dtype="bfloat16", **options)
    reshard.convert(tmp_path / "megatron", tmp_path / "back", to="dcp", dtype="float32", **options)
    hub, back = values(run), values(tmp_path / "back")
    native = values(reshard.open(tmp_path / "megatron").checkpoint.path)
    norm = "decoder.layers.2.self_attention.out_norm.weight"
    less_one = hub[f"model.{NORM}"] - 1
    assert less_one.any()
    assert torch.equal(native[f"optimizer.state.param.{norm}"], less_one)
    assert torch.equal(native[norm], less_one.bfloat16())
    assert torch.equal(back[f"model.{NORM}"], hub[f"model.{NORM}"])
    for moment in ("exp_avg", "exp_avg_sq"):
        name = f"optimizer.state.{NORM}.{moment}"
        assert torch.equal(native[f"optimizer.state.{moment}.{norm}"], hub[name])
        assert torch.equal(back[name], hub[name])
