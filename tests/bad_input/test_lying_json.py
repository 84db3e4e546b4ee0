"""JSON files whose values are of another kind than a format's: said in words of JSON, not of Python."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.bad_input.damage import MEGATRON, Copy, convert, edit_config, refusal
from tests.commandline import reshard

INDEX = "model.safetensors.index.json"
OF_PYTHON = re.compile(r"\w+Error\b|NoneType|' object|unhashable|indices|subscript|iterable|operand|literal")
"""Words of Python's own errors."""


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (None, "null"),
        ([], "a list"),
        ("x", "a text"),
        (3, "a number"),
        ({}, "an object without weight_map"),
        ({"weight_map": None}, "null as weight_map"),
        ({"weight_map": [1, 2]}, "a list as weight_map"),
        ({"weight_map": {"a": ["x"]}}, "a list as the file of a"),
        ({"weight_map": {"a": None}}, "null as the file of a"),
        ({"weight_map": {"a": "../x"}}, "'../x' is not below the folder of the checkpoint"),
    ],
)
def test_an_index_that_names_no_files(copy: Copy, content: Any, found: str) -> None:
    src = copy("sharded")
    (src / INDEX).write_text(json.dumps(content))
    problem = refusal(*convert(src, *MEGATRON))
    assert problem["message"] == "the index cannot be read" and problem["file"] == str(src / INDEX)
    assert problem["found"] == found and "from names of tensors to names of files" in problem["expected"]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_key_value_heads", []),
        ("num_key_value_heads", "x"),
        ("head_dim", -1),
        ("head_dim", 10**30),
        ("num_hidden_layers", 10**30),
        ("rope_parameters", 3),
        ("rope_parameters", [None]),
        ("rope_parameters", {"rope_theta": None}),
        ("tie_word_embeddings", {"a": 1}),
    ],
)
def test_a_config_with_a_value_that_no_model_has(copy: Copy, key: str, value: Any) -> None:
    src = copy("qwen3")
    edit_config(src, **{key: value})
    told = reshard("inspect", src)
    shown = " ".join((told.out + told.err).split())
    assert told.code and not OF_PYTHON.search(shown), shown
    assert key in shown


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "generation_config.json"])
def test_a_companion_that_is_null(copy: Copy, name: str) -> None:
    src = copy("qwen3")
    (src / name).write_text("null")
    problem = refusal(*convert(src, *MEGATRON))
    assert (problem["expected"], problem["found"]) == ("a JSON object", "null")


@pytest.mark.parametrize(
    ("key", "value"),
    [("sources", 3), ("sources", [[]]), ("sources", [{"path": {}}]), ("options", {"to": 3, "layout": {}})],
)
def test_a_record_that_was_edited_proves_nothing(copy: Copy, tmp_path: Path, key: str, value: Any) -> None:
    src, out = copy("qwen3"), tmp_path / "out"
    assert reshard("convert", src, out, "--to", "huggingface").code == 0
    assert reshard("verify", src, out, "--proof").code == 0
    record = json.loads((out / "reshard.json").read_text())
    (out / "reshard.json").write_text(json.dumps({**record, key: value}))
    told = reshard("verify", src, out, "--proof")
    assert told.code == 2 and not OF_PYTHON.search(told.err), told.err
    assert "reshard.json" in told.err
