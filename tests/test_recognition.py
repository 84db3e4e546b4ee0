"""An engine computes what the config describes, possibly under another name; otherwise it is refused or forced."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("megatron.core")

import torch

import reshard
from reshard.base.errors import ReshardError
from reshard.families.undeclared import BUILT_ALIKE
from reshard.oracle.transformers import transformers_logits
from tests import commandline
from tests.genuine.huggingface import ALIASES, PLAIN_ROPE, YARN
from tests.judges import (
    THRESHOLD,
    TOKENS,
    assert_agree,
    assert_same_tensors,
    differing_keys,
    judged_by_megatron,
    tensors_of,
)

Models = Callable[..., Path]


def edited(source: Path, folder: Path, **changes: Any) -> Path:
    """A copy of a Hugging Face folder with other config keys."""
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return folder


def problems_of(source: Path, target: Path, **options: Any) -> list[reshard.base.errors.Problem]:
    with pytest.raises(ReshardError) as refused:
        reshard.convert(source, target, **options)
    assert not target.exists()
    return refused.value.problems


# ------------------------------------------------------------------------------------------------ aliases


@pytest.mark.parametrize("name", ALIASES)
@pytest.mark.thorough
def test_megatron_computes_with_a_family_of_another_name(name: str, hf_model: Models, tmp_path: Path) -> None:
    source = hf_model(name)
    expected = transformers_logits(source, TOKENS)
    for to in ("megatron", "megatron-legacy"):
        there, back = tmp_path / to, tmp_path / f"{to} back"
        reshard.convert(source, there, to=to, tp=2, pp=2)
        assert_agree(judged_by_megatron(there).logits, expected)
        reshard.convert(there, back)
        assert_same_tensors(tensors_of(back), tensors_of(source))
        assert differing_keys(back, source) == set()
        np.testing.assert_array_equal(transformers_logits(back, TOKENS), expected)


@pytest.mark.thorough
def test_kimi_k2_is_deepseek_v3_by_another_name(hf_model: Models, tmp_path: Path) -> None:
    """transformers has no class for it; its own code computes the same as DeepSeek-V3's."""
    deepseek = hf_model("deepseek_v3")
    kimi = edited(deepseek, tmp_path / "kimi", model_type="kimi_k2")
    reshard.convert(kimi, tmp_path / "there", to="megatron", tp=2, pp=2)
    assert_agree(judged_by_megatron(tmp_path / "there").logits, transformers_logits(deepseek, TOKENS))
    reshard.convert(tmp_path / "there", tmp_path / "back")
    assert_same_tensors(tensors_of(tmp_path / "back"), tensors_of(kimi))
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert (config["model_type"], config["architectures"]) == ("kimi_k2", ["DeepseekV3ForCausalLM"])


@pytest.mark.parametrize("key, value", [("clip_qkv", 8.0), ("use_sliding_window", True)])
def test_an_alias_that_computes_more_than_its_family_is_refused(
    key: str, value: object, hf_model: Models, tmp_path: Path
) -> None:
    source = edited(hf_model("iquestcoder"), tmp_path / "hub", **{key: value})
    [problem] = problems_of(source, tmp_path / "there", to="megatron")
    assert str(problem.found).startswith(f"{key} is {value!r}")


# ------------------------------------------------------------------------------------- built like a family


@pytest.mark.core("granite-megatron", "mellum-megatron-legacy", "ministral-internlm", "ministral3-megatron")
@pytest.mark.parametrize("to", ["megatron", "megatron-legacy", "internlm"])
@pytest.mark.parametrize("model_type", BUILT_ALIKE)
def test_a_model_that_is_built_like_a_family_is_refused_with_what_differs(
    model_type: str, to: str, hf_model: Models, tmp_path: Path
) -> None:
    heads = {"head_dim": 8, "num_key_value_heads": 8}  # InternEvo has no others
    source = edited(hf_model("llama", **heads), tmp_path / "hub", model_type=model_type)
    for family in (None, "llama"):
        [problem] = problems_of(source, tmp_path / "there", to=to, family=family)
        assert (problem.code, problem.rule) == ("model-type-differs", BUILT_ALIKE[model_type])
        assert "--family" not in str(problem.remedy)
        assert "--to huggingface, --to dcp or --to deepspeed" in str(problem.remedy)


@pytest.mark.parametrize(
    "settings", [{"logit_scale": 0.25}, {"final_logit_softcapping": 30.0}, {"sliding_window": 6}]
)
def test_a_model_that_nobody_knows_is_not_taken_for_a_family_without_its_scales_caps_and_windows(
    settings: dict[str, Any], hf_model: Models, tmp_path: Path
) -> None:
    unknown = edited(
        hf_model("llama"), tmp_path / "plain", model_type="nobodys", logit_scale=1.0, clip_qkv=None
    )
    [problem] = problems_of(unknown, tmp_path / "there", to="megatron")
    assert "--family llama" in str(problem.remedy)
    reshard.convert(unknown, tmp_path / "there", to="megatron", family="llama")
    source = edited(hf_model("llama"), tmp_path / "hub", model_type="nobodys", **settings)
    for family in (None, "llama"):
        [problem] = problems_of(source, tmp_path / "other", to="megatron", family=family)
        assert str(problem.rule).startswith(*settings) and "--family" not in str(problem.remedy)


def test_a_family_without_the_window_of_the_own_one_is_refused(hf_model: Models, tmp_path: Path) -> None:
    source = hf_model("mistral", sliding_window=6)
    [problem] = problems_of(source, tmp_path / "there", to="megatron", family="llama")
    assert str(problem.found).startswith("window_size=(5, 0)") and "leave out --family" in str(problem.remedy)


@pytest.mark.parametrize("to", ["huggingface", "dcp", "deepspeed"])
def test_formats_with_the_names_of_the_hub_keep_it_as_it_is(
    to: str, hf_model: Models, tmp_path: Path
) -> None:
    source = edited(hf_model("llama"), tmp_path / "hub", model_type="granite", embedding_multiplier=12.0)
    reshard.convert(source, tmp_path / "there", to=to)
    assert reshard.verify(source, tmp_path / "there").equal
    config = json.loads((tmp_path / "there" / "config.json").read_text())
    assert (config["model_type"], config["embedding_multiplier"]) == ("granite", 12.0)


def test_inspect_proposes_nothing_that_convert_refuses(hf_model: Models, tmp_path: Path) -> None:
    found = reshard.inspect(edited(hf_model("llama"), tmp_path / "hub", model_type="granite"))
    assert (found.family, found.next, found.whole) == ("granite", "", True)
    found = reshard.inspect(edited(hf_model("seed_oss"), tmp_path / "alias"))
    assert found.family == "llama" and "--to megatron" in found.next


# -------------------------------------------------------------- a declared family that computes otherwise

WINDOWED = ["full_attention", "sliding_attention"] * 2
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    ("deepseek_v3", {"rope_interleave": False}, "rope_interleave is False"),
    ("gpt_oss", {"swiglu_alpha": 2.5}, "swiglu_alpha is 2.5"),
]
# What decides nothing about the weights, and a run may choose.
TOLD: list[tuple[str, dict[str, Any], str]] = [
    ("qwen3", {"rope_parameters": YARN}, "rope_type is 'yarn'"),
    (
        "qwen3",
        {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2},
        "attend to 6 tokens",
    ),
    (
        "qwen2_moe",
        {"layer_types": WINDOWED, "sliding_window": 6, "use_sliding_window": True},
        "attend to 6 tokens",
    ),
    ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 6}, "attend to 6 tokens"),
    ("dots1", {"sliding_window": 6, "max_window_layers": 2}, "attend to 6 tokens"),
    ("deepseek_v2", {"num_experts_per_tok": 4}, "scored by its best expert"),
    ("deepseek_v3", {"norm_topk_prob": False}, "norm_topk_prob is False"),
    ("deepseek_v3", {"num_experts_per_tok": 4}, "scored by its 2 best experts"),
    ("glm4_moe", {"norm_topk_prob": False}, "norm_topk_prob is False"),
    ("glm4_moe", {"num_experts_per_tok": 1}, "norm_topk_prob is True"),
]


def assert_megatron_computes_otherwise(source: Path, there: Path) -> None:
    expected = transformers_logits(source, TOKENS)
    found = judged_by_megatron(there).logits[..., : expected.shape[-1]]
    assert np.abs(found - expected).max() > 100 * THRESHOLD * np.abs(expected).max()


@pytest.mark.core("gpt_oss-*")
@pytest.mark.parametrize("name, overrides, says", REFUSED)
def test_another_model_is_refused(
    name: str, overrides: dict[str, Any], says: str, hf_model: Models, tmp_path: Path
) -> None:
    source, there = hf_model(name, **overrides), tmp_path / "there"
    [problem] = problems_of(source, there, to="megatron", etp=1)
    assert problem.message == "the engine would compute a different model from the one in config.json"
    assert says in str(problem.found)
    inspected = reshard.inspect(source)
    assert inspected.whole and not inspected.problems and inspected.next == ""
    assert any(says in note for note in inspected.notes)
    family = json.loads((source / "config.json").read_text())["model_type"]
    assert problems_of(source, there, to="megatron", etp=1, family=family) == [problem]
    kept = reshard.convert(source, tmp_path / "kept", to="huggingface")
    assert kept.plan.warnings == []


@pytest.mark.core("qwen3-overrides0*", "deepseek_v3-*")
@pytest.mark.parametrize("name, overrides, says", TOLD)
def test_what_megatron_computes_otherwise_is_told_where_no_weight_depends_on_it(
    name: str, overrides: dict[str, Any], says: str, hf_model: Models, tmp_path: Path
) -> None:
    source, there = hf_model(name, **overrides), tmp_path / "there"
    done = commandline.reshard("convert", source, there, "--to", "megatron", "--etp", 1, "--quiet")
    assert done.code == 0
    assert "warning: the engine would compute a different model" in done.err and says in done.err
    assert_megatron_computes_otherwise(source, there)
    inspected = reshard.inspect(source)
    assert "--to megatron" in inspected.next and any(says in note for note in inspected.notes)
    assert reshard.convert(source, tmp_path / "kept", to="huggingface").plan.warnings == []


@pytest.mark.parametrize(
    "name, overrides",
    [
        ("llama", {"hidden_act": "swish"}),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 128, "max_window_layers": 2}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 4}),
        ("dots1", {"sliding_window": None, "max_window_layers": 2}),
        ("dots1", {"sliding_window": 6, "max_window_layers": 4}),
        ("glm4_moe", {"num_experts_per_tok": 1, "norm_topk_prob": False}),
        ("deepseek_v3", {"num_experts_per_tok": 4, "topk_group": 2}),
        ("gpt_oss", {"rope_parameters": {**PLAIN_ROPE, **YARN, "mscale": None, "mscale_all_dim": None}}),
    ],
)
@pytest.mark.core("qwen3-*", "gpt_oss-*")
def test_what_megatron_computes_alike_is_not_refused(
    name: str, overrides: dict[str, Any], hf_model: Models, tmp_path: Path
) -> None:
    source = hf_model(name, **overrides)
    reshard.convert(source, tmp_path / "there", to="megatron", etp=1)
    assert_agree(judged_by_megatron(tmp_path / "there").logits, transformers_logits(source, TOKENS))


def test_what_was_trained_comes_back_with_a_warning(hf_model: Models, tmp_path: Path) -> None:
    reshard.convert(hf_model("llama"), tmp_path / "megatron", to="megatron")
    source = edited(tmp_path / "megatron", tmp_path / "edited", hidden_act="gelu")
    result = reshard.convert(source, tmp_path / "back")
    assert ["hidden_act is 'gelu'" in str(warning.found) for warning in result.plan.warnings] == [True]


# ---------------------------------------------------------------------------------- a config of two minds

CONTRADICTIONS: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"rope_theta": 1e6}, "rope_theta is 1000000.0, rope_parameters.rope_theta is 50000.0"),
    (
        "llama",
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        "rope_scaling.type is 'linear', rope_parameters.rope_type is 'default'",
    ),
    (
        "deepseek_v3",
        {"rope_scaling": {**YARN, "factor": 8.0}},
        "rope_scaling.factor is 8.0, rope_parameters.factor is 4.0",
    ),
    (
        "glm4_moe",
        {"partial_rotary_factor": 0.25},
        "partial_rotary_factor is 0.25, rope_parameters.partial_rotary_factor",
    ),
    (
        "qwen3_moe",
        {"num_experts": 8, "num_local_experts": 16},
        "num_experts is 8, num_local_experts is 16",
    ),
    ("gpt_oss", {"experts_per_token": 4}, "num_experts_per_tok is 2, experts_per_token is 4"),
]


@pytest.mark.parametrize("name, changes, says", CONTRADICTIONS)
def test_a_config_that_contradicts_itself_is_refused_where_an_engine_computes(
    name: str, changes: dict[str, Any], says: str, hf_model: Models, tmp_path: Path
) -> None:
    source = edited(hf_model(name), tmp_path / "hub", **changes)
    [problem] = problems_of(source, tmp_path / "there", to="megatron", etp=1)
    assert problem.message == "config.json contradicts itself" and says in str(problem.found)
    assert problem.file == str(source / "config.json")
    inspected = reshard.inspect(source)
    assert inspected.next == "" and any(says in note for note in inspected.notes)
    reshard.convert(hf_model(name), tmp_path / "megatron", to="megatron", etp=1)
    [problem] = problems_of(tmp_path / "megatron", tmp_path / "there", base=source)
    assert says in str(problem.found)


@pytest.mark.parametrize("model_type", ["llama", "granite"])
def test_a_config_that_contradicts_itself_is_kept_as_it_is_where_none_does(
    model_type: str, hf_model: Models, tmp_path: Path
) -> None:
    source = edited(hf_model("llama"), tmp_path / "hub", model_type=model_type, rope_theta=1e6)
    result = reshard.convert(source, tmp_path / "there", to="huggingface")
    assert any("rope_theta is 1000000.0" in note for note in result.plan.notes)
    was, now = (json.loads((folder / "config.json").read_text()) for folder in (source, tmp_path / "there"))
    assert {key: now[key] for key in was} == {**was, "dtype": "float32"}


def test_what_is_said_twice_alike_is_no_contradiction(hf_model: Models, tmp_path: Path) -> None:
    """transformers 4 and 5 spell the rotary embedding in two ways, and a portable config has both."""
    reshard.convert(hf_model("deepseek_v3"), tmp_path / "portable", to="huggingface")
    config = json.loads((tmp_path / "portable" / "config.json").read_text())
    assert config["rope_scaling"] and config["rope_parameters"] and config["rope_theta"]
    reshard.convert(tmp_path / "portable", tmp_path / "there", to="megatron")


@pytest.mark.parametrize(
    ("name", "assumed"), [("mistral", "llama"), ("qwen2", "qwen2"), ("deepseek_v2", "deepseek_v2")]
)
def test_where_nothing_names_the_family_the_likeliest_is_assumed(
    name: str, assumed: str, hf_model: Callable[..., Path], tmp_path: Path
) -> None:
    """The arguments that Megatron-LM itself saves name no family. A softmax router tells DeepSeek-V2 from V3."""
    reshard.convert(hf_model(name), tmp_path / "m", to="megatron")
    (tmp_path / "m" / "config.json").unlink()
    file = tmp_path / "m" / "release" / "common.pt"
    content = torch.load(file, weights_only=False)
    del content["args"].hf_model_type
    torch.save(content, file)
    plan = reshard.convert(tmp_path / "m", tmp_path / "back", dry_run=True).plan
    assert plan.facts["family"] == assumed
    said = [note for note in plan.notes if "is assumed" in note]
    assert all(note.startswith(f"{assumed} is assumed; ") for note in said)
    assert said == [] if name == "deepseek_v2" else name == assumed or name in said[0]
