"""The weights of a running trainer in a running vLLM, after each step: those of the checkpoint of that step."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import reshard
from reshard.algebra.layout import Layout
from reshard.exchange.engine_recording import EngineRecording, read_recordings
from tests.environments import python
from tests.exchange.memory import loaded
from tests.genuine import kept_updates
from tests.genuine.hub_names import rewritten, rounded_delta_norms
from tests.genuine.megatron import tokens

pytest.importorskip("megatron.core")

from tests.genuine.ranks import on_ranks
from tests.genuine.train_megatron import train_and_save
from tests.genuine.vllm_server import serving
from tests.live.dtensor_rounds import WAYS, sent_rounds
from tests.live.test_weight_source import rounded_bias
from tests.live.transfer_rounds import BUCKET, Sent, send_round

pytestmark = pytest.mark.slow

Models = Callable[..., Path]
SIZES = {"head_dim": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
LATENT = {
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 64,
    "v_head_dim": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
DELTA_NET = {**SIZES, "linear_key_head_dim": 64, "linear_value_head_dim": 64}
"""Sizes for which vLLM has kernels of a CPU."""
STEPS = 5
HEADER_BYTES = 96
"""What gloo sends besides each message, and at times once more."""


@pytest.mark.parametrize(
    ("family", "sizes", "layout", "engines"),
    [
        ("qwen3", SIZES, Layout(tp=2), (1,)),
        ("qwen3_tied", SIZES, Layout(tp=2, pp=2), (2,)),
        ("qwen3_moe", SIZES, Layout(tp=2, ep=2), (2,)),
        ("qwen3_moe", SIZES, Layout(pp=2, ep=2), (1,)),
        ("deepseek_v3", LATENT, Layout(pp=2), (1,)),
        ("qwen3_next", DELTA_NET, Layout(tp=2, ep=2), (1,)),
        ("qwen3", SIZES, Layout(dp=2), (1, 1)),
    ],
)
def test_each_step_is_served(
    family: str,
    sizes: dict[str, Any],
    layout: Layout,
    engines: tuple[int, ...],
    hf_model: Models,
    tmp_path: Path,
) -> None:
    model = shutil.copytree(hf_model(family, dtype="bfloat16", **sizes), tmp_path / "model")
    rewritten(model, rounded_bias, rounded_delta_norms)
    reshard.convert(model, tmp_path / "start", to="megatron", transformer_impl="local")
    start = reshard.open(tmp_path / "start").checkpoint

    def train(send: Callable[[Any, int], None]) -> None:
        train_and_save(
            {**start.description.args},
            tmp_path / "run",
            tokens(),
            checkpoint=start.path,
            layout=layout,
            steps=STEPS,
            lr=1e-2,
            observe=send,
        )

    _assert_served(train, model, layout.world_size, engines, tmp_path)


@pytest.mark.parametrize(
    ("family", "way", "engines"),
    [
        ("llama_tied", "fsdp-tp", (2,)),
        ("qwen3_moe", "transformers-fsdp-tp-ep", (1,)),
        ("qwen3", "fsdp", (1, 1)),
    ],
)
def test_each_step_of_sharded_modules_is_served(
    family: str, way: str, engines: tuple[int, ...], hf_model: Models, tmp_path: Path
) -> None:
    model = hf_model(family, dtype="bfloat16", **SIZES)

    def train(send: Callable[[Any, int], None]) -> None:
        on_ranks(WAYS[way][0], sent_rounds, send, model, way, STEPS)

    _assert_served(train, model, WAYS[way][0], engines, tmp_path)


def _assert_served(
    train: Callable[[Any], None], model: Path, ranks: int, engines: tuple[int, ...], folder: Path
) -> None:
    """`train` calls what it gets on each rank, with the model and the number of steps, after each step."""
    (folder / "steps").mkdir()
    with ExitStack() as stack:
        servers = [
            stack.enter_context(_recording(model, folder / f"engine-{i}", tp)) for i, tp in enumerate(engines)
        ]
        train(partial(send_round, [each.url for each in servers], model, folder / "steps"))
    recordings = [read_recordings(folder / f"engine-{i}/recording") for i in range(len(engines))]
    for step in range(STEPS + 1):
        saved = folder / f"steps/step-{step}"
        sent = [Sent(*json.loads((saved / f"rank-{rank}").read_text())) for rank in range(ranks)]
        hub = load_file(saved / "model.safetensors")
        _assert_bytes(sent, recordings, hub)
        for number, engine in enumerate(recordings):
            for each in engine:
                kept = torch.load(folder / f"engine-{number}/update-{step + 1}-rank-{each.rank}.pt")
                _assert_parameters(kept["parameters"], each, hub)
                assert kept["most"] <= 2 * max(BUCKET, _largest(each))
    found = [json.loads((folder / f"steps/step-{step}/answers").read_text()) for step in range(STEPS + 1)]
    assert found[0] != found[1] != found[-1]
    for number, tp in enumerate(engines):
        assert [found[0][number], found[-1][number]] == _answers_after_loading(folder, tp, (0, STEPS))


def _recording(model: Path, out: Path, tp: int) -> Any:
    env = kept_updates.prepare(out)
    options = ("--model-loader-extra-config", json.dumps({"record": str(out / "recording")}))
    return serving(model, out / "log", tp=tp, dtype="bfloat16", env=env, options=options)


def _assert_bytes(
    sent: list[Sent], engines: list[list[EngineRecording]], hub: dict[str, torch.Tensor]
) -> None:
    """Elements are sent once, in the narrower dtype, and nothing but short headers besides.

    Of several engines, each rank sends its share.
    """
    recordings = [each for engine in engines for each in engine]
    least = sum(
        piece.numel * min(parameter.dtype.itemsize, hub[str(piece.source)].itemsize)
        for each in recordings
        for parameter in each.parameters.values()
        for piece in parameter.view.pieces
    )
    assert sum(each.payload for each in sent) == least
    for each in sent:
        headers = each.sockets - each.payload
        assert 0 <= headers <= HEADER_BYTES * (each.messages + 2)
        assert each.most <= 2 * max(BUCKET, max(map(_largest, recordings)))
    if len(engines) > 1:
        assert max(each.payload for each in sent) <= 1.1 * least / len(sent)


def _largest(engine: EngineRecording) -> int:
    return max(sum(engine.parameters[name].nbytes for name in names) for names in engine.buckets(BUCKET))


def _assert_parameters(
    kept: dict[str, torch.Tensor], engine: EngineRecording, hub: dict[str, torch.Tensor]
) -> None:
    assert kept.keys() == engine.parameters.keys()
    numbers = {name: tensor.float().numpy() for name, tensor in hub.items()}
    for name, values in loaded(engine, numbers).items():
        known = ~np.isnan(values)
        np.testing.assert_array_equal(kept[name].float().reshape(-1).numpy()[known], values[known])


def _answers_after_loading(folder: Path, tp: int, wanted: tuple[int, ...]) -> list[Any]:
    """What vLLM answers once it has loaded the checkpoint of each of some steps by itself."""
    steps = [folder / f"steps/step-{step}" for step in wanted]
    command = [
        python("vllm"),
        "-m",
        "tests.genuine.vllm_server",
        folder / "answers",
        "bfloat16",
        str(tp),
        *steps,
    ]
    binding = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "0|1" if tp == 2 else "0"}
    env = {**os.environ, **binding, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(list(map(str, command)), capture_output=True, text=True, env=env)
    assert ran.returncode == 0, ran.stderr[-4000:]
    return json.loads((folder / "answers").read_text())


def test_the_script_of_the_documentation(hf_model: Models, tmp_path: Path) -> None:
    model = hf_model("qwen3", dtype="bfloat16", **SIZES)
    page = (Path(__file__).parents[2] / "docs/transfer.md").read_text()
    script = next(
        part for part in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "weight_sender" in part
    )
    (tmp_path / "model").symlink_to(model)
    with serving(model, tmp_path / "log", dtype="bfloat16") as server:
        before = server.answers()
        on_cpu = "from tests.genuine.mcore import cpu_patches\n\ncpu_patches.enable()\n"
        (tmp_path / "train.py").write_text(on_cpu + script.replace("http://localhost:8000", server.url))
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        path = os.pathsep.join([str(Path.cwd()), *filter(None, [os.environ.get("PYTHONPATH")])])
        env = {**os.environ, "PYTHONPATH": path}
        subprocess.run([*torchrun, "train.py"], cwd=tmp_path, env=env, check=True)
        with urlopen(f"{server.url}/weight_info") as told:
            assert json.loads(told.read()) == {"weight_version": "step-2"}
        assert server.answers() != before


SENDING = """
import sys
from transformers import AutoModelForCausalLM
from vllm.distributed.weight_transfer import HTTPVLLMWeightSyncClient, WeightTransferTrainerFactory
import reshard
from reshard.live.vllm_transfer import ReshardTrainerInitInfo

folder, base, url = sys.argv[1:]
source = reshard.weight_source(AutoModelForCausalLM.from_pretrained(folder, dtype="auto"), base=base)
told = ReshardTrainerInitInfo(rank=0, host="127.0.0.1", timeout=60)
sending = WeightTransferTrainerFactory.trainer_init(told, client=HTTPVLLMWeightSyncClient(url), source=source)
sending.send_weights()
sending.shutdown()
"""


def test_a_trainer_engine_of_vllm(hf_model: Models, tmp_path: Path) -> None:
    first, other = (hf_model("qwen3", dtype="bfloat16", seed=seed, **SIZES) for seed in (0, 1))
    with serving(other, tmp_path / "log-1", dtype="bfloat16") as server:
        expected = server.answers()
    with serving(first, tmp_path / "log-2", dtype="bfloat16") as server:
        assert server.answers() != expected
        subprocess.run([python("vllm"), "-c", SENDING, other, first, server.url], check=True)
        assert server.answers() == expected
