"""What SGLang loads for some command lines: `python -m tests.genuine.load_sglang CASES OUT`, where it is installed.

CASES is a JSON list: of the `words` that follow `sglang serve`, and `update`, the path of a checkpoint that replaces
the weights. OUT gets for each a digest of every parameter and buffer of the model, or the text of the error; for an
update, a list of these, of what `update_weights_from_disk` said, and of the digests after it. Only the model is built
and loaded, all in one process: the server would end with the first error. `spoiled` is a file that changes once a
checkpoint is opened (if there is an update, that one), or is deleted if `deleted`.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from tests.genuine.serve_vllm import spoil

CPU = ("--device", "cpu", "--attention-backend", "torch_native", "--dtype", "float32")


def prepare(words: list[str]) -> Any:
    """What a process of SGLang does before it loads a model, from the command line on."""
    from sglang.srt.distributed import init_distributed_environment, initialize_model_parallel
    from sglang.srt.distributed.parallel_state import model_parallel_is_initialized
    from sglang.srt.runtime_context import get_context, get_parallel
    from sglang.srt.server_args import prepare_server_args

    arguments = prepare_server_args([*CPU, *words])
    arguments.resolve_once()
    get_context().set_server_args(arguments)
    if not model_parallel_is_initialized():
        init_distributed_environment(
            world_size=1,
            rank=0,
            local_rank=0,
            distributed_init_method="tcp://127.0.0.1:29911",
            backend="gloo",
        )
        initialize_model_parallel(backend="gloo")
        ranks = (
            "tp_rank",
            "attn_tp_rank",
            "attn_dp_rank",
            "pp_rank",
            "moe_ep_rank",
            "moe_tp_rank",
            "attn_cp_rank",
        )
        get_parallel().override_permanently(**dict.fromkeys(ranks, 0))
    return arguments


def digest(tensor: Any) -> str:
    """The bytes of a tensor, with its dtype and shape."""
    elements = tensor.detach().contiguous().flatten().view(torch.uint8).numpy()
    return f"{tensor.dtype} {list(tensor.shape)} {hashlib.sha256(elements).hexdigest()}"


def digests(model: Any) -> dict[str, str]:
    return {name: digest(tensor) for name, tensor in (*model.named_parameters(), *model.named_buffers())}


def load(words: list[str]) -> tuple[Any, Any]:
    """A model that SGLang loads, and its config."""
    from sglang.srt.configs.device_config import DeviceConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.model_executor.model_runner_components.load_model_utils import build_load_config
    from sglang.srt.model_loader.loader import get_model_loader

    arguments = prepare(words)
    config = ModelConfig.from_server_args(arguments)
    how = build_load_config(
        server_args=arguments,
        tp_rank=0,
        remote_instance_weight_transporter_engine=None,
        remote_instance_weight_transporter_session_id="",
        draft_model_idx=None,
        weight_cache_mode="off",
        weight_cache_socket=None,
    )
    model = get_model_loader(how, config).load_model(model_config=config, device_config=DeviceConfig("cpu"))
    return model, config


def update(model: Any, config: Any, path: str) -> str:
    """What SGLang says when it replaces the weights of a model."""
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater

    updater = WeightUpdater(
        tp_rank=0,
        device="cpu",
        gpu_id=0,
        model_config=config,
        custom_weight_loaders={},
        get_model=lambda: model,
        update_model_fields=lambda *_, **__: None,
        recapture_cuda_graph=lambda: None,
        get_model_runner=lambda: None,
    )
    return str(updater.update_weights_from_disk(path, "reshard")[1])


def done(case: dict[str, Any]) -> Any:
    """What comes of a case."""
    if "spoiled" in case and "update" not in case:
        spoil(Path(case["spoiled"]), case.get("deleted", False))
    model, config = load(case["words"])
    if "update" not in case:
        return digests(model)
    first = digests(model)
    if "spoiled" in case:
        spoil(Path(case["spoiled"]), case.get("deleted", False))
    return [first, update(model, config, case["update"]), digests(model)]


def attempt(case: dict[str, Any]) -> Any:
    """The same, or the text of the error."""
    try:
        return done(case)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    from sglang.srt.plugins import load_plugins

    os.environ |= {"HF_HUB_OFFLINE": "1"}
    load_plugins()
    cases, out = sys.argv[1:]
    Path(out).write_text(json.dumps([attempt(case) for case in json.loads(cases)]))
