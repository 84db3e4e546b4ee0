"""A language model inside a larger one: its config, its names and the parts copied with it, in all formats."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import reshard
from reshard.base.errors import ReshardError
from reshard.containers.dcp_metadata import read_metadata
from reshard.transfer.source_files import Sources
from tests import commandline
from tests.genuine.huggingface import make_model
from tests.genuine.model_types import TYPES, make_model_type
from tests.judges import assert_same_tensors, tensors_of
from tests.test_dcp_format import as_torch_reads, save

NAMES = ("qwen2_5_vl", "qwen3_vl")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            made[name] = make_model_type(name, tmp_path_factory.mktemp(name) / "hub")
        return made[name]

    return get


def edited(
    source: Path, folder: Path, edit: Callable[[dict[str, Any], dict[str, torch.Tensor]], None]
) -> Path:
    """A copy of a Hugging Face folder after `edit` of its config and its tensors."""
    folder.mkdir()
    config, tensors = (
        json.loads((source / "config.json").read_text()),
        load_file(source / "model.safetensors"),
    )
    edit(config, tensors)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_bytes((source / "tokenizer.json").read_bytes())
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.core("qwen2_5_vl-megatron", "qwen3_vl-deepspeed")
@pytest.mark.parametrize("to", ["megatron", "megatron-legacy", "dcp", "deepspeed"])
@pytest.mark.parametrize("name", NAMES)
def test_every_format_takes_all_parts(
    name: str, to: str, model: Callable[[str], Path], tmp_path: Path
) -> None:
    layout = {"tp": 2, "pp": 2} if to.startswith("megatron") else {}
    reshard.convert(model(name), tmp_path / "there", to=to, **layout)
    assert reshard.verify(model(name), tmp_path / "there").equal or to == "deepspeed"  # which holds float32
    reshard.convert(tmp_path / "there", tmp_path / "back", dtype="bfloat16")
    assert_same_tensors(tensors_of(tmp_path / "back"), tensors_of(model(name)))
    assert reshard.verify(model(name), tmp_path / "back").equal


def test_what_is_carried_is_whole_in_the_first_stage(model: Callable[[str], Path], tmp_path: Path) -> None:
    reshard.convert(model("qwen3_vl"), tmp_path / "m", to="megatron", tp=2, pp=2)
    tensors = read_metadata(tmp_path / "m" / "iter_0000000" / ".metadata", Sources()).tensors
    carried = {key: tensor for key, tensor in tensors.items() if key.startswith("visual.visual.")}
    assert len(carried) == 39 and all(
        key.startswith("language_model.") for key in tensors.keys() - carried.keys()
    )
    assert {
        (Path(chunk.file).name, chunk.sizes == each.shape)
        for each in carried.values()
        for chunk in each.chunks
    } == {("__0_0.distcp", True)}
    reshard.convert(model("qwen3_vl"), tmp_path / "legacy", to="megatron-legacy", tp=2, pp=2)
    found = {
        folder.name: {
            key.partition(".")[0]
            for key in torch.load(folder / "model_optim_rng.pt", weights_only=False)["model"]
        }
        for folder in (tmp_path / "legacy" / "iter_0000000").iterdir()
    }
    first, last = {"language_model", "visual"}, {"language_model"}
    assert found == {f"mp_rank_{tp:02}_{pp:03}": last if pp else first for tp in (0, 1) for pp in (0, 1)}


def test_the_names_of_another_engine(model: Callable[[str], Path], tmp_path: Path) -> None:
    reshard.convert(model("qwen3_vl"), tmp_path / "m", to="megatron", engine="megatron-bridge")
    assert any(name.startswith("vision_model.decoder") for name in reshard.open(tmp_path / "m").tensors)
    reshard.convert(tmp_path / "m", tmp_path / "same", to="megatron", tp=2)
    assert reshard.open(tmp_path / "same").tensors.keys() == reshard.open(tmp_path / "m").tensors.keys()
    reshard.convert(tmp_path / "m", tmp_path / "other", to="megatron", engine="mcore-bridge", pp=2)
    assert any(name.startswith("visual.visual.blocks") for name in reshard.open(tmp_path / "other").tensors)
    assert reshard.verify(tmp_path / "other", model("qwen3_vl")).equal
    with pytest.raises(ReshardError, match="does not compute the family qwen3_vl"):
        reshard.convert(model("qwen3_vl"), tmp_path / "refused", to="megatron", engine="mcore")


def test_ms_swift_gets_a_numbered_iteration_of_any_family(tmp_path: Path) -> None:
    base = make_model("llama", tmp_path / "base")
    for engine, tracked in (("mcore-bridge", "0"), ("mcore", "release"), (None, "release")):
        out = tmp_path / str(engine)
        reshard.convert(base, out, to="megatron", engine=engine)
        assert (out / "latest_checkpointed_iteration.txt").read_text() == tracked


@pytest.mark.parametrize("engine", ["megatron-bridge", "mcore"])
def test_an_engine_that_has_no_omni_models(engine: str, tmp_path: Path) -> None:
    base = make_model_type("qwen2_5_omni", tmp_path / "base")
    done = commandline.reshard("convert", base, tmp_path / "out", "--to", "megatron", "--engine", engine)
    assert done.code == 2 and not (tmp_path / "out").exists()
    assert "the family qwen2_5_omni" in done.err and f"--engine {engine}" in done.err
    assert "pass --engine mcore-bridge, or remove --engine" in done.err


def test_inspect_counts_what_is_carried(model: Callable[[str], Path]) -> None:
    found = commandline.reshard("inspect", model("qwen3_vl"), "--json").json
    sizes = [tensor.numel() for name, tensor in tensors_of(model("qwen3_vl")).items() if "visual" in name]
    assert found["carried"] == {"model.visual.": {"tensors": len(sizes), "parameters": sum(sizes)}}
    assert "model.visual.*" in commandline.reshard("inspect", model("qwen3_vl")).out


def test_a_config_keeps_all_that_it_says(model: Callable[[str], Path], tmp_path: Path) -> None:
    """Flat, as on the Hub, or nested, as transformers 5 saves it; a change is made where the value is."""

    nested = make_model_type("qwen2_5_vl", tmp_path / "nested", as_saved=True)
    for source in (nested, model("qwen2_5_vl")):
        reshard.convert(source, tmp_path / "m" / source.name, to="megatron", dtype="float32")
        reshard.convert(tmp_path / "m" / source.name, tmp_path / f"back-{source.name}")
        before, after = (
            json.loads((folder / "config.json").read_text())
            for folder in (source, tmp_path / f"back-{source.name}")
        )
        assert ("text_config" in after) == ("text_config" in before)
        assert after["dtype"] == after["torch_dtype"] == "float32"
        assert after["vision_config"] == before["vision_config"]
        for said, kept in ((before, after), (before.get("text_config", {}), after.get("text_config", {}))):
            assert {key: kept[key] for key in said if "dtype" not in key and "_config" not in key} == {
                key: value for key, value in said.items() if "dtype" not in key and "_config" not in key
            }
        assert after.get("text_config", after)["rope_scaling"]["mrope_section"] == [2, 1, 1]


@pytest.mark.parametrize("to", ["megatron", "dcp", "huggingface"])
@pytest.mark.parametrize("name", ["gemma3", "gemma3_text"])
def test_ropes_by_layer_type_stay_what_they_are(name: str, to: str, tmp_path: Path) -> None:
    """In the spelling of transformers 4, as on the Hub, with one `rope_scaling` for the layers of full attention."""
    hub = make_model_type(name, tmp_path / "hub")
    assert "rope_parameters" not in (hub / "config.json").read_text()
    reshard.convert(hub, tmp_path / "there", to=to)
    was, now = (
        transformers.AutoConfig.from_pretrained(each).get_text_config().rope_parameters
        for each in (hub, tmp_path / "there")
    )
    assert now == was and set(was) == {"sliding_attention", "full_attention"}


def test_a_part_that_is_missing_is_noticed(model: Callable[[str], Path], tmp_path: Path) -> None:
    def blind(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if "visual" in name]:
            del tensors[name]

    source = edited(model("qwen3_vl"), tmp_path / "blind", blind)
    for to in ("megatron", "dcp"):
        with pytest.raises(ReshardError, match=r"a part of the model is missing(?s:.*)model\.visual\."):
            reshard.convert(source, tmp_path / "out", to=to)


def test_a_tensor_of_no_part_is_noticed(model: Callable[[str], Path], tmp_path: Path) -> None:
    def add(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.audio.weight"] = torch.zeros(4)

    with pytest.raises(ReshardError, match=r"a tensor is unknown(?s:.*)model\.audio\.weight"):
        reshard.convert(edited(model("qwen3_vl"), tmp_path / "more", add), tmp_path / "out", to="megatron")


def test_without_a_config_the_base_is_asked_for(model: Callable[[str], Path], tmp_path: Path) -> None:
    reshard.convert(model("qwen3_vl"), tmp_path / "m", to="megatron")
    (tmp_path / "m" / "config.json").unlink()
    for family in (None, "qwen3_vl"):
        with pytest.raises(ReshardError, match="--base DIR"):
            reshard.convert(tmp_path / "m", tmp_path / "back", family=family)
    reshard.convert(tmp_path / "m", tmp_path / "back", base=model("qwen3_vl"))
    assert_same_tensors(tensors_of(tmp_path / "back"), tensors_of(model("qwen3_vl")))


@pytest.mark.core("qwen2_5_vl-True", "qwen3_vl_moe-False", "internvl-True")
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", (*NAMES, "qwen2_vl", "qwen3_vl_moe", "internvl"))
def test_names_in_memory(name: str, tied: bool, tmp_path: Path) -> None:
    """A state dict of the live model gets the Hub's names, and the output has all keys of the live model."""
    hub = make_model_type(name, tmp_path / "hub", tie_word_embeddings=tied)
    kind = getattr(transformers, TYPES[name].architecture)
    live = kind.from_pretrained(hub, dtype=torch.bfloat16).state_dict()
    save({"model": live}, tmp_path / "live")
    reshard.convert(tmp_path / "live", tmp_path / "back", base=hub)
    assert_same_tensors(tensors_of(tmp_path / "back"), tensors_of(hub))
    reshard.convert(hub, tmp_path / "dcp", to="dcp")
    assert_same_tensors(as_torch_reads(tmp_path / "dcp")["model"], live)


@pytest.mark.parametrize("name", NAMES)
def test_an_adapter_of_a_part(name: str, tmp_path: Path) -> None:
    """PEFT uses the names of the model in memory; if it trained the embedding, the head is a separate tensor."""
    hub = make_model_type(name, tmp_path / "hub", as_saved=True, tie_word_embeddings=True)
    model = getattr(transformers, TYPES[name].architecture).from_pretrained(hub, dtype=torch.bfloat16)
    targets = r".*language_model.*\.(q_proj|k_proj|v_proj)"
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=targets))
    for key, parameter in wrapped.named_parameters():
        if "lora_B" in key:
            parameter.data = torch.randn_like(parameter)
    wrapped.save_pretrained(tmp_path / "lora")
    trained = load_file(tmp_path / "lora" / "adapter_model.safetensors")
    wrapped.merge_and_unload().save_pretrained(tmp_path / "expected")
    reshard.convert(tmp_path / "lora", tmp_path / "merged", merge=True, base=hub)
    assert_same_tensors(tensors_of(tmp_path / "merged"), tensors_of(tmp_path / "expected"))

    reshard.convert(tmp_path / "lora", tmp_path / "m", to="megatron", base=hub, tp=2)
    keys = read_metadata(next(tmp_path.glob("m/*/.metadata")), Sources()).tensors
    assert keys and all(key.startswith("language_model.decoder.layers.") for key in keys)
    reshard.convert(tmp_path / "m", tmp_path / "back", base=hub)
    again = load_file(tmp_path / "back" / "adapter_model.safetensors")
    assert again.keys() == trained.keys()

    whole = {key: tensor for key, tensor in trained.items() if "layers.0" in key}
    embedding = tensors_of(hub)[next(key for key in tensors_of(hub) if key.endswith("embed_tokens.weight"))]
    whole["base_model.model.model.language_model.embed_tokens.weight"] = embedding + 1
    save_file(whole, tmp_path / "lora" / "adapter_model.safetensors", metadata={"format": "pt"})
    reshard.convert(tmp_path / "lora", tmp_path / "untied", merge=True, base=hub)
    assert torch.equal(tensors_of(tmp_path / "untied")["lm_head.weight"], embedding)
    config = json.loads((tmp_path / "untied" / "config.json").read_text())
    assert (config["tie_word_embeddings"], config["text_config"]["tie_word_embeddings"]) == (False, False)


def test_transformers_computes_the_same_of_what_it_saved_and_what_came_back(tmp_path: Path) -> None:
    """transformers 5 saves the experts of a new model with other axes than the Hub; both are read."""
    saved = make_model_type("qwen3_vl_moe", tmp_path / "saved", as_saved=True)
    hub = make_model_type("qwen3_vl_moe", tmp_path / "hub")
    reshard.convert(saved, tmp_path / "m", to="megatron", tp=2, pp=2, ep=2, etp=1)
    reshard.convert(tmp_path / "m", tmp_path / "back")
    assert_same_tensors(tensors_of(tmp_path / "back"), tensors_of(hub))
    assert_same_tensors(computed(tmp_path / "back"), computed(saved))


@pytest.mark.core("internvl", "qwen3_vl_tied")
@pytest.mark.parametrize("name", ["qwen2_vl", "internvl", "internvl_qwen2", "qwen3_vl_tied"])
def test_transformers_computes_the_same_of_what_came_back(name: str, tmp_path: Path) -> None:
    hub = make_model_type(name, tmp_path / "hub")
    reshard.convert(hub, tmp_path / "m", to="megatron", tp=2, pp=2)
    reshard.convert(tmp_path / "m", tmp_path / "back")
    assert_same_tensors(tensors_of(tmp_path / "back"), tensors_of(hub))
    assert_same_tensors(computed(tmp_path / "back"), computed(hub))


def computed(folder: Path) -> dict[str, torch.Tensor]:
    """transformers' logits of some text."""
    architecture = json.loads((folder / "config.json").read_text())["architectures"][0]
    model = getattr(transformers, architecture).from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return {"logits": model(input_ids=torch.arange(4, 24)[None]).logits}


def test_a_language_model_of_another_family_is_refused(model: Callable[[str], Path], tmp_path: Path) -> None:
    def other(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        config["text_config"]["model_type"] = "internlm2"

    source = edited(model("internvl"), tmp_path / "other", other)
    with pytest.raises(ReshardError, match="of a family that it is not declared with"):
        reshard.convert(source, tmp_path / "m", to="megatron")
