"""Complete checkpoints to damage, each made once, and copies of them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import reshard as api
from tests.bad_input.damage import Copy

DATA = Path(__file__).parents[1] / "data"


def adapter(base: Path, out: Path, **settings: Any) -> None:
    """An adapter of the attention, saved by PEFT."""
    from tests.genuine.peft import make_adapter

    make_adapter(
        base, out, r=4, lora_alpha=12, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], **settings
    )


def trained(base: Path, out: Path, frozen: str = "", *, wide: bool = False) -> None:
    """Weights and states of AdamW, saved by DCP: none of the `frozen` weights, or one of another shape."""
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not frozen or frozen not in name)
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad])
    weights, states = get_state_dict(model, optimizer)
    if wide:
        states["state"]["model.norm.weight"]["exp_avg"] = torch.zeros(7)
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=out, no_dist=True)


def _vision(base: Path, out: Path) -> None:
    from tests.genuine.model_types import make_model_type

    make_model_type("qwen3_vl", out)


def buffers(base: Path, out: Path, **options: Any) -> None:
    """A run of Megatron-Core with the buffers of its distributed optimizer."""
    from reshard.algebra.layout import Layout
    from tests.genuine.megatron import QWEN2, tokens
    from tests.genuine.train_megatron import train_and_save

    train_and_save(QWEN2, out, tokens(), layout=Layout(), steps=1, distributed_optimizer=True, **options)


MADE: dict[str, tuple[str, Callable[[Path, Path], object]]] = {
    "adapter": ("llama", adapter),
    "adapter with DoRA": ("llama", partial(adapter, use_dora=True)),
    "frozen q_proj": ("qwen3", partial(trained, frozen="layers.0.self_attn.q_proj")),
    "frozen layers.0.mlp": ("qwen3", partial(trained, frozen="layers.0.mlp")),
    "misshapen states": ("qwen3", partial(trained, wide=True)),
    "qwen3_vl": ("qwen3", _vision),
    "buffers": ("qwen3", partial(buffers, lr=1e-2)),
    "untrained buffers": ("qwen3", partial(buffers, lr=0.0)),
}
"""What other programs make of a model."""


@pytest.fixture(scope="session")
def originals(
    hf_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """Complete checkpoints, each made once: Hugging Face models, and what `convert` makes of them."""
    root = tmp_path_factory.mktemp("originals")
    models: dict[str, dict[str, Any]] = {
        "sharded": {"name": "qwen3", "max_shard_size": "200KB"},
        "gpt_oss of another width": {"name": "gpt_oss", "intermediate_size": 80},
        "llama of another width": {"name": "llama", "hidden_size": 48, "intermediate_size": 80},
    }
    converted: dict[str, tuple[str, dict[str, Any]]] = {
        "torch_dist": ("qwen3", {"to": "megatron", "tp": 2, "pp": 2}),
        "legacy": ("qwen3", {"to": "megatron-legacy", "tp": 2, "pp": 2}),
        "torch_dist moe": ("qwen3_moe", {"to": "megatron", "tp": 2, "ep": 2}),
        "legacy moe": ("qwen3_moe", {"to": "megatron-legacy", "ep": 2}),
        "dcp": ("qwen3", {"to": "dcp"}),
        "fp8": ("qwen3", {"quantize": "fp8"}),
        "fp8 llama": ("llama", {"quantize": "fp8"}),
        "native qwen3_vl": ("qwen3_vl", {"to": "megatron", "no_tokenizer": True}),
        "internlm2": ("data internlm/internlm2-tp2pp2", {"no_tokenizer": True}),
    }

    def get(name: str) -> Path:
        if name.startswith("data "):
            return DATA / name.removeprefix("data ")
        path = root / name.replace(" ", "-")
        if name in converted and not path.exists():
            model, options = converted[name]
            api.convert(get(model), path, **options)
        elif name in MADE and not path.exists():
            model, make = MADE[name]
            make(get(model), path)
        return path if path.exists() else hf_model(**models.get(name, {"name": name}))

    return get


@pytest.fixture
def copy(originals: Callable[[str], Path], tmp_path: Path) -> Copy:
    """A copy of an original, named `src`, for a test to damage."""
    return lambda name: Path(shutil.copytree(originals(name), tmp_path / "src"))
