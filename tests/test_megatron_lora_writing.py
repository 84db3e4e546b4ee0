"""Adapters written for Megatron-Bridge, judged by its own checkpoints, by its own LoRA, and by the real PEFT."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from peft import PeftModel
from safetensors.torch import load_file

import reshard
from reshard.base.errors import ReshardError
from reshard.containers.dcp_metadata import read_metadata
from reshard.transfer.source_files import Sources
from tests.environments import python
from tests.genuine import make_megatron_lora as genuine
from tests.genuine.huggingface import make_model
from tests.genuine.peft import load, make_adapter
from tests.test_megatron_lora import DATA, base_of

Boxes = dict[str, tuple[tuple[int, ...], list[tuple[tuple[int, ...], tuple[int, ...]]]]]
LLAMA = base_of("bridge-tp2")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen3") / "base"
    make_model("qwen3", folder, tokenizer=False, **genuine.SIZES)
    return folder


def adapter_of(base: Path, out: Path, **settings: Any) -> Path:
    return make_adapter(base, out, **{"r": 4, "lora_alpha": 12, "target_modules": "all-linear", **settings})


def written(adapter: Path, out: Path, base: Path, **options: Any) -> dict[str, Any]:
    """Write `adapter` for Megatron-Bridge, and return the settings stored with it."""
    reshard.convert(adapter, out, to="megatron", base=base, **options)
    (file,) = out.glob("*/run_config.yaml")
    settings: dict[str, Any] = yaml.safe_load(file.read_text())["peft"]
    return settings


def boxes(folder: Path) -> Boxes:
    """Every key with its shape and its chunks."""
    (file,) = folder.glob("*/.metadata")
    found = read_metadata(file, Sources()).tensors
    return {key: (t.shape, sorted((c.offsets, c.sizes) for c in t.chunks)) for key, t in found.items()}


def peft_tensors(adapter: Path, out: Path, base: Path) -> dict[str, torch.Tensor]:
    reshard.convert(adapter, out, to="peft", base=base)
    return load_file(out / "adapter_model.safetensors")


def products(adapter: Path, scale: float) -> dict[str, torch.Tensor]:
    """The change of each module by an adapter."""
    tensors = load_file(adapter / "adapter_model.safetensors")
    return {
        name.removesuffix(".lora_A.weight"): scale * tensors[name.replace("_A", "_B")] @ tensors[name]
        for name in tensors
        if name.endswith(".lora_A.weight")
    }


def assert_same_products(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    """Modules without an adapter may have zeros."""
    assert wanted and wanted.keys() <= got.keys()
    for name, product in got.items():
        torch.testing.assert_close(product, wanted.get(name, torch.zeros_like(product)), rtol=1e-5, atol=1e-6)


def test_keys_shapes_and_chunks_are_those_of_megatron_bridge(tmp_path: Path) -> None:
    reshard.convert(DATA / "bridge-tp2", tmp_path / "peft", base=LLAMA)
    settings = written(tmp_path / "peft", tmp_path / "ours", LLAMA, tp=2)
    assert boxes(tmp_path / "ours") == boxes(DATA / "bridge-tp2")
    assert (settings["dim"], settings["alpha"]) == (genuine.RANK, genuine.ALPHA)
    assert sorted(settings["target_modules"]) == sorted(genuine.LINEARS)


@pytest.mark.core("{'tp': 4}-*", "{'tp': 1, 'pp': 2}-bridge-tp2")
@pytest.mark.parametrize("name", ["bridge-tp2", "swift-tp2", "swift-pp2"])
@pytest.mark.parametrize("layout", [{"tp": 2}, {"tp": 1, "pp": 2}, {"tp": 4}], ids=str)
def test_a_shared_lora_a_comes_back_bit_for_bit(name: str, layout: dict[str, int], tmp_path: Path) -> None:
    before = peft_tensors(DATA / name, tmp_path / "peft", LLAMA)
    for source in (tmp_path / "peft", DATA / name):
        out = tmp_path / f"ours-{source.name}"
        assert written(source, out, LLAMA, **layout)["dim"] == genuine.RANK
        after = peft_tensors(out, tmp_path / f"back-{source.name}", LLAMA)
        assert after.keys() == before.keys()
        assert all(torch.equal(after[key], before[key]) for key in before)


def test_projections_with_a_lora_a_of_their_own_stand_block_by_block(base: Path, tmp_path: Path) -> None:
    adapter = adapter_of(base, tmp_path / "adapter")
    settings = written(adapter, tmp_path / "ours", base, tp=2)
    assert (settings["dim"], settings["alpha"]) == (12, 36)
    after = peft_tensors(tmp_path / "ours", tmp_path / "back", base)
    assert all(12 in tensor.shape for tensor in after.values())
    assert_same_products(products(tmp_path / "back", 3), products(adapter, 3))


@pytest.mark.parametrize(
    ("settings", "tp", "dim", "scale"),
    [
        ({"target_modules": ["q_proj", "v_proj"]}, 1, 8, 3),
        ({"target_modules": ["o_proj"], "r": 3}, 2, 4, 4),
        ({"use_rslora": True}, 1, 12, 6),
        ({"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"q_proj": 6}}, 2, 10, 3),
    ],
    ids=["some projections", "a rank that TP does not divide", "rslora", "ranks in one proportion"],
)
def test_zeros_fill_up_what_is_not_adapted(
    settings: dict[str, Any], tp: int, dim: int, scale: float, base: Path, tmp_path: Path
) -> None:
    adapter = adapter_of(base, tmp_path / "adapter", **settings)
    beside = written(adapter, tmp_path / "ours", base, tp=tp)
    assert (beside["dim"], beside["alpha"]) == (dim, scale * dim)
    peft_tensors(tmp_path / "ours", tmp_path / "back", base)
    assert_same_products(products(tmp_path / "back", scale), products(adapter, scale))


def test_an_adapter_of_attention_alone_fits_a_mixture_of_experts(tmp_path: Path) -> None:
    base = base_of("bridge-experts")
    adapter = adapter_of(base, tmp_path / "adapter", target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])
    written(adapter, tmp_path / "ours", base, tp=2, ep=2)
    peft_tensors(tmp_path / "ours", tmp_path / "back", base)
    assert_same_products(products(tmp_path / "back", 3), products(adapter, 3))


@pytest.mark.parametrize(
    ("settings", "offenders"),
    [
        ({"use_dora": True}, ["q_proj", "down_proj"]),
        ({"target_modules": ["q_proj", "embed_tokens", "lm_head"]}, ["embed_tokens", "lm_head"]),
        ({"modules_to_save": ["lm_head"]}, ["lm_head.weight"]),
        ({"alpha_pattern": {"o_proj": 1, "up_proj": 2}}, ["o_proj", "up_proj"]),
        (
            {"target_modules": r".*layers\.0\..*proj"},
            ["layers.1.self_attention.linear_qkv", "layers.1.mlp.linear_fc2"],
        ),
        (
            {"target_modules": r"lm_head|.*layers\.0\.mlp.*proj", "alpha_pattern": {"up_proj": 1}},
            ["lm_head", "layers.0.mlp.up_proj", "layers.1.mlp.linear_fc1"],
        ),
    ],
    ids=["dora", "embeddings", "whole weights", "strengths", "some layers", "three kinds"],
)
def test_all_that_megatron_has_no_place_for_is_refused_at_once(
    settings: dict[str, Any], offenders: list[str], base: Path, tmp_path: Path
) -> None:
    adapter = adapter_of(base, tmp_path / "adapter", **settings)
    with pytest.raises(ReshardError) as caught:
        written(adapter, tmp_path / "ours", base)
    named = [str(problem.tensor) for problem in caught.value.problems]
    assert all(any(offender in name for name in named) for offender in offenders), named
    assert not (tmp_path / "ours").exists()


def test_experts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ReshardError) as caught:
        written(DATA / "bridge-experts", tmp_path / "ours", base_of("bridge-experts"))
    assert any(".experts." in str(problem.tensor) for problem in caught.value.problems)


def test_an_adapter_of_another_size_is_refused(base: Path, tmp_path: Path) -> None:
    make_model("qwen3", tmp_path / "other", tokenizer=False, **{**genuine.SIZES, "hidden_size": 64})
    adapter = adapter_of(tmp_path / "other", tmp_path / "adapter")
    with pytest.raises(ReshardError, match="does not match the base"):
        written(adapter, tmp_path / "ours", base)


@pytest.mark.parametrize("dropout", ["x", [0.1]])
def test_a_dropout_that_is_no_number_is_refused(base: Path, tmp_path: Path, dropout: Any) -> None:
    adapter = adapter_of(base, tmp_path / "adapter")
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "lora_dropout": dropout}))
    with pytest.raises(ReshardError, match="lora_dropout is not a number") as caught:
        written(adapter, tmp_path / "ours", base)
    assert caught.value.problems[0].file == str(file) and not (tmp_path / "ours").exists()


def test_without_its_base_nothing_is_written(tmp_path: Path) -> None:
    reshard.convert(DATA / "bridge-tp2", tmp_path / "peft", base=LLAMA)
    with pytest.raises(ReshardError, match="--merge --base DIR"):
        reshard.convert(tmp_path / "peft", tmp_path / "ours", to="megatron")


def test_optimizer_states_are_refused(tmp_path: Path) -> None:
    reshard.convert(DATA / "bridge-tp2", tmp_path / "peft", base=LLAMA)
    with pytest.raises(ReshardError, match="optimizer"):
        written(tmp_path / "peft", tmp_path / "ours", LLAMA, with_optimizer=True)


@pytest.mark.slow
@pytest.mark.parametrize("tp", [2, 4], ids=["", "ranks that share query groups"])
@pytest.mark.parametrize("source", ["shared", "apart"])
def test_megatron_bridge_loads_it_strictly_and_computes_what_peft_does(
    source: str, tp: int, base: Path, tmp_path: Path
) -> None:
    base, adapter = (
        (base, adapter_of(base, tmp_path / "peft")) if source == "apart" else (LLAMA, tmp_path / "peft")
    )
    if source == "shared":
        reshard.convert(DATA / "bridge-tp2", adapter, base=base)
    tokens = torch.from_numpy(genuine.TOKENS)
    with torch.no_grad():
        before = load(base).eval()(tokens).logits.numpy()
        wanted = PeftModel.from_pretrained(load(base), adapter).eval()(tokens).logits.numpy()
    assert np.abs(before - wanted).max() > 0.1 * np.abs(wanted).max()
    written(adapter, tmp_path / "ours", base, tp=tp)
    for ranks, pp, spec in ((tp, 1, "local"), (1, 1, "local"), (tp, 1, "te"), (1, 2, "te")):
        file = tmp_path / f"logits-{ranks}-{pp}-{spec}.npy"
        words = [tmp_path / "ours", base, file, ranks, pp, spec]
        command = [python("bridges"), "-m", "tests.genuine.load_megatron_lora", *map(str, words)]
        subprocess.run(command, check=True, timeout=300)
        assert np.abs(np.load(file) - wanted).max() <= 1e-5 * np.abs(wanted).max()
