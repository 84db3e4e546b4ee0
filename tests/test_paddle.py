"""Safetensors of PaddleNLP and PaddleFormers: the same model as on the Hub, and refused where that is not sure.

The folders in tests/data/paddle are what the libraries saved of models of `huggingface` (`make`), with their logits.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import reshard
from tests.commandline import reshard as command
from tests.environments import python
from tests.genuine.huggingface import edit_config
from tests.genuine.make_paddle import TOKENS
from tests.judges import assert_agree, tensors_of

DATA = Path(__file__).parent / "data/paddle"
SAFE = {"safe_serialization": True}
FUSED = {"fuse_attention_qkv": True, "fuse_attention_ffn": True}
OF_FORMERS = {**SAFE, "save_to_hf": False, "save_checkpoint_format": ""}


class Case(NamedTuple):
    """A model that a library loads, with its settings, and whether it computes it on a CPU.

    If it is not `loaded`, the library leaves the initial values in what it fuses.
    """

    library: str
    model: str
    settings: Mapping[str, Any] = {}
    overrides: Mapping[str, Any] = {}
    computes: bool = True
    loaded: bool = True


NARROW = {"head_dim": 8}
"""Paddle's Llama has as many features of all heads as of the model."""
CASES = {
    "llama": Case("paddlenlp", "llama", {}, NARROW),
    "llama-fused": Case("paddlenlp", "llama", FUSED, NARROW),
    "llama-tied": Case("paddlenlp", "llama_tied", {}, NARROW),
    "qwen2": Case("paddlenlp", "qwen2"),
    "qwen2-fused": Case("paddlenlp", "qwen2", FUSED),
    "qwen2_moe": Case("paddlenlp", "qwen2_moe", computes=False),
    "deepseek_v2": Case("paddlenlp", "deepseek_v2", computes=False),
    "deepseek_v3": Case("paddlenlp", "deepseek_v3", computes=False),
    "mixtral": Case("paddlenlp", "mixtral", {}, NARROW, computes=False),
    "formers-qwen2": Case("paddleformers", "qwen2"),
    "formers-qwen3": Case("paddleformers", "qwen3"),
    "formers-qwen3-fused": Case("paddleformers", "qwen3", FUSED, loaded=False),
    "formers-qwen2_moe": Case("paddleformers", "qwen2_moe"),
    "formers-qwen3_moe": Case("paddleformers", "qwen3_moe"),
}


def make(library: str, cases: list[tuple[Path, Path, Mapping[str, Any]]]) -> None:
    """Let a library save Hugging Face folders as its own; see `tests.genuine.make_paddle`."""
    how = SAFE if library == "paddlenlp" else OF_FORMERS
    told = json.dumps([[str(source), str(out), settings, how] for source, out, settings in cases])
    words = [python(library), "-m", "tests.genuine.make_paddle", library, told]
    ran = subprocess.run(words, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-4000:]


def with_keys_of_paddle(source: Path, out: Path) -> Path:
    """A copy of a folder with the keys of config.json that the libraries read: those of transformers 4."""
    config = json.loads((shutil.copytree(source, out) / "config.json").read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope["rope_theta"]
    if "num_local_experts" in config:
        config["num_experts"] = config["num_local_experts"]
    (out / "config.json").write_text(json.dumps(config))
    return out


def converted(source: Path, out: Path) -> Path:
    reshard.convert(source, out, to="huggingface", no_tokenizer=True)
    return out


def logits(folder: Path) -> np.ndarray[Any, Any]:
    with torch.no_grad():
        found = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(torch.tensor(TOKENS)).logits
    array: np.ndarray[Any, Any] = found.numpy()
    return array


@pytest.mark.parametrize("name", ["nlp-llama", "nlp-llama-fused", "formers-qwen3"])
def test_the_model_computes_the_same(name: str, tmp_path: Path) -> None:
    """Its square weights, too, which do not show that they are [in, out]."""
    out = converted(DATA / name, tmp_path / "out")
    assert_agree(logits(out), np.load(DATA / name / "logits.npy"))
    assert command("inspect", DATA / name, "--json").json["format"] == "paddle"


def test_one_file_is_read_as_its_folder(tmp_path: Path) -> None:
    whole, one = (
        converted(DATA / "formers-qwen3" / part, tmp_path / f"out{part}")
        for part in ("", "model.safetensors")
    )
    assert (whole / "model.safetensors").read_bytes() == (one / "model.safetensors").read_bytes()


def turned(folder: Path, *names: str) -> None:
    """Store weights of a folder [out, in], or again [in, out]; all linear ones if there are no names."""
    held = load_file(folder / "model.safetensors")
    for name in held:
        if name in names or (not names and "_proj." in name):
            held[name] = held[name].T.contiguous()
    save_file(held, folder / "model.safetensors", {"format": "np"})


def test_weights_as_on_the_hub_are_taken_for_them_whatever_their_header_says(tmp_path: Path) -> None:
    folder = shutil.copytree(converted(DATA / "formers-qwen3", tmp_path / "hub"), tmp_path / "np")
    turned(folder)
    turned(folder)
    assert command("inspect", folder, "--json").json["format"] == "huggingface"
    assert_agree(logits(folder), np.load(DATA / "formers-qwen3" / "logits.npy"))


def problem(folder: Path) -> dict[str, Any]:
    result = command("inspect", folder, "--json")
    assert result.code == 2, result.err
    found: dict[str, Any] = result.json["problems"][0]
    return found


def test_weights_of_both_kinds_are_refused(tmp_path: Path) -> None:
    folder = shutil.copytree(DATA / "formers-qwen3", tmp_path / "mixed")
    turned(folder, "model.layers.1.mlp.up_proj.weight")
    found = problem(folder)
    assert (found["code"], found["tensor"]) == ("paddle-weights-mixed", "model.layers.1.mlp.up_proj.weight")


def test_a_model_whose_names_are_not_known_is_refused(tmp_path: Path) -> None:
    folder = shutil.copytree(DATA / "formers-qwen3", tmp_path / "other")
    edit_config(folder, {"model_type": "nobodys"})
    assert problem(folder)["code"] == "paddle-model-unsupported"
    (folder / "config.json").unlink()
    assert problem(folder)["found"] == "no config.json beside the weights"


def test_a_matrix_whose_name_is_not_known_is_refused(tmp_path: Path) -> None:
    folder = shutil.copytree(DATA / "formers-qwen3", tmp_path / "other")
    held = load_file(folder / "model.safetensors")
    held["model.layers.0.mlp.adapter.weight"] = torch.ones(4, 4)
    save_file(held, folder / "model.safetensors", {"format": "np"})
    found = problem(folder)
    assert (found["code"], found["tensor"]) == ("paddle-tensor-unknown", "model.layers.0.mlp.adapter.weight")


def test_a_scaling_that_only_paddle_reads_is_told(tmp_path: Path) -> None:
    folder = shutil.copytree(DATA / "nlp-llama", tmp_path / "scaled")
    edit_config(folder, {"rope_scaling_type": "linear", "rope_scaling_factor": 2.0})
    assert "set rope_scaling in the output" in command("inspect", folder).out


@pytest.mark.slow
@pytest.mark.parametrize("library", ["paddlenlp", "paddleformers"])
def test_what_the_libraries_save_of_a_model_becomes_that_model(
    library: str, hf_model: Callable[..., Path], tmp_path: Path
) -> None:
    sources, cases = {}, {name: case for name, case in CASES.items() if case.library == library}
    for name, case in cases.items():
        sources[name] = with_keys_of_paddle(hf_model(case.model, **case.overrides), tmp_path / f"hub-{name}")
    make(library, [(sources[name], tmp_path / name, case.settings) for name, case in cases.items()])
    for name, case in cases.items():
        out = converted(tmp_path / name, tmp_path / f"out-{name}")
        expected, found = tensors_of(sources[name]), tensors_of(out)
        assert found.keys() == expected.keys(), name
        assert not case.loaded or all(torch.equal(found[each], expected[each]) for each in found), name
        if case.computes:
            assert_agree(logits(out), np.load(tmp_path / name / "logits.npy"))
