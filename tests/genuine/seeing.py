"""A small random BLIP-2, whose pictures vLLM can prepare without torchvision."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import Blip2Config, Blip2ForConditionalGeneration

from tests.genuine.huggingface import make_tokenizer, randomise

SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
LANGUAGE: dict[str, Any] = {
    "model_type": "opt",
    "vocab_size": 288,
    "hidden_size": 128,
    "word_embed_proj_dim": 128,
    "ffn_dim": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}
QUERY = {"encoder_hidden_size": 64, "vocab_size": 288, "max_position_embeddings": 32}


def make_blip2(folder: Path) -> Path:
    """Write the model with its tokenizer and its processor to `folder` and return it."""
    tokenizer = make_tokenizer()
    tokenizer.add_tokens("<image>", special_tokens=True)
    config = Blip2Config(
        text_config=LANGUAGE,
        vision_config={**SMALL, "image_size": 16, "patch_size": 4},
        qformer_config={**SMALL, **QUERY},
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        num_query_tokens=4,
        image_text_hidden_size=16,
    )
    model = Blip2ForConditionalGeneration._from_config(config, dtype=torch.float32)
    randomise(model, torch.Generator().manual_seed(0))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    pictures = {"image_processor_type": "BlipImageProcessor", "size": {"height": 16, "width": 16}}
    for name, said in (("preprocessor", pictures), ("processor", {"num_query_tokens": 4})):
        said |= {"processor_class": "Blip2Processor"}
        (folder / f"{name}_config.json").write_text(json.dumps(said))
    return folder
