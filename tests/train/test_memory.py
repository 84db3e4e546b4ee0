"""Memory: the estimate compared with the bytes of real steps, and the advice if a run does not fit."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import reshard
from reshard.base.errors import ReshardError
from reshard.base.quantities import GIB
from reshard.folders.json_objects import read_object
from reshard.runs.train.memory import activations
from reshard.runs.train.memory.activations import KeptBytes, LayerWidths
from reshard.runs.train.memory.estimate import TrainingSetup, memory_parts
from reshard.runs.train.memory.gpu_models import gpus_named
from reshard.runs.train.memory.parameter_counts import count_parameters
from reshard.transfer.source_files import Sources
from tests.train.conftest import chats, write_lines

QWEN3_8B = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 40960,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
}
SMALL = {
    "model_type": "qwen3",
    "vocab_size": 1000,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
EXPERTS = {
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}
SEQUENCES, LENGTH = 2, 75
"""150 tokens: no matrix of the models has that many rows or columns."""


LORA = {"r": 16, "target_modules": "all-linear"}


def small(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def trainable(folder: Path, dtype: str = "float32", lora: dict[str, Any] | None = None) -> Any:
    """The model that TRL trains, with random weights."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(str(folder))
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    model.config.use_cache = False
    if lora:
        model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **lora))
    return model.train()


def tokens_of(model: Any) -> Any:
    import torch

    return torch.randint(3, model.config.vocab_size, (SEQUENCES, LENGTH))


def nbytes(tensors: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None)


@dataclass
class Saved:
    """Storages that autograd keeps: in the forward pass, and again in the backward pass."""

    forward: dict[int, Any] = field(default_factory=dict)
    again: dict[int, Any] = field(default_factory=dict)
    goes_back: bool = False

    def nbytes(self, again: bool = False) -> int:
        tensors = (self.again if again else self.forward).values()
        return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


@contextmanager
def saved_tensors(model: Any) -> Iterator[Saved]:
    """Storages that autograd keeps during the block, without the parameters and their 16-bit copies."""
    import torch

    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    shapes = {tuple(p.shape) for p in model.parameters()} | {tuple(p.shape)[::-1] for p in model.parameters()}
    saved = Saved()

    def pack(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        is_cast = tensor.dtype != torch.float32 and tuple(tensor.shape) in shapes
        if storage.data_ptr() not in own and not is_cast:
            (saved.again if saved.goes_back else saved.forward)[storage.data_ptr()] = tensor
        return tensor

    def unpack(tensor: Any) -> Any:
        saved.goes_back = True
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield saved


def setup_of(folder: Path, **given: Any) -> TrainingSetup:
    lora = LORA if given.get("lora") else None
    sizes = {
        "parallel": "ddp",
        "gpus": 1,
        "batch": SEQUENCES,
        "sequences": SEQUENCES,
        "length": LENGTH,
        "computed": 4,
    }
    config = read_object(folder / "config.json", Sources())
    return TrainingSetup(count_parameters(folder, lora), LayerWidths.of(config), **{**sizes, **given})


@pytest.mark.parametrize(
    ("name", "lora"), [("qwen2_tied", False), ("qwen3", True), ("qwen3_moe", False), ("qwen3_moe", True)]
)
def test_states_are_those_of_a_real_step(name: str, lora: bool, tiny: Callable[..., Path]) -> None:
    import torch

    model = trainable(tiny(name), lora=LORA if lora else None)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained)
    ids = tokens_of(model)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    moments = [state[key] for state in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
    found = memory_parts(setup_of(tiny(name), lora=lora))
    assert (found["weights"], found["gradients"], found["optimizer"]) == (
        nbytes(model.parameters()),
        nbytes(p.grad for p in trained),
        nbytes(moments),
    )


@pytest.mark.core("config0-float32-False-False", "config2*", "config3*", "config4*")
@pytest.mark.parametrize(
    ("config", "dtype", "autocast", "again"),
    [
        (SMALL, "float32", False, False),
        (SMALL, "bfloat16", False, False),
        (SMALL, "float32", True, False),
        (SMALL, "float32", False, True),
        ({**SMALL, **EXPERTS}, "float32", False, False),
        ({**SMALL, **EXPERTS}, "bfloat16", False, False),
    ],
)
def test_activations_are_those_that_autograd_keeps(
    config: dict[str, Any], dtype: str, autocast: bool, again: bool, tmp_path: Path
) -> None:
    import torch

    model = trainable(small(tmp_path / "model", config), dtype)
    if again:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    with saved_tensors(model) as kept, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        model.lm_head(model.model(tokens_of(model)).last_hidden_state)
    widths = LayerWidths.of(config)
    case = KeptBytes(
        computed=2 if autocast or dtype == "bfloat16" else 4, residual=2 if dtype == "bfloat16" else 4
    )
    layers = activations.of_layers(widths, case, LENGTH)
    if again:
        layers = widths.layers * activations.between_layers(widths, case)
    expected = SEQUENCES * LENGTH * (layers + activations.of_ends(widths, case))
    assert expected == pytest.approx(kept.nbytes(), rel=0.1)


@pytest.mark.parametrize("again", [False, True])
def test_adapters_keep_inputs_but_not_what_frozen_norms_would(again: bool, tmp_path: Path) -> None:
    model = trainable(small(tmp_path / "model", SMALL), lora={**LORA, "r": 8})
    if again:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    with saved_tensors(model) as kept:
        model.get_base_model().model(tokens_of(model))
    widths = LayerWidths.of(SMALL)
    case = KeptBytes(computed=4, residual=4, frozen=True)
    layers = activations.of_layers(widths, case, LENGTH)
    if again:
        layers = widths.layers * activations.between_layers(widths, case)
    norm = activations.of_ends(widths, case) - 4 * widths.hidden  # the head is left out here
    assert SEQUENCES * LENGTH * (layers + norm) == pytest.approx(kept.nbytes(), rel=0.1)


@pytest.fixture(scope="module")
def qwen3_8b(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small(tmp_path_factory.mktemp("qwen3-8b") / "model", QWEN3_8B)


def test_a_run_that_does_not_fit_is_refused_with_what_fits(qwen3_8b: Path, tmp_path: Path) -> None:
    data = write_lines(tmp_path / "chats.jsonl", chats()[:2])
    asked = {"model": qwen3_8b, "data": data, "output": tmp_path / "out"}
    with pytest.raises(ReshardError) as caught:
        reshard.train("sft", gpus="H100:8", **asked)
    (problem,) = caught.value.problems
    assert problem.code == "run-exceeds-gpu-memory" and problem.remedy == "add --parallel fsdp2"
    assert not (tmp_path / "out").exists()
    assert reshard.train("sft", gpus="H100:8", parallel="fsdp2", **asked).status is None
    assert (tmp_path / "out/accelerate.yaml").exists()


def test_sharding_divides_states_and_lora_and_four_bits_shrink_them(qwen3_8b: Path) -> None:
    alone = memory_parts(setup_of(qwen3_8b))
    sharded = memory_parts(setup_of(qwen3_8b, parallel="fsdp2", gpus=8))
    for part in ("weights", "gradients", "optimizer"):
        assert sharded[part] == alone[part] // 8
    zero2 = memory_parts(setup_of(qwen3_8b, parallel="zero2", gpus=8))
    assert (zero2["weights"], zero2["optimizer"]) == (alone["weights"], alone["optimizer"] // 8)
    lora = memory_parts(setup_of(qwen3_8b, lora=True, weights=2))
    quantized = memory_parts(setup_of(qwen3_8b, lora=True, weights=2, quantized=True))
    assert lora["optimizer"] < alone["optimizer"] / 50
    assert lora["weights"] > 15 * GIB > 8 * GIB > quantized["weights"] > 4 * GIB
    assert memory_parts(setup_of(qwen3_8b, reference=True))["reference model"] == alone["weights"]


@pytest.mark.parametrize(("text", "gib", "count"), [("H100:8", 80, 8), ("4090", 24, 1), ("80GB:2", 80, 2)])
def test_gpus_by_name_or_memory(text: str, gib: int, count: int) -> None:
    found = gpus_named(text)
    assert (found.bytes, found.count) == (gib * GIB, count)


@pytest.mark.parametrize("text", ["", "8", "H1000:8", "H100:0", "H100:many"])
def test_gpus_that_are_not_named_are_refused(text: str) -> None:
    with pytest.raises(ReshardError, match="does not name GPUs"):
        gpus_named(text)
