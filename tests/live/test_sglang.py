"""SGLang has the same weights, and answers the same, from any checkpoint as from the Hugging Face folder of a model."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest
from safetensors.torch import load_file, save_file

import reshard
from tests.environments import python
from tests.genuine.huggingface import edit_config
from tests.genuine.peft import make_adapter
from tests.genuine.quantized import fp8
from tests.genuine.serve_sglang import PROMPTS, SAMPLING

pytestmark = pytest.mark.slow

ENVIRONMENT = "sglang-serving"
RESHARD = {"load_format": "reshard"}
MAKE_VERL = ("-m", "tests.genuine.make_fsdp_ranks", "verl", "fsdp2-hsdp")
LOADED = ("--load-format", "reshard")
"""Words of a command line."""


def run(*words: object) -> str:
    """What a command prints."""
    ran = subprocess.run([str(word) for word in words], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-4000:]
    return ran.stdout + ran.stderr


def serve(out: Path, *cases: dict[str, Any]) -> list[list[Any]]:
    """What SGLang answers; see `tests.genuine.serve_sglang`."""
    told = json.dumps(cases, default=str)
    printed = run(python(ENVIRONMENT), "-m", "tests.genuine.serve_sglang", told, out / "answers.json")
    (out / "log").write_text(printed)
    found: list[list[Any]] = json.loads((out / "answers.json").read_text())
    return found


def load(out: Path, *cases: tuple[object, ...], **more: object) -> list[Any]:
    """What SGLang loads; see `tests.genuine.load_sglang`."""
    told = json.dumps([{"words": ["--model-path", *case], **more} for case in cases], default=str)
    printed = run(python(ENVIRONMENT), "-m", "tests.genuine.load_sglang", told, out / "digests.json")
    (out / "log").write_text(printed)
    found: list[Any] = json.loads((out / "digests.json").read_text())
    return found


def from_source(path: Path, **options: Any) -> tuple[str, ...]:
    return (*LOADED, "--model-loader-extra-config", json.dumps({"source": str(path), **options}))


@pytest.fixture(scope="module")
def models(hf_model: Callable[..., Path]) -> dict[str, Path]:
    return {
        "dense": hf_model("qwen3"),
        "other": hf_model("qwen3", seed=7),
        "experts": hf_model("qwen3_moe"),
        "tied": hf_model("llama_tied"),
        "latent": hf_model("deepseek_v3"),
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
        ("latent", "megatron", {"tp": 2}),
    ):
        made[f"{name}-{to}"] = out / f"{name}-{to}"
        reshard.convert(models[name], out / f"{name}-{to}", to=to, **layout)
    made["bare"] = out / "bare"
    shutil.copytree(made["dense-megatron"], made["bare"], ignore=shutil.ignore_patterns("*.json", "*.jinja"))
    return made


def test_the_installed_package_is_a_plugin_of_sglang() -> None:
    found = [each for each in entry_points(group="sglang.srt.plugins") if each.name == "reshard"]
    assert [each.value for each in found] == ["reshard.live.sglang_plugin:register"], "run `make` again"


def test_every_format_gives_the_parameters_of_sglangs_own_loader(
    models: dict[str, Path], checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    sources = {**models, **{name: path for name, path in checkpoints.items() if name != "bare"}}
    own = dict(zip(models, load(tmp_path, *((path,) for path in models.values())), strict=True))
    assert not any(isinstance(each, str) for each in own.values()), own
    found = load(tmp_path, *((path, *LOADED) for path in sources.values()))
    assert {
        name: got == own[name.split("-")[0]] for name, got in zip(sources, found, strict=True)
    } == dict.fromkeys(sources, True)


def test_weights_elsewhere_are_loaded_with_the_config_of_the_model(
    models: dict[str, Path], checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    adapter = make_adapter(models["dense"], tmp_path / "adapter", target_modules=["q_proj", "down_proj"])
    reshard.convert(adapter, tmp_path / "merged", base=models["dense"], merge=True)
    reshard.convert(models["dense"], tmp_path / "half", to="huggingface", dtype="bfloat16")
    quantized = fp8(tmp_path / "half", tmp_path / "fp8", block=32)
    reshard.convert(quantized, tmp_path / "dequantized", to="huggingface", dtype="bfloat16")
    half = ("--dtype", "bfloat16")
    cases: list[tuple[tuple[object, ...], tuple[object, ...]]] = [
        ((models["dense"],), (models["dense"], *from_source(checkpoints["bare"]))),
        ((tmp_path / "merged",), (models["dense"], *from_source(adapter, merge=True))),
        (
            (tmp_path / "dequantized", *half),
            (tmp_path / "half", *half, *from_source(quantized, dtype="bfloat16")),
        ),
    ]
    found = load(tmp_path, *(each for pair in cases for each in pair))
    assert found[::2] == found[1::2] and not any(isinstance(each, str) for each in found)


@pytest.mark.parametrize("stage", [2, 3])
def test_what_deepspeed_saved_is_loaded(stage: int, tmp_path: Path) -> None:
    """The weights with which DeepSpeed itself went on are the reference."""
    name = f"served_z{stage}"
    run(python("deepspeed"), "-m", "tests.genuine.make_deepspeed", "make", tmp_path, name)
    made, hub = tmp_path / name, tmp_path / "hub"
    hub.mkdir()
    shutil.copy(made / "config.json", hub)
    save_file(load_file(made / "module.safetensors"), hub / "model.safetensors", {"format": "pt"})
    expected, found = load(tmp_path, (hub,), (made, *LOADED))
    assert found == expected and not isinstance(found, str), found


def test_what_verl_saved_is_loaded(tmp_path: Path) -> None:
    """verl's own merger, whose output is in bfloat16, is the reference."""
    run(python("verl"), *MAKE_VERL, tmp_path / "run", json.dumps({"head_dim": 32}))
    actor, merged = tmp_path / "run" / "global_step_3" / "actor", tmp_path / "merged"
    merge = ("merge", "--backend", "fsdp", "--local_dir", actor, "--target_dir", merged)
    run(python("verl"), "-m", "verl.model_merger", *merge)
    elsewhere = from_source(tmp_path / "run", dtype="bfloat16")
    expected, found = load(tmp_path, (merged,), (actor / "huggingface", *elsewhere))
    assert found == expected and not isinstance(found, str), found


def test_the_server_answers_the_same(
    models: dict[str, Path], checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    names = ("dense", "experts")
    expected = serve(tmp_path, *({"model_path": models[name]} for name in names))
    found = serve(tmp_path, *({"model_path": checkpoints[f"{name}-megatron"], **RESHARD} for name in names))
    assert found == expected and found[0] != found[1]


def test_each_rank_reads_its_part(
    models: dict[str, Path], checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    two = {"tp_size": 2}
    for name in ("dense", "experts"):
        source = checkpoints[f"{name}-megatron"]
        expected, found = serve(
            tmp_path, {"model_path": models[name], **two}, {"model_path": source, **two, **RESHARD}
        )
        assert found == expected and len(found[0]["weights"]) == 2
        total = sum(tensor.nbytes for tensor in reshard.open(source).values())
        read = read_by_ranks(tmp_path / "log")
        assert len(read) == 2 and all(0.4 * total < each < 0.6 * total for each in read), (read, total)


def read_by_ranks(log: Path) -> list[float]:
    """Bytes that each rank read, as the log says."""
    lines = [line for line in log.read_text().splitlines() if " kB in " in line]
    return [float(line.split(" kB in ")[0].split()[-1]) * 1000 for line in lines]


def test_weights_are_updated_from_another_format(
    models: dict[str, Path], checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """A checkpoint of another model changes nothing, and neither does one that is damaged: SGLang rolls back."""
    torn = tmp_path / "torn"
    shutil.copytree(checkpoints["dense-dcp"], torn)
    (torn / "__0_0.distcp").unlink()
    missing = tmp_path / "nothing"
    updates = [
        {"model_path": str(path)}
        for path in (
            checkpoints["other-megatron-legacy"],
            models["experts"],
            missing,
            torn,
            checkpoints["dense-deepspeed"],
            checkpoints["bare"],
        )
    ]
    first, other = (
        state for (state,) in serve(tmp_path, *({"model_path": models[name]} for name in ("dense", "other")))
    )
    options = json.dumps({"source": str(checkpoints["bare"])})
    start = {"model_path": models["dense"], **RESHARD, "model_loader_extra_config": options}
    (found,) = serve(tmp_path, {**start, "updates": updates})
    refused = [each for each in found if isinstance(each, str)]
    assert [each for each in found if not isinstance(each, str)] == [*[first, *[other] * 4], first, first]
    assert "the config and the checkpoint disagree on experts" in refused[0]
    assert "no such file or directory" in refused[1] and str(missing) in refused[1]
    assert "__0_0.distcp" in refused[2] and first != other


def test_what_sglang_loaded_itself_is_updated(
    models: dict[str, Path], checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    start = {"model_path": models["dense"], "updates": []}
    for path in ("other-megatron-legacy", "experts-megatron", "dense-dcp"):
        start["updates"].append({"model_path": str(checkpoints[path]), **RESHARD})
    first, other = (
        state for (state,) in serve(tmp_path, *({"model_path": models[name]} for name in ("dense", "other")))
    )
    (found,) = serve(tmp_path, start)
    refused = found.pop(2)
    assert "disagree on experts" in refused
    assert found == [first, other, other, first]


@pytest.mark.parametrize("deleted", [False, True])
def test_a_source_that_changes_is_an_error(
    deleted: bool, models: dict[str, Path], checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    shutil.copytree(checkpoints["dense-dcp"], tmp_path / "dcp")
    file = tmp_path / "dcp" / "__0_0.distcp"
    (found,) = load(tmp_path, (tmp_path / "dcp", *LOADED), spoiled=file, deleted=deleted)
    assert found.startswith("ReshardError: a source changed while it was read\n"), found
    assert found.count(str(file)) == 1 and ("No such file or directory" in found) == deleted, found


@pytest.mark.parametrize("own", [False, True])
def test_an_update_that_fails_halfway_is_rolled_back(
    own: bool, models: dict[str, Path], checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """SGLang reads the path of its model again, which would be the new one."""
    shutil.copytree(checkpoints["dense-dcp"], tmp_path / "dcp")
    case = (models["other"],) if own else (models["other"], *LOADED)
    file = tmp_path / "dcp" / "__0_0.distcp"
    ((first, said, after),) = load(tmp_path, case, update=tmp_path / "dcp", spoiled=file)
    assert "a source changed while it was read" in said and "Rolling back" in said
    assert after == first


def test_wrong_uses_end_in_one_error(
    models: dict[str, Path], checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    adapter = make_adapter(models["dense"], tmp_path / "adapter", target_modules=["q_proj"])
    shutil.copytree(models["dense"], tmp_path / "incomplete")
    weights = tmp_path / "incomplete" / "model.safetensors"
    tensors = load_file(weights)
    lost = "model.layers.2.self_attn.k_proj.weight"
    save_file({name: tensor for name, tensor in tensors.items() if name != lost}, weights, {"format": "pt"})
    shutil.copytree(models["dense"], tmp_path / "biased")
    edit_config(tmp_path / "biased", {"model_type": "qwen3", "attention_bias": True})
    shutil.copytree(checkpoints["dense-dcp"], tmp_path / "torn")
    (tmp_path / "torn" / "__0_0.distcp").unlink()
    reshard.convert(models["dense"], tmp_path / "half", to="huggingface", dtype="bfloat16")
    quantized = fp8(tmp_path / "half", tmp_path / "fp8", block=32)
    dense, extra = models["dense"], "--model-loader-extra-config"
    cases: dict[str, tuple[object, ...]] = {
        "disagree on experts": (dense, *from_source(checkpoints["experts-dcp"])),
        "the source is an adapter": (dense, *from_source(adapter)),
        lost: (tmp_path / "incomplete", *LOADED),
        "qkv_proj.bias": (tmp_path / "biased", *LOADED),
        "__0_0.distcp": (tmp_path / "torn", *LOADED),
        "did you mean source?": (dense, *LOADED, extra, '{"sorce": "x"}'),
        "not a JSON object": (dense, *LOADED, extra, "[1]"),
        "a step number": (dense, *from_source(checkpoints["bare"], iteration="last")),
        "the checkpoint is quantized": (dense, *from_source(quantized)),
        "build tensors of this quantization": (dense, *LOADED, "--quantization", "modelopt_fp8"),
        "--model-checksum compares files": (dense, *LOADED, "--model-checksum", "sums.json"),
    }
    found = load(tmp_path, *cases.values())
    wrong = {text: each for text, each in zip(cases, found, strict=True) if text not in str(each)}
    assert wrong == {}


def test_a_different_setting_is_told(
    models: dict[str, Path], checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    shutil.copytree(models["dense"], tmp_path / "model")
    edit_config(tmp_path / "model", {"rms_norm_eps": 1e-3})
    (found,) = load(tmp_path, (tmp_path / "model", *from_source(checkpoints["dense-megatron"])))
    assert not isinstance(found, str)
    assert "rms_norm_eps: 0.001 instead of 1e-06" in (tmp_path / "log").read_text()


@contextmanager
def server(log: Path, *words: object) -> Iterator[str]:
    """The address of a server that a user would start; its process ends with the block."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [Path(python(ENVIRONMENT)).with_name("sglang"), "serve", *words, "--port", port]
    with log.open("w") as out:
        started = subprocess.Popen(
            [str(word) for word in command], stdout=out, stderr=out, start_new_session=True
        )
        try:
            while started.poll() is None and "ready to roll" not in log.read_text():
                time.sleep(0.5)
            yield f"http://127.0.0.1:{port}"
        finally:
            if started.poll() is None:
                os.killpg(started.pid, signal.SIGKILL)
            started.wait()


def post(address: str, told: dict[str, Any]) -> Any:
    request = Request(address, json.dumps(told).encode(), {"Content-Type": "application/json"})
    with urlopen(request) as answer:
        return json.loads(answer.read())


def test_the_command_of_the_page_serves(
    models: dict[str, Path], checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    first, other = (
        [each[0] for each in state["answers"]]
        for (state,) in serve(tmp_path, *({"model_path": models[name]} for name in ("dense", "other")))
    )
    words = ("--device", "cpu", "--attention-backend", "torch_native", "--dtype", "float32")
    prompts = {"input_ids": PROMPTS, "sampling_params": SAMPLING}
    with server(
        tmp_path / "log",
        "--model-path",
        checkpoints["dense-megatron"],
        *LOADED,
        *words,
        "--max-total-tokens",
        1024,
    ) as address:
        assert [each["output_ids"] for each in post(f"{address}/generate", prompts)] == first
        post(f"{address}/update_weights_from_disk", {"model_path": str(checkpoints["other-megatron-legacy"])})
        assert [each["output_ids"] for each in post(f"{address}/generate", prompts)] == other
    with server(
        tmp_path / "log", "--model-path", models["experts"], *words, *from_source(checkpoints["bare"])
    ):
        assert "the config and the checkpoint disagree on experts" in (tmp_path / "log").read_text()
