"""Record the logs of this folder again: `python -m tests.doctor.history.record [CASE …]`. Needs torch and an index.

Each release is installed next to the environment with pip, and the interpreter runs the failing line. Its
output is kept, with its paths replaced by `/home/user/venv`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

OLD = (
    "transformers==4.40.2",
    "tokenizers==0.19.1",
    "huggingface-hub==0.23.5",
    "accelerate==0.27.2",
    "peft==0.10.0",
)
MIDDLE = (
    "transformers==4.51.3",
    "tokenizers==0.21.1",
    "huggingface-hub==0.30.2",
    "accelerate==1.4.0",
    "peft==0.15.2",
)
CASES: dict[str, tuple[tuple[str, ...], str]] = {
    "trl-name-later": ((*OLD, "trl==0.9.6"), "from trl import GRPOTrainer"),
    "trl-name-gone": ((*MIDDLE, "trl==0.24.0"), "from trl import PPOv2Config"),
    "trl-keyword-later": ((*OLD, "trl==0.9.6"), "import trl; trl.SFTConfig('out', padding_free=True)"),
    "trl-keyword-gone": ((*MIDDLE, "trl==0.24.0"), "import trl; trl.SFTConfig('out', max_seq_length=512)"),
    "trl-inherited-keyword-gone": (
        (*MIDDLE, "trl==0.24.0"),
        "import trl; trl.SFTConfig('out', evaluation_strategy='no')",
    ),
    "accelerate-keyword-later": (OLD, "import accelerate; accelerate.Accelerator(dataloader_config=None)"),
    "accelerate-keyword-gone": (MIDDLE, "import accelerate; accelerate.Accelerator(dispatch_batches=False)"),
    "accelerate-attribute-later": (OLD, "import accelerate; accelerate.utils.ParallelismConfig"),
    "hub-name-gone": (MIDDLE, "from huggingface_hub import cached_download"),
    "peft-of-another-transformers": (("peft==0.17.1",), "import peft"),
    "transformers-module-later": (OLD, "import transformers.models.qwen3"),
    "transformers-model-type": (
        OLD,
        "import json, pathlib, transformers\n"
        "pathlib.Path('config.json').write_text(json.dumps({'model_type': 'qwen3'}))\n"
        "transformers.AutoConfig.from_pretrained('.')",
    ),
    "transformers-method-gone": ((), "import transformers; transformers.DynamicCache().get_usable_length(1)"),
}
"""The packages to install next to the environment, and the code to run."""
FOLDER = Path(__file__).parent


def record(case: str) -> str:
    """The output of one case."""
    requirements, code = CASES[case]
    with TemporaryDirectory() as folder:
        site = Path(folder) / "site"
        if requirements:
            install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(site)]
            subprocess.run([*install, *requirements], check=True)
        script = Path(folder) / "train.py"
        script.write_text(code + "\n")
        environment = {**os.environ, "PYTHONPATH": str(site), "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, str(script)]
        run = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, check=False
        )
        assert run.returncode, f"{case} did not fail"
        text = run.stderr.replace(str(site), "/home/user/venv/lib/python3.11/site-packages")
        text = re.sub(
            r"/\S+?/lib/python3\.\d+/site-packages", "/home/user/venv/lib/python3.11/site-packages", text
        )
        return text.replace(folder, "/home/user/train")


def main() -> None:
    for case in sys.argv[1:] or CASES:
        (FOLDER / f"{case}.log").write_text(record(case), encoding="utf-8")
        print(case)


if __name__ == "__main__":
    main()
