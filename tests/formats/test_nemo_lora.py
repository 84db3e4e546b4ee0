"""Adapters of NeMo's own modules, saved as NeMo 1 and 2 do: merged as those modules compute, and for PEFT."""

from __future__ import annotations

import json
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft import PeftModel
from transformers import AutoModelForCausalLM

import reshard
from reshard.algebra.layout import Layout
from tests.commandline import reshard as command
from tests.genuine.make_nemo_1 import ADAPTED, CONFIG, KEPT_ADAPTERS, LORA, make
from tests.genuine.nemo_adapters import ALPHA, DIM
from tests.judges import assert_same_tensors, tensors_of
from tests.work import extract_all

DATA = Path(__file__).parents[1] / "data" / "nemo"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model that was adapted, in float32 as it was when NeMo's modules were merged into it."""
    out = tmp_path_factory.mktemp("nemo") / "base"
    reshard.convert(DATA / "iter_0000002", out, no_tokenizer=True, dtype="float32")
    return out


@pytest.fixture(scope="module")
def merged(base: Path) -> dict[str, torch.Tensor]:
    """The model with what the modules of NeMo compute for each unit vector added to its weights."""
    reshard.convert(DATA / "lora-1-merged", base.parent / "merged", base=base, no_tokenizer=True)
    return tensors_of(base.parent / "merged")


@pytest.mark.parametrize("name", KEPT_ADAPTERS)
def test_merged_as_nemo_computes(
    name: str, base: Path, merged: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    reshard.convert(DATA / name, tmp_path / "out", merge=True, base=base, no_tokenizer=True)
    found, before = tensors_of(tmp_path / "out"), tensors_of(base)
    assert_same_tensors(found, merged)
    changed = {tensor for tensor in found if not found[tensor].equal(before[tensor])}
    assert changed == {tensor for tensor in found if "proj" in tensor}


@pytest.mark.slow
@pytest.mark.parametrize("how", ADAPTED)
@pytest.mark.parametrize("layout", [Layout(), Layout(pp=2), Layout(tp=2)])
def test_every_variant_in_every_layout(how: str, layout: Layout, base: Path, tmp_path: Path) -> None:
    config = {**CONFIG, "peft": {"peft_scheme": "lora", "lora_tuning": LORA}}
    sizes = {"tensor_model_parallel_size": layout.tp, "pipeline_model_parallel_size": layout.pp}
    source = make(DATA / "iter_0000002", tmp_path / "a.nemo", layout, how, {**config, **sizes})
    words = ("convert", source, tmp_path / "out", "--merge", "--lora-alpha", ALPHA, "--base", base)
    done = command(*words, "--no-tokenizer", "--json")
    if "canonical" in how and layout.tp > 1:
        assert [each["code"] for each in done.json["problems"]] == ["nemo-canonical-adapter-sharded"]
        return
    assert done.code == 0, done.err
    reshard.convert(tmp_path / "a-merged", tmp_path / "merged", base=base, no_tokenizer=True)
    assert_same_tensors(tensors_of(tmp_path / "out"), tensors_of(tmp_path / "merged"))


@pytest.mark.parametrize("name", KEPT_ADAPTERS)
def test_peft_loads_and_merges_it(
    name: str, base: Path, merged: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    reshard.convert(DATA / name, tmp_path / "out", base=base, no_tokenizer=True)
    told = json.loads((tmp_path / "out/adapter_config.json").read_text())
    assert (told["r"], told["lora_alpha"], told["lora_dropout"]) == (DIM, ALPHA, 0.1)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    by_peft = PeftModel.from_pretrained(model, tmp_path / "out").merge_and_unload().state_dict()
    for tensor, value in merged.items():
        torch.testing.assert_close(by_peft[tensor], value, rtol=1e-6, atol=1e-7)


@pytest.fixture
def unpacked(tmp_path: Path) -> Path:
    with tarfile.open(DATA / "lora-1.nemo") as archive:
        extract_all(archive, tmp_path / "unpacked")
    return tmp_path / "unpacked"


def edited(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = yaml.safe_load(file.read_text())
    change(content)
    file.write_text(yaml.safe_dump(content))


def alpha_of(path: Path) -> Any:
    from reshard.adapters.adapter_settings import find_settings

    return find_settings(reshard.open(path).checkpoint).alpha("")


def test_an_alpha_that_is_not_set_is_the_default(unpacked: Path, tmp_path: Path) -> None:
    """NeMo 1 takes the rank, and NeMo 2 leaves out what its class has as default: 32."""
    edited(unpacked / "model_config.yaml", lambda config: config["peft"]["lora_tuning"].pop("alpha"))
    assert alpha_of(unpacked) == DIM
    second = shutil.copytree(DATA / "lora-2", tmp_path / "lora-2")
    edited(second / "context/model.yaml", lambda model: model["model_transform"].pop("alpha"))
    assert alpha_of(second) == 32


def test_an_unknown_alpha_is_an_error(base: Path, tmp_path: Path) -> None:
    second = shutil.copytree(DATA / "lora-2/weights", tmp_path / "weights")
    done = command("convert", second, tmp_path / "out", "--merge", "--base", base, "--no-tokenizer", "--json")
    assert [each["code"] for each in done.json["problems"]] == ["lora-alpha-unknown"]


def test_a_missing_rank_is_an_error(unpacked: Path, base: Path) -> None:
    shutil.rmtree(unpacked / "tp_rank_00_pp_rank_001")
    done = command("convert", unpacked, unpacked / "out", "--base", base, "--no-tokenizer", "--json")
    assert [each["code"] for each in done.json["problems"]] == ["nemo-rank-missing"]


def test_layers_without_an_adapter_are_an_error(unpacked: Path, base: Path) -> None:
    """The number of a layer counts from the first of its stage, whose number is then unknown."""
    for file in unpacked.glob("tp_rank_*_pp_rank_000/model_weights.ckpt"):
        state = {name: value for name, value in torch.load(file).items() if "layers.1." not in name}
        torch.save(state, file)
    done = command("convert", unpacked, unpacked / "out", "--base", base, "--no-tokenizer", "--json")
    assert [each["code"] for each in done.json["problems"]] == ["nemo-layers-unnumbered"]


def test_canonical_adapters_of_several_ranks_are_an_error(unpacked: Path, base: Path) -> None:
    for file in unpacked.glob("*/model_weights.ckpt"):
        state = torch.load(file)
        torch.save(
            {
                name.replace("lora_kqv_adapter", "lora_unfused_kqv_adapter.q_adapter"): state[name]
                for name in state
            },
            file,
        )
    done = command("convert", unpacked, unpacked / "out", "--base", base, "--no-tokenizer", "--json")
    assert [each["code"] for each in done.json["problems"]] == ["nemo-canonical-adapter-sharded"]


def test_other_adapters_are_an_error(unpacked: Path, base: Path) -> None:
    for file in unpacked.glob("*/model_weights.ckpt"):
        state = {
            name.replace("lora_kqv_adapter", "adapter_1"): value for name, value in torch.load(file).items()
        }
        torch.save(state, file)
    done = command("convert", unpacked, unpacked / "out", "--base", base, "--no-tokenizer", "--json")
    assert done.code == 2 and {each["code"] for each in done.json["problems"]} == {"adapter-module-unknown"}
