"""Tiny vision-language models with their real processors, and data with images for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
import trl
from PIL import Image

from tests.genuine.huggingface import make_tokenizer, randomise
from tests.genuine.model_types import TYPES

TEMPLATES = Path(str(trl.__file__)).parent / "chat_templates"
"""The chat templates of the genuine models, as TRL has them."""
VARIABLE = "RESHARD_TEST_VISION_MODEL"
"""Has the model of `test_vision.py`."""
TOKENS = {
    "qwen2_5_vl": {"image": "<|image_pad|>", "video": "<|video_pad|>"},
    "gemma3": {"boi": "<start_of_image>", "eoi": "<end_of_image>", "image": "<image_soft_token>"},
}
MORE = ("<|vision_start|>", "<|vision_end|>", "<start_of_turn>", "<end_of_turn>")


def make_vision_model(name: str, folder: Path) -> Path:
    """Write a model of `TOKENS` with random weights in float32, its processor and its chat template."""
    tokenizer = make_tokenizer()
    tokenizer.add_tokens([*MORE, *TOKENS[name].values()], special_tokens=True)
    tokenizer.save_pretrained(folder)
    named = {f"{key}_token": token for key, token in TOKENS[name].items()} if name == "gemma3" else {}
    template = (TEMPLATES / f"{name}.jinja").read_text()
    edit(folder / "tokenizer_config.json", extra_special_tokens=named, bos_token="<|endoftext|>")
    (folder / "chat_template.jinja").write_text(template)
    edit(folder / "preprocessor_config.json", **_PROCESSORS[name])
    edit(
        folder / "processor_config.json",
        processor_class=_PROCESSORS[name]["processor_class"],
        **_SEQUENCE[name],
    )
    model = getattr(transformers, TYPES[name].architecture)
    config = model.config_class(**_settings(name, tokenizer))
    made = model._from_config(config, dtype=torch.float32)
    randomise(made, torch.Generator().manual_seed(0))
    made.generation_config.update(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    made.save_pretrained(folder)
    return folder


_PROCESSORS: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": "Qwen2_5_VLProcessor",
        "patch_size": 4,
        "merge_size": 2,
        "temporal_patch_size": 2,
        "min_pixels": 64,
        "max_pixels": 1024,
    },
    "gemma3": {
        "image_processor_type": "Gemma3ImageProcessor",
        "processor_class": "Gemma3Processor",
        "size": {"height": 16, "width": 16},
    },
}
_SEQUENCE: dict[str, dict[str, Any]] = {"qwen2_5_vl": {}, "gemma3": {"image_seq_length": 4}}


def _settings(name: str, tokenizer: Any) -> dict[str, Any]:
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in (*MORE, *TOKENS[name].values())}
    settings = json.loads(json.dumps(dict(TYPES[name].settings)))
    settings["text_config"] |= {"vocab_size": 320, "num_hidden_layers": 2}
    settings["text_config"] |= {"bos_token_id": 0, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": 0}
    if name == "gemma3":
        own = {"boi_token_index": "<start_of_image>", "eoi_token_index": "<end_of_image>"}
        own |= {"image_token_id": "<image_soft_token>"}
    else:
        own = {"vision_start_token_id": "<|vision_start|>", "vision_end_token_id": "<|vision_end|>"}
        own |= {"image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>"}
    return settings | {key: ids[token] for key, token in own.items()} | {"tie_word_embeddings": True}


def edit(file: Path, **content: Any) -> None:
    """Set keys of a JSON file, which may not exist yet."""
    old = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({**old, **content}, indent=2))


def colours(count: int = 16) -> list[dict[str, Any]]:
    """Chats of one question about the image `N.png`, which is the first part of the question, and its answer."""
    return [
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "image", "image": f"{n}.png"},
                        {"type": "text", "text": f"Which colour is {n}?"},
                    ],
                },
                {"role": "assistant", "content": [{"type": "text", "text": f"It is {n * 16} red."}]},
            ]
        }
        for n in range(count)
    ]


def paint(folder: Path, count: int = 16) -> Path:
    """Write the images of `colours`, of several sizes."""
    for n in range(count):
        Image.new("RGB", (16 + 4 * (n % 5), 20), (n * 16, 255 - n * 16, n)).save(folder / f"{n}.png")
    return folder


def plain_losses(run: Any, rows: Any, output: Path, **more: Any) -> list[float]:
    """The losses of TRL's own trainer with the processor of the model, without any of reshard's code."""
    from transformers import AutoModelForImageTextToText, AutoProcessor, set_seed
    from trl import SFTConfig, SFTTrainer

    given = {
        name: value for name, value in run.options.items() if "eval" not in name and name != "save_steps"
    }
    settings = {
        "use_cpu": True,
        "bf16": False,
        "report_to": "none",
        "logging_steps": 1,
        "save_strategy": "no",
    }
    set_seed(42)
    trainer = SFTTrainer(
        AutoModelForImageTextToText.from_pretrained(run.model, dtype="float32"),
        args=SFTConfig(str(output), **settings, **more.pop("config", {}), **given),
        train_dataset=rows,
        processing_class=AutoProcessor.from_pretrained(run.model),
        **more,
    )
    trainer.train()
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def as_trl_wants(rows: list[dict[str, Any]], folder: Path) -> Any:
    """The rows of `colours` as a dataset with a column of images."""
    from datasets import Dataset, Features, Image, List, Value

    part = {"type": Value("string"), "text": Value("string")}
    turns = List({"role": Value("string"), "content": List(part)})
    plain = [
        {
            "messages": [
                {
                    "role": turn["role"],
                    "content": [{"type": p["type"], "text": p.get("text")} for p in turn["content"]],
                }
                for turn in row["messages"]
            ],
            "images": [
                str(folder / p["image"]) for t in row["messages"] for p in t["content"] if "image" in p
            ],
        }
        for row in rows
    ]
    return Dataset.from_list(plain, features=Features({"messages": turns, "images": List(Image())}))
