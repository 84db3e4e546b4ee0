"""Whether a checkpoint would load, train and be saved again, compared with transformers where it can tell."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

import reshard
from reshard.runs.checks import checkpoint_checks


@pytest.fixture
def folder(hf_model: Callable[..., Path], tmp_path: Path) -> Path:
    shutil.copytree(hf_model("qwen3"), tmp_path / "model")
    return tmp_path / "model"


def change(path: Path, **values: object) -> None:
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**content, **values}, indent=2))


def test_sampling_options_without_sampling_are_those_that_transformers_refuses_to_save(
    folder: Path, tmp_path: Path
) -> None:
    from transformers import GenerationConfig

    path = folder / "generation_config.json"
    for options in ({"temperature": 0.6}, {"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.1}):
        for sampling in (True, False):
            path.write_text(json.dumps({"do_sample": sampling, **options}, indent=2))
            found = [f for f in reshard.doctor(folder) if f.code == "checkpoint-generation-config"]
            try:
                trained = GenerationConfig.from_pretrained(folder)
                trained.pad_token_id = 1  # as a trainer does
                trained.save_pretrained(tmp_path / "saved")
                refused = False
            except ValueError:
                refused = True
            assert bool(found) == refused, (options, sampling)
            if found:
                path.write_text(json.dumps({"do_sample": True, **options}, indent=2))
                GenerationConfig.from_pretrained(folder).save_pretrained(tmp_path / "saved")


def test_a_tokenizer_of_transformers_5_is_an_error_beside_transformers_4(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change(folder / "tokenizer_config.json", tokenizer_class="TokenizersBackend")
    severity = {}
    for installed in ("5.23.0", "4.51.3"):
        monkeypatch.setattr(
            checkpoint_checks, "installed_version", lambda package, installed=installed: installed
        )
        found = {finding.code: finding for finding in reshard.doctor(folder)}["checkpoint-tokenizer-of-5"]
        severity[installed] = found.severity
    assert severity == {"5.23.0": "warning", "4.51.3": "error"}
    assert "transformers 4.51.3 is installed here" in map(str, found.evidence)


def test_a_head_that_is_missing_although_it_is_not_tied(hf_model: Callable[..., Path], folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors.pop("lm_head.weight", None)
    save_file(tensors, path, {"format": "pt"})
    change(folder / "config.json", tie_word_embeddings=False)
    assert "lm_head.weight" in json.dumps([finding.in_language("en") for finding in reshard.doctor(folder)])


def test_an_adapter_whose_base_is_not_there(hf_model: Callable[..., Path], tmp_path: Path) -> None:
    base = hf_model("qwen3")
    adapter = get_peft_model(
        AutoModelForCausalLM.from_pretrained(base), LoraConfig(r=2, target_modules=["q_proj"])
    )
    adapter.save_pretrained(tmp_path / "adapter")
    assert [finding.code for finding in reshard.doctor(tmp_path / "adapter")] == []
    change(tmp_path / "adapter/adapter_config.json", base_model_name_or_path="/nowhere/model")
    (found,) = reshard.doctor(tmp_path / "adapter")
    assert found.code == "checkpoint-adapter-base" and "/nowhere/model" in found.rule.en
    with pytest.raises(Exception, match="/nowhere/model"):  # by its name, on the hub
        AutoModelForCausalLM.from_pretrained(tmp_path / "adapter")
    change(tmp_path / "adapter/adapter_config.json", base_model_name_or_path="Qwen/Qwen3-8B")
    assert reshard.doctor(tmp_path / "adapter") == []
