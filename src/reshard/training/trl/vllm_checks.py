"""Checks before launch for reasons why vLLM cannot generate: versions, server, GPUs, ranks.

Sources: `is_vllm_available` of trl/import_utils.py, trl/generation/vllm_client.py and vllm_generation.py of TRL 1.16.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import urlopen

from reshard.base.errors import GIB, Problem, when
from reshard.checks.environment import Environment
from reshard.training.planning.gpu_models import is_planned
from reshard.training.run import Run
from reshard.training.trl.batches import plan_instead

SERVER_SECONDS = 5
"""Timeout in seconds for a server."""
LOCAL_HOSTS = ("0.0.0.0", "127.0.0.1", "localhost", "::1")
_SERVE = 'VLLM_SERVER_DEV_MODE=1 vllm serve {model} --weight-transfer-config \'{{"backend": "nccl"}}\' ' + (
    "--logprobs-mode processed_logprobs"
)


def problems(run: Run, options: Mapping[str, Any], environment: Environment) -> Iterator[Problem]:
    """Problems of `--use_vllm`; none without it. A missing package is reported elsewhere."""
    if not options.get("use_vllm"):
        return
    yield from _version()
    yield from when(
        run.parallel == "tp",
        "vllm-plan-unsupported",
        "vLLM cannot receive the weights of tensor-parallel ranks",
        rule="TRL gathers weights for vLLM only under FSDP2 and DeepSpeed",
        found="--use_vllm with --parallel tp",
        remedy=f"{plan_instead(run)}; for tensor parallelism inside vLLM: --vllm_tensor_parallel_size",
    )
    processes = run.ranks.nproc or len(environment.gpus) or 1
    if options["vllm_mode"] == "server":
        if not is_planned():
            yield from _server(run, options, environment, processes)
    elif options["vllm_mode"] == "colocate":
        yield from _beside(run, options, environment, processes)
    else:
        yield Problem(
            "vllm-mode-unknown",
            "vLLM has no such mode",
            expected="colocate, server",
            found=f"--vllm_mode {options['vllm_mode']}",
            remedy="pass colocate to run it on the GPUs of the run, or server for one that runs elsewhere",
        )


def share(options: Mapping[str, Any]) -> float:
    """The share of a GPU that vLLM keeps during training: none in sleep mode, and none with a server."""
    colocated = options.get("use_vllm") and options.get("vllm_mode") == "colocate"
    if not colocated or options.get("vllm_enable_sleep_mode"):
        return 0.0
    return float(options["vllm_gpu_memory_utilization"])


def _version() -> list[Problem]:
    """A problem if TRL itself warns about the installed release."""
    from trl.import_utils import is_vllm_available

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        is_vllm_available()
    words = [str(each.message) for each in told if "vLLM versions" in str(each.message)]
    return when(
        words,
        "vllm-version-untested",
        "this release of vLLM is untested with TRL",
        found="".join(words).split(". We")[0],
        remedy="pip install 'trl[vllm]'",
        severity="warning",
    )


def _beside(run: Run, options: Mapping[str, Any], environment: Environment, processes: int) -> list[Problem]:
    """Problems of vLLM on the run's GPUs: groups of ranks share an engine, whose GPU share has to hold the model."""
    ranks, size = processes * run.ranks.nnodes, int(options["vllm_tensor_parallel_size"])
    part = float(options["vllm_gpu_memory_utilization"])
    found = [
        *when(
            size < 1 or ranks % size,
            "vllm-ranks-not-divisible",
            "the ranks cannot be divided into groups that share a vLLM engine",
            expected=f"a divisor of {ranks} ranks",
            found=f"--vllm_tensor_parallel_size {size}",
            remedy="choose 1 or a divisor of the ranks of a node",
        ),
        *when(
            not 0 < part < 1,
            "vllm-share-impossible",
            "vLLM and training cannot share a GPU like this",
            expected="a part of the GPU's memory between 0 and 1",
            found=f"--vllm_gpu_memory_utilization {part:g}",
            remedy="0.3 is the default of TRL",
        ),
    ]
    if found or not environment.gpus:
        return found
    from reshard.training.trl.memory_estimate import sizes_of

    room = min(gpu.memory for gpu in environment.gpus)
    weights = 2 * sizes_of(run, options).all // size
    return when(
        weights > part * room,
        "vllm-share-too-small",
        "the weights do not fit into vLLM's part of the GPU",
        rule="vLLM needs memory for a 16-bit copy of the model and for its KV cache, in addition to training",
        expected=f"more than {weights / GIB:.1f} GiB",
        found=f"--vllm_gpu_memory_utilization {part:g} of {room / GIB:.0f} GiB",
        remedy="raise it, raise --vllm_tensor_parallel_size, or use --vllm_mode server",
    )


def _server(
    run: Run, options: Mapping[str, Any], environment: Environment, processes: int
) -> Iterator[Problem]:
    """Problems of a separate server: it must answer, accept weights, and have other GPUs than the run."""
    given = options.get("vllm_server_base_url")
    url = str(given or f"http://{options['vllm_server_host']}:{options['vllm_server_port']}").rstrip("/")
    serve, gpus = _SERVE.format(model=run.model), len(environment.gpus)
    try:
        _ask(f"{url}/health")
        info = json.loads(_ask(f"{url}/server_info?config_format=json"))["vllm_config"]
        workers = int(json.loads(_ask(f"{url}/get_world_size"))["world_size"])
    except HTTPError as error:
        yield Problem(
            "vllm-server-without-weights",
            "the vLLM server does not accept weights",
            found=f"{error.url}: HTTP {error.code}",
            rule="TRL uses the development endpoints of the server",
            remedy=f"restart it: {serve}",
        )
        return
    except (OSError, HTTPException, ValueError, KeyError, TypeError) as error:
        yield Problem(
            "vllm-server-unreachable",
            "the vLLM server does not answer",
            found=f"{url}: {getattr(error, 'reason', None) or error}",
            expected=f"a server that answers within {SERVER_SECONDS} s",
            remedy=f"start it on separate GPUs: {serve}; or correct --vllm_server_base_url",
        )
        return
    mode = (info.get("model_config") or {}).get("logprobs_mode")
    yield from when(
        info.get("weight_transfer_config") is None,
        "vllm-server-without-transfer",
        "the vLLM server cannot receive weights",
        found=f"{url}: no weight-transfer engine",
        remedy=f"restart it: {serve}",
    )
    yield from when(
        options.get("vllm_importance_sampling_correction") and mode != "processed_logprobs",
        "vllm-server-raw-probabilities",
        "the vLLM server's unprocessed log probabilities bias the importance sampling",
        expected="--logprobs-mode processed_logprobs",
        found=f"{url}: {mode}",
        remedy=f"restart it: {serve}; or pass --vllm_importance_sampling_correction false",
        severity="warning",
    )
    yield from when(
        urlsplit(url).hostname in LOCAL_HOSTS and gpus and workers + processes > gpus,
        "vllm-server-on-same-gpus",
        "the vLLM server and the run need more GPUs than this node has",
        rule="NCCL uses each GPU once, so a GPU of the server cannot train",
        expected=f"at most {gpus} GPUs",
        found=f"{workers} of the server, {processes} processes",
        remedy=f"pass --nproc {max(gpus - workers, 1)}, and the server other GPUs by "
        "CUDA_VISIBLE_DEVICES; or use --vllm_mode colocate",
    )


def _ask(url: str) -> bytes:
    with urlopen(url, timeout=SERVER_SECONDS) as answer:
        content: bytes = answer.read(1 << 20)
        return content
