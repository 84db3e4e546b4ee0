"""Hugging Face folders: every variant is read, and the output loads in safetensors and transformers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import FalconConfig, FalconForCausalLM

import reshard
from reshard.base.errors import ReshardError
from reshard.oracle.transformers import transformers_logits
from tests.judges import TOKENS, assert_same_tensors, tensors_of

Models = Callable[..., Path]
INDEX = "model.safetensors.index.json"
DTYPES = ("float32", "bfloat16", "float16")


def converted(source: Path, out: Path, **options: Any) -> Path:
    reshard.convert(source, out, to="huggingface", **options)
    return out


def with_weights(source: Path, out: Path, tensors: dict[str, Any], file: str) -> Path:
    """A folder like `source`, but with these tensors in one file, written by torch or by safetensors."""
    out.mkdir()
    for path in source.iterdir():
        if not path.name.startswith("model"):
            (out / path.name).write_bytes(path.read_bytes())
    if file.endswith(".bin"):
        torch.save(tensors, out / file)
    else:
        save_file(tensors, out / file, metadata={"format": "pt"})
    return out


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def assert_same_model(ours: Path, reference: Path) -> None:
    """Assert the same tensors for safetensors, and the same logits for transformers, after a strict load."""
    assert_same_tensors(tensors_of(ours), tensors_of(reference))
    np.testing.assert_array_equal(transformers_logits(ours, TOKENS), transformers_logits(reference, TOKENS))


# ------------------------------------------------------------------------------------------------ writing


@pytest.mark.core("20KB-*", "5GB-qwen3")
@pytest.mark.parametrize("name", ["qwen3", "llama_tied", "qwen3_moe", "deepseek_v3_mtp"])
@pytest.mark.parametrize("limit", ["20KB", "100KB", "5GB"])
def test_shards(name: str, limit: str, hf_model: Models, tmp_path: Path) -> None:
    """No shard exceeds the limit, except with a single tensor that does; the index has the true size."""
    source = hf_model(name)
    out = converted(source, tmp_path / "out", max_shard_size=limit)
    assert_same_model(out, source)
    shards = sorted(out.glob("*.safetensors"))
    if limit == "5GB":
        assert [shard.name for shard in shards] == ["model.safetensors"]
        assert not (out / INDEX).exists()
        return
    count = len(shards)
    assert count > 3
    assert [shard.name for shard in shards] == [
        f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)
    ]
    content = [load_file(shard) for shard in shards]
    for tensors in content:
        assert len(tensors) == 1 or sum(tensor.nbytes for tensor in tensors.values()) <= reshard_bytes(limit)
    index = json.loads((out / INDEX).read_text())
    assert index["weight_map"] == {
        name: shard.name for shard, tensors in zip(shards, content, strict=True) for name in tensors
    }
    official = split_torch_state_dict_into_shards(tensors_of(source), max_shard_size=limit)
    assert index["metadata"]["total_size"] == official.metadata["total_size"]


def test_a_shard_may_be_as_large_as_the_limit(hf_model: Models, tmp_path: Path) -> None:
    source = hf_model("qwen3")
    whole = load_file(converted(source, tmp_path / "whole") / "model.safetensors")
    limit = sum(tensor.nbytes for tensor in whole.values())
    assert (
        len(list(converted(source, tmp_path / "one", max_shard_size=str(limit)).glob("*.safetensors"))) == 1
    )
    assert (
        len(list(converted(source, tmp_path / "two", max_shard_size=str(limit - 1)).glob("*.safetensors")))
        == 2
    )


def reshard_bytes(limit: str) -> int:
    return int(limit.removesuffix("KB")) * 1000


def test_headers_are_as_transformers_4_wants_them(hf_model: Models, tmp_path: Path) -> None:
    for shard in converted(hf_model("qwen2"), tmp_path / "out", max_shard_size="100KB").glob("*.safetensors"):
        with safe_open(shard, framework="pt") as file:
            assert file.metadata() == {"format": "pt"}
        with shard.open("rb") as raw:
            assert (
                int.from_bytes(raw.read(8), "little") % 8 == 0
            )  # tensors are aligned, as safetensors writes them


@pytest.mark.parametrize("stored", DTYPES)
@pytest.mark.parametrize("wanted", DTYPES)
def test_dtypes_are_cast_as_torch_casts(stored: str, wanted: str, hf_model: Models, tmp_path: Path) -> None:
    """Bit for bit, with ties, subnormal numbers, signed zeros and infinities; NaN stays NaN."""
    base = hf_model("qwen2", dtype=stored)
    tensors = tensors_of(base)
    edge = tensors["model.embed_tokens.weight"].view(-1)
    values = torch.tensor(EDGES, dtype=torch.float64).to(edge.dtype)
    fit = values[~values.isfinite() | values.to(getattr(torch, wanted)).isfinite()]
    edge[: len(fit)] = fit  # for the others, see test_overflow.py
    source = with_weights(base, tmp_path / "source", tensors, "model.safetensors")
    out = converted(source, tmp_path / "out", dtype=wanted)
    for name, tensor in tensors_of(out).items():
        expected = tensors[name].to(getattr(torch, wanted))
        assert tensor.dtype == expected.dtype
        assert torch.equal(tensor.isnan(), expected.isnan())
        assert torch.equal(
            *(bits(t.nan_to_num(nan=0.5, posinf=torch.inf, neginf=-torch.inf)) for t in (tensor, expected))
        )
    config = json.loads((out / "config.json").read_text())
    assert config["dtype"] == config["torch_dtype"] == wanted


EDGES = [0.0, -0.0, 1.00390625, 1.01171875, 65504.0, 65520.0, 1e30, 3.4e38, 6e-8, 2e-8, 1e-40, 1e-45]
EDGES += [-value for value in EDGES] + [float("inf"), float("-inf"), float("nan")]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int32 if tensor.dtype == torch.float32 else torch.int16)


def test_a_conversion_replaces_all_that_was_there(hf_model: Models, tmp_path: Path) -> None:
    """No shard and no index of the earlier folder remains that could be read instead of the new one."""
    converted(hf_model("qwen3_moe"), tmp_path / "out", max_shard_size="100KB")
    with pytest.raises(ReshardError, match="--overwrite"):
        converted(hf_model("qwen2"), tmp_path / "out")
    out = converted(hf_model("qwen2"), tmp_path / "out", overwrite=True)
    assert {path.name for path in out.glob("model*")} == {"model.safetensors"}
    assert_same_model(out, hf_model("qwen2"))


def test_config_speaks_to_old_and_new_readers(hf_model: Models, tmp_path: Path) -> None:
    source = hf_model("llama_rope_scaling")
    edit = tmp_path / "source"
    with_weights(source, edit, tensors_of(source), "model.safetensors")
    edit_config(edit, use_cache=False)
    config = json.loads((converted(edit, tmp_path / "out") / "config.json").read_text())
    assert config["use_cache"] is True
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 50000.0
    assert config["rope_scaling"]["rope_type"] == config["rope_parameters"]["rope_type"] == "llama3"
    assert config["torch_dtype"] == config["dtype"] == "float32"


# ------------------------------------------------------------------------------------------------ reading


@pytest.mark.parametrize("name", ["qwen2", "qwen3_moe"])
def test_shards_of_transformers_are_read(name: str, hf_model: Models, tmp_path: Path) -> None:
    source = hf_model(name, max_shard_size="100KB")
    assert (source / INDEX).is_file()
    assert_same_model(converted(source, tmp_path / "out"), source)


def test_one_file_of_torch_is_read(hf_model: Models, tmp_path: Path) -> None:
    """Also with views of one storage in it, transposed, strided and with an offset."""
    source = hf_model("qwen2")
    tensors = tensors_of(source)
    stacked = torch.stack([tensors[f"model.layers.{i}.mlp.down_proj.weight"] for i in range(4)], dim=1)
    for i in range(4):
        tensors[f"model.layers.{i}.mlp.down_proj.weight"] = stacked[:, i]
        name = f"model.layers.{i}.self_attn.o_proj.weight"
        tensors[name] = tensors[name].t().contiguous().t()
    assert not tensors["model.layers.1.mlp.down_proj.weight"].is_contiguous()
    folder = with_weights(source, tmp_path / "bin", tensors, "pytorch_model.bin")
    assert_same_model(converted(folder, tmp_path / "out"), source)
    assert_same_model(converted(folder / "pytorch_model.bin", tmp_path / "out of the file"), source)


Nest = Callable[[dict[str, torch.Tensor]], dict[str, Any]]
NESTED: dict[str, Nest] = {
    "net": lambda weights: {"net": weights, "step": torch.tensor(3)},
    "app.model": lambda weights: {"app": {"model": weights}, "config": {"lr": 1e-3}},
    "model, averaged": lambda weights: {"model": weights, "ema": {k: v * 2 for k, v in weights.items()}},
    "with an optimizer": lambda weights: {
        "weights": weights,
        "optimizer": {"state": {i: {"exp_avg": tensor} for i, tensor in enumerate(weights.values())}},
    },
}


@pytest.mark.parametrize("nest", NESTED)
def test_weights_are_found_in_what_a_training_loop_saved(nest: str, hf_model: Models, tmp_path: Path) -> None:
    source = hf_model("qwen2")
    content = NESTED[nest](tensors_of(source))
    folder = with_weights(source, tmp_path / "bin", content, "pytorch_model.bin")
    assert_same_model(converted(folder, tmp_path / "out"), source)


def test_weights_of_two_models_are_not_guessed(hf_model: Models, tmp_path: Path) -> None:
    source = hf_model("qwen2")
    weights = tensors_of(source)
    content = {"policy": {"net": weights}, "critic": weights | {"more": torch.zeros(2)}}
    folder = with_weights(source, tmp_path / "bin", content, "pytorch_model.bin")
    with pytest.raises(ReshardError, match=r"below policy\.net, \d+ below critic"):
        converted(folder, tmp_path / "out")


def test_dicts_that_share_each_other_are_read_in_time(tmp_path: Path) -> None:
    inner: dict[str, Any] = {"weight": torch.ones(2)}
    for _ in range(3):
        inner = {f"key{i}": inner for i in range(1000)}
    torch.save(inner, tmp_path / "pytorch_model.bin")
    assert reshard.open(tmp_path).tensors.keys() == {"weight"}


def test_shards_that_changed_names_are_read_by_the_names_in_them(hf_model: Models, tmp_path: Path) -> None:
    source = hf_model("qwen3", max_shard_size="200KB")
    folder = Path(shutil.copytree(source, tmp_path / "exchanged"))
    first, second, *_ = sorted(folder.glob("model-*.safetensors"))
    first.rename(tmp_path / "spare")
    second.rename(first)
    (tmp_path / "spare").rename(second)
    reshard.convert(folder, tmp_path / "out", to="huggingface")
    assert_same_tensors(tensors_of(tmp_path / "out"), tensors_of(source))
    assert reshard.verify(folder, source).equal


def test_an_index_of_other_tensors_than_the_shards_have_is_refused(hf_model: Models, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(hf_model("qwen3", max_shard_size="200KB"), tmp_path / "stale"))
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["model.extra.weight"] = index["weight_map"].pop("model.norm.weight")
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(ReshardError) as raised:
        reshard.open(folder)
    assert [(problem.code, problem.tensor) for problem in raised.value.problems] == [
        ("indexed-tensor-missing", "model.extra.weight"),
        ("tensor-not-in-index", "model.norm.weight"),
    ]


def test_shards_of_torch_are_read(hf_model: Models, tmp_path: Path) -> None:
    source = hf_model("qwen3_moe")
    tensors = tensors_of(source)
    names = sorted(tensors)
    halves = {
        f"pytorch_model-0000{i}-of-00002.bin": {name: tensors[name] for name in half}
        for i, half in ((1, names[::2]), (2, names[1::2]))
    }
    folder = with_weights(source, tmp_path / "bin", {}, "pytorch_model.bin")
    (folder / "pytorch_model.bin").unlink()
    for file, half in halves.items():
        torch.save(half, folder / file)
    weight_map = {name: file for file, half in halves.items() for name in half}
    (folder / "pytorch_model.bin.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )
    assert_same_model(converted(folder, tmp_path / "out", max_shard_size="100KB"), source)
    (folder / "pytorch_model-00002-of-00002.bin").unlink()
    with pytest.raises(ReshardError, match=r"pytorch_model-00002-of-00002\.bin"):
        converted(folder, tmp_path / "none")


@pytest.mark.parametrize("to", ["huggingface", "dcp"])
def test_shards_count_themselves_if_the_index_is_missing_too(to: str, tmp_path: Path) -> None:
    """Nobody declared Falcon: its names are taken as they are, so no tensor would be missed."""
    config = FalconConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2)
    FalconForCausalLM(config).save_pretrained(tmp_path / "whole", max_shard_size="8KB")
    shards = sorted((tmp_path / "whole").glob("*.safetensors"))
    (tmp_path / "whole" / "model.safetensors.index.json").unlink()
    whole = reshard.convert(tmp_path / "whole", tmp_path / "out", to=to, no_tokenizer=True)
    assert whole.plan.tensors == len(tensors_of(tmp_path / "whole"))
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    (tmp_path / "cut" / shards[1].name).unlink()
    for source in (tmp_path / "cut", tmp_path / "whole" / shards[0].name):
        assert [each.code for each in reshard.inspect(source).problems][:1] == ["hub-shards-missing"]
        with pytest.raises(ReshardError, match=shards[1].name):
            reshard.convert(source, tmp_path / "none", to=to, no_tokenizer=True)
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("to", ["huggingface", "megatron"])
def test_the_file_itself_may_be_named(to: str, hf_model: Models, tmp_path: Path) -> None:
    source = hf_model("llama")
    reshard.convert(source / "model.safetensors", tmp_path / "out", to=to)
    assert reshard.verify(source, tmp_path / "out").equal
    assert (tmp_path / "out" / "tokenizer.json").is_file()


def test_a_tied_head_that_is_stored_is_checked(hf_model: Models, tmp_path: Path) -> None:
    """Some tools save it although the config says that it is tied; transformers 5 does not."""
    source = hf_model("qwen2_tied")
    tensors = tensors_of(source)
    assert "lm_head.weight" not in tensors
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    both = with_weights(source, tmp_path / "both", tensors, "pytorch_model.bin")
    assert_same_model(converted(both, tmp_path / "out"), source)
    tensors["lm_head.weight"][3, 3] += 1
    other = with_weights(source, tmp_path / "other", tensors, "pytorch_model.bin")
    with pytest.raises(ReshardError, match=r"lm_head\.weight"):
        converted(other, tmp_path / "none")


@pytest.mark.parametrize("file", ["pytorch_model.bin", "model.safetensors"])
def test_rotary_buffers_of_older_versions_are_dropped_by_name(
    file: str, hf_model: Models, tmp_path: Path
) -> None:
    source = hf_model("llama")
    buffers = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(8) for i in range(4)}
    folder = with_weights(source, tmp_path / "old", {**tensors_of(source), **buffers}, file)
    plan = reshard.convert(folder, tmp_path / "megatron", to="megatron").plan
    assert plan.dropped == {"rotary buffers": 4 * 8 * 4}
    assert reshard.verify(folder, tmp_path / "megatron").equal
    assert_same_model(converted(folder, tmp_path / "out"), source)


def test_mtp_layers_that_only_the_config_names(hf_model: Models, tmp_path: Path) -> None:
    """transformers leaves them out when it saves a model, but keeps their number in the config."""
    source = hf_model("deepseek_v3_mtp")
    plain = {name: tensor for name, tensor in tensors_of(source).items() if "model.layers.4." not in name}
    folder = with_weights(source, tmp_path / "plain", plain, "model.safetensors")
    assert json.loads((folder / "config.json").read_text())["num_nextn_predict_layers"] == 1
    plan = reshard.convert(folder, tmp_path / "megatron", to="megatron").plan
    assert any("config.json names 1, the checkpoint has 0; --fill-from" in note for note in plan.notes)
    (tmp_path / "megatron" / "config.json").unlink()
    reshard.convert(tmp_path / "megatron", tmp_path / "out", base=source)
    assert_same_tensors(tensors_of(tmp_path / "out"), plain)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["num_nextn_predict_layers"] == 0


def test_what_megatron_computes_otherwise_is_told(hf_model: Models, tmp_path: Path) -> None:
    source = hf_model("llama")
    folder = with_weights(source, tmp_path / "scaled", tensors_of(source), "model.safetensors")
    edit_config(folder, rope_parameters={"rope_type": "yarn", "factor": 4.0, "rope_theta": 50000.0})
    plan = reshard.convert(folder, tmp_path / "out", to="megatron", dry_run=True).plan
    assert [str(each.found).split(";")[0] for each in plan.warnings] == ["rope_type is 'yarn'"]
    assert not reshard.convert(source, tmp_path / "out", to="megatron", dry_run=True).plan.notes


def test_a_quantized_base_does_not_make_plain_weights_quantized(hf_model: Models, tmp_path: Path) -> None:
    source = hf_model("llama")
    base = with_weights(source, tmp_path / "base", {}, "model.safetensors")
    edit_config(base, quantization_config={"quant_method": "fp8"})
    reshard.convert(source, tmp_path / "megatron", to="megatron")
    reshard.convert(tmp_path / "megatron", tmp_path / "out", base=base)
    assert_same_model(tmp_path / "out", source)


def test_what_it_is_need_be_said_only_for_another_format(hf_model: Models, tmp_path: Path) -> None:
    with pytest.raises(ReshardError, match="--to"):
        reshard.convert(hf_model("llama"), tmp_path / "out")


# ------------------------------------------------------------------------------------------ unknown models


def test_an_unknown_model_that_fits_keeps_its_name(hf_model: Models, tmp_path: Path) -> None:
    """Its config keeps its name, so that its own code still loads it; here Llama's code reads the output."""
    source = hf_model("llama")
    folder = with_weights(source, tmp_path / "source", tensors_of(source), "model.safetensors")
    edit_config(folder, model_type="newcomer", architectures=["NewcomerForCausalLM"])
    with pytest.raises(ReshardError, match=r"newcomer(?s:.*)--family llama"):
        reshard.convert(folder, tmp_path / "megatron", to="megatron", tp=2)
    reshard.convert(folder, tmp_path / "megatron", to="megatron", tp=2, family="llama")
    plan = reshard.convert(tmp_path / "megatron", tmp_path / "forced", family="llama").plan
    assert plan.facts["family"] == "llama"
    assert json.loads((tmp_path / "forced" / "config.json").read_text())["model_type"] == "newcomer"
    edit_config(tmp_path / "forced", model_type="llama", architectures=["LlamaForCausalLM"])
    assert_same_model(tmp_path / "forced", source)


def test_an_unknown_model_may_have_empty_tensors_and_numbers(hf_model: Models, tmp_path: Path) -> None:
    source = hf_model("llama")
    tensors = {**tensors_of(source), "empty": torch.zeros(0, 4), "number": torch.tensor(3.0)}
    folder = with_weights(source, tmp_path / "source", tensors, "model.safetensors")
    edit_config(folder, model_type="newcomer")
    assert_same_tensors(tensors_of(converted(folder, tmp_path / "out")), tensors)


def test_an_unknown_model_that_does_not_fit_names_what_is_unmatched(hf_model: Models, tmp_path: Path) -> None:
    source = hf_model("llama")
    tensors = {**tensors_of(source), "model.layers.2.mlp.novelty.weight": torch.ones(3)}
    folder = with_weights(source, tmp_path / "source", tensors, "model.safetensors")
    edit_config(folder, model_type="newcomer")
    with pytest.raises(ReshardError, match=r"model\.layers\.2\.mlp\.novelty\.weight"):
        reshard.convert(folder, tmp_path / "out", to="megatron")
    with pytest.raises(ReshardError, match=r"model\.layers\.2\.mlp\.novelty\.weight"):
        reshard.convert(folder, tmp_path / "out", to="megatron", family="llama")
    assert not (tmp_path / "out").exists()
