"""The shared parts of the makers of ms-swift's and Megatron-Bridge's checkpoints: a run, and its base model."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SMALL: dict[str, Any] = {
    "vocab_size": 288,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
MOE: dict[str, Any] = {"num_experts": 4, "moe_intermediate_size": 24}


@dataclass(frozen=True)
class Run:
    """A model with its own sizes, a layout, and options of the framework."""

    model_type: str
    sizes: dict[str, Any] = field(default_factory=dict)
    tp: int = 1
    pp: int = 1
    ep: int = 1
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        return self.tp * self.pp


def make_base(run: Run, folder: Path) -> Path:
    """The Hugging Face folder that a run starts from, in the spelling of transformers 4 and the Hub."""
    from reshard.families.rope import both_spellings
    from reshard.folders.companions import portable_tokenizer_config
    from tests.genuine.huggingface import make_model

    make_model(run.model_type, folder, dtype="bfloat16", **{**SMALL, **run.sizes})
    file = folder / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, **both_spellings(config), "torch_dtype": "bfloat16"}, indent=2))
    tokenizer = folder / "tokenizer_config.json"
    tokenizer.write_text(json.dumps(portable_tokenizer_config(json.loads(tokenizer.read_text())), indent=2))
    return folder
