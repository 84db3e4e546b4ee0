"""vLLM is recorded while it loads a model: its parameters are what the recording says, to the last element."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from reshard.exchange.engine_recording import read_recordings
from tests.environments import python
from tests.exchange.memory import loaded
from tests.exchange.test_transfer_plan import RECORDINGS, SIZES
from tests.genuine.record_vllm import prepare

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("name", "tp"), [("qwen3_moe", 2), ("llama_tied", 2), ("qwen3", 1)])
def test_vllm_does_what_was_recorded(
    name: str, tp: int, hf_model: Callable[..., Path], tmp_path: Path
) -> None:
    model = hf_model(name, **SIZES)
    out = tmp_path / "out"
    command = [python("vllm"), "-m", "tests.genuine.record_vllm", str(model), str(out), str(tp)]
    ran = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **prepare(out)})
    assert ran.returncode == 0, ran.stderr[-4000:]
    hub = load_file(next(model.glob("*.safetensors")))
    for recording in read_recordings(out):
        kept = torch.load(out / f"rank-{recording.rank}.pt")
        assert kept.keys() == recording.parameters.keys()
        for parameter, values in loaded(recording, hub).items():
            known = ~np.isnan(values)
            np.testing.assert_array_equal(kept[parameter].reshape(-1).numpy()[known], values[known])
            assert not kept[parameter].reshape(-1).numpy()[~known].any()  # rows that vLLM adds
        assert not recording.loaded
    if (RECORDINGS / name).is_dir():
        assert read_recordings(out) == read_recordings(RECORDINGS / name)
