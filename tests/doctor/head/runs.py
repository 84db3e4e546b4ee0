"""The five failures that reshard's doctor exists for, as they happen: each run's script, launch and framework.

`<case>/<run>.log` is what the run printed here, with this machine's folders replaced by /home/user. To make them anew:

    python -m tests.doctor.head.runs [RUN …]

Old frameworks are those of `tests/environments.py`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests import environments
from tests.genuine import megatron

HERE = Path(__file__).parent
INTERNLM = Path(__file__).parents[2] / "data" / "internlm" / "internlm1-tp2"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
ACCELERATE = ("-m", "accelerate.commands.launch", "--config_file", "accelerate.yaml")
BASE = "models/Qwen2.5-0.5B"


@dataclass(frozen=True)
class Run:
    """One run: `case` is its folder, `words` what follows `python`, `environment` is None for that of the tests.

    `prepare` lays models into the folder that it is given, with the interpreter that it is given.
    """

    case: str
    words: tuple[str, ...]
    prepare: Callable[[Path, str], None]
    environment: str | None = None


def make_base(folder: Path, python: str, *words: str) -> None:
    """Make the model that training started from with the transformers of an interpreter."""
    done = _run([python, str(HERE / "tiny_model.py"), str(folder), *words], HERE)
    if done.returncode:
        raise RuntimeError(f"the model cannot be made:\n{done.stdout}")


def _model(folder: Path, python: str) -> None:
    make_base(folder / BASE, python)


def _megatron(variant: str, name: str) -> Callable[[Path, str], None]:
    """Prepare what training left behind: a Megatron checkpoint, beside the model that it started from."""

    def prepare(folder: Path, python: str) -> None:
        _model(folder, python)
        made = megatron.make(variant, folder / "made")
        (folder / "megatron_output").mkdir()
        made.roots["torch_dist"].rename(folder / "megatron_output" / name)
        shutil.rmtree(folder / "made")

    return prepare


def _remote_code(folder: Path, python: str) -> None:
    """Prepare a model with code of its own, which has the method of transformers 4.34."""
    _model(folder, python)
    shutil.copytree(folder / BASE, folder / "models" / "Qwen-14B-Chat")
    add_remote_code(folder / "models" / "Qwen-14B-Chat")


def add_remote_code(model: Path) -> None:
    """Let a model bring its own code, as the first Qwen did."""
    shutil.copy(HERE / "device_map" / "modeling_qwen.py", model)
    config = json.loads((model / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "modeling_qwen.QWenLMHeadModel"}
    config["architectures"] = ["QWenLMHeadModel"]
    (model / "config.json").write_text(json.dumps(config, indent=2))


def _internlm(folder: Path, python: str) -> None:
    shutil.copytree(INTERNLM, folder / "internlm-7b-sft" / "1000")


_EXPORT = ("export.py", "megatron_output/Qwen2.5-0.5B", BASE, "out/hf")
_SFT = ("export.py", "--model", "megatron_output/Qwen3-30B-A3B")
TRAINED = {"copy_mixed": "qwen2-tp2-pp2", "no_tokenizer": "qwen3-moe-tp2-pp2-ep2-etp2"}
"""The Megatron checkpoints of cases, as `tests.genuine.megatron` makes them."""
_QWEN2 = _megatron(TRAINED["copy_mixed"], "Qwen2.5-0.5B")
_QWEN3_MOE = _megatron(TRAINED["no_tokenizer"], "Qwen3-30B-A3B")
_SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_layers": 2,
    "num_attention_heads": 4,
}
_CONVERT = (
    *("convert2hf.py", "--src_folder", "internlm-7b-sft/1000", "--tgt_folder", "out/hf"),
    *(word for name, size in _SIZES.items() for word in (f"--{name}", str(size))),
)
RUNS = {
    "export": Run("copy_mixed", _EXPORT, _QWEN2, "transformers-4.51"),
    "grpo": Run("cat_mixed", (*ACCELERATE, "train_grpo.py"), _model, "transformers-4.51"),
    "grpo-accelerate-1.9": Run(
        "cat_mixed", (*ACCELERATE, "multi_gpu.py", "train_grpo.py"), _model, "transformers-4.53"
    ),
    "finetune": Run("device_map", (*TORCHRUN, "finetune.py"), _remote_code),
    "finetune-fixed": Run("device_map", (*TORCHRUN, "finetune_fixed.py"), _remote_code),
    "export-sft": Run("no_tokenizer", _SFT, _QWEN3_MOE),
    "export-sft-4.51": Run("no_tokenizer", _SFT, _QWEN3_MOE, "transformers-4.51"),
    "convert2hf": Run("internlm_tp", _CONVERT, _internlm),
}


def prepared(name: str, folder: Path) -> str:
    """Lay everything that a run needs into `folder`; returns its interpreter."""
    run = RUNS[name]
    python = environments.python(run.environment) if run.environment else sys.executable
    for path in (HERE / run.case).iterdir():
        if path.suffix in (".py", ".yaml"):
            shutil.copy(path, folder)
    run.prepare(folder, python)
    return python


def log_of(name: str, folder: Path, python: str) -> tuple[int, str]:
    """Do a run in a folder that was `prepared`: its exit status and all that it printed, under neutral paths."""
    done = _run([python, *RUNS[name].words], folder)
    return done.returncode, neutral(done.stdout, folder)


def neutral(text: str, folder: Path) -> str:
    """A log as another machine would have written it, with `\\n` after each state of a progress bar."""
    text = re.sub(
        r"/\S*?/(?:site-packages|dist-packages)/", "/home/user/venv/lib/python3.11/site-packages/", text
    )
    text = re.sub(r"(?<![\w.])/\S*?/bin/python[\d.]*", "/home/user/venv/bin/python", text)
    text = re.sub(r"(?<![\w.])/\S*?/lib/python3\.\d+/(?!site-packages)", "/usr/lib/python3.11/", text)
    return text.replace(str(folder), "/home/user/train").replace("\r", "\n")


def _run(words: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    own = {
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    launched = (
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "PYTEST_CURRENT_TEST",
        "PYTHONPATH",
    )
    environment = {key: value for key, value in os.environ.items() if key not in launched} | own
    environment["HF_HOME"] = str(folder / "cache")
    return subprocess.run(
        words,
        cwd=folder,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=300,
    )


def _main(names: list[str]) -> None:
    for name in names or RUNS:
        with tempfile.TemporaryDirectory() as made:
            folder = Path(made).resolve()
            status, log = log_of(name, folder, prepared(name, folder))
        (HERE / RUNS[name].case / f"{name}.log").write_text(log, encoding="utf-8")
        print(f"{name}: exit status {status}, {log.count(chr(10))} lines")


if __name__ == "__main__":
    _main(sys.argv[1:])
