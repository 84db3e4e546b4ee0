"""`--fill-from`: what a checkpoint lacks comes from a complete model, each tensor named, and counted by the proof."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, OlmoConfig, OlmoForCausalLM

import reshard
from reshard.base.errors import ReshardError
from reshard.oracle.transformers import transformers_logits
from tests.genuine.model_types import make_model_type
from tests.judges import TOKENS, assert_agree, assert_same_tensors, judged_by_megatron, tensors_of

Models = Callable[..., Path]

MTP = "model.layers.4."


def trained(source: Path, folder: Path) -> Path:
    """What transformers saves after a step of training: it drops MTP layers, and keeps their number in the config."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype="auto")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.0625)
    model.save_pretrained(folder)
    return folder


def without(source: Path, folder: Path, *begins: str, **config: object) -> Path:
    """A copy of a Hugging Face folder without the tensors whose names begin so."""
    folder.mkdir()
    kept = {name: each for name, each in tensors_of(source).items() if not name.startswith(begins)}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    settings = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, **config}))
    return folder


def olmo(folder: Path, hidden: int) -> Path:
    """A model of a family that reshard copies without knowing it."""
    config = OlmoConfig(vocab_size=64, hidden_size=hidden, intermediate_size=48, num_hidden_layers=2)
    OlmoForCausalLM(config).save_pretrained(folder)
    return folder


def refused(source: Path, out: Path, **options: object) -> list[str]:
    with pytest.raises(ReshardError) as caught:
        reshard.convert(source, out, **options)  # type: ignore[arg-type]
    assert not out.exists()
    return [problem.code for problem in caught.value.problems]


def test_mtp_layers_that_transformers_drops(hf_model: Models, tmp_path: Path) -> None:
    base = hf_model("deepseek_v3_mtp")
    source = trained(base, tmp_path / "trained")
    own, whole = tensors_of(source), tensors_of(base)
    copies = {
        f"{MTP}embed_tokens.weight": "model.embed_tokens.weight",
        f"{MTP}shared_head.head.weight": "lm_head.weight",
    }
    absent = whole.keys() - own.keys() - copies.keys()
    assert absent and all(name.startswith(MTP) for name in absent)
    plan = reshard.convert(source, tmp_path / "out", fill_from=base).plan
    assert plan.facts["filled"] == sorted(absent)
    assert any(f"{len(absent):,} tensors are filled from {base}" in note for note in plan.notes)
    again = {name: own[original] for name, original in copies.items()}  # of what was trained
    assert_same_tensors(
        tensors_of(tmp_path / "out"), {**{name: whole[name] for name in absent}, **own, **again}
    )
    assert json.loads((tmp_path / "out" / "config.json").read_text())["num_nextn_predict_layers"] == 1
    assert json.loads((tmp_path / "out" / "reshard.json").read_text())["filled"] == sorted(absent)
    proof = reshard.verify(source, tmp_path / "out", proof=True)
    assert proof and proof.source.filled == sum(whole[name].numel() for name in absent)
    assert reshard.verify(source, tmp_path / "out", fill_from=base)
    assert {row.kind for row in reshard.verify(source, tmp_path / "out").rows} == {"only in B"}


def test_to_and_from_megatron(hf_model: Models, tmp_path: Path) -> None:
    """Megatron-Core loads what was filled strictly, and a run that left the MTP layers out gets them back."""
    base = hf_model("deepseek_v3_mtp")
    source = trained(base, tmp_path / "trained")
    reshard.convert(source, tmp_path / "filled", to="megatron", tp=2, fill_from=base)
    assert_agree(judged_by_megatron(tmp_path / "filled").logits, transformers_logits(source, TOKENS))
    reshard.convert(source, tmp_path / "run", to="megatron", tp=2, base=base)
    assert not any("mtp" in name for name in reshard.open(tmp_path / "run").tensors)
    reshard.convert(tmp_path / "run", tmp_path / "out", fill_from=base)
    reshard.convert(source, tmp_path / "want", fill_from=base)
    assert_same_tensors(tensors_of(tmp_path / "out"), tensors_of(tmp_path / "want"))
    assert reshard.verify(tmp_path / "run", tmp_path / "out", proof=True)


def test_the_tower_of_a_language_model_trained_alone(tmp_path: Path) -> None:
    """The text model that transformers saves has other names, another config and no tower."""
    base = make_model_type("qwen3_vl", tmp_path / "base")
    whole = AutoModelForImageTextToText.from_pretrained(base, dtype="auto")
    text = {f"model.{name}": each for name, each in whole.model.language_model.state_dict().items()}
    text["lm_head.weight"] = whole.lm_head.weight.detach()
    alone = tmp_path / "text.pt"
    torch.save({name: each.clone() for name, each in text.items()}, alone)
    reshard.convert(alone, tmp_path / "out", fill_from=base)
    assert_same_tensors(tensors_of(tmp_path / "out"), tensors_of(base))
    assert reshard.verify(alone, tmp_path / "out", proof=True)
    loaded = AutoModelForImageTextToText.from_pretrained(tmp_path / "out", dtype="auto")
    assert loaded.state_dict().keys() == whole.state_dict().keys()


@pytest.mark.parametrize("to", ["huggingface", "megatron"])
def test_a_head_that_was_not_saved(to: str, hf_model: Models, tmp_path: Path) -> None:
    base = hf_model("qwen3")
    source = without(base, tmp_path / "headless", "lm_head.")
    assert refused(source, tmp_path / "out", to="dcp", no_tokenizer=True) == ["untied-head-missing"]
    plan = reshard.convert(source, tmp_path / "out", to=to, fill_from=base).plan
    assert plan.facts["filled"] == ["lm_head.weight"]
    assert reshard.verify(tmp_path / "out", base)


def test_a_family_that_is_not_declared(tmp_path: Path) -> None:
    base = olmo(tmp_path / "base", 32)
    names = sorted(tensors_of(base))
    source = without(base, tmp_path / "partial", names[0])
    plan = reshard.convert(source, tmp_path / "out", fill_from=base, no_tokenizer=True).plan
    assert plan.facts["filled"] == [names[0]]
    assert_same_tensors(tensors_of(tmp_path / "out"), tensors_of(base))
    other = olmo(tmp_path / "other", 64)
    (source / "config.json").unlink()
    assert set(refused(source, tmp_path / "no", fill_from=other, no_tokenizer=True)) == {"fill-other-model"}


def test_from_a_quantized_model(hf_model: Models, tmp_path: Path) -> None:
    """What is filled has the dtype of the checkpoint; two models that are quantized alike stay so."""
    base = hf_model("deepseek_v3_mtp", dtype="bfloat16")
    reshard.convert(base, tmp_path / "fp8", quantize="fp8")
    source = trained(base, tmp_path / "trained")
    reshard.convert(tmp_path / "fp8", tmp_path / "wide", dtype="bfloat16")
    reshard.convert(source, tmp_path / "out", fill_from=tmp_path / "fp8")
    wide, out = tensors_of(tmp_path / "wide"), tensors_of(tmp_path / "out")
    copies = {f"{MTP}embed_tokens.weight", f"{MTP}shared_head.head.weight"}
    assert out.keys() == wide.keys()
    mtp = {name: wide[name] for name in wide if name.startswith(MTP)}
    assert_same_tensors(
        *({n: t for n, t in each.items() if n not in copies} for each in (out, {**mtp, **tensors_of(source)}))
    )
    part = without(tmp_path / "fp8", tmp_path / "part", MTP)
    shutil.copy(tmp_path / "fp8" / "tokenizer.json", part)
    reshard.convert(part, tmp_path / "same", fill_from=tmp_path / "fp8")
    assert_same_tensors(tensors_of(tmp_path / "same"), tensors_of(tmp_path / "fp8"))
    assert refused(part, tmp_path / "no", fill_from=base) == ["fill-quantization-differs"]


def test_nothing_is_filled_by_default_or_without_a_reason(hf_model: Models, tmp_path: Path) -> None:
    base = hf_model("qwen3")
    plan = reshard.convert(base, tmp_path / "same", to="dcp", fill_from=base).plan
    assert f"the checkpoint has every tensor of {base}: nothing is filled" in plan.notes
    assert "filled" not in plan.facts
    layer = without(base, tmp_path / "layer", "model.layers.3.")
    assert refused(layer, tmp_path / "out", to="dcp")
    assert refused(layer, tmp_path / "out", fill_from=tmp_path / "layer")  # lacks as much


def test_states_of_filled_tensors_are_missing(hf_model: Models, tmp_path: Path) -> None:
    base = hf_model("qwen3")
    source = without(base, tmp_path / "headless", "lm_head.")
    assert refused(source, tmp_path / "out", to="megatron", fill_from=base, with_optimizer=True)
