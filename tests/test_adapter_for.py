"""`--for`: adapters in the layout of vLLM, SGLang or PEFT, judged by PEFT; tests/live/test_adapters.py asks vLLM."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

import reshard
from reshard.base.errors import ReshardError
from tests import commandline
from tests.genuine import make_fsdp_ranks
from tests.genuine import make_megatron_lora as megatron
from tests.genuine.model_types import make_model_type
from tests.genuine.peft import load, make_adapter, randomise
from tests.judges import assert_same_tensors

Model = Callable[..., Path]
DATA = Path(__file__).parent / "data"
ENGINES = ("vllm", "sglang", "peft")
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
GATE_UP, DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
CLOSE = 1e-5


def logits(model: Any, tokens: int = 60) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.eval()(torch.from_numpy(megatron.TOKENS) % tokens).logits
    return found


def adapted(base: Path, adapter: Path, tokens: int = 60) -> torch.Tensor:
    """The logits of PEFT."""
    return logits(PeftModel.from_pretrained(load(base), adapter), tokens)


def assert_alike(base: Path, source: Path, output: Path) -> None:
    """PEFT computes the same with both, and something else without."""
    expected, ours, before = adapted(base, source), adapted(base, output), logits(load(base))
    assert (expected - before).abs().max() > 0.1 * expected.abs().max()
    assert (ours - expected).abs().max() <= CLOSE * expected.abs().max()


def config_of(adapter: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((adapter / "adapter_config.json").read_text())
    return content


def names_of(adapter: Path) -> set[str]:
    """The names of the modules, without numbers."""
    tensors = load_file(adapter / "adapter_model.safetensors")
    return {
        re.sub(r"\d+", "N", name.partition(".lora_")[0].removeprefix("base_model.model.")) for name in tensors
    }


@pytest.mark.core("settings0-vllm", "settings1-sglang", "settings2-peft")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "settings",
    [
        {"r": 4, "lora_alpha": 6, "target_modules": ALL},
        {"r": 8, "lora_alpha": 6, "target_modules": ["q_proj", "up_proj"], "use_rslora": True},
        {"r": 4, "lora_alpha": 6, "target_modules": ALL, "layers_to_transform": [1, 2]},
    ],
)
def test_dense_adapters_compute_the_same(
    engine: str, settings: dict[str, Any], hf_model: Model, tmp_path: Path
) -> None:
    base = hf_model("qwen3")
    source = make_adapter(base, tmp_path / "source", **settings)
    reshard.convert(source, tmp_path / "ours", adapter_for=engine, base=base)
    assert_alike(base, source, tmp_path / "ours")


def test_ranks_and_strengths_of_modules_are_kept(hf_model: Model, tmp_path: Path) -> None:
    base = hf_model("qwen3")
    patterns = {"rank_pattern": {"q_proj": 8, "layers.1.mlp.up_proj": 2}, "alpha_pattern": {"o_proj": 24}}
    source = make_adapter(base, tmp_path / "source", r=4, lora_alpha=6, target_modules=ALL, **patterns)
    for engine in ("vllm", "peft"):
        reshard.convert(source, tmp_path / engine, adapter_for=engine, base=base)
        assert_alike(base, source, tmp_path / engine)
    with pytest.raises(ReshardError) as caught:
        reshard.convert(source, tmp_path / "sglang", adapter_for="sglang", base=base)
    layers = re.findall(r"layers\.(\d+)\.self_attn\.o_proj", str(caught.value))
    assert "--merge" in str(caught.value) and ("(all 4)" in str(caught.value) or len(layers) == 4)
    assert not (tmp_path / "sglang").exists()


def test_lower_ranks_of_one_strength_are_filled_up_for_sglang(hf_model: Model, tmp_path: Path) -> None:
    base = hf_model("qwen3")
    patterns = {"rank_pattern": {"q_proj": 8}, "alpha_pattern": {"q_proj": 12}}
    source = make_adapter(base, tmp_path / "source", r=4, lora_alpha=6, target_modules=ALL, **patterns)
    reshard.convert(source, tmp_path / "ours", adapter_for="sglang", base=base)
    assert_alike(base, source, tmp_path / "ours")
    config = config_of(tmp_path / "ours")
    assert (config["r"], config["lora_alpha"]) == (8, 12)
    assert not config["rank_pattern"] and not config["alpha_pattern"]


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral"])
@pytest.mark.parametrize("parameters", [(GATE_UP, DOWN), (GATE_UP,), (DOWN,)])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.core("vllm-parameters0-qwen3_moe", "peft-parameters1-qwen3_moe", "sglang-parameters2-qwen3_moe")
def test_stacked_experts_compute_the_same_in_every_layout(
    engine: str, parameters: tuple[str, ...], name: str, hf_model: Model, tmp_path: Path
) -> None:
    base = hf_model(name)
    source = make_adapter(
        base,
        tmp_path / "source",
        r=4,
        lora_alpha=6,
        target_modules=["q_proj"],
        target_parameters=[*parameters],
    )
    reshard.convert(source, tmp_path / "ours", adapter_for=engine, base=base)
    config = config_of(tmp_path / "ours")
    if (name, engine) == ("mixtral", "sglang"):  # it has names of its own for the linears of experts
        assert config["target_modules"] == ["down_proj", "gate_proj", "k_proj", "q_proj", "up_proj", "v_proj"]
        config["target_modules"] += ["w1", "w2", "w3"]
        (tmp_path / "ours" / "adapter_config.json").write_text(json.dumps(config))
    assert_alike(base, source, tmp_path / "ours")
    names = {each for each in names_of(tmp_path / "ours") if "experts" in each}
    if engine == "peft":
        assert names == {each for each in names_of(source) if "experts" in each}
        assert config["target_parameters"] == [*parameters]
    elif name == "mixtral":
        assert names == {"model.layers.N.block_sparse_moe.experts.N.wN"}
    else:
        assert names == {f"model.layers.N.mlp.experts.N.{each}_proj" for each in ("gate", "up", "down")}
        assert "target_parameters" not in config


@pytest.mark.core(
    "vllm-bridge-tp2", "sglang-swift-experts-ep2", "peft-bridge-canonical-tp2", "peft-swift-pp2"
)
@pytest.mark.parametrize("name", megatron.VARIANTS)
@pytest.mark.parametrize("engine", ENGINES)
def test_adapters_of_megatron_compute_the_same(engine: str, name: str, tmp_path: Path) -> None:
    source = DATA / "megatron_lora" / name
    base = DATA / "megatron_lora" / f"base-{megatron.VARIANTS[name].base}"
    reshard.convert(source, tmp_path / "plain", base=base)
    reshard.convert(source, tmp_path / "ours", base=base, adapter_for=engine)
    assert_alike(base, tmp_path / "plain", tmp_path / "ours")
    if "experts" in name and engine == "peft":
        assert config_of(tmp_path / "ours")["target_parameters"] == [GATE_UP, DOWN]


@pytest.mark.parametrize("engine", ENGINES)
def test_adapters_of_ranks_compute_the_same(engine: str, hf_model: Model, tmp_path: Path) -> None:
    """Of verl with FSDP2, and of DeepSpeed with ZeRO-3, whose base was saved with it."""
    module = load_file(DATA / "deepspeed" / "z3_lora" / "module.safetensors")
    base = tmp_path / "base"
    base.mkdir()
    shutil.copy(DATA / "deepspeed" / "z3_lora" / "config.json", base)
    weights = {
        name.removeprefix("base_model.model.").replace(".base_layer", ""): tensor.float()
        for name, tensor in module.items()
        if "lora_" not in name
    }
    save_file(weights, base / "model.safetensors", {"format": "pt"})
    verl = hf_model("llama", **make_fsdp_ranks.TINY)
    for source, model, options in (
        (DATA / "verl" / "fsdp2-lora", verl, {}),
        (DATA / "deepspeed" / "z3_lora", base, {"lora_alpha": 64}),
    ):
        out = tmp_path / source.name
        reshard.convert(source, out / "plain", to="peft", base=model, **options)  # type: ignore[arg-type]
        reshard.convert(source, out / "ours", to="peft", base=model, adapter_for=engine, **options)  # type: ignore[arg-type]
        plain, ours = (adapted(model, out / each, tokens=20) for each in ("plain", "ours"))
        assert (plain - logits(load(model), tokens=20)).abs().max() > 0.001 * plain.abs().max()
        assert (ours - plain).abs().max() <= CLOSE * plain.abs().max()


def test_a_layout_and_back_gives_the_same_bytes(hf_model: Model, tmp_path: Path) -> None:
    """Gate and up of a stack share lora_A, so they become one pair again."""
    base = hf_model("qwen3_moe")
    parameters = [GATE_UP, DOWN]
    source = make_adapter(
        base, tmp_path / "source", r=4, lora_alpha=6, target_modules=["q_proj"], target_parameters=parameters
    )
    reshard.convert(source, tmp_path / "apart", adapter_for="vllm", base=base)
    reshard.convert(tmp_path / "apart", tmp_path / "again", adapter_for="peft", base=base)
    assert_same_tensors(
        *(load_file(tmp_path / each / "adapter_model.safetensors") for each in ("again", "source"))
    )
    again, before = config_of(tmp_path / "again"), config_of(source)
    for key in ("r", "lora_alpha", "target_modules", "rank_pattern", "alpha_pattern"):
        assert again[key] == before[key], key
    assert sorted(again["target_parameters"]) == sorted(before["target_parameters"])  # PEFT's are a set


@pytest.mark.parametrize("name", ["qwen3_vl_moe", "qwen3_5_moe"])
def test_vllm_gets_stacks_of_models_that_it_adapts_so(name: str, tmp_path: Path) -> None:
    base = make_model_type(name, tmp_path / "base")

    def model() -> Any:
        return AutoModelForImageTextToText.from_pretrained(base, dtype=torch.float32)

    made = get_peft_model(
        model(), LoraConfig(r=4, lora_alpha=6, target_modules=["q_proj"], target_parameters=[DOWN])
    )
    randomise(made)
    made.save_pretrained(tmp_path / "source")
    reshard.convert(tmp_path / "source", tmp_path / "vllm", adapter_for="vllm", base=base)
    reshard.convert(tmp_path / "source", tmp_path / "sglang", adapter_for="sglang", base=base)
    names = {each.partition("experts")[2] for each in names_of(tmp_path / "vllm") if "experts" in each}
    assert names == {"", ".base_layer"}
    expected = logits(PeftModel.from_pretrained(model(), tmp_path / "source"))
    ours = logits(PeftModel.from_pretrained(model(), tmp_path / "vllm"))
    before = logits(model())
    assert (expected - before).abs().max() > 0.1 * expected.abs().max()
    assert (ours - expected).abs().max() <= CLOSE * expected.abs().max()
    stack = load_file(tmp_path / "source" / "adapter_model.safetensors")
    prefix = next(name.partition(".lora_A")[0] for name in stack if name.endswith("experts.lora_A.weight"))
    a, b = stack[f"{prefix}.lora_A.weight"], stack[f"{prefix}.lora_B.weight"]
    apart = load_file(tmp_path / "sglang" / "adapter_model.safetensors")
    count = sum(name.startswith(f"{prefix}.") and name.endswith("down_proj.lora_A.weight") for name in apart)
    a, b = a.reshape(count, 4, -1), b.reshape(b.shape[0], 4, count)
    for index in range(count):
        one = f"{prefix}.{index}"
        assert torch.equal(apart[f"{one}.down_proj.lora_A.weight"], a[index])
        assert torch.equal(apart[f"{one}.down_proj.lora_B.weight"], b[:, :, index])
        assert not apart[f"{one}.gate_proj.lora_B.weight"].any()


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"modules_to_save": ["lm_head"]}, "lm_head.weight"),
        ({"init_lora_weights": "pissa"}, "pissa"),
    ],
)
def test_what_an_engine_skips_is_refused_by_name(
    engine: str, settings: dict[str, Any], found: str, hf_model: Model, tmp_path: Path
) -> None:
    base = hf_model("qwen3")
    source = make_adapter(base, tmp_path / "source", r=4, target_modules=["q_proj", "o_proj"], **settings)
    with pytest.raises(ReshardError) as caught:
        reshard.convert(source, tmp_path / "ours", adapter_for=engine, base=base)
    text = str(caught.value)
    assert found in text and "--merge --base DIR" in text
    assert {problem.code for problem in caught.value.problems} == {"adapter-engine-unable"}
    assert not (tmp_path / "ours").exists()


def test_trained_biases_are_refused(hf_model: Model, tmp_path: Path) -> None:
    base = hf_model("qwen2")
    source = make_adapter(base, tmp_path / "source", r=4, target_modules=["q_proj"], bias="lora_only")
    with pytest.raises(ReshardError, match=r"q_proj\.bias"):
        reshard.convert(source, tmp_path / "ours", adapter_for="vllm", base=base)
    reshard.convert(source, tmp_path / "peft", adapter_for="peft", base=base)
    assert_alike(base, source, tmp_path / "peft")


def test_peft_keeps_what_only_it_applies(hf_model: Model, tmp_path: Path) -> None:
    base = hf_model("qwen3")
    source = make_adapter(
        base, tmp_path / "source", r=4, target_modules=["q_proj"], use_dora=True, modules_to_save=["lm_head"]
    )
    reshard.convert(source, tmp_path / "ours", adapter_for="peft", base=base)
    assert_alike(base, source, tmp_path / "ours")


def test_modules_that_sglang_does_not_adapt_are_refused(hf_model: Model, tmp_path: Path) -> None:
    base = hf_model("qwen2_moe")
    source = make_adapter(base, tmp_path / "source", r=4, target_modules=["q_proj", "shared_expert_gate"])
    with pytest.raises(ReshardError, match="shared_expert_gate"):
        reshard.convert(source, tmp_path / "ours", adapter_for="sglang", base=base)
    reshard.convert(source, tmp_path / "ours", adapter_for="vllm", base=base)
    assert_alike(base, source, tmp_path / "ours")


def test_ranks_above_those_of_vllm_are_refused(hf_model: Model, tmp_path: Path) -> None:
    base = hf_model("qwen3")
    source = make_adapter(base, tmp_path / "source", r=513, target_modules=["q_proj"])
    with pytest.raises(ReshardError, match="rank 513"):
        reshard.convert(source, tmp_path / "ours", adapter_for="vllm", base=base)


def test_an_adapter_of_another_model_is_refused(hf_model: Model, tmp_path: Path) -> None:
    source = make_adapter(hf_model("qwen3"), tmp_path / "source", r=4, target_modules=ALL)
    with pytest.raises(ReshardError) as caught:
        reshard.convert(source, tmp_path / "ours", adapter_for="vllm", base=hf_model("qwen3_moe"))
    assert "adapter-misfits-base" in {problem.code for problem in caught.value.problems}


def test_the_base_is_needed_and_found(hf_model: Model, tmp_path: Path) -> None:
    base = hf_model("qwen3")
    source = make_adapter(base, tmp_path / "source", r=4, lora_alpha=6, target_modules=ALL)
    reshard.convert(source, tmp_path / "found", adapter_for="vllm")  # base_model_name_or_path
    assert_alike(base, source, tmp_path / "found")
    config = config_of(source)
    (source / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": "Org/None"}))
    with pytest.raises(ReshardError, match="--base DIR"):
        reshard.convert(source, tmp_path / "ours", adapter_for="vllm")


def test_the_flag_is_for_adapters(hf_model: Model, tmp_path: Path) -> None:
    base = hf_model("qwen3")
    source = make_adapter(base, tmp_path / "source", r=4, target_modules=ALL)
    for words in (
        (base, tmp_path / "a", "--to", "megatron", "--for", "vllm"),
        (source, tmp_path / "b", "--merge", "--base", base, "--for", "vllm"),
    ):
        ended = commandline.reshard("convert", *words)
        assert ended.code == 2 and "--for is for adapters" in ended.err
    done = commandline.reshard(
        "convert", source, tmp_path / "c", "--to", "peft", "--for", "vllm", "--base", base
    )
    assert done.code == 0 and "vLLM" in done.err


def test_without_the_flag_nothing_changes(hf_model: Model, tmp_path: Path) -> None:
    base = hf_model("qwen3_moe")
    source = make_adapter(
        base, tmp_path / "source", r=4, target_modules=["q_proj"], target_parameters=[GATE_UP, DOWN]
    )
    reshard.convert(source, tmp_path / "ours")
    assert config_of(tmp_path / "ours") == config_of(source)
    ours, theirs = (load_file(each / "adapter_model.safetensors") for each in (tmp_path / "ours", source))
    assert_same_tensors(ours, theirs)
