"""Names, values, paths and logs that imitate reshard's own lines or contain terminal commands."""

from __future__ import annotations

import json
import os
import re
import shutil
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import reshard as api
from reshard.base.errors import Problem, ReshardError
from reshard.base.foreign_text import escape, printable_json, printable_line, printable_lines
from tests.commandline import apart, in_terminal, reshard

EVIL = "\x1b[2J\x1b]0;owned\x07\n\x9b31merror: forged\r\n\u202eerror: forged\u2028error: forged"
"""Clears the screen, sets the window title, and forges lines: by newlines, a carriage return, and reversed text."""
OURS = re.compile(r"\x1b(?:\[[0-9;?]*[A-Za-z])")
"""The sequences that rich sends a terminal for colours, and to redraw a line."""
TAG = "[bold red]"


def assert_harmless(text: str) -> None:
    """Assert that no command and no line of `EVIL` came through; output for a terminal may be coloured."""
    assert "\x1b[2J" not in text and "owned\x07" not in text
    plain = OURS.sub("", re.sub(r"\r(?=\n|\x1b\[)", "", text))
    strange = {
        character for character in plain if unicodedata.category(character) in ("Cc", "Cf", "Zl", "Zp")
    }
    assert strange <= {"\n"}, strange
    assert not re.search(r"^\s*(?:error|warning|note): forged", plain, re.MULTILINE), text


def told(*words: object) -> str:
    """All output of a command."""
    done = reshard(*words)
    assert done.code != 3 and "bug in reshard" not in done.err, done.err
    assert_harmless(done.out + done.err)
    return done.out + done.err


def edited(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.fixture(scope="module")
def good(hf_model: Callable[..., Path]) -> Path:
    return hf_model("qwen3")


@pytest.fixture
def evil(good: Path, tmp_path: Path) -> Path:
    """A model in a folder, with a tensor, files and values that all have deceptive names."""
    folder = Path(shutil.copytree(good, tmp_path / f"模型 {EVIL.replace('/', '')}"))
    tensors = {**load_file(folder / "model.safetensors"), f"{TAG}{EVIL}": torch.ones(3)}
    (folder / "model.safetensors").unlink()
    save_file(tensors, folder / f"a{EVIL}.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.thorough
def test_a_model_whose_names_and_values_deceive(evil: Path, good: Path, tmp_path: Path) -> None:
    for words in (
        ("inspect", evil),
        ("convert", evil, tmp_path / "dst", "--to", "huggingface"),
        ("convert", evil, tmp_path / "dst", "--to", "megatron", "--dry-run"),
        ("convert", good, evil, "--to", "huggingface"),
        ("convert", good, tmp_path / "dst", "--to", "huggingface", "--base", f"{evil}{EVIL}"),
        ("verify", evil, good),
        ("doctor", evil),
        ("inspect", tmp_path / f"{EVIL}/nothing"),
        ("inspect", tmp_path),
        ("convert", evil, tmp_path / "dst", "--debug"),
        (f"in{EVIL}",),
        ("inspect", good, f"--{EVIL}"),
        ("convert", good, tmp_path / "dst", "--to", EVIL),
    ):
        said = told(*words)
        assert r"\x1b[2J\x1b]0;owned\x07\n\x9b31merror: forged\r\n\u202eerror" in said, words
    assert r"模型 \x1b[2J" in told("inspect", evil)
    to_megatron = ("convert", evil, tmp_path / "dst", "--to", "megatron")
    for words in (("verify", evil, good), ("inspect", evil), to_megatron):
        piped = apart(*words)
        assert_harmless(piped.stdout + piped.stderr)
        assert TAG in piped.stdout + piped.stderr
        assert_harmless(in_terminal(*words))


@pytest.mark.parametrize("key", ["model_type", "architectures", "rope_scaling", "torch_dtype", "hidden_size"])
def test_a_config_whose_values_deceive(key: str, good: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(good, tmp_path / "model"))
    edited(folder, **{key: {"rope_type": EVIL} if key == "rope_scaling" else EVIL})
    for words in (
        ("inspect", folder),
        ("convert", folder, tmp_path / "to", "--to", "megatron"),
        ("doctor", folder),
    ):
        told(*words)


def test_files_beside_the_weights_that_deceive(good: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(good, tmp_path / "model"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"name_or_path": EVIL, "tokenizer_class": EVIL}))
    (folder / f"{EVIL}.json").write_text(EVIL)
    (folder / "generation_config.json").write_text(json.dumps({EVIL: EVIL}))
    (folder / "chat_template.jinja").write_text(EVIL)
    for words in (("inspect", folder), ("convert", folder, tmp_path / "to"), ("doctor", folder)):
        told(*words)


def test_pickles_whose_names_deceive(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    module, _, name = EVIL.partition("\n")
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x02c" + f"{module}\n{name}\n".encode() + b")R.")
    torch.save({f"x{EVIL}.weight": torch.ones(2, 2)}, tmp_path / "pytorch_model.bin")
    for words in (("inspect", folder), ("inspect", tmp_path / "pytorch_model.bin"), ("doctor", folder)):
        told(*words)


def test_logs_and_scripts_that_deceive(tmp_path: Path) -> None:
    frame = f'  File "/home/{EVIL.splitlines()[0]}/train.py", line 3, in <module>\n    {EVIL}\n'
    texts = {
        "unknown.log": f"Traceback (most recent call last):\n{frame}ValueError: no frobs {EVIL}\n",
        "error.log": f"[rank0]: error: {EVIL}\n[rank{EVIL}]: ValueError: {EVIL}\n",
        "known.log": f"torch.OutOfMemoryError: CUDA out of memory. {EVIL.splitlines()[0]} Tried to allocate 2 GiB",
        "module.log": f"ModuleNotFoundError: No module named 'a{EVIL.splitlines()[0]}'",
        "train.py": f"# {EVIL}\nx = '''{EVIL}'''\nimport (",
        "launch.sh": f"torchrun --nproc_per_node=9 train.py '{EVIL}'\nCUDA_VISIBLE_DEVICES=0 {EVIL}",
        "config.yaml": f"distributed_type: FSDP\nfsdp_config: {{x: '{EVIL.splitlines()[0]}'}}\n",
        "config.json": json.dumps({"zero_optimization": {"stage": 7, EVIL: EVIL}, "train_batch_size": EVIL}),
        "run.ipynb": json.dumps({"cells": [{"cell_type": "code", "source": EVIL, "outputs": []}]}),
    }
    for name, text in texts.items():
        path = tmp_path / f"{EVIL}{name}"
        path.write_text(text)
        for words in (("doctor", path), ("doctor", path, "--quiet"), ("doctor", path, "--lang", "zh")):
            told(*words)


@pytest.mark.thorough
def test_json_is_whole_and_commands_no_terminal(evil: Path, good: Path, tmp_path: Path) -> None:
    hidden = EVIL + "\x7f\x85\U000e0041"
    edited(evil, model_type=hidden)
    for words in (
        ("inspect", evil),
        ("verify", evil, good),
        ("doctor", evil),
        ("convert", evil, tmp_path / "dst", "--to", "huggingface"),
    ):
        out = apart(*words, "--json").stdout
        assert_harmless(out)
        assert EVIL in str(json.loads(out)) or "\\x1b[2J" in str(json.loads(out))
    assert api.inspect(evil).as_dict()["path"] == str(evil)
    assert json.loads(apart("inspect", evil, "--json").stdout)["path"] == str(evil)


def test_only_what_deceives_is_escaped() -> None:
    for text in (
        "模型/检查点 ü é ñ",
        "नमस्ते",
        "ไทย",
        "می‌خواهم",
        "👩‍🚀",
        "a\u3000b\u00a0c",
        "C:\\x1b",
        os.fsdecode(b"\xe9"),
    ):
        assert (
            printable_line(text) == printable_lines(text) == text
            and printable_json(f'"{text}"') == f'"{text}"'
        )
    assert printable_line(EVIL).isascii() and printable_lines(EVIL).count("\n") == 2
    for code in range(0x110000):
        character = chr(code)
        if unicodedata.category(character) in ("Cc", "Zl", "Zp") or unicodedata.bidirectional(character) in (
            *("LRE", "RLE", "LRO", "RLO", "PDF"),
            *("LRI", "RLI", "FSI", "PDI"),
        ):
            assert printable_line(character).isascii() and printable_line(character) != character, hex(code)
            assert (
                json.loads(printable_json(json.dumps(f"{character}x", ensure_ascii=False))) == f"{character}x"
            )
    assert escape("[red]\x1b") == r"\[red]\x1b"


def test_an_error_is_as_many_lines_as_it_has_fields() -> None:
    problem = Problem("evil", EVIL, tensor=EVIL, file=EVIL, rule=EVIL, expected=EVIL, found=EVIL, remedy=EVIL)
    assert len(str(problem).splitlines()) == 7 and len(str(ReshardError([problem] * 2)).splitlines()) == 14
    assert problem.as_dict()["found"] == EVIL


def test_foreign_text_has_one_way_to_the_terminal() -> None:
    """No code that prints uses the `escape` of rich, which lets control characters pass."""
    source = Path(api.__file__).parent
    takers = [path for path in source.rglob("*.py") if "rich.markup" in path.read_text(encoding="utf-8")]
    assert [path.name for path in takers] == ["foreign_text.py"]
