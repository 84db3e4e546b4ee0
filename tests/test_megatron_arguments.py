"""Arguments of the real megatron-core that change what it computes reach the config, or the checkpoint is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("megatron.core")

import torch

import reshard
from reshard.base.errors import ReshardError
from reshard.oracle.transformers import transformers_logits
from tests.genuine.mcore.checkpoint_io import SaveOptions
from tests.genuine.megatron import DEEPSEEK_V3, DENSE, GPT_OSS, MOE, QWEN2_MOE, QWEN3_MOE, tokens
from tests.genuine.train_megatron import train_and_save
from tests.genuine.warm import megatron_logits
from tests.judges import TOKENS, assert_agree, judged_by_megatron

MIXTRAL = {**DENSE, **MOE, "moe_ffn_hidden_size": 48}
LATENT = {**DEEPSEEK_V3, "mtp_num_layers": None}
PRE = {"moe_router_pre_softmax": True}

EXPRESSED: dict[str, tuple[dict[str, Any], str]] = {
    "positions divided by 4": ({**DENSE, "rotary_seq_len_interpolation_factor": 4}, "llama"),
    "no shared expert": ({**LATENT, "moe_shared_expert_intermediate_size": None}, "deepseek_v3"),
    "a sigmoid router without a shared expert": (
        {**QWEN3_MOE, "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True},
        "dots1",
    ),
    "a sigmoid router with one expert for each token": (
        {**LATENT, "moe_router_topk": 1, "moe_router_num_groups": None, "moe_router_group_topk": None},
        "deepseek_v3",
    ),
    "a number of groups that nothing selects": ({**LATENT, "moe_router_group_topk": None}, "deepseek_v3"),
    "no window": ({**GPT_OSS, "window_size": None, "window_attn_skip_freq": None}, "gpt_oss"),
}


def trained(args: dict[str, Any], out: Path, *formats: Any) -> Path:
    save = tuple(SaveOptions(format=each, optimizer=False) for each in formats or ("torch_dist",))
    return train_and_save(args, out, tokens(), steps=0, bf16=False, iteration=2, save=save).folder


@pytest.mark.core("no window", "positions divided by 4")
@pytest.mark.parametrize("case", EXPRESSED)
def test_what_a_config_can_say_it_says(case: str, tmp_path: Path) -> None:
    args, family = EXPRESSED[case]
    folder = trained(args, tmp_path / "run")
    reshard.convert(tmp_path / "run", tmp_path / "hf", no_tokenizer=True)
    assert reshard.inspect(tmp_path / "hf").family == family
    assert_agree(
        transformers_logits(tmp_path / "hf", TOKENS), megatron_logits(folder, TOKENS, args=args).logits
    )


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "mixtral scores": (MIXTRAL, PRE, "moe_router_pre_softmax=True"),
    "mixtral scaling": (
        MIXTRAL,
        {"moe_router_topk_scaling_factor": 2.0},
        "moe_router_topk_scaling_factor=2.0",
    ),
    "qwen2_moe scaling": (
        {**QWEN2_MOE, **PRE},
        {"moe_router_topk_scaling_factor": 2.0},
        "moe_router_topk_scaling_factor=2.0",
    ),
    "qwen3_moe scaling": (
        {**QWEN3_MOE, **PRE},
        {"moe_router_topk_scaling_factor": 2.5},
        "moe_router_topk_scaling_factor=2.5",
    ),
    "qwen3_moe groups": (
        QWEN3_MOE,
        {"moe_router_num_groups": 2, "moe_router_group_topk": 1},
        "moe_router_group_topk=1",
    ),
    "softmax with one more": (DENSE, {"softmax_type": "off-by-one"}, "softmax_type=off-by-one"),
    "clamped": (DENSE, {"activation_func_clamp_value": 0.05}, "activation_func_clamp_value=0.05"),
    "shifted": (DENSE, {"glu_linear_offset": 1.0}, "glu_linear_offset=1.0"),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.core("softmax*")
def test_what_no_config_can_say_is_refused(case: str, tmp_path: Path) -> None:
    """With a config as well, unless that is the one to trust."""
    plain, more, said = REFUSED[case]
    trained(plain, tmp_path / "plain")
    folder = trained({**plain, **more}, tmp_path / "run")
    judged = [megatron_logits(folder, TOKENS, args=args).logits for args in (plain, {**plain, **more})]
    assert np.abs(judged[0] - judged[1]).max() > 1e-3
    reshard.convert(tmp_path / "plain", tmp_path / "base", no_tokenizer=True)
    for base in (None, tmp_path / "base"):
        with pytest.raises(ReshardError) as caught:
            reshard.convert(tmp_path / "run", tmp_path / "hf", base=base, no_tokenizer=True)
        assert {problem.code for problem in caught.value.problems} == {"model-type-cannot-describe"}
        assert any(str(problem.found).startswith(said) for problem in caught.value.problems)
        assert not (tmp_path / "hf").exists()
    done = reshard.convert(
        tmp_path / "run", tmp_path / "hf", base=tmp_path / "base", trust="config", no_tokenizer=True
    )
    assert any(str(warning.found).startswith(said) for warning in done.plan.warnings)
    assert_agree(transformers_logits(tmp_path / "hf", TOKENS), judged[0])


@pytest.mark.parametrize("format, file", [("torch_dist", "common.pt"), ("torch", "model_optim_rng.pt")])
def test_norms_less_one_are_known_by_the_name_of_the_field_too(
    format: str, file: str, tmp_path: Path
) -> None:
    """Megatron-LM stores `--apply-layernorm-1p` under it since core_v0.16; the RMSNorm with it is for GPUs only."""
    folder = trained(DENSE, tmp_path / "run", format)
    for path in folder.rglob(file):
        content = torch.load(path, weights_only=False)
        vars(content["args"]).pop("apply_layernorm_1p", None)
        content["args"].layernorm_zero_centered_gamma = True
        torch.save(content, path)
    with pytest.raises(ReshardError, match="apply_layernorm_1p=True") as caught:
        reshard.convert(tmp_path / "run", tmp_path / "hf", no_tokenizer=True)
    assert [problem.code for problem in caught.value.problems] == ["model-type-cannot-describe"]


def test_megatron_divides_positions_as_a_linear_rope_does(
    hf_model: Callable[..., Path], tmp_path: Path
) -> None:
    rope = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}
    source = hf_model("llama", rope_parameters=rope)
    plan = reshard.convert(source, tmp_path / "there", to="megatron").plan
    assert plan.warnings == [] and "--rotary-seq-len-interpolation-factor 4" in " ".join(plan.load_with)
    assert_agree(judged_by_megatron(tmp_path / "there").logits, transformers_logits(source, TOKENS))
    halves = hf_model("llama", rope_parameters={**rope, "factor": 2.5})
    notes = reshard.convert(halves, tmp_path / "halves", to="megatron").plan.notes
    assert any("command line has only integers" in note for note in notes)
