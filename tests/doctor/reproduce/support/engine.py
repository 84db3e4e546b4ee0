"""DeepSpeed on a CPU, and what it has saved."""

import shutil
import subprocess
import sys
from pathlib import Path

from small import DATA

SAVED = DATA / "deepspeed"


def engine(stage, path, **changes):
    """A model of the config in a folder, in DeepSpeed's hands."""
    import deepspeed
    from transformers import AutoConfig, AutoModelForCausalLM

    deepspeed.init_distributed("gloo")
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": True},
        **changes,
    }
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def copied(name):
    """A copy of a checkpoint, to be spoiled."""
    return Path(shutil.copytree(SAVED / name, Path("out") / name))


def zero_to_fp32(folder, *options):
    """Run DeepSpeed's script. Returns its exit status."""
    command = [sys.executable, "-m", "deepspeed.utils.zero_to_fp32", folder, "out/fp32", *options]
    return subprocess.call(command)
