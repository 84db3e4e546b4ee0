"""Load a Hugging Face folder with plain transformers and let it continue a prompt.

python -m demo.generate FOLDER PROMPT
"""

from __future__ import annotations

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging


def main(folder: str, prompt: str) -> None:
    """Print the prompt and the 46 most probable tokens after it."""
    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    with torch.inference_mode():
        output = model.generate(**inputs, max_new_tokens=46, do_sample=False)
    print(tokenizer.decode(output[0], skip_special_tokens=True))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
