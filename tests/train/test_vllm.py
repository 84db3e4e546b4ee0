"""`--use_vllm` before the launch: plans, shares of a GPU, and a server that answers TRL's client.

vLLM itself is not installed here: the server has the three endpoints that trl/generation/vllm_client.py uses.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from reshard.checks.environment import Environment, Gpu
from reshard.training.run import Run, RunProcesses
from reshard.training.trl import vllm_checks
from tests.serving import serving

GIB = 1 << 30
COLOCATED = {
    "use_vllm": True,
    "vllm_mode": "colocate",
    "vllm_tensor_parallel_size": 1,
    "vllm_gpu_memory_utilization": 0.3,
}
SERVED = {"use_vllm": True, "vllm_mode": "server", "vllm_importance_sampling_correction": True}
RIGHT = {
    "/health": {},
    "/server_info?config_format=json": {
        "vllm_config": {
            "weight_transfer_config": {"backend": "nccl"},
            "model_config": {"logprobs_mode": "processed_logprobs"},
        }
    },
    "/get_world_size": {"world_size": 2},
}


def node(gpus: int, memory: int = 80 * GIB) -> Environment:
    return Environment({}, [Gpu("H100", 9.0, memory)] * gpus, None, {})


def codes(options: dict[str, Any], environment: Environment, **fields: Any) -> list[str]:
    run = Run("grpo", fields.pop("model", Path("/m")), Path("/d"), Path("/o"), **fields)
    return [problem.code for problem in vllm_checks.problems(run, options, environment)]


@contextmanager
def server(answers: dict[str, Any]) -> Iterator[str]:
    """A server that answers some paths with JSON, others with 404."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = answers.get(self.path)
            self.send_response(404 if found is None else 200)
            self.end_headers()
            self.wfile.write(json.dumps(found).encode())

        def log_message(self, format: str, *args: Any) -> None:
            pass

    listening = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    with serving(listening):
        yield f"http://127.0.0.1:{listening.server_address[1]}"


@pytest.mark.parametrize(
    ("options", "fields", "code"),
    [
        ({}, {}, None),
        ({}, {"parallel": "tp"}, "vllm-plan-unsupported"),
        ({"vllm_mode": "elsewhere"}, {}, "vllm-mode-unknown"),
        ({"vllm_tensor_parallel_size": 3}, {}, "vllm-ranks-not-divisible"),
        ({"vllm_tensor_parallel_size": 3}, {"ranks": RunProcesses(nproc=3)}, None),
        ({"vllm_gpu_memory_utilization": 1.0}, {}, "vllm-share-impossible"),
        ({"vllm_gpu_memory_utilization": 1e-5}, {}, "vllm-share-too-small"),
        ({"use_vllm": False, "vllm_mode": "elsewhere"}, {}, None),
    ],
)
def test_plans_and_shares_that_vllm_cannot_have_are_refused(
    options: dict[str, Any], fields: dict[str, Any], code: str | None, tiny: Callable[..., Path]
) -> None:
    found = codes({**COLOCATED, **options}, node(4, GIB), model=tiny("qwen3"), **fields)
    assert found == ([code] if code else [])


def test_what_vllm_keeps_is_not_there_to_train() -> None:
    assert vllm_checks.share(COLOCATED) == 0.3
    assert vllm_checks.share({**COLOCATED, "vllm_enable_sleep_mode": True}) == 0
    assert vllm_checks.share({**COLOCATED, **SERVED}) == vllm_checks.share({}) == 0


@pytest.mark.parametrize(
    ("answers", "gpus", "code"),
    [
        (RIGHT, 4, None),
        (RIGHT, 3, "vllm-server-on-same-gpus"),
        ({"/health": {}}, 4, "vllm-server-without-weights"),
        (
            {
                **RIGHT,
                "/server_info?config_format=json": {
                    "vllm_config": {"model_config": {"logprobs_mode": "processed_logprobs"}}
                },
            },
            4,
            "vllm-server-without-transfer",
        ),
        (
            {
                **RIGHT,
                "/server_info?config_format=json": {"vllm_config": {"weight_transfer_config": {}}},
            },
            4,
            "vllm-server-raw-probabilities",
        ),
        ({**RIGHT, "/server_info?config_format=json": []}, 4, "vllm-server-unreachable"),
    ],
)
def test_a_server_that_cannot_answer_for_grpo_is_refused(
    answers: dict[str, Any], gpus: int, code: str | None
) -> None:
    with server(answers) as url:
        found = codes({**SERVED, "vllm_server_base_url": url}, node(gpus), ranks=RunProcesses(nproc=2))
    assert found == ([code] if code else [])


def test_a_server_that_is_not_there_is_refused() -> None:
    with server({}) as url:
        pass
    assert codes({**SERVED, "vllm_server_base_url": url}, node(4)) == ["vllm-server-unreachable"]
