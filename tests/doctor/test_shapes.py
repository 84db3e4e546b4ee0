"""Shape mismatches: their class, with the numbers, for the messages of each framework."""

from __future__ import annotations

import traceback

import pytest
import torch

from reshard.base.languages import LANGUAGES
from reshard.runs.checks import rules
from reshard.runs.doctor.causes.shape_mismatches import computed, pairs
from reshard.runs.doctor.log_diagnosis import diagnose_text

LOAD = (
    "size mismatch for {}: copying a param with shape torch.Size({}) from checkpoint, "
    "the shape in current model is torch.Size({})."
)
CASES = [
    ("model.layers.0.mlp.up_proj.weight", [0], [64, 32], "ZeRO-3"),
    ("model.layers.0.mlp.up_proj.weight", [1024, 1], [64, 32], "bitsandbytes"),
    ("model.layers.0.mlp.up_proj.weight", [32, 32], [64, 32], "one tensor-parallel rank of 2"),
    ("model.layers.0.self_attn.o_proj.weight", [64, 16], [64, 64], "one tensor-parallel rank of 4"),
    (
        "model.layers.0.mlp.up_proj.weight",
        [64, 32],
        [32, 32],
        "rank of 2, or from the config of a smaller model",
    ),
    ("model.layers.0.self_attn.k_proj.weight", [64, 64], [16, 64], "num_key_value_heads"),
    ("model.embed_tokens.weight", [151936, 64], [151665, 64], "271 more"),
    ("lm_head.weight", [32000, 64], [32064, 64], "64 more in the model"),
    ("model.layers.0.mlp.gate.weight", [64, 32], [60, 32], "64 experts, and the model 60"),
    ("base.layers.0.q_proj.lora_A.default.weight", [16, 64], [8, 64], "rank 16"),
    ("model.norm.weight", [2048], [4096], "no tensor-parallel shard"),
    ("lm_head.weight", [32000, 2048], [32000, 4096], "no tensor-parallel shard"),
    ("output_layer.weight", [32000, 4096], [32000, 2048], "no tensor-parallel shard"),
    ("score.weight", [1, 2048], [1, 4096], "no tensor-parallel shard"),
    ("weight", [151936, 1024], [151936, 2048], "no tensor-parallel shard"),
    ("model.layers.0.self_attn.q_proj.weight", [4096, 2048], [4096, 4096], "no tensor-parallel shard"),
    ("base.layers.0.q_proj.lora_A.weight", [16, 2048], [16, 4096], "no tensor-parallel shard"),
    ("tok_embeddings.weight", [32000, 2048], [32000, 4096], "one tensor-parallel rank of 2"),
    ("model.layers.0.mlp.up_proj.weight", [2048], [64, 32], "flattened"),
    ("model.layers.0.mlp.up_proj.weight", [13824, 5120], [11008, 4096], "several dimensions"),
    ("layers.19.mlp.up_proj.weight", [13824, 64], [13696, 64], "no tensor-parallel shard"),
    ("classifier.weight", [9, 64], [5, 64], "num_labels=9"),
    ("score.weight", [2, 64], [1, 64], "num_labels=2"),
    ("weight", [128256, 64], [128003, 64], "differ by 253"),
    ("model.embed_tokens.weight", [50304, 64], [50257, 64], "differ by 47"),
    ("lm_head.weight", [151936, 64], [152064, 64], "differ by 128"),
    ("output_layer.weight", [50257, 64], [50300, 64], "differ by 43"),
    ("weight", [13824, 64], [13696, 64], "no tensor-parallel shard"),
]


def texts(said: str) -> list[str]:
    """Title, cause and cure of what is computed from a message, in English and in Chinese."""
    identifier, values = computed(said) or ("", {})
    found = rules.finding(identifier, [], values)
    return [" / ".join(each.of(to) for each in (found.message, found.rule, found.remedy)) for to in LANGUAGES]


@pytest.mark.parametrize(("name", "saved", "wanted", "shown"), CASES, ids=lambda value: str(value)[:30])
def test_the_class_of_two_shapes(name: str, saved: list[int], wanted: list[int], shown: str) -> None:
    english, chinese = texts(LOAD.format(name, saved, wanted))
    assert shown in english and "{" not in english + chinese
    assert name in chinese


def test_rows_that_megatron_padded_are_not_resized() -> None:
    english, chinese = texts(LOAD.format("lm_head.weight", [50304, 64], [50257, 64]))
    assert "resize_token_embeddings" not in english + chinese and "reshard convert" in english


def test_another_hidden_size_is_another_model_whatever_comes_first() -> None:
    shards = LOAD.format("model.layers.0.mlp.up_proj.weight", [32, 64], [64, 64])
    hidden = LOAD.format("lm_head.weight", [512, 32], [512, 64])
    sharded_rows = LOAD.format("model.norm.weight", [32], [64])
    assert (computed(f"{shards}\n{hidden}") or "")[0] == "shape-other-size"
    assert (computed(f"{shards}\n{sharded_rows}") or "")[0] == "shape-shard", "FSDP2 cuts all in dimension 0"


SAVED, WANTED = "torch.Size([32, 64])", "torch.Size([64, 64])"
TOLD = {
    "transformers": f"a.v_proj.weight | MISMATCH | Reinit due to size mismatch - ckpt: {SAVED} vs model:{WANTED}",
    "transformers 4": f'Trying to set a tensor of shape {SAVED} in "weight" (which has shape {WANTED}), this looks bad',
    "dcp": f"Size mismatch between saved {SAVED} and current: {WANTED} for model.a.weight",
    "megatron": f"Global shape mismatch for loaded ({SAVED}) and expected ((64, 64)) tensor for key decoder.a.weight",
}


@pytest.mark.parametrize("who", TOLD)
def test_shapes_are_read_in_the_words_of_each_framework(who: str) -> None:
    (pair,) = pairs(TOLD[who])
    assert (pair.saved, pair.wanted) == ((32, 64), (64, 64))


RUNS = {
    "view": ("torch.ones(2, 8, 512).view(2, 8, 8, 128)", "0.5 times as many elements"),
    "add": ("torch.ones(4, 1024) + torch.ones(4, 4096)", "a factor of 4"),
    "load": (
        "torch.nn.Linear(64, 128, bias=False).load_state_dict({'weight': torch.ones(32, 64)})",
        "one tensor-parallel rank of 4",
    ),
}


@pytest.mark.parametrize("name", RUNS)
def test_what_torch_itself_says_is_computed(name: str) -> None:
    code, shown = RUNS[name]
    with pytest.raises(RuntimeError) as raised:
        exec(compile(code, "train.py", "exec"), {"torch": torch})
    of_script = raised.value.__traceback__
    while of_script and of_script.tb_frame.f_code.co_filename != "train.py":
        of_script = of_script.tb_next
    text = "".join(traceback.format_exception(raised.value.with_traceback(of_script)))
    (found,) = diagnose_text("log", text)
    assert found.code.startswith("shape-") and found.certainty != "sure" and shown in found.rule.en


def test_nothing_is_computed_from_equal_or_unrelated_numbers() -> None:
    assert computed("The size of tensor a (7) must match the size of tensor b (5)") is None
    assert computed(LOAD.format("a.weight", [4, 4], [4, 4])) is None
    assert "do not fit" in texts("shape '[2, -1]' is invalid for input of size 7")[0]


def test_a_shape_that_is_no_shard_is_of_another_size() -> None:
    said = LOAD.format(
        "base_model.model.layers.19.mlp.up_proj.lora_B.default.weight", [13824, 64], [13696, 64]
    )
    (found,) = diagnose_text("log", said)
    assert found.code == "shape-other-size" and "no tensor-parallel shard" in found.rule.en
    rank = LOAD.format("base_model.model.layers.19.mlp.up_proj.lora_A.default.weight", [16, 64], [8, 64])
    assert diagnose_text("log", rank)[0].code == "shape-rank"
