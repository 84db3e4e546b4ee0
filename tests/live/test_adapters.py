"""vLLM answers with an adapter that was written for it as PEFT does, and not with the same one as PEFT saved it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel

import reshard
from tests.environments import python
from tests.genuine.peft import load, make_adapter
from tests.genuine.serve_adapters import PROMPTS

pytestmark = pytest.mark.slow

Model = Callable[..., Path]
SIZES = {"head_dim": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
"""Heads that vLLM's attention for CPUs has."""
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
STACKS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
CLOSE = 1e-4
CLOSE_OF_GPT_OSS = 5e-3
"""vLLM's gpt-oss differs from that of transformers without an adapter, too: by 5e-4 here."""


def serve(out: Path, *cases: dict[str, Any]) -> list[list[Any]]:
    """What vLLM answers; see `tests.genuine.serve_adapters`."""
    told = json.dumps(cases, default=str)
    command = [python("vllm"), "-m", "tests.genuine.serve_adapters", told, str(out / "answers.json")]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-4000:]
    found: list[list[Any]] = json.loads((out / "answers.json").read_text())
    return found


def assert_answers_of(model: Any, answers: Any, close: float = CLOSE) -> None:
    """vLLM's tokens and log-probabilities are the model's."""
    assert not isinstance(answers, str), answers
    for prompt, (tokens, places) in zip(PROMPTS, answers, strict=True):
        with torch.no_grad():
            scores = model.eval()(torch.tensor([[*prompt, *tokens]])).logits[0].log_softmax(-1)
        scores = scores[len(prompt) - 1 : -1]
        assert scores.argmax(-1).tolist() == tokens
        for place, mine in zip(places, scores, strict=True):
            assert all(abs(mine[int(token)] - score) <= close for token, score in place.items())


def assert_served(
    out: Path, base: Path, adapters: Iterable[tuple[Path, Path]], close: float = CLOSE, **settings: Any
) -> None:
    """vLLM computes with each output what PEFT computes with its source, and something else without."""
    sources, outputs = zip(*adapters, strict=True)
    (found,) = serve(out, {"model": base, "adapters": outputs, **settings})
    assert_answers_of(load(base), found[0], close)
    for source, answers in zip(sources, found[1:], strict=True):
        assert_answers_of(PeftModel.from_pretrained(load(base), source), answers, close)
        assert [tokens for tokens, _ in answers] != [tokens for tokens, _ in found[0]]


def converted(source: Path, base: Path, out: Path, **options: Any) -> tuple[Path, Path]:
    """The adapter as it is, which PEFT loads, and the one for vLLM."""
    reshard.convert(source, out / "peft", base=base, to="peft", **options)
    reshard.convert(source, out / "vllm", base=base, to="peft", adapter_for="vllm", **options)
    return out / "peft", out / "vllm"


def test_dense_adapters(hf_model: Model, tmp_path: Path) -> None:
    base = hf_model("qwen3", **SIZES)
    settings: dict[str, dict[str, Any]] = {
        "all": {"r": 4, "lora_alpha": 6, "target_modules": ALL},
        "some": {"r": 8, "lora_alpha": 6, "target_modules": ["q_proj", "up_proj"], "use_rslora": True},
        "patterns": {
            "r": 4,
            "lora_alpha": 6,
            "target_modules": ALL,
            "rank_pattern": {"q_proj": 8, "layers.1.mlp.up_proj": 2},
            "alpha_pattern": {"o_proj": 24},
        },
        "tables": {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "embed_tokens", "lm_head"]},
    }
    made = {name: make_adapter(base, tmp_path / name, **each) for name, each in settings.items()}
    assert_served(tmp_path, base, [converted(made[name], base, tmp_path / f"of-{name}") for name in made])


def test_adapters_of_megatron(hf_model: Model, tmp_path: Path) -> None:
    """vLLM has no attention for heads as small as those that the trainers' adapters in tests/data have."""
    base = hf_model("qwen3", **SIZES)
    source = make_adapter(base, tmp_path / "source", r=4, lora_alpha=6, target_modules=ALL)
    reshard.convert(source, tmp_path / "megatron", base=base, to="megatron", tp=2)
    assert_served(tmp_path, base, [converted(tmp_path / "megatron", base, tmp_path)])


@pytest.mark.parametrize("parameters", [STACKS, STACKS[:1], STACKS[1:]])
@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "gpt_oss"])
def test_adapters_of_stacked_experts(
    name: str, parameters: list[str], hf_model: Model, tmp_path: Path
) -> None:
    base = hf_model(name, **SIZES, **({"swiglu_limit": 7.0} if name == "gpt_oss" else {}))
    source = make_adapter(
        base, tmp_path / "source", r=4, lora_alpha=6, target_modules=["q_proj"], target_parameters=parameters
    )
    close = CLOSE_OF_GPT_OSS if name == "gpt_oss" else CLOSE
    assert_served(tmp_path, base, [converted(source, base, tmp_path)], close, experts=True)


def test_the_classes_of_sglang_find_a_place_for_every_tensor(hf_model: Model, tmp_path: Path) -> None:
    """SGLang cannot run on a CPU; see `tests.genuine.load_sglang_adapters`."""
    found: dict[str, tuple[Any, Any]] = {}
    for name, settings in {
        "qwen3": {"target_modules": ["q_proj", "up_proj"], "use_rslora": True},
        "qwen3_moe": {"target_modules": ["v_proj"], "target_parameters": STACKS[:1]},
        "mixtral": {"target_modules": ["o_proj"], "target_parameters": STACKS},
    }.items():
        base, out = hf_model(name), tmp_path / name
        source = make_adapter(base, out / "source", r=4, lora_alpha=6, **settings)
        reshard.convert(source, out / "ours", base=base, adapter_for="sglang")
        command = [python("sglang"), "-m", "tests.genuine.load_sglang_adapters", str(out / "read.json"), "4"]
        subprocess.run([*command, str(source), str(out / "ours")], check=True, capture_output=True)
        theirs, ours = json.loads((out / "read.json").read_text())
        assert not ours["skipped"] and not ours["misfits"]
        found[name] = theirs, ours
    assert [found[name][1]["scale"] for name in found] == [3.0, 1.5, 1.5]
    assert found["qwen3"][1]["buffers"] == {"qkv_proj": 8, "gate_up_proj": 8}
    for name, count in (("qwen3_moe", 8), ("mixtral", 4)):
        experts = {"gate_up_proj_moe": 8 * count, "down_proj_moe": 8 * count}
        assert experts.items() <= found[name][1]["buffers"].items()
    # As PEFT saved them, it fails on one, and skips parts of another: once it does not, their layout need not change.
    assert "KeyError" in found["qwen3"][0]
    assert all("experts" in name for name in found["mixtral"][0]["skipped"])
    assert found["mixtral"][0]["skipped"]


def test_vllm_refuses_what_peft_saved(hf_model: Model, tmp_path: Path) -> None:
    """Once it does not, the layout for it need not be another one."""
    base = hf_model("qwen3_moe", **SIZES)
    settings: dict[str, Any] = {"r": 4, "target_modules": ["q_proj"]}
    adapters = [
        make_adapter(base, tmp_path / "stacked", target_parameters=STACKS, **settings),
        make_adapter(base, tmp_path / "dora", use_dora=True, **settings),
        make_adapter(base, tmp_path / "head", modules_to_save=["lm_head"], **settings),
    ]
    (found,) = serve(tmp_path, {"model": base, "adapters": adapters, "experts": True})
    assert ["fused 3D MoE weights" in found[1], "DoRA" in found[2], "modules_to_save" in found[3]] == [
        True
    ] * 3
