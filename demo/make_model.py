"""Write a small random Qwen3-MoE model and its tokenizer as a Hugging Face folder.

    python -m demo.make_model FOLDER

The model comes from transformers' own `save_pretrained`; the tokenizer is trained on the bundled text.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.genuine.huggingface import make_model

SIZES = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "head_dim": 32,
    "max_position_embeddings": 2048,
}


def main(folder: Path) -> None:
    """Write the model to `folder` and say what was written."""
    make_model("qwen3_moe", folder, dtype="bfloat16", **SIZES)
    print("wrote", ", ".join(sorted(path.name for path in folder.iterdir())))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
