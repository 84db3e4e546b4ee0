"""Adapters, judged by the real PEFT: its files are read, its merges reproduced, and it loads what is written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

import reshard
from reshard.adapters import merge_adapter, read_adapter
from reshard.base.errors import ReshardError
from reshard.formats import open_checkpoint
from reshard.transfer.gather import Gatherer
from reshard.transfer.thread_files import OpenFiles
from tests import commandline
from tests.genuine import peft as genuine
from tests.judges import assert_merged, products_agree, tensors_of

Model = Callable[..., Path]
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
LINEAR = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.gate.weight"]
SMALL: dict[str, Any] = {"num_hidden_layers": 2}

FEATURES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("llama", {"r": 8, "lora_alpha": 24, "target_modules": LINEAR}),
    "odd scale": ("llama", {"r": 6, "lora_alpha": 10, "target_modules": ["q_proj", "down_proj"]}),
    "rank-stabilized": (
        "llama",
        {"r": 8, "lora_alpha": 24, "target_modules": ["q_proj"], "use_rslora": True},
    ),
    "patterns": (
        "llama",
        {
            "r": 8,
            "lora_alpha": 24,
            "target_modules": LINEAR,
            "rank_pattern": {"layers.1.self_attn.q_proj": 4, "down_proj": 16},
            "alpha_pattern": {"k_proj": 5, r"layers\.0\..*up_proj": 7},
        },
    ),
    "high rank": ("llama", {"r": 200, "lora_alpha": 24, "target_modules": ["q_proj", "down_proj"]}),
    "bias": ("qwen2", {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "v_proj"], "lora_bias": True}),
    "DoRA": ("llama", {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "down_proj"], "use_dora": True}),
    "embedding and head": (
        "llama",
        {"r": 4, "lora_alpha": 6, "target_modules": ["embed_tokens", "lm_head", "q_proj"]},
    ),
    "DoRA of the embedding": (
        "llama",
        {"r": 4, "lora_alpha": 6, "target_modules": ["embed_tokens"], "use_dora": True},
    ),
    "trained whole": (
        "llama",
        {
            "r": 4,
            "lora_alpha": 6,
            "target_modules": ["q_proj"],
            "modules_to_save": ["lm_head", "embed_tokens"],
        },
    ),
    "trained whole, once tied": (
        "llama_tied",
        {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    ),
    "stacked experts": (
        "qwen3_moe",
        {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj"], "target_parameters": EXPERTS},
    ),
    "stacked experts of Mixtral": (
        "mixtral",
        {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj"], "target_parameters": EXPERTS},
    ),
}
CASES = [(feature, dtype) for feature in FEATURES for dtype in ("float32", "bfloat16")]
CASES += [(feature, "float16") for feature in ("plain", "DoRA", "embedding and head", "stacked experts")]


@pytest.fixture(scope="module")
def llama(hf_model: Model) -> Path:
    return hf_model("llama", **SMALL)


@pytest.fixture(scope="module")
def plain(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter of `llama` that the real PEFT saved."""
    return genuine.make_adapter(llama, tmp_path_factory.mktemp("plain"), **FEATURES["plain"][1])


def refusal(*words: object, **options: Any) -> ReshardError:
    with pytest.raises(ReshardError) as caught:
        reshard.convert(*words, **options)  # type: ignore[arg-type]
    return caught.value


def changed(adapter: Path, out: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    """A copy of an adapter whose tensors were changed by hand."""
    tensors = load_file(adapter / "adapter_model.safetensors")
    change(tensors)
    out.mkdir()
    save_file(tensors, out / "adapter_model.safetensors", {"format": "pt"})
    (out / "adapter_config.json").write_bytes((adapter / "adapter_config.json").read_bytes())
    return out


# ---------------------------------------------------------------------------------------------------- merging


@pytest.mark.parametrize(("feature", "dtype"), CASES)
@pytest.mark.core(
    "patterns-bfloat16",
    "DoRA-bfloat16",
    "embedding and head-bfloat16",
    "trained whole, once tied-bfloat16",
    "stacked experts-bfloat16",
)
def test_merging_gives_the_bytes_of_merge_and_unload(
    feature: str, dtype: str, hf_model: Model, tmp_path: Path
) -> None:
    name, settings = FEATURES[feature]
    base = hf_model(name, dtype=dtype, **SMALL)
    adapter = genuine.make_adapter(base, tmp_path / "adapter", dtype, **settings)
    reference = genuine.merged_by_peft(base, adapter, tmp_path / "reference", dtype)
    before = tensors_of(base)
    assert any(
        not torch.equal(tensor, before[key]) for key, tensor in tensors_of(reference).items() if key in before
    )

    reshard.convert(adapter, tmp_path / "ours", base=base, merge=True)

    assert_merged(tensors_of(tmp_path / "ours"), tensors_of(reference))
    assert genuine.load(tmp_path / "ours", dtype).config.tie_word_embeddings is False
    assert reshard.verify(tmp_path / "ours", reference).equal or not products_agree()


@pytest.mark.parametrize("use_dora", [False, True])
def test_weights_that_lie_transposed_are_merged_as_peft_does(use_dora: bool, tmp_path: Path) -> None:
    """GPT-2's Conv1D; the family is undeclared, so names stay unchanged."""
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 90, "n_positions": 32}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", **sizes))
    model.save_pretrained(tmp_path / "base")
    settings = {"target_modules": ["c_attn", "attn.c_proj"], "fan_in_fan_out": True, "use_dora": use_dora}
    adapter = genuine.make_adapter(tmp_path / "base", tmp_path / "adapter", r=4, lora_alpha=6, **settings)
    reference = genuine.merged_by_peft(tmp_path / "base", adapter, tmp_path / "reference")
    reshard.convert(adapter, tmp_path / "ours", base=tmp_path / "base", merge=True, no_tokenizer=True)
    assert_merged(tensors_of(tmp_path / "ours"), tensors_of(reference))


def test_a_tied_head_and_embedding_part_where_only_one_of_them_is_adapted(
    hf_model: Model, tmp_path: Path
) -> None:
    base = hf_model("qwen2_tied", **SMALL)
    model = genuine.wrapped(base, r=4, lora_alpha=8, target_modules=["embed_tokens", "q_proj"])
    model.save_pretrained(tmp_path / "adapter")

    plan = reshard.convert(tmp_path / "adapter", tmp_path / "ours", base=base, merge=True).plan

    assert any("no longer tied" in note for note in plan.notes)
    ours = genuine.load(tmp_path / "ours")
    assert torch.allclose(genuine.logits(ours), genuine.logits(model), atol=1e-4)


def test_a_merge_in_another_dtype_is_that_of_a_base_loaded_in_it(
    llama: Path, plain: Path, tmp_path: Path
) -> None:
    reference = genuine.merged_by_peft(llama, plain, tmp_path / "reference", "bfloat16")
    reshard.convert(plain, tmp_path / "ours", base=llama, merge=True, dtype="bfloat16")
    assert_merged(tensors_of(tmp_path / "ours"), tensors_of(reference))


def test_an_adapter_merges_into_a_megatron_base_and_into_any_layout(
    llama: Path, plain: Path, tmp_path: Path
) -> None:
    reference = genuine.merged_by_peft(llama, plain, tmp_path / "reference")
    reshard.convert(llama, tmp_path / "base", to="megatron", pp=2)

    reshard.convert(plain, tmp_path / "ours", base=tmp_path / "base", merge=True, to="megatron", tp=2)
    reshard.convert(plain, tmp_path / "back", base=tmp_path / "base", merge=True)

    assert reshard.verify(tmp_path / "ours", tmp_path / "back").equal
    assert_merged(tensors_of(tmp_path / "back"), tensors_of(reference))


def test_any_window_of_a_merged_weight_has_the_same_elements(llama: Path, tmp_path: Path) -> None:
    settings = {"r": 4, "lora_alpha": 6, "target_modules": ["embed_tokens", "q_proj"], "use_dora": True}
    adapter = read_adapter(open_checkpoint(genuine.make_adapter(llama, tmp_path / "adapter", **settings)))
    weights = merge_adapter(adapter, open_checkpoint(llama).tensors, lambda name, stored: stored)
    files = OpenFiles()
    gatherer = Gatherer(files, None)
    random = np.random.default_rng(0)
    for name in ("model.embed_tokens.weight", "model.layers.1.self_attn.q_proj.weight"):
        tensor = weights[name]
        whole = gatherer.read(tensor, 0, tensor.view.numel)
        for begin, end in np.sort(random.integers(0, tensor.view.numel, (40, 2)), axis=1):
            assert np.array_equal(gatherer.read(tensor, int(begin), int(end)), whole[begin:end])
    files.close()


def test_the_facts_name_the_files_of_adapter_and_base(llama: Path, plain: Path, tmp_path: Path) -> None:
    reshard.convert(plain, tmp_path / "ours", base=llama, merge=True)
    facts = json.loads((tmp_path / "ours" / "reshard.json").read_text())
    assert {"model.safetensors", "adapter_model.safetensors"} <= facts["source"]["files"].keys()


def test_the_base_is_found_where_the_config_says_it_was(llama: Path, plain: Path, tmp_path: Path) -> None:
    plan = reshard.convert(plain, tmp_path / "ours", merge=True).plan
    assert any(str(llama) in note for note in plan.notes)


# -------------------------------------------------------------------------------------------- carrying over


@pytest.mark.parametrize(
    "feature", ["plain", "DoRA", "trained whole", "embedding and head", "stacked experts"]
)
def test_peft_loads_what_is_carried_over_and_computes_the_same(
    feature: str, hf_model: Model, tmp_path: Path
) -> None:
    name, settings = FEATURES[feature]
    base = hf_model(name, **SMALL)
    source = genuine.wrapped(base, **settings)
    source.save_pretrained(tmp_path / "adapter")

    reshard.convert(tmp_path / "adapter", tmp_path / "ours")

    ours, theirs = (load_file(tmp_path / at / "adapter_model.safetensors") for at in ("ours", "adapter"))
    assert_merged(ours, theirs)
    loaded = PeftModel.from_pretrained(genuine.load(base), tmp_path / "ours")
    assert torch.equal(genuine.logits(loaded), genuine.logits(source))


@pytest.mark.parametrize("feature", ["plain", "patterns", "DoRA", "trained whole", "bias"])
def test_the_state_of_a_live_model_becomes_an_adapter_that_peft_loads(
    feature: str, hf_model: Model, tmp_path: Path
) -> None:
    """As in FSDP, DeepSpeed and DCP: the adapter's name in the names, with the base, without adapter_config."""
    name, settings = FEATURES[feature]
    settings = {key: value for key, value in settings.items() if key != "alpha_pattern"}
    base = hf_model(name, **SMALL)
    model = genuine.wrapped(base, **settings)
    (tmp_path / "state").mkdir()
    torch.save(model.state_dict(), tmp_path / "state" / "pytorch_model.bin")

    converted = reshard.convert(tmp_path / "state", tmp_path / "ours", lora_alpha=settings["lora_alpha"])

    assert converted.plan.dropped["base weights"] > 0
    loaded = PeftModel.from_pretrained(genuine.load(base), tmp_path / "ours")
    assert torch.equal(genuine.logits(loaded), genuine.logits(model))


def test_the_state_of_a_live_model_is_merged_into_the_base_that_it_holds(llama: Path, tmp_path: Path) -> None:
    model = genuine.wrapped(llama, **FEATURES["trained whole"][1])
    state = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}  # as accelerate nests it
    (tmp_path / "state").mkdir()
    torch.save(state, tmp_path / "state" / "pytorch_model.bin")
    model.merge_and_unload().save_pretrained(tmp_path / "reference")

    reshard.convert(tmp_path / "state", tmp_path / "ours", merge=True, base=llama, lora_alpha=6)

    assert_merged(tensors_of(tmp_path / "ours"), tensors_of(tmp_path / "reference"))


def test_a_distributed_checkpoint_of_the_adapter_alone_is_read(llama: Path, tmp_path: Path) -> None:
    """As Trainer leaves it under FSDP: no base, no config, the model nested as `model`."""
    model = genuine.wrapped(llama, **FEATURES["plain"][1])
    state = {name: tensor for name, tensor in model.state_dict().items() if "lora_" in name}
    folder = tmp_path / "run" / "checkpoint-2" / "pytorch_model_fsdp_0"
    dcp.save({"model": state}, checkpoint_id=folder, no_dist=True)
    model.merge_and_unload().save_pretrained(tmp_path / "reference")

    found = commandline.reshard("inspect", tmp_path / "run", "--json").json
    assert "--lora-alpha" in found["next"]
    reshard.convert(tmp_path / "run", tmp_path / "ours", merge=True, base=llama, lora_alpha=24)
    assert_merged(tensors_of(tmp_path / "ours"), tensors_of(tmp_path / "reference"))


def test_alpha_is_taken_from_what_verl_notes(llama: Path, plain: Path, tmp_path: Path) -> None:
    bare = changed(plain, tmp_path / "bare", lambda tensors: None)
    (bare / "adapter_config.json").unlink()
    (bare / "lora_train_meta.json").write_text('{"r": 8, "lora_alpha": 24, "task_type": "CAUSAL_LM"}')
    reference = genuine.merged_by_peft(llama, plain, tmp_path / "reference")
    reshard.convert(bare, tmp_path / "ours", base=llama, merge=True)
    assert_merged(tensors_of(tmp_path / "ours"), tensors_of(reference))


def test_an_adapter_of_torch_save_is_read(llama: Path, plain: Path, tmp_path: Path) -> None:
    old = tmp_path / "old"
    PeftModel.from_pretrained(genuine.load(llama), plain).save_pretrained(old, safe_serialization=False)
    assert (old / "adapter_model.bin").is_file()
    reshard.convert(old, tmp_path / "ours")
    ours, theirs = (load_file(at / "adapter_model.safetensors") for at in (tmp_path / "ours", plain))
    assert_merged(ours, theirs)


def test_one_of_several_adapters_is_chosen_by_name(llama: Path, plain: Path, tmp_path: Path) -> None:
    model = genuine.wrapped(llama, **FEATURES["plain"][1])
    model.load_adapter(plain, "second")
    (tmp_path / "state").mkdir()
    torch.save(model.state_dict(), tmp_path / "state" / "pytorch_model.bin")

    error = refusal(tmp_path / "state", tmp_path / "ours", lora_alpha=24)
    assert "default, second" in str(error)
    assert "--adapter" in str(error)

    reshard.convert(tmp_path / "state", tmp_path / "ours", lora_alpha=24, adapter="second")
    ours, theirs = (load_file(at / "adapter_model.safetensors") for at in (tmp_path / "ours", plain))
    assert_merged(ours, theirs)


# ---------------------------------------------------------------------------------------------------- inspect


def test_inspect_prints_the_command_that_merges(llama: Path, plain: Path, tmp_path: Path) -> None:
    adapter = changed(plain, tmp_path / "adapter", lambda tensors: None)
    result = commandline.reshard("inspect", adapter, "--json")
    assert result.code == 0
    assert any("rank 8" in note and "alpha 24" in note and "q_proj" in note for note in result.json["notes"])
    words = result.json["next"].split()[1:]
    assert commandline.reshard(*words, "--quiet").code == 0
    reference = genuine.merged_by_peft(llama, plain, tmp_path / "reference")
    assert_merged(tensors_of(Path(f"{adapter}-merged")), tensors_of(reference))


def test_inspect_asks_for_an_alpha_that_no_file_tells(plain: Path, tmp_path: Path) -> None:
    bare = changed(plain, tmp_path / "bare", lambda tensors: None)
    (bare / "adapter_config.json").unlink()
    found = commandline.reshard("inspect", bare, "--json").json
    assert "--lora-alpha" in found["next"]
    assert [problem["severity"] for problem in found["problems"]] == ["warning"]


# --------------------------------------------------------------------------------------------------- refusals


def test_alpha_that_nobody_noted_is_asked_for(llama: Path, plain: Path, tmp_path: Path) -> None:
    bare = changed(plain, tmp_path / "bare", lambda tensors: None)
    (bare / "adapter_config.json").unlink()
    assert "--lora-alpha" in str(refusal(bare, tmp_path / "ours"))
    assert "--lora-alpha" in str(refusal(bare, tmp_path / "ours", merge=True, base=llama))
    reference = genuine.merged_by_peft(llama, plain, tmp_path / "reference")
    reshard.convert(bare, tmp_path / "ours", merge=True, base=llama, lora_alpha=24)
    assert_merged(tensors_of(tmp_path / "ours"), tensors_of(reference))


def test_tensors_that_were_saved_without_gathering_are_all_named(plain: Path, tmp_path: Path) -> None:
    def empty(tensors: dict[str, torch.Tensor]) -> None:
        tensors.update({name: torch.empty(0) for name in tensors if "layers.0." in name})

    error = refusal(changed(plain, tmp_path / "adapter", empty), tmp_path / "ours")
    assert len(error.problems) == len(LINEAR)
    assert "ZeRO-3" in str(error)


def test_a_tensor_without_its_partner_is_named(plain: Path, tmp_path: Path) -> None:
    missing = "base_model.model.model.layers.1.mlp.up_proj.lora_B.weight"
    error = refusal(changed(plain, tmp_path / "adapter", lambda t: t.pop(missing)), tmp_path / "ours")  # type: ignore[arg-type, return-value]
    assert [problem.tensor for problem in error.problems] == ["model.layers.1.mlp.up_proj.lora_A"]
    assert error.problems[0].expected == "model.layers.1.mlp.up_proj.lora_B"


@pytest.mark.parametrize("other", [{"intermediate_size": 80}, {"num_hidden_layers": 1}])
def test_an_adapter_of_another_model_is_refused(
    other: dict[str, Any], plain: Path, hf_model: Model, tmp_path: Path
) -> None:
    error = refusal(plain, tmp_path / "ours", merge=True, base=hf_model("llama", **{**SMALL, **other}))
    assert error.problems[0].message == "the adapter does not match the base"
    assert "--base" in str(error)


def test_a_config_of_another_rank_is_refused(plain: Path, tmp_path: Path) -> None:
    adapter = changed(plain, tmp_path / "adapter", lambda tensors: None)
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**config, "r": 16}))
    assert "disagree on the rank" in str(refusal(adapter, tmp_path / "ours"))


@pytest.mark.parametrize(
    "nonsense",
    [
        {"peft_type": ["LORA"]},
        {"lora_alpha": "much"},
        {"rank_pattern": ["q_proj"], "lora_alpha": None},
        {"target_parameters": 3, "lora_alpha": None},
        {"alpha_pattern": {"(": 3}},
    ],
)
def test_a_config_of_nonsense_is_refused_and_not_tripped_over(
    nonsense: dict[str, Any], llama: Path, plain: Path, tmp_path: Path
) -> None:
    adapter = changed(plain, tmp_path / "adapter", lambda tensors: None)
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**config, **nonsense}))
    assert refusal(adapter, tmp_path / "ours", merge=True, base=llama).problems
    assert commandline.reshard("inspect", adapter).code in (0, 1)


@pytest.mark.parametrize("kind", ["IA3", "PREFIX_TUNING", "LOHA"])
def test_other_kinds_of_adapters_are_refused_by_name(kind: str, plain: Path, tmp_path: Path) -> None:
    adapter = changed(plain, tmp_path / "adapter", lambda tensors: None)
    (adapter / "adapter_config.json").write_text(json.dumps({"peft_type": kind}))
    assert kind in str(refusal(adapter, tmp_path / "ours"))
    assert commandline.reshard("inspect", adapter).code == 1


def test_an_initialization_that_changed_the_base_is_not_merged(llama: Path, tmp_path: Path) -> None:
    settings = {**FEATURES["odd scale"][1], "init_lora_weights": "pissa"}
    adapter = genuine.make_adapter(llama, tmp_path / "adapter", **settings)
    error = refusal(adapter, tmp_path / "ours", merge=True, base=llama)
    assert "pissa" in str(error)
    assert "path_initial_model_for_weight_conversion" in str(error)


def test_a_quantized_base_is_refused(llama: Path, plain: Path, tmp_path: Path) -> None:
    base = tmp_path / "base"
    base.mkdir()
    tensors = tensors_of(llama)
    name = "model.layers.0.self_attn.q_proj.weight"
    tensors |= {name: tensors[name].to(torch.int8), f"{name}_scale": torch.ones(1)}
    save_file(tensors, base / "model.safetensors", {"format": "pt"})
    (base / "config.json").write_bytes((llama / "config.json").read_bytes())
    assert "quantized" in str(refusal(plain, tmp_path / "ours", merge=True, base=base, no_tokenizer=True))


def test_an_adapter_is_not_mistaken_for_a_model(llama: Path, plain: Path, tmp_path: Path) -> None:
    assert "--merge" in str(refusal(plain, tmp_path / "ours", to="megatron"))
    assert "no adapter" in str(refusal(llama, tmp_path / "ours", merge=True, base=llama))
    assert "no adapter" in str(refusal(llama, tmp_path / "ours", to="peft"))


def test_a_base_that_is_not_there_is_asked_for(plain: Path, tmp_path: Path) -> None:
    adapter = changed(plain, tmp_path / "adapter", lambda tensors: None)
    config = json.loads((adapter / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = "somebody/model"
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    error = refusal(adapter, tmp_path / "ours", merge=True)
    assert "somebody/model" in str(error)
    assert "--base" in str(error)


def test_a_base_that_the_adapter_does_not_name_is_told(
    llama: Path, plain: Path, hf_model: Callable[..., Path], tmp_path: Path
) -> None:
    def notes(base: Path) -> list[str]:
        plan = reshard.convert(plain, tmp_path / "out", base=base, merge=True, dry_run=True).plan
        return [note for note in plan.notes if "was trained on" in note]

    (tmp_path / "moved").mkdir()
    moved = tmp_path / "moved" / llama.name
    moved.symlink_to(llama)
    assert notes(llama) == notes(moved) == []
    (told,) = notes(hf_model("llama", seed=7, **SMALL))
    assert str(llama) in told
