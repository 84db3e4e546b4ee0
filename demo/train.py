"""Train a Megatron-Core checkpoint on a text with megatron-core's own model, schedule and optimizer, on four CPU ranks.

    python -m demo.train CHECKPOINT MODEL TEXT.jsonl OUT STEPS

MODEL is the Hugging Face folder with the tokenizer.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
from transformers import AutoTokenizer

import reshard
from reshard.formats import open_checkpoint
from tests.genuine.train_megatron import train_and_save

LENGTH = 272
"""Tokens of a sequence: the longest paragraph and its end."""
LAYOUT = reshard.Layout(tp=2, pp=2, ep=2, etp=1)


def tokens_of(model: Path, text: Path) -> np.ndarray:
    """The paragraphs of a text as tokens [paragraphs, LENGTH + 1], filled up with the end-of-text token."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    texts = [json.loads(line)["text"] for line in text.read_text(encoding="utf-8").splitlines()]
    ids = [tokenizer(each)["input_ids"][:LENGTH] for each in texts]
    rows = [each + [tokenizer.eos_token_id] * (LENGTH + 1 - len(each)) for each in ids]
    return np.array(rows, dtype=np.int64)


def main(checkpoint: Path, model: Path, text: Path, out: Path, steps: int) -> None:
    """Train for some steps, and print the losses."""
    opened = open_checkpoint(checkpoint)
    run = train_and_save(
        opened.description.args,
        out,
        tokens_of(model, text),
        checkpoint=opened.path,
        layout=LAYOUT,
        steps=steps,
        sequences=4,
        lr=2e-3,
        distributed_optimizer=True,
    )
    for step in range(0, steps, max(steps // 8, 1)):
        print(f"step {step + 1}/{steps}  loss {run.losses[step]:.4f}")
    print(f"saved {run.folder}, loss {run.losses[-1]:.4f}")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:5]), steps=int(sys.argv[5]))
