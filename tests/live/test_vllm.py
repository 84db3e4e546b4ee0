"""vLLM answers the same from any checkpoint as from the Hugging Face folder of the same model."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

import reshard
from tests.environments import python
from tests.genuine.huggingface import edit_config, make_tokenizer
from tests.genuine.peft import make_adapter
from tests.genuine.quantized import fp8
from tests.genuine.seeing import make_blip2

pytestmark = pytest.mark.slow

RELEASES = ("vllm", "vllm-0.31")
SIZES = {"head_dim": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
"""Heads that vLLM's attention for CPUs has."""
RESHARD = {"load_format": "reshard"}
WITHOUT_COMPANIONS = shutil.ignore_patterns("*.json", "*.jinja")
FOUND = {"config_format": "reshard", "tokenizer_mode": "reshard"}
MAKE_VERL = ("-m", "tests.genuine.make_fsdp_ranks", "verl", "fsdp2-hsdp")


def from_source(path: Path, **options: Any) -> dict[str, Any]:
    return {**RESHARD, "model_loader_extra_config": {"source": str(path), **options}}


def run(*words: object) -> str:
    """What a command prints."""
    ran = subprocess.run([str(word) for word in words], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-4000:]
    return ran.stdout + ran.stderr


def serve(release: str, out: Path, *cases: dict[str, Any]) -> list[list[Any]]:
    """What vLLM answers; see `tests.genuine.serve_vllm`."""
    told = json.dumps(cases, default=str)
    printed = run(python(release), "-m", "tests.genuine.serve_vllm", told, out / "answers.json")
    (out / "log").write_text(printed)
    found: list[list[Any]] = json.loads((out / "answers.json").read_text())
    return found


@pytest.fixture(scope="module")
def models(hf_model: Callable[..., Path]) -> dict[str, Path]:
    return {
        "dense": hf_model("qwen3", **SIZES),
        "other": hf_model("qwen3", seed=7, **SIZES),
        "experts": hf_model("qwen3_moe", **SIZES),
        "tied": hf_model("llama_tied", **SIZES),
    }


@pytest.fixture(scope="module")
def checkpoints(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The models in other formats, and a Megatron folder without config and tokenizer."""
    out = tmp_path_factory.mktemp("checkpoints")
    made = {}
    for name, to, layout in (
        ("dense", "megatron", {"tp": 2, "pp": 2}),
        ("dense", "dcp", {}),
        ("dense", "deepspeed", {}),
        ("other", "megatron-legacy", {"tp": 2}),
        ("experts", "megatron", {"tp": 2, "ep": 2}),
        ("experts", "dcp", {}),
        ("tied", "megatron", {"pp": 2}),
    ):
        made[f"{name}-{to}"] = out / f"{name}-{to}"
        reshard.convert(models[name], out / f"{name}-{to}", to=to, **layout)
    made["bare"] = out / "bare"
    shutil.copytree(made["dense-megatron"], made["bare"], ignore=WITHOUT_COMPANIONS)
    return made


def test_the_installed_package_is_a_plugin_of_vllm() -> None:
    found = [each for each in entry_points(group="vllm.general_plugins") if each.name == "reshard"]
    assert [each.value for each in found] == ["reshard.live.vllm:register"], "run `make` again"


@pytest.mark.parametrize("release", RELEASES)
def test_every_format_is_served(
    release: str, models: dict[str, Path], checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    expected = serve(release, tmp_path, *({"model": models[name]} for name in ("dense", "experts", "tied")))
    names = [name for name in checkpoints if name.startswith(("dense", "experts", "tied"))]
    assert not any(isinstance(each[0], str) for each in expected), expected
    found = serve(release, tmp_path, *({"model": checkpoints[name], **RESHARD} for name in names))
    judged = dict(zip(("dense", "experts", "tied"), expected, strict=True))
    assert {
        name: got == judged[name.split("-")[0]] for name, got in zip(names, found, strict=True)
    } == dict.fromkeys(names, True)
    assert not any(isinstance(each[0], str) for each in expected)


def test_weights_elsewhere_are_served_with_the_config_of_the_model(
    models: dict[str, Path], checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    adapter = make_adapter(models["dense"], tmp_path / "adapter", target_modules=["q_proj", "down_proj"])
    reshard.convert(adapter, tmp_path / "merged", base=models["dense"], merge=True)
    half = {"dtype": "bfloat16"}
    reshard.convert(models["dense"], tmp_path / "half", to="huggingface", dtype="bfloat16")
    quantized = fp8(tmp_path / "half", tmp_path / "fp8", block=32)
    reshard.convert(quantized, tmp_path / "dequantized", to="huggingface", dtype="bfloat16")
    bare = {"hf_config_path": models["dense"], "tokenizer": models["dense"]}
    derived = {**FOUND, "tokenizer": models["dense"]}
    cases: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"model": models["dense"]}, {"model": models["dense"], **from_source(checkpoints["bare"])}),
        ({"model": models["dense"]}, {"model": checkpoints["bare"], **RESHARD, **bare}),
        ({"model": models["dense"]}, {"model": checkpoints["bare"], **RESHARD, **derived}),
        ({"model": tmp_path / "merged"}, {"model": models["dense"], **from_source(adapter, merge=True)}),
        (
            {"model": tmp_path / "dequantized", **half},
            {"model": tmp_path / "half", **half, **from_source(quantized, dtype="bfloat16")},
        ),
    ]
    found = serve("vllm", tmp_path, *(each for pair in cases for each in pair))
    assert found[::2] == found[1::2] and not any(isinstance(each[0], str) for each in found)


@pytest.mark.parametrize("release", RELEASES)
def test_each_rank_reads_its_part(
    release: str, models: dict[str, Path], checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    two = {"tensor_parallel_size": 2}
    for name in ("dense", "experts"):
        source = checkpoints[f"{name}-megatron"]
        expected = serve(release, tmp_path, {"model": models[name], **two})
        assert serve(release, tmp_path, {"model": source, **two, **RESHARD}) == expected
        assert not isinstance(expected[0][0], str), expected
        total = sum(tensor.nbytes for tensor in reshard.open(source).values())
        read = read_by_ranks(tmp_path / "log")
        assert len(read) == 2 and all(0.4 * total < each < 0.6 * total for each in read), (read, total)


def read_by_ranks(log: Path) -> list[float]:
    """Bytes that each rank read, as the log says."""
    lines = [line for line in log.read_text().splitlines() if " kB in " in line]
    return [float(line.split(" kB in ")[0].split()[-1]) * 1000 for line in lines]


def test_a_model_that_sees(tmp_path: Path) -> None:
    """The pictures matter, and so does every part of the model that looks at them."""
    hub = make_blip2(tmp_path / "hub")
    reshard.convert(hub, tmp_path / "dcp", to="dcp")
    source = {"model": tmp_path / "dcp", "pictures": True, **RESHARD}
    two = {"tensor_parallel_size": 2, "pictures": True}
    blind, expected, found = serve("vllm", tmp_path, {"model": hub}, {"model": hub, "pictures": True}, source)
    assert found == expected != blind and not isinstance(blind[0], str), (blind, expected, found)
    apart = serve("vllm", tmp_path, {"model": hub, **two})
    assert serve("vllm", tmp_path, {**source, **two}) == apart and not isinstance(apart[0][0], str)
    total = sum(tensor.nbytes for tensor in reshard.open(tmp_path / "dcp").values())
    read = read_by_ranks(tmp_path / "log")
    assert len(read) == 2 and all(each < 0.7 * total for each in read), (read, total)


@pytest.mark.parametrize("stage", [2, 3])
def test_what_deepspeed_saved_is_served(stage: int, tmp_path: Path) -> None:
    """The weights with which DeepSpeed itself went on are the reference."""
    name = f"served_z{stage}"
    run(python("deepspeed"), "-m", "tests.genuine.make_deepspeed", "make", tmp_path, name)
    made, hub = tmp_path / name, tmp_path / "hub"
    hub.mkdir()
    shutil.copy(made / "config.json", hub)
    save_file(load_file(made / "module.safetensors"), hub / "model.safetensors", {"format": "pt"})
    make_tokenizer().save_pretrained(hub)
    make_tokenizer().save_pretrained(made)
    expected, found = serve("vllm", tmp_path, {"model": hub}, {"model": made, **RESHARD})
    assert found == expected and not isinstance(found[0], str), found


def test_what_verl_saved_is_served(tmp_path: Path) -> None:
    """verl's own merger, whose output is in bfloat16, is the reference."""
    run(python("verl"), *MAKE_VERL, tmp_path / "run", json.dumps({"head_dim": 32}))
    actor, merged = tmp_path / "run" / "global_step_3" / "actor", tmp_path / "merged"
    merge = ("merge", "--backend", "fsdp", "--local_dir", actor, "--target_dir", merged)
    run(python("verl"), "-m", "verl.model_merger", *merge)
    half = {"dtype": "bfloat16"}
    served = {"model": actor / "huggingface", **from_source(tmp_path / "run", **half)}
    run_itself = {"model": tmp_path / "run", **RESHARD, **FOUND, "model_loader_extra_config": half}
    expected, *found = serve("vllm", tmp_path, {"model": merged}, served, run_itself)
    assert found == [expected, expected] and not isinstance(expected[0], str), found


@pytest.mark.parametrize("deleted", [False, True])
def test_a_source_that_changes_is_one_error(
    deleted: bool, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    shutil.copytree(checkpoints["dense-dcp"], tmp_path / "dcp")
    file = tmp_path / "dcp" / "__0_0.distcp"
    case = {"model": tmp_path / "dcp", **RESHARD, "spoiled": file, "deleted": deleted}
    ((found,),) = serve("vllm", tmp_path, case)
    assert found.startswith("ReshardError: a source changed while it was read\n"), found
    assert found.count(str(file)) == 1 and ("No such file or directory" in found) == deleted, found


@pytest.mark.parametrize("release", RELEASES)
def test_weights_are_reloaded_from_another_format(
    release: str, models: dict[str, Path], checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    missing = str(tmp_path / "nothing")
    paths = [
        checkpoints["other-megatron-legacy"],
        None,
        models["experts"],
        None,
        checkpoints["dense-deepspeed"],
        missing,
        checkpoints["bare"],
    ]
    first, other = serve(release, tmp_path, {"model": models["dense"]}, {"model": models["other"]})
    (found,) = serve(
        release, tmp_path, {"model": models["dense"], **from_source(checkpoints["bare"]), "reload": paths}
    )
    refused, gone = found[3], found[7]
    assert "the config and the checkpoint disagree on experts" in refused
    assert "no such file or directory" in gone and missing in gone
    del found[7], found[3]
    assert found == [*first, *other, *other, *other, *other, *first, *first, *first]


def test_experts_are_reloaded_on_a_cpu(
    models: dict[str, Path], checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """vLLM's own loader answers something else after it reloads the same folder on a CPU."""
    reload = {"reload": [str(models["experts"])]}
    own, found = serve(
        "vllm",
        tmp_path,
        {"model": models["experts"], **reload},
        {"model": checkpoints["experts-dcp"], **RESHARD, **reload},
    )
    assert own[1] != own[0]
    assert found == [own[0], own[0]]


def test_wrong_uses_end_in_one_error(
    models: dict[str, Path], checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    adapter = make_adapter(models["dense"], tmp_path / "adapter", target_modules=["q_proj"])
    shutil.copytree(models["dense"], tmp_path / "incomplete")
    weights = tmp_path / "incomplete" / "model.safetensors"
    tensors = load_file(weights)
    lost = "model.layers.2.self_attn.k_proj.weight"
    save_file({name: tensor for name, tensor in tensors.items() if name != lost}, weights, {"format": "pt"})
    shutil.copytree(checkpoints["dense-dcp"], tmp_path / "torn")
    (tmp_path / "torn" / "__0_0.distcp").unlink()
    shutil.copytree(checkpoints["dense-dcp"], tmp_path / "unnamed", ignore=WITHOUT_COMPANIONS)
    reshard.convert(models["dense"], tmp_path / "half", to="huggingface", dtype="bfloat16")
    quantized = fp8(tmp_path / "half", tmp_path / "fp8", block=32)
    dense, bare = models["dense"], tmp_path / "config"
    bare.mkdir()
    shutil.copy(dense / "config.json", bare)
    cases = {
        "config.json": {"model": checkpoints["bare"], **RESHARD},
        "pass the Hugging Face folder": {"model": tmp_path / "unnamed", **RESHARD, **FOUND},
        "tokenizer not found": {"model": checkpoints["bare"], **RESHARD, **FOUND},
        "disagree on experts": {"model": dense, **from_source(checkpoints["experts-dcp"])},
        f"file: {bare}": {"model": bare, "tokenizer": dense, **from_source(adapter, merge=True)},
        "the source is an adapter": {"model": dense, **from_source(adapter)},
        lost: {"model": tmp_path / "incomplete", **RESHARD},
        "__0_0.distcp": {"model": tmp_path / "torn", **RESHARD},
        "did you mean source?": {"model": dense, **RESHARD, "model_loader_extra_config": {"sorce": "x"}},
        "a step number": {"model": dense, **from_source(checkpoints["bare"], iteration="last")},
        "the checkpoint is quantized": {"model": dense, **from_source(quantized)},
    }
    found = serve("vllm", tmp_path, *cases.values())
    wrong = {text: each[0] for text, each in zip(cases, found, strict=True) if text not in str(each[0])}
    assert wrong == {}


def test_a_parameter_without_weights_is_an_error(models: dict[str, Path], tmp_path: Path) -> None:
    """Of a family that reshard does not know, only vLLM's model tells what is missing."""
    shutil.copytree(models["dense"], tmp_path / "model")
    edit_config(tmp_path / "model", {"model_type": "qwen3", "attention_bias": True})
    (found,) = serve("vllm", tmp_path, {"model": tmp_path / "model", **RESHARD})
    assert isinstance(found[0], str) and "bias" in found[0]


def test_a_different_setting_is_told(
    models: dict[str, Path], checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    shutil.copytree(models["dense"], tmp_path / "model")
    edit_config(tmp_path / "model", {"rms_norm_eps": 1e-3})
    (found,) = serve(
        "vllm", tmp_path, {"model": tmp_path / "model", **from_source(checkpoints["dense-megatron"])}
    )
    assert not isinstance(found[0], str)
    assert "rms_norm_eps: 0.001 instead of 1e-06" in (tmp_path / "log").read_text()
