"""Processes that are forked with transformers and TRL imported, which takes each of them ten seconds otherwise."""

from __future__ import annotations

import os
from multiprocessing import get_context
from multiprocessing.forkserver import ensure_running
from pathlib import Path
from typing import Any
from unittest.mock import patch

PRELOADED = (
    *("datasets", "peft", "accelerate", "trl.trainer.sft_trainer"),
    *("transformers.models.qwen3.modeling_qwen3", "transformers.models.qwen2.modeling_qwen2"),
    *("torch.distributed.checkpoint", "torch.distributed.fsdp", "numpy.ctypeslib"),
    "tests.train.warm",
)
REPOSITORY = Path(__file__).parents[2]


def server() -> Any:
    """The context of multiprocessing whose processes are forked with the frameworks imported."""
    context = get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    path = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
    with patch.dict(os.environ, PYTHONPATH=path):  # for the last of them
        ensure_running()
    return context
