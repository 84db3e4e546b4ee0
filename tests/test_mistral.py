"""Files of Mistral's own code: read and written as mistral_inference has them, and refused when they are wrong."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import reshard
from reshard.base.errors import ReshardError
from tests.commandline import reshard as command
from tests.environments import python
from tests.genuine import huggingface
from tests.judges import assert_agree, assert_same_tensors, tensors_of

DATA = Path(__file__).parent / "data/mistral"
SCRIPT = Path(__file__).parent / "genuine/run_mistral.py"
WEIGHTS, PARAMS, CONFIG = "consolidated.safetensors", "params.json", "config.json"
Params = dict[str, Any]

SIZES: Params = {"dim": 64, "n_layers": 2, "head_dim": 32, "hidden_dim": 96, "n_heads": 4, "n_kv_heads": 2}
REST: Params = {"norm_eps": 1e-5, "vocab_size": 64, "rope_theta": 1e6}
SAMPLE: Params = {
    **SIZES,
    **REST,
    "dim": 16,
    "head_dim": 8,
    "hidden_dim": 24,
    "vocab_size": 32,
    "n_layers": 1,
}
TOWER: Params = {
    "hidden_size": 48,
    "num_channels": 3,
    "image_size": 16,
    "patch_size": 4,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "rope_theta": 10000.0,
    "max_image_size": 16,
    "image_token_id": 10,
    "image_break_token_id": 12,
    "image_end_token_id": 13,
}
MERGED = {"mm_projector_id": "patch_merge", "spatial_merge_size": 2, "add_pre_mm_projector_layer_norm": True}
MODELS: dict[str, Params] = {
    "mistral": {**SIZES, **REST},
    "window": {**SIZES, **REST, "rope_theta": 10000.0, "sliding_window": 6},
    "mixtral": {**SIZES, **REST, "moe": {"num_experts": 4, "num_experts_per_tok": 2}},
    "ministral": {**SIZES, **REST, "n_layers": 4, "sliding_window": [None, 6, None, 6]},
    "mistral3": {**SIZES, **REST, "vision_encoder": {**TOWER, **MERGED, "adapter_bias": False}},
    "pixtral": {**SIZES, **REST, "vision_encoder": {**TOWER, "adapter_bias": True}},
}
OLD = ("window",)
"""Saved in one file of torch, as the first releases."""
MINISTRAL3: Params = {
    **SIZES,
    **REST,
    "max_position_embeddings": 1024,
    "q_lora_rank": None,
    "yarn": {
        "original_max_position_embeddings": 64,
        "factor": 16,
        "apply_scale": False,
        "beta": 32,
        "alpha": 1,
    },
    "llama_4_scaling": {"original_max_position_embeddings": 64, "beta": 0.1},
}


def run(folder: Path, jobs: list[dict[str, Any]]) -> None:
    """Let mistral_inference do these jobs."""
    told = folder / "jobs.json"
    told.write_text(json.dumps(jobs, default=str))
    done = subprocess.run([python("mistral"), SCRIPT, told], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For each model, a folder of mistral_inference, what reshard makes of it, and of that again; and logits."""
    folder = tmp_path_factory.mktemp("mistral")
    jobs = [
        {"do": "make", "folder": folder / "theirs" / name, "params": params, "old": name in OLD}
        for name, params in MODELS.items()
    ]
    run(folder, jobs)
    for name in MODELS:
        reshard.convert(folder / "theirs" / name, folder / "hub" / name, no_tokenizer=True)
        reshard.convert(folder / "hub" / name, folder / "ours" / name, to="mistral", no_tokenizer=True)
    run(folder, [{"do": "load", "folder": folder / "ours" / name} for name in MODELS])
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_transformers_computes_what_mistral_inference_does(name: str, made: Path) -> None:
    told = torch.load(made / "theirs" / f"{name}.pt")
    kind = "AutoModelForImageTextToText" if told["images"] else "AutoModelForCausalLM"
    model, info = getattr(transformers, kind).from_pretrained(
        made / "hub" / name, dtype=torch.float32, output_loading_info=True
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    seen: dict[str, Any] = {}
    if told["images"]:
        seen = {"pixel_values": torch.stack(told["images"]), "image_sizes": torch.tensor([[16, 16]])}
    with torch.no_grad():
        logits = model(input_ids=told["tokens"][None], **seen).logits[0]
    assert_agree(logits.numpy(), told["logits"].numpy())


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_mistral_inference_loads_what_is_written(name: str, made: Path) -> None:
    ours, theirs = made / "ours" / name, made / "theirs" / name
    weights = torch.load(theirs / "consolidated.00.pth") if name in OLD else load_file(theirs / WEIGHTS)
    assert_same_tensors(load_file(ours / WEIGHTS), weights)
    params = json.loads((ours / PARAMS).read_text())
    assert {key: params.get(key) for key in MODELS[name]} == MODELS[name]
    logits = [torch.load(f"{each}.pt")["logits"] for each in (ours, theirs)]
    assert logits[0].equal(logits[1])


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_params_say_what_config_says(name: str, made: Path, tmp_path: Path) -> None:
    shutil.copytree(made / "ours" / name, tmp_path / "alone")
    (tmp_path / "alone" / CONFIG).unlink()
    reshard.convert(tmp_path / "alone", tmp_path / "out", no_tokenizer=True)
    configs = [json.loads((each / CONFIG).read_text()) for each in (tmp_path / "out", made / "hub" / name)]
    assert configs[0] == configs[1]
    assert_same_tensors(tensors_of(tmp_path / "out"), tensors_of(made / "hub" / name))
    assert command("verify", tmp_path / "alone", tmp_path / "out", "--proof").code == 0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the sample, which mistral_inference has written."""
    return shutil.copytree(DATA, tmp_path / "mistral")


def codes(path: Path, *words: object) -> list[str]:
    result = command("convert", path, path.parent / "out", "--no-tokenizer", "--json", *words)
    assert result.code == 2 and not (path.parent / "out").exists()
    return [each["code"] for each in result.json["problems"]]


def changed(folder: Path, **params: Any) -> None:
    told = {**json.loads((folder / PARAMS).read_text()), **params}
    (folder / PARAMS).write_text(json.dumps({key: value for key, value in told.items() if value is not ...}))


def edited(folder: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / WEIGHTS)
    edit(tensors)
    save_file(tensors, folder / WEIGHTS)


def config_of(folder: Path) -> dict[str, Any]:
    out = folder.parent / "out"
    reshard.convert(folder, out, no_tokenizer=True, overwrite=True)
    found: dict[str, Any] = json.loads((out / CONFIG).read_text())
    return found


def test_the_sample_goes_through_any_engine_and_back(folder: Path, tmp_path: Path) -> None:
    """Megatron-Core's names, and InternEvo's: as dense Llama."""
    for to, back in (("megatron", "mistral"), ("dcp", "mistral"), ("huggingface", "mistral")):
        place = tmp_path / to
        reshard.convert(folder, place / "there", to=to, no_tokenizer=True)
        reshard.convert(place / "there", place / back, to=back, no_tokenizer=True)
        assert_same_tensors(load_file(place / back / WEIGHTS), load_file(folder / WEIGHTS))


@pytest.mark.parametrize("indexed", [True, False])
def test_shards_are_read(indexed: bool, folder: Path, tmp_path: Path) -> None:
    reshard.convert(folder, tmp_path / "whole", no_tokenizer=True)
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    names = sorted(tensors)
    files = {f"consolidated-0000{at}-of-00002.safetensors": names[at - 1 :: 2] for at in (1, 2)}
    for file, those in files.items():
        save_file({name: tensors[name] for name in those}, folder / file)
    if indexed:
        index = {"weight_map": {name: file for file, those in files.items() for name in those}}
        (folder / "consolidated.safetensors.index.json").write_text(json.dumps(index))
        assert command("inspect", folder / "consolidated.safetensors.index.json").code == 0
    assert reshard.verify(folder, tmp_path / "whole")
    assert "index" not in command("inspect", folder).out
    (folder / "consolidated-00002-of-00002.safetensors").unlink()
    assert codes(folder) == ["shard-missing" if indexed else "hub-shards-missing"]


def test_weights_of_the_hub_come_first(folder: Path, tmp_path: Path) -> None:
    """Most repositories have both layouts: then Mistral's is read only when its file is passed."""
    reshard.convert(folder, tmp_path / "hub", no_tokenizer=True)
    both = shutil.copytree(tmp_path / "hub", tmp_path / "both")
    for name in (WEIGHTS, PARAMS):
        shutil.copy(folder / name, both)
    edited(both, lambda tensors: tensors["norm.weight"].zero_())
    assert reshard.open(both).checkpoint.format == "huggingface"
    assert reshard.open(both / WEIGHTS).checkpoint.format == "mistral"
    assert reshard.verify(both, tmp_path / "hub") and not reshard.verify(both / WEIGHTS, tmp_path / "hub")


def test_the_config_of_the_hub_is_used_if_it_is_there(folder: Path, tmp_path: Path) -> None:
    config = {**config_of(folder), "eos_token_id": 7}
    (folder / CONFIG).write_text(json.dumps(config))
    (folder / PARAMS).unlink()
    assert config_of(folder)["eos_token_id"] == 7


def test_names_of_the_hub_in_files_of_this_name(folder: Path, tmp_path: Path) -> None:
    reshard.convert(folder, tmp_path / "hub", no_tokenizer=True)
    shutil.move(tmp_path / "hub/model.safetensors", tmp_path / "hub" / WEIGHTS)
    assert reshard.open(tmp_path / "hub").checkpoint.format == "huggingface"
    assert reshard.verify(folder, tmp_path / "hub")


def test_a_model_of_transformers_may_have_such_names(tmp_path: Path) -> None:
    """Mistral Large 4 is published under names of Mistral's that transformers itself renames."""
    config = {
        "model_type": "mistral_large4",
        "architectures": ["MistralLarge4ForConditionalGeneration"],
        "text_config": {"model_type": "mistral_large4_text"},
    }
    (tmp_path / CONFIG).write_text(json.dumps(config))
    names = ("layers.0.attention.wq_a.weight", "tok_embeddings.weight")
    save_file({name: torch.ones(4, 4) for name in names}, tmp_path / WEIGHTS)
    assert reshard.open(tmp_path).checkpoint.format == "huggingface"
    (tmp_path / CONFIG).write_text(json.dumps({**config, "model_type": "mistral4", "architectures": []}))
    with pytest.raises(ReshardError, match="does not convert this model"):
        reshard.open(tmp_path)


def test_its_tokenizers_are_kept(folder: Path, tmp_path: Path) -> None:
    tokenizers = {"tekken.json": '{"vocab": []}', "tokenizer.model.v3": "pieces"}
    for name, content in tokenizers.items():
        (folder / name).write_text(content)
    reshard.convert(folder, tmp_path / "out", to="mistral")
    assert {name: (tmp_path / "out" / name).read_text() for name in tokenizers} == tokenizers


@pytest.mark.parametrize(
    ("window", "theta"), [(4096, 10000.0), (None, 1000000.0)], ids=["as in 7B v0.1", "as in later ones"]
)
def test_a_base_that_is_not_told(window: int | None, theta: float, folder: Path) -> None:
    """Until May 2024, mistral_inference chose it by the window, which v0.1 alone has."""
    changed(folder, rope_theta=..., sliding_window=window or ...)
    config = config_of(folder)
    assert (config["rope_theta"], config["sliding_window"]) == (theta, window)


def test_ministral_3_as_transformers_converter_describes_it(folder: Path, tmp_path: Path) -> None:
    changed(folder, **{**MINISTRAL3, **SAMPLE}, tied_embeddings=True)
    edited(folder, lambda tensors: tensors.pop("output.weight"))
    config = config_of(folder)
    assert config["rope_parameters"] == {
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 16,
        "original_max_position_embeddings": 64,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
    }
    assert (config["model_type"], config["tie_word_embeddings"]) == ("ministral3", True)
    loaded, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert type(loaded).__name__ == "Ministral3ForCausalLM"
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    reshard.convert(tmp_path / "out", tmp_path / "back", to="mistral", no_tokenizer=True)
    assert_same_tensors(load_file(tmp_path / "back" / WEIGHTS), load_file(folder / WEIGHTS))
    params = json.loads((tmp_path / "back" / PARAMS).read_text())
    told = {
        key: value for key, value in json.loads((folder / PARAMS).read_text()).items() if value is not None
    }
    assert {key: params[key] for key in told} == told


BEYOND: dict[str, Params] = {
    "latent attention": {"kv_lora_rank": 16},
    "shared experts": {"moe": {"num_experts": 4, "num_experts_per_tok": 2, "num_shared_experts": 1}},
    "another model": {"model_type": "mamba"},
    "sound": {"multimodal": {"whisper_model_args": {}}},
    "quantized": {"quantization": {"qformat_weight": "fp8_e4m3"}},
    "windows": {"sliding_window": [4, 8]},
    "a scaled rope": {"yarn": {"factor": 2, "apply_scale": False}},
    "scales of attention": {**MINISTRAL3, **SAMPLE, "yarn": {**MINISTRAL3["yarn"], "apply_scale": True}},
}


@pytest.mark.parametrize("kind", BEYOND)
def test_other_models_are_refused(kind: str, folder: Path) -> None:
    changed(folder, **BEYOND[kind])
    assert codes(folder) == ["mistral-model-unsupported"]


def test_no_number_of_layers_takes_memory(folder: Path) -> None:
    changed(folder, n_layers=10**12)
    assert codes(folder) == ["mistral-params-unreadable"]


@pytest.mark.parametrize("value", [..., "16", 0, -1, 2.5, True, [16]])
@pytest.mark.parametrize("key", ["dim", "n_layers", "n_heads", "n_kv_heads"])
def test_odd_params_are_an_error(key: str, value: Any, folder: Path) -> None:
    if (key, value) == ("n_kv_heads", ...):
        return  # as many as n_heads, as transformers' converter has it
    changed(folder, **{key: value})
    assert codes(folder) == ["mistral-params-unreadable"]


def test_weights_without_params_are_an_error(folder: Path) -> None:
    (folder / PARAMS).unlink()
    assert codes(folder) == ["mistral-without-params"]


def test_weights_in_fp8_are_refused(folder: Path) -> None:
    edited(folder, lambda tensors: tensors.update({"layers.0.attention.wq.qscale_weight": torch.ones(1)}))
    assert codes(folder) == ["mistral-weights-quantized"]


DAMAGE: dict[str, tuple[str, Callable[[dict[str, torch.Tensor]], object]]] = {
    "lost": ("tool-tensor-missing", lambda tensors: tensors.pop("norm.weight")),
    "no head": ("tool-tensor-missing", lambda tensors: tensors.pop("output.weight")),
    "another": ("tool-tensor-unknown", lambda tensors: tensors.update(foreign=torch.ones(1))),
    "a wrong shape": (
        "tensor-transposed",
        lambda tensors: tensors.update({"layers.0.feed_forward.w1.weight": torch.ones(16, 24)}),
    ),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_an_error(kind: str, folder: Path) -> None:
    code, edit = DAMAGE[kind]
    edited(folder, edit)
    assert codes(folder) == [code]


def test_more_layers_than_there_are(folder: Path) -> None:
    changed(folder, n_layers=2)
    assert {*codes(folder)} == {"tool-tensor-missing"}


def test_heads_that_do_not_divide_rows(folder: Path) -> None:
    changed(folder, n_heads=5)
    assert codes(folder) == ["tensors-misfit-names-in-memory"]


WITHOUT: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "mistral": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}},
    "mixtral": {"hidden_act": "gelu"},
}


@pytest.mark.parametrize("name", WITHOUT)
def test_what_has_no_place_is_not_written(name: str, hf_model: Callable[..., Path], tmp_path: Path) -> None:
    source = shutil.copytree(hf_model(name), tmp_path / "source")
    huggingface.edit_config(source, WITHOUT[name])
    assert codes(source, "--to", "mistral") == ["mistral-model-unsupported"]
