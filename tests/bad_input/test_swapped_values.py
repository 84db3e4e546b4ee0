"""Values with other types than frameworks write: refused as damage, or accepted, but never an internal error.

`swap` finds more if it runs longer: `python -m tests.bad_input.swap SEED COUNT FOLDER...`.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import reshard as api
from reshard.base.errors import ReshardError
from tests.bad_input.damage import Copy, find
from tests.commandline import within

DATA = Path(__file__).parents[1] / "data"
FOLDERS = (
    *("deepspeed/z2_moe", "deepspeed/z3_lora", "deepspeed/universal_z2", "internlm/internlm2-tp2pp2"),
    *("internlm/moe-tp2", "megatron_lora/swift-pp2", "megatron_lora/bridge-tp2", "torchtitan/llama"),
    *("verl/fsdp2-lora", "verl/fsdp1", "megatron_fsdp/qwen3"),
)
ODD: list[Any] = [None, True, -1, 0, 10**12, 1e400, "x", [], ["x"], [[1]], {}, {"a": 1}]


def planned(folder: Path, **options: Any) -> None:
    with suppress(ReshardError):
        api.convert(folder, folder.parent / "dst", dry_run=True, **options)
    with suppress(ReshardError):
        api.inspect(folder)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "deepseek_v3"])
def test_every_value_of_a_config(hf_model: Callable[..., Path], tmp_path: Path, name: str) -> None:
    folder = Path(shutil.copytree(hf_model(name), tmp_path / "src"))
    config = json.loads((folder / "config.json").read_text())
    for key in config:
        for value in ODD:
            (folder / "config.json").write_text(json.dumps({**config, key: value}))
            with within(10):
                planned(folder, to="megatron")


@pytest.mark.parametrize("value", ODD)
@pytest.mark.parametrize("key", ["num_attention_heads", "num_key_value_heads"])
def test_heads_that_rows_are_divided_by(tmp_path: Path, key: str, value: Any) -> None:
    """torchtitan stores the rows of queries and keys in pairs, which are counted within a head."""
    folder = Path(shutil.copytree(DATA / "torchtitan" / "llama", tmp_path / "src"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, key: value}))
    planned(folder)


@pytest.mark.core("model-None", "model-x", "added_tokens-None", "added_tokens-0")
@pytest.mark.parametrize("value", [*ODD, {"vocab": 1}, {"vocab": {"a": "b"}}, {"vocab": {"a": 1e400}}])
@pytest.mark.parametrize("key", ["model", "added_tokens"])
def test_every_value_of_a_tokenizer(copy: Copy, key: str, value: Any) -> None:
    src = copy("torch_dist")
    path = find(src, "tokenizer.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    planned(src)
    (src / "config.json").unlink()  # so that it is the tokenizer that counts
    planned(src)


@pytest.mark.slow
def test_values_in_the_files_of_every_format(originals: Callable[[str], Path]) -> None:
    made = [originals(name) for name in ("torch_dist moe", "legacy", "sharded")]
    folders = [*(DATA / name for name in FOLDERS), *made]
    done = subprocess.run(
        [sys.executable, "-m", "tests.bad_input.swap", "7", "7", *map(str, folders)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr[-3000:]
