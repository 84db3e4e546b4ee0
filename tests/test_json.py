"""The output of `--json` follows docs/json.schema.json. `tests.commandline.reshard` checks it in every test."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator, ValidationError

import reshard as api
from reshard.cli import COMMANDS
from tests.commandline import SCHEMA, follows_schema, reshard

SILENT = {"help"}
"""Commands without `--json`."""


def test_the_schema_is_one_and_has_every_command() -> None:
    schema = json.loads(SCHEMA.read_text(encoding="utf-8"))
    Draft202012Validator.check_schema(schema)
    assert COMMANDS.keys() - SILENT <= schema["$defs"].keys()


def test_the_page_checks_a_report() -> None:
    page = (SCHEMA.parent / "command-line.md").read_text(encoding="utf-8")
    space: dict[str, Any] = {}
    exec(re.findall(r"(?ms)^```python\n(.*?)^```$", page)[0], space)
    space["check_report"]("support", reshard("support", "--json").out, SCHEMA)
    with pytest.raises(ValidationError):
        space["check_report"]("convert", reshard("support", "--json").out, SCHEMA)


def test_variables_of_the_environment_are_documented() -> None:
    root = SCHEMA.parents[1]
    used = {
        name
        for folder in ("src", "bench", "tests")
        for path in (root / folder).rglob("*.py")
        for name in re.findall(r"\b_?RESHARD_[A-Z]+", path.read_text(encoding="utf-8"))
    }
    page = (SCHEMA.parent / "command-line.md").read_text(encoding="utf-8")
    assert used and [name for name in used if name not in page] == []


def test_what_does_not_follow_it_is_noticed() -> None:
    with pytest.raises(AssertionError, match="mcp"):
        follows_schema("mcp", '{"tool": "x"}')
    with pytest.raises(AssertionError, match="not valid under any"):
        follows_schema("verify", '{"equal": true, "files": 1, "bytes": 1, "faults": [], "more": 1}')


def test_every_kind_of_output(hf_model: Callable[..., Path], tmp_path: Path) -> None:
    """Other tests cover most kinds too; here all that need no framework appear once."""
    model, ckpt, log = hf_model("qwen3"), tmp_path / "ckpt", tmp_path / "train.log"
    log.write_text("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB\n")
    assert reshard("convert", model, ckpt, "--to", "megatron", "--tp", 2, "--json").code == 0
    api.convert(model, tmp_path / "other", to="hf", dtype="bfloat16")
    (tmp_path / ".gone.replaced-0123abcd").mkdir()
    outputs: list[tuple[tuple[object, ...], int]] = [
        (("convert", ckpt, tmp_path / "again", "--dry-run"), 0),
        (("inspect", ckpt), 0),
        (("inspect", tmp_path / "gone"), 1),
        (("inspect", ckpt, tmp_path / "gone", tmp_path / "nothing"), 2),
        (("inspect", tmp_path / "nothing"), 2),
        (("verify", model, tmp_path / "other"), 1),
        (("verify", tmp_path / "other"), 0),
        (("verify", model, ckpt, "--proof"), 0),
        (("doctor", log), 1),
        (("doctor", log, "--lang", "zh"), 1),
        (("doctor", "--list"), 0),
        (("doctor", "--explain", "bf16"), 0),
        (("doctor", "--explain", "env-small-shm"), 0),
        (("support",), 0),
        (("convert", model, ckpt, "--tpp", 2), 2),
        (("explode",), 2),
    ]
    for words, status in outputs:
        result = reshard(*words, "--json")
        assert result.code == status and result.out, words
