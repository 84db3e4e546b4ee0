"""The flags in addition to `--use-checkpoint-args`: everything that Megatron-LM needs, and no defaults."""

from __future__ import annotations

import ast
import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("megatron.core")

from megatron.core.transformer import MLATransformerConfig, TransformerConfig

import reshard
from reshard.families import FAMILIES
from reshard.families.megatron_flags import NOT_RESTORED, flags_not_restored
from reshard.oracle.megatron.stored_arguments import (
    ARGUMENT_DEFAULTS,
    complete,
    config_fields,
    yarn_attributes,
)
from tests.genuine.huggingface import VARIANTS
from tests.genuine.megatron import Genuine

Models = Callable[..., Path]


def architecture(args: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of megatron-core's own config that decide which function the weights compute."""
    full = complete({"padded_vocab_size": 256, **args})
    kind = MLATransformerConfig if full.multi_latent_attention else TransformerConfig
    config = kind(**config_fields(full, kind))
    rotary = [full.use_rope_scaling and full.rope_scaling_factor, full.quick_geglu, full.rotary_base]
    fields = {
        name: value for name, value in vars(config).items() if "init_method" not in name
    }  # new functions
    return {**fields, "class": kind, "rotary": rotary, "yarn": yarn_attributes(full)}


def parsed(flags: list[str]) -> dict[str, Any]:
    """The result of Megatron-LM's parser for flags."""
    found: dict[str, Any] = {}
    name = ""
    for word in flags:
        if word.startswith("--no-") and word != "--no-rope-freq":
            found[word.removeprefix("--no-").replace("-", "_")] = False
        elif word.startswith("--"):
            name = word.removeprefix("--").replace("-", "_")
            found[name] = True
        else:
            found[name] = ast.literal_eval(word) if word[0] in "0123456789([" else word
    return found


def loaded(args: Mapping[str, Any], flags: list[str]) -> dict[str, Any]:
    """The arguments of Megatron-LM: those that it restores, and those that are typed."""
    restored = {name: value for name, value in args.items() if name not in {*NOT_RESTORED, "norm_epsilon"}}
    return {**restored, **parsed(flags)}


@pytest.mark.parametrize("name", VARIANTS)
def test_megatron_builds_the_same_model_from_what_it_restores_and_is_told(
    name: str, hf_model: Models
) -> None:
    config = json.loads((hf_model(name) / "config.json").read_text())
    args = FAMILIES[config["model_type"]].config.to_args(config)
    flags = flags_not_restored(args)
    wanted = architecture(args)
    assert architecture(loaded(args, flags)) == wanted
    for said in parsed(flags).keys() - {"mscale_all_dim"}:
        less = {key: value for key, value in loaded(args, flags).items() if key != said}
        try:
            other = architecture(less)
        except (ValueError, AssertionError):  # half of a pair alone makes no model
            continue
        assert other != wanted, f"{said} need not be said"


def test_defaults_are_those_of_megatron() -> None:
    config = {field.name: field.default for field in dataclasses.fields(TransformerConfig)}
    latent = {field.name: field.default for field in dataclasses.fields(MLATransformerConfig)}
    parser = {**latent, **config, **ARGUMENT_DEFAULTS, "layernorm_epsilon": ARGUMENT_DEFAULTS["norm_epsilon"]}
    parser["apply_layernorm_1p"] = config["layernorm_zero_centered_gamma"]
    parser["rope_type"] = latent["rope_type"]  # which the config takes where the parser has None
    for name in NOT_RESTORED.keys() - {"mscale_all_dim"}:
        if not name.startswith("yarn_"):
            assert NOT_RESTORED[name] == parser[name], name


def test_what_a_run_stores_of_mechanisms_that_it_does_not_use_is_not_said(
    genuine: Callable[..., Genuine], tmp_path: Path
) -> None:
    """But the epsilon is, under the name of any version of Megatron-LM."""
    for name, said in {
        "qwen2-tp2-pp2": "--norm-epsilon 1e-06",
        "qwen3-moe-ep2": "--norm-epsilon 1e-06 --qk-layernorm",
    }.items():
        root = genuine(name).roots["torch_dist"]
        plan = reshard.convert(root, tmp_path, to="megatron", no_tokenizer=True, dry_run=True).plan
        assert " ".join(plan.load_with) == f"--use-checkpoint-args --no-load-optim --no-load-rng {said}"
