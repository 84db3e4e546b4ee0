"""Why names of weights differ between a checkpoint and a model; and helpers for other tests of causes."""

from __future__ import annotations

import re

import pytest

from reshard.runs.checks.finding import Finding
from reshard.runs.doctor.log_diagnosis import diagnose_text

SITE = "/home/user/venv/lib/python3.11/site-packages"
LOAD = "RuntimeError: Error(s) in loading state_dict for Net:\n\t"


def first(text: str) -> Finding:
    return diagnose_text("log", text)[0]


def raised(said: str, code: str = "f()", file: str = "/home/user/train.py") -> str:
    return f'Traceback (most recent call last):\n  File "{file}", line 3, in f\n    {code}\n{said}'


def lists(missing: str = "", unexpected: str = "") -> str:
    """torch's message about mismatched names; names are separated by spaces."""
    told = [("Missing", missing), ("Unexpected", unexpected)]
    quoted = (f'{how} key(s) in state_dict: "{names}". ' for how, names in told if names)
    return LOAD + "\n\t".join(quoted).replace(" h.", '", "h.').replace(" a.", '", "a.')


NAMES = {
    lists("a.0.weight a.1.weight", "module.a.0.weight module.a.1.weight".replace(" m", '", "m')): (
        "names-prefix-of-file",
        'removeprefix("module.")',
    ),
    lists("model.a.0.weight model.a.1.weight".replace(" m", '", "m'), "a.0.weight a.1.weight"): (
        "names-prefix-of-model",
        '"model." + name',
    ),
    lists("", 'epoch", "model_state_dict", "optimizer'): ("names-inside", 'checkpoint["model_state_dict"]'),
    lists("", "h.0.mlp.down_proj.weight.absmax h.0.mlp.up_proj.weight.quant_map"): (
        "names-quantized",
        "reshard convert",
    ),
    lists("", "h.0.q.lora_A.default.weight h.0.q.lora_B.default.weight"): ("names-adapter", "--base BASE"),
    lists("h.0.q.base_layer.weight h.0.q.lora_A.weight"): ("names-no-adapter", "PeftModel.from_pretrained"),
    lists("", "h.0.fc._extra_state h.1.fc._extra_state"): ("names-extra-state", "log_unexpected"),
    lists("", "lm_head.weight"): ("names-head", "tie_word_embeddings"),
    lists("h.12.fc.weight h.13.fc.weight"): ("names-layers-of-model", "reshard inspect"),
    lists("", "h.12.fc.weight h.13.fc.weight"): ("names-layers-of-file", "num_hidden_layers"),
    lists("", "v_head.summary.weight"): ("names-only-file", "same class"),
    lists("score.weight"): ("names-only-model", "strict=False"),
    lists("h.0.a.weight h.0.b.weight h.0.c.weight h.1.a.weight h.1.b.weight"): ("names-none", "--use-legacy"),
    lists(
        "layers.0.attn.q_proj.lora_a.weight layers.0.attn.q_proj.lora_b.weight layers.1.attn.q_proj.lora_a.weight"
    ): (
        "names-no-adapter",
        "PeftModel",
    ),
    lists("enc.conv.weight", "dec.up.gain"): ("names-other-model", "model_type"),
    raised("ValueError: Can not map tensor 'model.layers.0.mlp.down_proj.SCB'"): (
        "names-quantized",
        "--dtype bfloat16",
    ),
    "llama_model_load: error loading model: check_tensor_dims: tensor 'blk.0.ffn_norm.weight' not found": (
        "names-gguf",
        "convert_hf_to_gguf.py",
    ),
    lists("layers.0.self_attn.q_proj.weight", "layers.0.attention.wq.weight"): (
        "names-of-program",
        "MetaCheckpointer",
    ),
    lists("model.layers.0.mlp.up_proj.weight", "decoder.layers.0.mlp.linear_fc1.weight"): (
        "names-of-program",
        "reshard convert CHECKPOINT OUT",
    ),
    lists("decoder.layers.0.mlp.linear_fc1.weight", "model.layers.0.mlp.up_proj.weight"): (
        "names-of-program",
        "--to megatron",
    ),
    'Exception: Found unexpected key: "tok_embeddings.weight". Please check the format.': (
        "names-of-program",
        "Hugging Face folder",
    ),
    "KeyError: 'visual.patch_embed.proj.weight'": ("names-lookup", "transformers<4.52"),
}


@pytest.mark.parametrize("text", NAMES, ids=lambda text: text[-60:])
def test_a_class_of_causes_is_computed(text: str) -> None:
    assert_class(text, *NAMES[text])


def assert_class(text: str, code: str, cure: str) -> None:
    found = first(text)
    assert found.code == code
    assert cure in found.remedy.en and found.certainty != "sure"
    for said in (found.message, found.rule, found.remedy):
        assert not re.search(r"\{[a-z]+\}", said.en + said.zh)
