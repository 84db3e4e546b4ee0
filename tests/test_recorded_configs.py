"""What a checkpoint records of its own model is compared with a base, whatever its format: files that its tool wrote."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import reshard
from reshard.base.errors import Problem, ReshardError
from reshard.formats import FORMATS

DATA = Path(__file__).parent / "data"
Models = Callable[..., Path]
Config = dict[str, Any]

SOURCES = {
    "megatron": "megatron-0.19",
    "megatron, Megatron-Bridge": "peers/bridge/mistral",
    "megatron, NeMo": "nemo/torch_dist-tp2.nemo",
    "megatron-zarr": "megatron_zarr/qwen2-tp2-pp2/zarr",
    "megatron-legacy": "",
    "megatron-fsdp": "megatron_fsdp/qwen3",
    "nemo": "nemo/ranks-tp2-pp2.nemo",
    "dcp": "torchtitan/llama",
    "dcp, qwen3": "torchtitan/qwen3",
    "fsdp-ranks": "verl/fsdp2",
    "deepspeed": "deepspeed/z3",
    "mistral": "mistral",
    "meta": "meta",
    "litgpt": "litgpt",
    "nanotron": "nanotron/llama-tp2-pp2",
    "nanotron, qwen2": "nanotron/qwen2-tp2",
    "deepseek-inference": "deepseek_inference/v3",
    "paddle": "paddle/nlp-llama",
    "vllm-sharded-state": "vllm/tp2",
    "internlm": "internlm/internlm2-tp2pp2",
    "internlm, llama": "internlm/llama-tp2",
    "mlx": "mlx",
    "huggingface": "composer/trained",
    "huggingface, a state dict": "composer/ep0-ba2-rank0.pt",
    "gguf": "",
    "orbax": "maxtext/llama",
    "orbax-unscanned": "maxtext/llama_unscanned",
}
"""What a tool wrote in each format, below `DATA`; without a path, what reshard writes, which is the same."""
WITHOUT_MODELS = {"peft"}


def test_every_format_is_compared() -> None:
    assert {name.partition(",")[0] for name in SOURCES} == FORMATS.keys() - WITHOUT_MODELS


@pytest.fixture
def source(request: pytest.FixtureRequest, hf_model: Models, tmp_path: Path) -> Path:
    named: str = request.param
    if path := SOURCES[named]:
        return DATA / path
    to = tmp_path / ("model.gguf" if named == "gguf" else "source")
    reshard.convert(hf_model("llama"), to, to=named)
    return to


def recorded_config(source: Path, folder: Path) -> Config:
    """The config of the conversion without a base."""
    reshard.convert(source, folder, no_tokenizer=True, to="huggingface", dtype="float32")
    config: Config = json.loads((folder / "config.json").read_text())
    return config


def base_with(config: Config, folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def with_theta(config: Config, theta: float) -> Config:
    return config | {
        "rope_theta": theta,
        "rope_parameters": config["rope_parameters"] | {"rope_theta": theta},
    }


def theta_of(folder: Path) -> float:
    config = json.loads((folder / "config.json").read_text())
    return float(config["rope_parameters"]["rope_theta"])


def converted(source: Path, out: Path, base: Path, **options: Any) -> list[Problem]:
    done = reshard.convert(
        source, out, base=base, no_tokenizer=True, to="huggingface", dtype="float32", **options
    )
    return [*done.plan.warnings]


@pytest.mark.core("gguf", "meta", "nanotron", "huggingface")
@pytest.mark.parametrize("source", SOURCES, indirect=True)
def test_a_base_that_contradicts_what_is_recorded_is_not_believed(source: Path, tmp_path: Path) -> None:
    """Other heads with the same shapes are refused. What moves no weight is a warning, and the user's to decide."""
    own = recorded_config(source, tmp_path / "own")
    theta = theta_of(tmp_path / "own")
    size = own.get("head_dim") or own["hidden_size"] // own["num_attention_heads"]
    heads = {key: 2 * own[key] for key in ("num_attention_heads", "num_key_value_heads")}
    others = base_with({**own, **heads, "head_dim": size // 2}, tmp_path / "others")
    for trust in ("checkpoint", "config"):
        with pytest.raises(ReshardError, match="num_attention_heads"):
            converted(source, tmp_path / "out", others, trust=trust)
    other = base_with(with_theta(own, theta * 3), tmp_path / "theta")
    warnings = converted(source, tmp_path / "out", other)
    assert [problem.code for problem in warnings if "rope" in str(problem)] == [
        "config-differs-from-arguments"
    ]
    assert theta_of(tmp_path / "out") == theta
    assert converted(source, tmp_path / "trusted", other, trust="config") != []
    assert theta_of(tmp_path / "trusted") == theta * 3
    same = base_with(own, tmp_path / "same")
    assert [
        problem for problem in converted(source, tmp_path / "equal", same) if "rope" in str(problem)
    ] == []
