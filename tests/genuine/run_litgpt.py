"""Run in an environment with LitGPT: `run_litgpt.py JOBS` does what a JSON file asks, job after job.

A job "make"s a folder of random weights by LitGPT's own `GPT`, in the file that it has after training, or as
`convert_hf_checkpoint` saves it, with their logits, and what LitGPT's own script converts them to. tests/data/litgpt is
such a folder.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from litgpt import GPT, Config
from litgpt.scripts.convert_lit_checkpoint import convert_lit_checkpoint, qkv_reassemble
from litgpt.utils import incremental_save, save_config

TOKENS = 14


def make(folder: str, name: str, changes: dict[str, Any], nested: bool, old: bool, converted: bool) -> None:
    """The folder; with `old`, heads are by groups, as in releases before 0.5.5, which current ones load."""
    torch.manual_seed(0)
    place = Path(folder)
    place.mkdir(parents=True)
    config = Config.from_name(name, **changes)
    model = GPT(config)
    for key, each in model.named_parameters():
        torch.nn.init.normal_(each, mean=float("norm" in key or "ln_f" in key), std=0.05)
    model.bfloat16()
    weights = model.state_dict()
    save_config(config, place)
    torch.save({"model": weights}, place / "lit_model.pth")
    if converted:
        convert_lit_checkpoint(place, place / "converted")
    if old:
        weights = {
            key.replace("attn.qkv", "attn.attn"): qkv_reassemble(each, config) if "attn.qkv" in key else each
            for key, each in weights.items()
        }
    if nested:
        torch.save({"model": weights, "step": 3}, place / "lit_model.pth")
    else:  # whose keys of storages are integers
        with incremental_save(place / "lit_model.pth") as saver:
            saver.save({key: saver.store_early(each) for key, each in weights.items()})
    again = GPT(config)  # with a rotary embedding in float32
    again.load_state_dict({**weights})
    tokens = torch.arange(3, 3 + TOKENS)[None]
    with torch.no_grad():
        torch.save({"tokens": tokens, "logits": again(tokens)}, place / "logits.pt")


if __name__ == "__main__":
    for job in json.loads(Path(sys.argv[1]).read_text()):
        make(**job)
