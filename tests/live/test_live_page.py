"""The code of docs/live.md runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import reshard
from tests.test_docs import fences

PAGE = Path(__file__).parents[2] / "docs" / "live.md"
OF_VLLM = "llm."
"""Code for a running engine, which `tests/live/test_vllm.py` runs."""


def test_the_code_of_the_page_runs(
    hf_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = hf_model("qwen3_moe")
    (tmp_path / "model").symlink_to(source)
    reshard.convert(source, tmp_path / "run", to="megatron", tp=2)
    (tmp_path / "CKPT").symlink_to(tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    blocks = [fence for fence in fences(PAGE) if fence.language == "python" and OF_VLLM not in fence.text]
    assert len(blocks) == 2
    for block in blocks:
        exec(compile(block.text, str(PAGE), "exec"), {})
    first = fences(PAGE)[0].text
    (typed,) = (line for line in first.splitlines() if line.startswith("python -c"))
    exec(typed.split("'", 1)[1].rsplit("'", 1)[0], {})
