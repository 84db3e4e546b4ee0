"""What a checkpoint records of its own model is compared with a base: files of all formats, made by their tools."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

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
WITHOUT_MODELS = {"peft", "mlx-adapter"}


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


def test_frequencies_in_a_file_are_not_dropped_for_a_base_without_them(
    hf_model: Models, tmp_path: Path
) -> None:
    """llama.cpp's converter stores what Llama 3.1 divides its rotary frequencies by."""
    scaled = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    rope = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, **scaled}
    reshard.convert(hf_model("llama", rope_parameters=rope), tmp_path / "model.gguf", to="gguf")
    own = recorded_config(tmp_path / "model.gguf", tmp_path / "own")
    plain = {"rope_theta": 500000.0, "rope_scaling": None, "rope_parameters": None}
    base = base_with({**own, **plain}, tmp_path / "plain")
    for trust in ("checkpoint", "config"):
        with pytest.raises(ReshardError, match="rope_type=llama3") as caught:
            converted(tmp_path / "model.gguf", tmp_path / "out", base, trust=trust)
        assert [problem.code for problem in caught.value.problems] == ["config-contradicts-arguments"]
    other = {"rope_scaling": None, "rope_parameters": {**rope, "factor": 32.0}}
    base = base_with({**own, **other}, tmp_path / "factor")
    assert any(
        "'factor': 8.0" in str(each.found)
        for each in converted(tmp_path / "model.gguf", tmp_path / "out", base)
    )
    assert json.loads((tmp_path / "out" / "config.json").read_text())["rope_parameters"]["factor"] == 8.0


def test_heads_are_recorded_by_files_of_any_architecture(tmp_path: Path, hf_model: Models) -> None:
    """Of an architecture for which no config is derived, those of a GGUF file are compared all the same."""
    reshard.convert(hf_model("llama"), tmp_path / "model.gguf", to="gguf")
    content = (tmp_path / "model.gguf").read_bytes()
    (tmp_path / "model.gguf").write_bytes(content.replace(b"llama", b"frobs"))
    config = json.loads((hf_model("llama") / "config.json").read_text())
    heads = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 8}
    base = base_with({**config, **heads}, tmp_path / "base")
    with pytest.raises(ReshardError, match="num_attention_heads=8"):
        converted(tmp_path / "model.gguf", tmp_path / "out", base)


def test_a_config_beside_that_the_tensors_refute_gives_way_to_a_base(
    hf_model: Models, tmp_path: Path
) -> None:
    source = Path(shutil.copytree(hf_model("llama"), tmp_path / "source"))
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(
        json.dumps({**config, "num_hidden_layers": 9, "rope_parameters": None})
    )
    assert converted(source, tmp_path / "out", hf_model("llama"), max_shard_size="1MB") == []


def test_a_base_of_another_width_is_named(hf_model: Models, tmp_path: Path) -> None:
    """Nothing is missing then: another hidden size is that of another model."""
    source = Path(shutil.copytree(hf_model("llama"), tmp_path / "source"))
    config = json.loads((source / "config.json").read_text())
    base = base_with({**config, "hidden_size": 128}, tmp_path / "base")
    for _ in range(2):
        with pytest.raises(ReshardError) as caught:
            converted(source, tmp_path / "out", base, max_shard_size="1MB")
        assert "hidden_size" in str(caught.value) and "missing" not in str(caught.value)
        (source / "config.json").unlink(missing_ok=True)


def test_a_yarn_that_megatron_bridge_notes_is_compared(tmp_path: Path) -> None:
    """Since 0.6, it has `position_embedding_type: yarn` and the parameters in run_config.yaml."""
    source = Path(shutil.copytree(DATA / "peers/bridge/mistral", tmp_path / "source"))
    file = source / "iter_0000000" / "run_config.yaml"
    noted = yaml.safe_load(file.read_text())
    noted["model"] |= {"position_embedding_type": "yarn", "yarn_rotary_scaling_factor": 4.0}
    noted["model"] |= {
        "yarn_original_max_position_embeddings": 32,
        "yarn_beta_fast": 32.0,
        "yarn_beta_slow": 1.0,
    }
    file.write_text(yaml.safe_dump(noted))
    config = json.loads((DATA / "peers/bridge/base-mistral/config.json").read_text())
    rope = {"rope_type": "yarn", "rope_theta": theta_of(DATA / "peers/bridge/base-mistral"), "factor": 4.0}
    rope |= {"original_max_position_embeddings": 32}
    base = base_with({**config, "rope_parameters": rope}, tmp_path / "base")
    assert converted(source, tmp_path / "out", base) == []
    assert json.loads((tmp_path / "out" / "config.json").read_text())["rope_parameters"] == rope
    other = base_with({**config, "rope_parameters": {**rope, "factor": 2.0}}, tmp_path / "other")
    [warning] = converted(source, tmp_path / "other-out", other)
    assert warning.values == {"key": "rope_parameters"} and "'factor': 4.0" in str(warning.found)
    with pytest.raises(ReshardError, match="rope_type=yarn"):
        converted(source, tmp_path / "none", DATA / "peers/bridge/base-mistral")


@pytest.mark.parametrize("biases", [{"attention_bias": True}, {"mlp_bias": True}])
def test_biases_that_megatron_core_does_not_build_are_named_and_kept_elsewhere(
    biases: Config, hf_model: Models, tmp_path: Path
) -> None:
    source = hf_model("llama", **biases)
    with pytest.raises(
        ReshardError, match="have biases; Megatron-Core builds them in linear_qkv only"
    ) as caught:
        reshard.convert(source, tmp_path / "out", to="megatron")
    assert len(caught.value.problems) == 1
    for to in ("dcp", "gguf"):
        there = tmp_path / f"there.{to}"
        reshard.convert(source, there, to=to)
        reshard.convert(there, tmp_path / f"back-{to}", no_tokenizer=True, to="huggingface", base=source)
        assert reshard.verify(source, tmp_path / f"back-{to}").equal
