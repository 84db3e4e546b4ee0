"""Train a Megatron-Core checkpoint on the bundled text with the real megatron-core, one process a rank.

    python -m demo.train CHECKPOINT [--steps N]

The checkpoint is loaded strictly at the layout that it was written for, with gloo in place of NCCL. The result is
saved beside the iteration that training started from, as Megatron-LM does when `--load` and `--save` name one
folder, so the config and the tokenizer in that folder are found again.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import numpy.typing as npt
from transformers import AutoTokenizer

import reshard
from reshard.engines.megatron import train_and_save
from tests.genuine.huggingface import CORPUS

LENGTH = 256
"""Tokens of one training sequence."""


def sequences(folder: Path) -> npt.NDArray[np.int64]:
    """The bundled text as [sequences, LENGTH + 1] token ids; the last sequence ends where the text does."""
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    tokens = np.array(tokenizer(CORPUS.read_text(encoding="utf-8"))["input_ids"], dtype=np.int64)
    last = len(tokens) - LENGTH - 1
    return np.stack([tokens[start : start + LENGTH + 1] for start in (*range(0, last, LENGTH), last)])


def main(folder: Path, steps: int) -> None:
    """Train for `steps` optimizer steps."""
    checkpoint = reshard.open(folder)
    assert checkpoint.args is not None
    run = train_and_save(
        checkpoint.args,
        folder,
        sequences(folder),
        checkpoint=checkpoint.path,
        layout=checkpoint.layout,
        steps=steps,
        lr=5e-3,
    )
    print(f"loaded {checkpoint.path} strictly on {checkpoint.layout.world_size} ranks ({checkpoint.layout})")
    print(f"trained {steps} steps: loss {run.losses[0]:.2f} → {run.losses[-1]:.2f}")
    print(f"saved {run.folder}")
    check_loss(run.losses)


def check_loss(losses: tuple[float, ...]) -> None:
    """Exit with a message unless the last loss is below the first."""
    if not losses[-1] < losses[0]:
        raise SystemExit(f"the loss did not fall: {losses[0]:.2f} → {losses[-1]:.2f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train a Megatron-Core checkpoint on the bundled text.")
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--steps", type=int, default=60)
    arguments = parser.parse_args()
    main(arguments.checkpoint, arguments.steps)
