"""The folders of `make_model` match those of users, and the transformers oracle notices any fault in them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer
from transformers.modeling_layers import MtpModel

from reshard.base.errors import ReshardError
from reshard.oracle.transformers import generate, load_model, transformers_logits
from tests.genuine.huggingface import EOS, VARIANTS, VOCAB_SIZE, make_model

TOKENS = np.random.default_rng(0).integers(0, VOCAB_SIZE, (2, 24))
ATTENTION = {f"self_attn.{name}_proj.weight" for name in "qkvo"}
NORMS = {"input_layernorm.weight", "post_attention_layernorm.weight"}


def mlp(prefix: str, names: str = "gate_proj up_proj down_proj") -> set[str]:
    return {f"{prefix}.{name}.weight" for name in names.split()}


def experts(prefix: str, count: int, names: str = "gate_proj up_proj down_proj") -> set[str]:
    return {name for expert in range(count) for name in mlp(f"{prefix}.{expert}", names)}


MLA = {
    "self_attn.kv_a_proj_with_mqa.weight",
    "self_attn.kv_a_layernorm.weight",
    "self_attn.kv_b_proj.weight",
    "self_attn.o_proj.weight",
}
DEEPSEEK_MOE = (
    experts("mlp.experts", 8)
    | mlp("mlp.shared_experts")
    | {"mlp.gate.weight", "mlp.gate.e_score_correction_bias"}
)
Q_LORA = {"self_attn.q_a_proj.weight", "self_attn.q_a_layernorm.weight", "self_attn.q_b_proj.weight"}

# The tensors of decoder layer 1, by the names that the models on the Hub have.
HUB_NAMES = {
    "llama": ATTENTION | NORMS | mlp("mlp"),
    "mixtral": ATTENTION
    | NORMS
    | {"block_sparse_moe.gate.weight"}
    | experts("block_sparse_moe.experts", 4, "w1 w2 w3"),
    "qwen2": ATTENTION | NORMS | mlp("mlp") | {f"self_attn.{name}_proj.bias" for name in "qkv"},
    "qwen2_moe": ATTENTION
    | NORMS
    | {f"self_attn.{name}_proj.bias" for name in "qkv"}
    | experts("mlp.experts", 4)
    | mlp("mlp.shared_expert")
    | {"mlp.gate.weight", "mlp.shared_expert_gate.weight"},
    "qwen3_moe": ATTENTION
    | NORMS
    | {"self_attn.q_norm.weight", "self_attn.k_norm.weight", "mlp.gate.weight"}
    | experts("mlp.experts", 8),
    "internlm3": ATTENTION | NORMS | mlp("mlp"),
    "internlm3_bias": ATTENTION
    | NORMS
    | mlp("mlp")
    | {name.replace("weight", "bias") for name in ATTENTION | mlp("mlp")},
    "deepseek_v3": MLA | Q_LORA | NORMS | DEEPSEEK_MOE,
    "deepseek_v3_noq": MLA | {"self_attn.q_proj.weight"} | NORMS | DEEPSEEK_MOE,
}


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def rewrite(folder: Path, changes: dict[str, torch.Tensor | None]) -> None:
    """Replace, add or (None) remove tensors of a folder with one file."""
    tensors = {**load_file(folder / "model.safetensors"), **changes}
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize("name", HUB_NAMES)
def test_the_folder_has_the_names_of_the_hub(name: str, tmp_path: Path) -> None:
    prefix = "model.layers.1."
    found = {
        key.removeprefix(prefix) for key in tensors_of(make_model(name, tmp_path)) if key.startswith(prefix)
    }
    assert found == HUB_NAMES[name]


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_loads_strictly_and_keeps_its_activations_in_bounds(name: str, tmp_path: Path) -> None:
    logits = transformers_logits(make_model(name, tmp_path), TOKENS)
    assert logits.shape == (*TOKENS.shape, VOCAB_SIZE) and logits.dtype == np.float32
    assert 0.5 < logits.std() < 2


@pytest.mark.parametrize("name", ["qwen2_moe", "qwen3", "internlm3_bias", "deepseek_v3"])
def test_every_tensor_matters(name: str, tmp_path: Path) -> None:
    """The logits detect a converter that loses the sign of any tensor, including norms and biases."""
    model = load_model(make_model(name, tmp_path))
    tokens = torch.from_numpy(TOKENS)
    with torch.inference_mode():
        expected = model(input_ids=tokens, use_cache=False).logits
        for key, tensor in model.state_dict().items():
            if "layers." in key and "layers.1." not in key:
                continue
            tensor.neg_()
            assert not torch.allclose(model(input_ids=tokens, use_cache=False).logits, expected, atol=1e-3), (
                key
            )
            tensor.neg_()


def test_the_seed_decides_every_byte(tmp_path: Path) -> None:
    first, again, other = (
        (make_model("qwen3_moe", tmp_path / label, seed=seed) / "model.safetensors").read_bytes()
        for label, seed in (("first", 1), ("again", 1), ("other", 2))
    )
    assert first == again != other


def test_tied_embeddings_are_stored_once(tmp_path: Path) -> None:
    for name in ("llama_tied", "qwen2_tied", "qwen3_tied"):
        assert "lm_head.weight" not in tensors_of(make_model(name, tmp_path / name))


def test_weights_have_the_dtype_asked_for_and_routing_biases_stay_float32(tmp_path: Path) -> None:
    tensors = tensors_of(make_model("deepseek_v3", tmp_path, dtype="bfloat16"))
    single = {name for name, tensor in tensors.items() if tensor.dtype == torch.float32}
    assert single == {f"model.layers.{layer}.mlp.gate.e_score_correction_bias" for layer in (1, 2, 3)}
    assert {tensor.dtype for name, tensor in tensors.items() if name not in single} == {torch.bfloat16}


def test_logits_are_computed_in_float32_from_bfloat16_weights(tmp_path: Path) -> None:
    folder = make_model("qwen2", tmp_path, dtype="bfloat16")
    rounded = transformers_logits(folder, TOKENS, dtype="bfloat16")
    difference = np.abs(transformers_logits(folder, TOKENS) - rounded).max()
    assert 1e-3 < difference < 0.5


@pytest.mark.parametrize("name", ["qwen3_moe", "internlm3", "deepseek_v3_mtp"])
def test_a_sharded_folder_says_the_same(name: str, tmp_path: Path) -> None:
    whole = make_model(name, tmp_path / "whole")
    sharded = make_model(name, tmp_path / "sharded", max_shard_size="100KB")
    assert len(list(sharded.glob("model-*.safetensors"))) > 1
    assert not (sharded / "model.safetensors").exists()
    np.testing.assert_array_equal(transformers_logits(whole, TOKENS), transformers_logits(sharded, TOKENS))


def test_internlm3_with_a_bias_on_query_key_and_value_only(tmp_path: Path) -> None:
    folder = make_model("internlm3", tmp_path, qkv_bias=True)
    biases = {name for name in tensors_of(folder) if name.endswith(".bias")}
    assert biases == {f"model.layers.{i}.self_attn.{n}_proj.bias" for i in range(4) for n in "qkv"}
    model = load_model(folder)
    assert not model.model.layers[0].self_attn.o_proj.bias.any()
    assert model.model.layers[0].self_attn.q_proj.bias.any()


def test_transformers_own_mtp_model_finds_all_its_tensors(tmp_path: Path) -> None:
    """`MtpModel` raises if a tensor of the additional layer is missing; it shares embedding and head."""
    main = load_model(make_model("deepseek_v3_mtp", tmp_path))
    # transformers finds MTP layers by the number that they have in the 61-layer model.
    main._keys_to_ignore_on_load_unexpected = [r"model\.layers\.4\."]
    mtp = MtpModel.from_pretrained(main)
    stored = tensors_of(tmp_path)
    torch.testing.assert_close(
        mtp.layers[0].eh_proj.weight, stored["model.layers.4.eh_proj.weight"], rtol=0, atol=0
    )
    torch.testing.assert_close(
        mtp.layers[0].post_norm.weight, stored["model.layers.4.shared_head.norm.weight"], rtol=0, atol=0
    )
    assert torch.equal(stored["model.layers.4.embed_tokens.weight"], stored["model.embed_tokens.weight"])


def test_the_mtp_layer_has_no_part_in_the_logits(tmp_path: Path) -> None:
    folder = make_model("deepseek_v3_mtp", tmp_path)
    expected = transformers_logits(folder, TOKENS)
    mtp = {name: None for name in tensors_of(folder) if name.startswith("model.layers.4.")}
    assert "model.layers.4.mlp.experts.7.up_proj.weight" in mtp
    rewrite(folder, mtp)
    np.testing.assert_array_equal(transformers_logits(folder, TOKENS), expected)


def test_the_folder_speaks(tmp_path: Path) -> None:
    folder = make_model("qwen3", tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "Nothing was lost, café 数."
    assert len(tokenizer) == VOCAB_SIZE
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "Go."}], tokenize=False)
    assert prompt == "<|im_start|>user\nGo.<|im_end|>\n"
    said = generate(folder, "To move a model", 12)
    assert said and said == generate(folder, "To move a model", 12)
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == EOS


def test_missing_extra_and_misshapen_tensors_are_all_named(tmp_path: Path) -> None:
    folder = make_model("qwen2", tmp_path)
    rewrite(
        folder,
        {
            "model.layers.2.self_attn.q_proj.bias": None,
            "model.layers.4.mlp.up_proj.weight": torch.zeros(96, 64),
            "model.layers.1.mlp.down_proj.weight": torch.zeros(96, 64),
        },
    )
    with pytest.raises(ReshardError) as caught:
        transformers_logits(folder, TOKENS)
    problems = {problem.tensor: problem for problem in caught.value.problems}
    assert (
        problems["model.layers.2.self_attn.q_proj.bias"].message
        == "the model needs a tensor that is not there"
    )
    assert problems["model.layers.4.mlp.up_proj.weight"].message == "the model has no place for a tensor"
    wrong = problems["model.layers.1.mlp.down_proj.weight"]
    assert (wrong.expected, wrong.found) == ("[64, 96]", "[96, 64]")
    assert len(problems) == 3


@pytest.mark.parametrize("expert", [0, 5, 7])
def test_a_missing_expert_is_an_error(expert: int, tmp_path: Path) -> None:
    folder = make_model("qwen3_moe", tmp_path)
    prefix = f"model.layers.3.mlp.experts.{expert}"
    rewrite(folder, {f"{prefix}.{name}_proj.weight": None for name in ("gate", "up", "down")})
    with pytest.raises(ReshardError, match=re.escape("model.layers.3.mlp.experts")):
        transformers_logits(folder, TOKENS)


def test_a_part_of_an_expert_that_is_missing_is_an_error(tmp_path: Path) -> None:
    folder = make_model("qwen3_moe", tmp_path)
    rewrite(folder, {"model.layers.3.mlp.experts.5.up_proj.weight": None})
    with pytest.raises(ReshardError, match="cannot put the weights together"):
        transformers_logits(folder, TOKENS)


def test_an_extra_expert_is_an_error(tmp_path: Path) -> None:
    folder = make_model("qwen3_moe", tmp_path)
    rewrite(
        folder,
        {
            "model.layers.3.mlp.experts.8.up_proj.weight": torch.zeros(32, 64),
            "model.layers.3.mlp.experts.8.gate_proj.weight": torch.zeros(32, 64),
            "model.layers.3.mlp.experts.8.down_proj.weight": torch.zeros(64, 32),
        },
    )
    with pytest.raises(ReshardError, match=re.escape("model.layers.3.mlp.experts")):
        transformers_logits(folder, TOKENS)


@pytest.mark.parametrize("model_type", ["llama", "private_model"])
def test_code_in_the_folder_is_never_run(model_type: str, tmp_path: Path) -> None:
    folder = make_model("llama", tmp_path)
    (folder / "configuration_trap.py").write_text(
        f"open({str(tmp_path / 'sprung')!r}, 'w')\nclass Trap: pass\n"
    )
    (folder / "modeling_trap.py").write_text(f"open({str(tmp_path / 'sprung')!r}, 'w')\nclass Trap: pass\n")
    auto_map = {"AutoConfig": "configuration_trap.Trap", "AutoModelForCausalLM": "modeling_trap.Trap"}
    edit_config(folder, model_type=model_type, auto_map=auto_map)
    if model_type == "llama":
        transformers_logits(folder, TOKENS)
    else:
        with pytest.raises(ReshardError, match="private_model"):
            transformers_logits(folder, TOKENS)
    assert not (tmp_path / "sprung").exists()
