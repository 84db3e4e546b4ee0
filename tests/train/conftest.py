"""Models and data for the tests of training: tiny, with a tokenizer that has a chat template."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

SUMS = [(a, b) for a in range(8) for b in range(8)]


def chats() -> list[dict[str, object]]:
    """64 conversations of one question and one answer."""
    return [
        {
            "messages": [
                {"role": "user", "content": f"What is {a} plus {b}?"},
                {"role": "assistant", "content": f"The answer is {a + b}."},
            ]
        }
        for a, b in SUMS
    ]


def preferences() -> list[dict[str, object]]:
    """64 pairs of answers, the first of which is preferred."""
    return [
        {
            "prompt": [{"role": "user", "content": f"What is {a} plus {b}?"}],
            "chosen": [{"role": "assistant", "content": f"The answer is {a + b}."}],
            "rejected": [{"role": "assistant", "content": "no"}],
        }
        for a, b in SUMS
    ]


def rated() -> list[dict[str, object]]:
    """64 answers, every other one bad."""
    return [
        {
            "prompt": [{"role": "user", "content": f"What is {a} plus {b}?"}],
            "completion": [{"role": "assistant", "content": f"The answer is {a + b}." if good else "no"}],
            "label": good,
        }
        for (a, b), good in zip(SUMS, [True, False] * 32, strict=True)
    ]


def prompts() -> list[dict[str, object]]:
    """64 questions."""
    return [{"prompt": [{"role": "user", "content": f"What is {a} plus {b}?"}]} for a, b in SUMS]


def write_lines(path: Path, rows: list[dict[str, object]]) -> Path:
    """Rows as a JSONL file."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def tiny(hf_model: Callable[..., Path]) -> Callable[..., Path]:
    """A Hugging Face folder of two layers: `tiny("qwen3")`, "qwen2", "qwen3_moe" …"""

    def get(name: str = "qwen3", **sizes: object) -> Path:
        return hf_model(name, dtype="float32", **{"num_hidden_layers": 2, **sizes})

    return get


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A JSONL file for each method."""
    folder = tmp_path_factory.mktemp("data")
    records = {
        "chat": (chats(), ("sft",)),
        "pairs": (preferences(), ("dpo", "reward")),
        "rated": (rated(), ("kto",)),
        "prompts": (prompts(), ("grpo", "rloo", "distillation")),
    }
    files = {name: write_lines(folder / f"{name}.jsonl", rows) for name, (rows, _) in records.items()}
    return {method: files[name] for name, (_, methods) in records.items() for method in methods}
