"""Tensors, configs and families that do not belong together."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.bad_input.damage import (
    MEGATRON,
    QUERY,
    Copy,
    convert,
    converted,
    edit_config,
    edit_index,
    edit_tensors,
    refusal,
    refused,
)
from tests.commandline import reshard

# ----------------------------------------------------------------------- tensors that should be others


def test_a_missing_tensor(copy: Copy) -> None:
    src = copy("qwen3")
    edit_tensors(src, lambda tensors: tensors.pop(QUERY))
    problem = refusal(*convert(src, *MEGATRON))
    assert (problem["message"], problem["tensor"]) == ("a tensor is missing", QUERY)
    assert problem["expected"] == "[128, 64]" and problem["file"] == str(src)
    inspected = reshard("inspect", src, "--json")
    assert inspected.code == 1 and inspected.json["problems"] == [problem]
    plain = reshard("inspect", src)
    assert plain.code == 1 and QUERY in plain.out and "Traceback" not in plain.err


def test_an_extra_tensor(copy: Copy) -> None:
    src = copy("qwen3")
    edit_tensors(src, lambda tensors: tensors.update({"model.layers.1.sink": np.zeros(3, np.float32)}))
    problem = refusal(*convert(src, *MEGATRON))
    assert (problem["message"], problem["tensor"]) == ("a tensor is unknown", "model.layers.1.sink")
    assert problem["found"] == "float32 [3]" and problem["file"] == str(src / "model.safetensors")


def test_an_extra_layer(copy: Copy) -> None:
    src = copy("qwen3")

    def add_layer(tensors: dict[str, Any]) -> None:
        for name in [name for name in tensors if ".layers.3." in name]:
            tensors[name.replace(".3.", ".4.")] = tensors[name] + 1

    edit_tensors(src, add_layer)
    problem = refusal(*convert(src, *MEGATRON))
    assert "disagree on layers" in problem["message"]
    assert (problem["expected"], problem["found"]) == ("4 (config.json)", "5 (checkpoint)")


def test_a_transposed_matrix(copy: Copy) -> None:
    src = copy("qwen3")
    edit_tensors(src, lambda tensors: tensors.update({QUERY: np.ascontiguousarray(tensors[QUERY].T)}))
    problem = refusal(*convert(src, *MEGATRON))
    assert (problem["message"], problem["tensor"]) == ("a tensor is transposed", QUERY)
    assert (problem["expected"], problem["found"]) == ("[128, 64]", "[64, 128]")


def test_nan_and_inf_are_a_warning_and_with_strict_an_error(copy: Copy) -> None:
    src = copy("qwen3")

    def spoil(tensors: dict[str, Any]) -> None:
        tensors[QUERY][3, 3] = np.nan
        tensors["model.norm.weight"][1] = -np.inf

    edit_tensors(src, spoil)
    result = converted(src, src.parent / "warned", "--to", "huggingface")
    assert f"warning: NaN or Inf in {QUERY}, model.norm.weight" in result.err and "--strict" in result.err
    found = converted(src, src.parent / "counted", "--to", "huggingface", "--json").json
    assert sorted(found["nonfinite"]) == [QUERY, "model.norm.weight"]
    problems = refused(*convert(src, "--to", "huggingface", "--strict"))
    assert sorted(problem["tensor"] for problem in problems) == [QUERY, "model.norm.weight"]
    assert "--strict" in problems[0]["rule"]


def test_mixed_dtypes_in_what_megatron_fuses(copy: Copy) -> None:
    src = copy("qwen3")
    key = QUERY.replace("q_proj", "k_proj")
    edit_tensors(src, lambda tensors: tensors.update({key: tensors[key].astype(np.float16)}))
    problem = refusal(*convert(src, *MEGATRON))
    assert key in problem["tensor"] and problem["found"] == "float16, float32"
    assert "--dtype" in problem["remedy"]
    converted(src, src.parent / "dst", *MEGATRON, "--dtype", "bfloat16")


def test_a_tied_head_with_values_of_its_own(copy: Copy) -> None:
    src = copy("qwen2_tied")
    edit_tensors(
        src, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"] + 1})
    )
    problem = refusal(*convert(src, *MEGATRON))
    assert problem["tensor"] == "lm_head.weight" and "tie_word_embeddings" in problem["rule"]
    assert "tie_word_embeddings" in problem["remedy"]
    edit_tensors(
        src, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].copy()})
    )
    converted(src, src.parent / "dst", *MEGATRON)


def test_the_index_names_a_tensor_that_is_in_no_shard(copy: Copy) -> None:
    src = copy("sharded")
    edit_index(src, lambda weights: weights.update({"model.ghost": min(weights.values())}))
    problem = refusal(*convert(src, *MEGATRON))
    assert (problem["message"], problem["tensor"]) == ("a tensor is missing", "model.ghost")
    assert "model-00001-of-" in problem["file"] and "index" in problem["rule"]


def test_the_index_does_not_name_a_tensor(copy: Copy) -> None:
    src = copy("sharded")
    edit_index(src, lambda weights: weights.pop(QUERY))
    problem = refusal(*convert(src, *MEGATRON))
    assert problem["message"] == "a tensor is in a shard but not in the index" and problem["tensor"] == QUERY


def test_the_index_is_broken(copy: Copy) -> None:
    src = copy("sharded")
    (src / "model.safetensors.index.json").write_text('{"weight_map"')
    assert refusal(*convert(src, *MEGATRON))["message"] == "the index cannot be read"


def test_a_tensor_in_two_shards(copy: Copy) -> None:
    src = copy("sharded")
    first, second, *_ = sorted(src.glob("model-*.safetensors"))
    one, two = load_file(first), load_file(second)
    name = min(one)
    save_file({**two, name: one[name]}, second, metadata={"format": "pt"})
    problem = refusal(*convert(src, *MEGATRON))
    assert (problem["message"], problem["tensor"]) == ("a tensor is in more than one file", name)
    assert problem["file"] == str(second) and str(first) in problem["found"]


# --------------------------------------------------------------------- configs that say something else


@pytest.mark.parametrize(
    ("name", "changes", "what"),
    [
        ("qwen3", {"num_hidden_layers": 3}, "layers"),
        ("qwen3", {"num_hidden_layers": 6}, "layers"),
        ("qwen3", {"num_attention_heads": 4}, "attention heads"),
        ("qwen3", {"num_key_value_heads": 2}, "key-value heads"),
        ("qwen3", {"vocab_size": 300}, "vocabulary"),
        ("qwen3", {"hidden_size": 128}, "hidden size"),
        ("qwen3_moe", {"num_experts": 16, "num_local_experts": 16}, "experts"),
        ("torch_dist", {"num_hidden_layers": 3}, "layers"),
        ("torch_dist", {"vocab_size": 2000}, "vocabulary"),
        ("torch_dist", {"hidden_size": 128}, "hidden size"),
        ("torch_dist moe", {"num_experts": 4, "num_local_experts": 4}, "experts"),
        ("torch_dist", {"num_attention_heads": 4}, "num_attention_heads=4"),
        ("legacy", {"num_key_value_heads": 2}, "num_key_value_heads=2"),
        ("legacy", {"intermediate_size": 48}, "intermediate_size=48"),
    ],
)
def test_a_config_that_disagrees_is_one_problem(
    copy: Copy, name: str, changes: dict[str, int], what: str
) -> None:
    src = copy(name)
    edit_config(src, **changes)
    problem = refusal(*convert(src, *(MEGATRON if name.startswith("qwen") else ())))
    assert what in problem["message"] + problem["expected"]
    assert str(next(iter(changes.values()))) in problem["expected"]
    assert "config" in problem["remedy"]


def test_another_width_is_one_problem_for_all_layers(copy: Copy) -> None:
    src = copy("qwen3")
    edit_config(src, intermediate_size=128)
    problems = refused(*convert(src, *MEGATRON))
    assert [problem["tensor"] for problem in problems] == [
        f"model.layers.*.mlp.{name}_proj.weight (all 4)" for name in ("down", "gate", "up")
    ]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden_size": ..., "num_attention_heads": ...}, "no usable hidden_size, num_attention_heads"),
        ({"num_hidden_layers": "many"}, "no usable num_hidden_layers"),
        ({"num_attention_heads": 0}, "no usable num_attention_heads"),
        ({"vocab_size": None}, "no usable vocab_size"),
        ({"rope_parameters": "yes"}, "rope_parameters: 'yes'"),
    ],
)
def test_a_config_without_what_it_needs(copy: Copy, changes: dict[str, Any], named: str) -> None:
    src = copy("qwen3")
    edit_config(src, **changes)
    problem = refusal(*convert(src, *MEGATRON))
    assert problem["message"] == "config.json does not describe a model of family qwen3"
    assert named in problem["found"] and problem["file"] == str(src / "config.json")


@pytest.mark.parametrize("text", ['{"model_type": "qwen3"', "[]", "", "\x00", '{"model_type": ["qwen3"]}'])
def test_a_config_that_is_no_json_object(copy: Copy, text: str) -> None:
    src = copy("qwen3")
    (src / "config.json").write_text(text)
    problem = refusal(*convert(src, *MEGATRON))
    assert problem["message"] == "config.json cannot be read" and problem["file"] == str(src / "config.json")
    inspected = reshard("inspect", src, "--json")
    assert inspected.code == 1 and inspected.json["problems"] == [problem]


def test_no_config(copy: Copy, originals: Callable[[str], Path]) -> None:
    src = copy("qwen3")
    (src / "config.json").unlink()
    assert "--base" in refusal(*convert(src, *MEGATRON))["remedy"]
    assert (
        "the base folder does not exist" in refusal(*convert(src, *MEGATRON, "--base", "nowhere"))["message"]
    )
    assert "no config.json" in refusal(*convert(src, *MEGATRON, "--base", src))["message"]
    converted(src, src.parent / "dst", *MEGATRON, "--base", originals("qwen3"))


def test_no_tokenizer(copy: Copy, originals: Callable[[str], Path]) -> None:
    src = copy("qwen3")
    for path in src.glob("*token*"):
        path.unlink()
    problem = refusal(*convert(src, *MEGATRON))
    assert problem["message"] == "tokenizer not found next to the checkpoint"
    assert "--base" in problem["remedy"] and "--no-tokenizer" in problem["remedy"]
    converted(src, src.parent / "without", *MEGATRON, "--no-tokenizer")
    assert not (src.parent / "without" / "tokenizer.json").exists()
    converted(src, src.parent / "with", *MEGATRON, "--base", originals("qwen3"))
    assert (src.parent / "with" / "tokenizer.json").exists()


# -------------------------------------------------------------------------------------------- families


def test_a_family_that_is_not_supported(copy: Copy) -> None:
    src = copy("qwen3")
    edit_config(src, model_type="my_sinks")
    edit_tensors(
        src, lambda tensors: tensors.update({"model.layers.0.self_attn.sinks": np.zeros(8, np.float32)})
    )
    problem, misfit = refused(*convert(src, *MEGATRON))
    assert '"my_sinks" is not supported' in problem["message"] and "reshard support" in problem["expected"]
    assert "--family" in problem["remedy"]
    assert misfit["tensor"] == "model.layers.0.self_attn.sinks" and "qwen3" in misfit["message"]


@pytest.mark.parametrize("name", ["qwen3", "torch_dist", "legacy"])
def test_an_unknown_model_type_whose_tensors_are_those_of_a_family(copy: Copy, name: str) -> None:
    src = copy(name)
    edit_config(src, model_type="my_qwen")
    words = convert(src, "--to", "megatron", "--tp", 2)
    problem = refusal(*words)
    assert problem["message"] == 'model_type "my_qwen" is not known, though the tensors are named as in qwen3'
    assert "--family qwen3" in problem["remedy"] and problem["file"] == str(src / "config.json")
    assert ("--to huggingface" in problem["remedy"]) == (name == "qwen3")
    forced = converted(src, src.parent / "forced", "--to", "huggingface", "--family", "qwen3")
    assert "is not known" not in forced.err
    assert json.loads((src.parent / "forced" / "config.json").read_text())["model_type"] == "my_qwen"
    assert reshard("verify", src, src.parent / "forced").code == 0


def test_an_unknown_model_type_goes_anywhere_under_its_own_names(copy: Copy) -> None:
    src = copy("qwen3")
    edit_config(src, model_type="my_qwen")
    result = converted(src, src.parent / "dst", "--to", "huggingface")
    assert 'note: model_type "my_qwen" is not known; names are taken as they are' in result.err
    assert json.loads((src.parent / "dst" / "config.json").read_text())["model_type"] == "my_qwen"
    assert reshard("verify", src, src.parent / "dst").code == 0


@pytest.mark.parametrize("name", ["torch_dist", "legacy"])
def test_an_unknown_model_type_is_no_more_welcome_on_the_way_back(copy: Copy, name: str) -> None:
    src = copy(name)
    edit_config(src, model_type="my_qwen")
    problem = refusal(*convert(src))
    assert "--family qwen3" in problem["remedy"]
    inspected = reshard("inspect", src, "--json")
    assert inspected.code == 1 and inspected.json["problems"] == [problem] and inspected.json["next"] == ""


def test_a_config_without_a_model_type(copy: Copy) -> None:
    src = copy("qwen3")
    edit_config(src, model_type=...)
    converted(src, src.parent / "dst", *MEGATRON)
    assert json.loads((src.parent / "dst" / "config.json").read_text())["model_type"] == "qwen3"


def test_a_family_that_is_forced_and_does_not_fit(copy: Copy) -> None:
    problems = refused(*convert(copy("qwen3"), *MEGATRON, "--family", "llama"))
    assert {problem["tensor"] for problem in problems} == {
        f"model.layers.*.self_attn.{name}_norm.weight (all 4)" for name in "qk"
    }
    assert "--family" in problems[0]["remedy"]


def test_a_family_that_is_not_there(copy: Copy) -> None:
    problem = refusal(*convert(copy("qwen3"), *MEGATRON, "--family", "qwen9"))
    assert problem["found"] == "--family qwen9" and "reshard support" in problem["expected"]
