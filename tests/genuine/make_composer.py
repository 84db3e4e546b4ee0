"""A run of the real Composer, on which LLM Foundry is built: its Trainer, with a Hugging Face model and its tokenizer.

    python -m tests.genuine.make_composer TOKENIZER OUT

with Composer importable, and a tokenizer.json. `OUT` gets `ep0-ba2-rank0.pt`, and `trained/`: the model as transformers
saves it then.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from composer import Trainer
from composer.models import HuggingFaceModel
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast


def make(tokenizer: Path, out: Path) -> None:
    """Train two batches, with an optimizer, and save at the end."""
    torch.manual_seed(0)
    words = PreTrainedTokenizerFast(tokenizer_file=str(tokenizer))
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=len(words), num_hidden_layers=1))
    tokens = torch.arange(16).reshape(2, 8)
    rows = [{"input_ids": row, "attention_mask": torch.ones_like(row), "labels": row} for row in tokens]
    trainer = Trainer(
        model=HuggingFaceModel(model, tokenizer=words, use_logits=True),
        train_dataloader=DataLoader(rows, batch_size=1),
        optimizers=torch.optim.AdamW(model.parameters(), lr=1e-2),
        max_duration="2ba",
        save_folder=str(out),
        save_interval="2ba",
        save_latest_filename=None,
        device="cpu",
        progress_bar=False,
    )
    trainer.fit()
    trainer.close()
    model.save_pretrained(out / "trained")


if __name__ == "__main__":
    make(Path(sys.argv[1]), Path(sys.argv[2]))
