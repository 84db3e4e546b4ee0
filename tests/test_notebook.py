"""The notebook about fine-tuning: its cells run, in order, on checkpoints of two formats."""

from __future__ import annotations

import ast
import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import reshard
from tests.environments import python

NOTEBOOK = Path(__file__).parents[1] / "docs" / "notebooks" / "fine-tuning.ipynb"


@pytest.fixture
def place(hf_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model, and a Megatron checkpoint of it whose attention changed, the first layer most."""
    (tmp_path / "base").symlink_to(hf_model("qwen3"))
    reshard.convert(tmp_path / "base", tmp_path / "edited", to="huggingface")
    file = tmp_path / "edited" / "model.safetensors"
    tensors: dict[str, Any] = load_file(file)
    for layer in range(4):
        tensors[f"model.layers.{layer}.self_attn.q_proj.weight"] *= np.float32(1 + 10.0 ** -(layer + 1))
    save_file(tensors, file, metadata={"format": "pt"})
    reshard.convert(tmp_path / "edited", tmp_path / "tuned", to="megatron", tp=2, pp=2)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run_cells() -> list[Any]:
    """Run the notebook and return the value of the last expression of each cell, which a notebook shows."""
    names: dict[str, Any] = {}
    shown = []
    for number, cell in enumerate(json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]):
        if cell["cell_type"] == "code":
            body = ast.parse("".join(cell["source"]), f"cell {number}")
            last = body.body.pop() if isinstance(body.body[-1], ast.Expr) else None
            exec(compile(body, f"cell {number}", "exec"), names)
            if isinstance(last, ast.Expr):
                shown.append(eval(compile(ast.Expression(last.value), f"cell {number}", "eval"), names))
    return shown


def test_every_cell_runs_and_shows_what_it_says(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base, tuned, weights, rows, found, heat = run_cells()
    assert (base.checkpoint.format, tuned.checkpoint.format) == ("huggingface", "megatron")
    assert "TP2 · PP2" in tuned._repr_html_() and "q_proj" in weights._repr_html_()
    assert rows.shape == (4, 4) and np.abs(rows).max() > 0
    assert not found and {row.tensor for row in found.rows} == {
        f"model.layers.{layer}.self_attn.q_proj.weight" for layer in range(4)
    }
    first = capsys.readouterr().out.splitlines()
    assert any("1.00e-01  model.layers.0.self_attn.q_proj.weight" in line for line in first)
    drawn = heat._repr_html_()
    assert drawn.count("<tr>") == 1 + 11 and drawn.count("rgba(29, 95, 168, 0.00)") == 4 * 10
    assert "0.15" in drawn and "1.00)" in drawn and (place / "changes.html").is_file()


def test_it_is_stored_as_it_was_written_without_results() -> None:
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    assert [cell for cell in cells if cell.get("outputs") or cell.get("execution_count")] == []
    assert {cell["cell_type"] for cell in cells} == {"code", "markdown"}


CELLS = """
import reshard
reshard.convert("base", "out", to="megatron", tp=2)
reshard.verify("base", "out")
reshard.convert("base", "quiet", on_plan=print, on_bytes=lambda count: None, on_resume=print, to="dcp")
reshard.convert("base", "none", dry_run=True, to="dcp")
"""


@pytest.mark.slow
def test_calls_draw_a_bar_in_a_kernel(place: Path) -> None:
    """A real kernel runs the cells, and each bar reaches 100%."""
    script = [
        "import json, sys, nbformat, nbclient",
        "cells = [nbformat.v4.new_code_cell(line) for line in sys.stdin.read().split('\\n') if line]",
        "nbclient.NotebookClient(book := nbformat.v4.new_notebook(cells=cells), kernel_name='python3').execute()",
        "print(json.dumps([cell.outputs for cell in book.cells]))",
    ]
    done = subprocess.run(
        [python("notebooks"), "-c", "\n".join(script)],
        input=CELLS,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    bars = [
        ["".join(output["data"].get("text/html", "")) for output in outputs if "<progress" in str(output)]
        for outputs in json.loads(done.stdout)
    ]
    assert [len(each) for each in bars] == [0, 1, 1, 0, 0]
    for (bar,) in (bars[1], bars[2]):
        total, value = re.search(r"max='(\d+)' value='(\d+)'", bar).groups()  # type: ignore[union-attr]
        assert int(total) == int(value) > 100_000
