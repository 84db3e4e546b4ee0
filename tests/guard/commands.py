"""Genuine training commands of two processes on a CPU, each in the environment of its time.

python -m tests.guard.commands [NAME …]     run them alone, and show what they print and how long they take
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.environments import TESTS, python

FILES = Path(__file__).parent / "files"
SUPPORT = Path(__file__).parents[1] / "doctor" / "reproduce" / "support"
STEPS = 20
TRAINER = (
    *("--output_dir", "out", "--max_steps", "{steps}", "--save_steps", "10", "--logging_steps", "1"),
    *("--per_device_train_batch_size", "2", "--report_to", "none", "--use_cpu", "true"),
)
TRL = (*TRAINER, "--max_length", "64", "--bf16", "false", "--gradient_checkpointing", "false")
GRPO = (*TRAINER, "--num_generations", "2", "--max_completion_length", "8", "--bf16", "false")
TORCHRUN = ("torchrun", "--nproc-per-node", "2", "--master-port", "{port}")
ACCELERATE = ("accelerate", "launch", "--config_file", "fsdp2.yaml", "--main_process_port", "{port}")
WITHOUT_GPUS = {
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONPATH": str(SUPPORT),
}


@dataclass(frozen=True)
class Command:
    """A command as it is typed, in a folder that `prepare` has made. `{port}` and `{steps}` are filled in.

    `variables` are set for it alone. `saves` is the checkpoint of step `{step}`, which appears last in that step's
    save. `diverges` are words to add for a loss that becomes NaN. `fails` is what it ends with on its own.
    """

    name: str
    environment: str
    words: tuple[str, ...]
    saves: str = "out/checkpoint-{step}"
    variables: Mapping[str, str] = field(default_factory=dict)
    diverges: tuple[str, ...] = ("--learning_rate", "1e30", "--max_grad_norm", "0")
    fails: str = ""

    def filled(self, port: int, steps: int = STEPS) -> tuple[str, ...]:
        """The words to run."""
        return tuple(word.format(port=port, steps=steps) for word in self.words)

    def surroundings(self, port: int) -> dict[str, str]:
        """The variables to run it with: those of this process, its own, and its environment first in the PATH."""
        scripts = Path(sys.executable if self.environment == TESTS else python(self.environment)).parent
        own = {name: value.format(port=port) for name, value in self.variables.items()}
        path = {"PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}"}
        return {**os.environ, **WITHOUT_GPUS, **path, **own}


COMMANDS = {
    command.name: command
    for command in (
        Command(
            "lora-device-map",
            "transformers-4.53",
            (*TORCHRUN, "lora_auto.py", *TRL),
            fails="got mixed torch.Tensor and DTensor",
        ),
        Command(
            "grpo-device-map",
            "transformers-4.53",
            (*ACCELERATE, "grpo_auto.py", *GRPO),
            fails="FSDP requires named DeviceMesh dims for ND parallelism",
        ),
        Command("grpo-fsdp2", "transformers-4.53-torch-2.13", (*ACCELERATE, "grpo.py", *GRPO)),
        Command(
            "torchrun-loop",
            TESTS,
            (*TORCHRUN, "loop.py", "--steps", "{steps}"),
            saves="out/step_{step}.pt",
            diverges=("--lr", "1e30"),
        ),
        Command("torchrun-trainer", TESTS, (*TORCHRUN, "trainer.py", *TRAINER)),
        Command("accelerate-fsdp2", TESTS, (*ACCELERATE, "sft.py", *TRL)),
        Command(
            "deepspeed-zero3",
            "deepspeed",
            (
                *("deepspeed", "--num_gpus", "2", "--master_port", "{port}", "sft.py"),
                *("--deepspeed", "zero3.json", *TRL),
            ),
            variables={"DS_ACCELERATOR": "cpu"},
        ),
        Command(
            "swift-sft",
            "ms-swift",
            (
                *("swift", "sft", "--model", "model", "--model_type", "qwen2", "--template", "qwen2_5"),
                *("--tuner_type", "lora", "--dataset", "data.jsonl", "--torch_dtype", "float32"),
                *("--output_dir", "out", "--add_version", "false", "--max_steps", "{steps}"),
                *("--save_steps", "10", "--logging_steps", "1", "--per_device_train_batch_size", "2"),
                *("--split_dataset_ratio", "0", "--max_length", "128", "--use_cpu", "true"),
            ),
            variables={"NPROC_PER_NODE": "2", "MASTER_PORT": "{port}"},
        ),
        Command(
            "llamafactory-sft",
            "llamafactory",
            ("llamafactory-cli", "train", "llamafactory.yaml", "max_steps={steps}"),
            variables={"FORCE_TORCHRUN": "1", "NPROC_PER_NODE": "2", "MASTER_PORT": "{port}"},
            diverges=("learning_rate=1e30", "max_grad_norm=0"),
        ),
    )
}


def prepare(folder: Path) -> Path:
    """Fill a folder with the scripts and configurations, a dataset, and a tiny model that all environments read."""
    from tests.genuine.huggingface import make_model
    from tests.train.conftest import chats, write_lines

    shutil.copytree(FILES, folder, dirs_exist_ok=True)
    write_lines(folder / "data.jsonl", chats())
    model = make_model("qwen2", folder / "model", num_hidden_layers=2)
    _edit(
        model / "tokenizer_config.json",
        tokenizer_class="PreTrainedTokenizerFast",
        extra_special_tokens=None,
        additional_special_tokens=["<|im_start|>"],
    )
    rope = json.loads((model / "config.json").read_text())["rope_parameters"]
    _edit(
        model / "config.json",
        rope_parameters=None,
        rope_theta=rope["rope_theta"],
        dtype=None,
        torch_dtype="float32",
    )
    return folder


def _edit(path: Path, **changes: object) -> None:
    """Change keys of a JSON file into those of transformers 4; None removes one."""
    content = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}, indent=2))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    for name in sys.argv[1:] or COMMANDS:
        place = prepare(Path(os.environ.get("TMPDIR", "/tmp")) / "guard-commands" / name)
        shutil.rmtree(place / "out", ignore_errors=True)
        command, port, began = COMMANDS[name], free_port(), time.monotonic()
        words = command.filled(port)
        print("$", *words, flush=True)
        status = subprocess.run(words, cwd=place, env=command.surroundings(port)).returncode
        print(f"{name}: exit status {status} after {time.monotonic() - began:.1f} s", flush=True)
