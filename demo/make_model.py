"""Write a small random Qwen3-MoE model and its tokenizer as a Hugging Face folder, and a text to train it on.

    python -m demo.make_model FOLDER TEXT.jsonl

The model comes from transformers' own `save_pretrained`; the tokenizer is trained on the bundled text, and each
paragraph of that text becomes a record.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.genuine.huggingface import CORPUS, make_model

SIZES = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "head_dim": 32,
    "max_position_embeddings": 2048,
}


def main(folder: Path, data: Path) -> None:
    """Write the model to `folder`, the text to `data`, and print what was written."""
    make_model("qwen3_moe", folder, dtype="bfloat16", **SIZES)
    print("wrote", ", ".join(sorted(path.name for path in folder.iterdir())))
    paragraphs = CORPUS.read_text(encoding="utf-8").strip().split("\n\n")
    data.write_text("".join(json.dumps({"text": each}) + "\n" for each in paragraphs), encoding="utf-8")
    print("wrote", data.name)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
