"""The config.json that reshard writes has the same meaning in transformers 4 and 5."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from reshard.oracle.transformers import transformers_logits
from tests.environments import python
from tests.families.test_config import TOKENS, folder_and_config, written_config
from tests.genuine.huggingface import VARIANTS

OLD_TRANSFORMERS = """
import sys, json, numpy, torch, transformers
transformers.logging.set_verbosity_error()
tokens = torch.from_numpy(numpy.load(sys.argv[1]))
for folder in sys.argv[2:]:
    config = transformers.AutoConfig.from_pretrained(folder)
    assert str(config.torch_dtype) == "torch.float32" and config.use_cache
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", output_loading_info=True
    )
    faults = info["missing_keys"] + info["mismatched_keys"]
    faults += [name for name in info["unexpected_keys"] if ".layers.4." not in name]
    assert not faults, (folder, faults)
    with torch.inference_mode():
        numpy.save(folder + "/logits.npy", model.eval()(tokens).logits.numpy())
"""


OTHERWISE = ("deepseek_v2", "gpt_oss")
"""Differences of transformers 4.57 for any config: its DeepSeek-V2 leaves YaRN's mscale out of the softmax, its gpt-oss
clamps at 7.0 and not at `swiglu_limit`."""

NEWER = {
    "4.51": (
        "deepseek_v3_noq",
        "glm4_moe",
        "dots1",
        "ernie4_5",
        "smollm3",
        "cwm",
        "qwen3_next",
        "qwen3_5_text",
        "hy_v3",
    ),
    "4.53": ("glm4_moe", "ernie4_5", "cwm", "qwen3_next", "qwen3_5_text", "hy_v3"),
    "4.57": ("cwm", "qwen3_5_text", "hy_v3"),
}
"""Families that a version does not support, or not completely."""


@pytest.mark.slow
@pytest.mark.parametrize("version", NEWER)
def test_transformers_4_reads_the_portable_config_alike(version: str, tmp_path: Path) -> None:
    folders = {}
    for name in VARIANTS:
        if not name.startswith(("internlm3", "mimo", *OTHERWISE, *NEWER[version])):
            # Mixtral had no head_dim of its own before 4.48.
            narrow = {"head_dim": 8} if name == "mixtral" else {}
            folder, config = folder_and_config(name, tmp_path, **narrow)
            (folder / "config.json").write_text(json.dumps(written_config(config, "float32")))
            folders[folder] = transformers_logits(folder, TOKENS)
    np.save(tmp_path / "tokens.npy", TOKENS)
    command = [
        python(f"transformers-{version}"),
        "-c",
        OLD_TRANSFORMERS,
        str(tmp_path / "tokens.npy"),
        *map(str, folders),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    sys.stderr.write(done.stderr)
    assert done.returncode == 0
    for folder, expected in folders.items():
        np.testing.assert_allclose(
            np.load(folder / "logits.npy"),
            expected,
            rtol=1e-5,
            atol=2e-5,  # a delta net is a sum over all earlier tokens, in another order in each release
            err_msg=f"{folder.name}, {version}",
        )
