"""How releases of PEFT, and other tools, lay out the pairs of stacked experts (`adapters/expert_layout.py`)."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import reshard
from reshard.base.errors import ReshardError
from tests.environments import python
from tests.genuine import make_stacked_adapter
from tests.genuine.peft import make_adapter, merged_by_peft
from tests.judges import assert_merged, tensors_of
from tests.test_adapter_for import adapted

Model = Callable[..., Path]
GATE_UP, DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
EXPERTS, RANK = 8, 4
SQUARE = {GATE_UP: {"moe_intermediate_size": 32}, DOWN: {"moe_intermediate_size": 64}}
"""The width of an expert with which the matrices of a parameter are square, in a model of width 64."""


def make(model: Model, out: Path, *parameters: str, **sizes: Any) -> tuple[Path, Path]:
    """The base, and an adapter of its experts by the PEFT of the tests."""
    base = model("qwen3_moe", **sizes)
    return base, make_adapter(
        base, out, r=RANK, lora_alpha=6, target_modules=[], target_parameters=[*parameters]
    )


def rewrite(
    adapter: Path,
    pair: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
    **settings: Any,
) -> Path:
    """Lay out the pairs of an adapter anew, and change its settings; those that are None are removed."""
    path = adapter / "adapter_model.safetensors"
    tensors = load_file(path)
    for name in [name for name in tensors if name.endswith("lora_A.weight")]:
        other = name.replace("lora_A", "lora_B")
        tensors[name], tensors[other] = (each.contiguous() for each in pair(tensors[name], tensors[other]))
    save_file(tensors, path, {"format": "pt"})
    config = adapter / "adapter_config.json"
    content = {**json.loads(config.read_text()), **settings}
    config.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))
    return adapter


def turned(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The pairs as PEFT had them before 0.19.1: lora_A has the rows of the matrices."""
    factors_a = a.reshape(EXPERTS, RANK, -1)
    factors_b = b.reshape(-1, RANK, EXPERTS)
    return factors_b.permute(2, 1, 0).flatten(0, 1), factors_a.permute(2, 1, 0).flatten(1)


def by_expert(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Columns of lora_B by expert, then by rank."""
    return a, b.reshape(-1, RANK, EXPERTS).transpose(1, 2).flatten(1)


def unchanged(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return a, b


def refused(adapter: Path, base: Path, out: Path, **options: Any) -> set[str]:
    with pytest.raises(ReshardError) as caught:
        reshard.convert(adapter, out, base=base, **options)
    assert not out.exists()
    return {problem.code for problem in caught.value.problems}


@pytest.mark.slow
@pytest.mark.parametrize("release", ["peft-0.18", "peft-0.19.0", "peft-0.19.1"])
@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "gpt_oss"])
@pytest.mark.parametrize("parameters", [(GATE_UP,), (DOWN,), (GATE_UP, DOWN)])
def test_earlier_releases_are_merged_as_they_do(
    release: str, name: str, parameters: tuple[str, ...], hf_model: Model, tmp_path: Path
) -> None:
    width = {GATE_UP: 32, DOWN: 64}[parameters[0]]
    base = hf_model(name, **{"moe_intermediate_size" if name == "qwen3_moe" else "intermediate_size": width})
    script = make_stacked_adapter.__file__
    subprocess.run([python(release), "-W", "ignore", script, base, tmp_path, *parameters], check=True)
    reshard.convert(tmp_path / "adapter", tmp_path / "ours", base=base, merge=True, dtype="float32")
    assert_merged(tensors_of(tmp_path / "ours"), tensors_of(tmp_path / "reference"))


@pytest.mark.parametrize("parameters", [(GATE_UP,), (DOWN,), (DOWN, GATE_UP)])
def test_pairs_before_0_19_are_turned(parameters: tuple[str, ...], hf_model: Model, tmp_path: Path) -> None:
    base, adapter = make(hf_model, tmp_path / "adapter", *parameters, **SQUARE[parameters[0]])
    reference = merged_by_peft(base, adapter, tmp_path / "reference")
    rewrite(adapter, turned, peft_version="0.18.1")
    reshard.convert(adapter, tmp_path / "ours", base=base, merge=True)
    assert_merged(tensors_of(tmp_path / "ours"), tensors_of(reference))
    assert reshard.verify(adapter, tmp_path / "ours", proof=True)


@pytest.mark.parametrize("engine", ["vllm", "sglang", "peft"])
def test_engines_get_them_in_today_s_layout(engine: str, hf_model: Model, tmp_path: Path) -> None:
    base, adapter = make(hf_model, tmp_path / "adapter", GATE_UP, **SQUARE[GATE_UP])
    expected = adapted(base, adapter)
    rewrite(adapter, turned, peft_version="0.18.1")
    reshard.convert(adapter, tmp_path / "ours", base=base, adapter_for=engine)
    assert (adapted(base, tmp_path / "ours") - expected).abs().max() <= 1e-5 * expected.abs().max()
    reshard.convert(adapter, tmp_path / "direct", base=base, merge=True)
    reshard.convert(tmp_path / "ours", tmp_path / "again", base=base, merge=True)
    assert_merged(tensors_of(tmp_path / "again"), tensors_of(tmp_path / "direct"))


@pytest.mark.parametrize("version", [None, "0.19.1.dev0@main"])
def test_square_matrices_need_a_release(version: str | None, hf_model: Model, tmp_path: Path) -> None:
    base, adapter = make(hf_model, tmp_path / "adapter", GATE_UP, **SQUARE[GATE_UP])
    rewrite(adapter, unchanged, peft_version=version)
    for options in ({"merge": True}, {"adapter_for": "vllm"}, {"adapter_for": "peft"}):
        assert refused(adapter, base, tmp_path / "ours", **options) == {"adapter-expert-sides-unknown"}


def test_the_shapes_of_other_matrices_tell_without_a_release(hf_model: Model, tmp_path: Path) -> None:
    base, adapter = make(hf_model, tmp_path / "adapter", DOWN, GATE_UP, **SQUARE[DOWN])
    reference = merged_by_peft(base, adapter, tmp_path / "reference")
    for layout, out in ((unchanged, tmp_path / "straight"), (turned, tmp_path / "turned")):
        rewrite(adapter, layout, peft_version=None)
        reshard.convert(adapter, out, base=base, merge=True)
        assert_merged(tensors_of(out), tensors_of(reference))


def test_columns_by_expert_are_read_where_the_settings_say_so(hf_model: Model, tmp_path: Path) -> None:
    base, adapter = make(hf_model, tmp_path / "adapter", DOWN)
    reference = merged_by_peft(base, adapter, tmp_path / "reference")
    rewrite(adapter, by_expert, lora_B_layout="grouped_by_expert", auto_mapping={"unsloth_fixed": True})
    reshard.convert(adapter, tmp_path / "ours", base=base, merge=True)
    assert_merged(tensors_of(tmp_path / "ours"), tensors_of(reference))
    reshard.convert(adapter, tmp_path / "peft", base=base, adapter_for="peft")
    assert "lora_B_layout" not in json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert_merged(
        tensors_of(merged_by_peft(base, tmp_path / "peft", tmp_path / "again")), tensors_of(reference)
    )


UNORDERED: dict[str, dict[str, Any]] = {
    "Unsloth without lora_B_layout": {"auto_mapping": {"unsloth_fixed": True}},
    "another lora_B_layout": {"lora_B_layout": "new"},
    "Megatron-Bridge 0.6": {"peft_version": None, "target_parameters": [f"model.layers.0.{DOWN}"]},
}


@pytest.mark.parametrize("name", UNORDERED)
def test_columns_in_an_unknown_order_are_refused(name: str, hf_model: Model, tmp_path: Path) -> None:
    base, adapter = make(hf_model, tmp_path / "adapter", DOWN)
    rewrite(adapter, unchanged, **UNORDERED[name])
    for options in ({"merge": True}, {"adapter_for": "peft"}):
        assert refused(adapter, base, tmp_path / "ours", **options) == {"adapter-expert-order-unknown"}


GROUPED: dict[str, dict[str, tuple[int, ...]]] = {
    "Tinker": {"w1.lora_A.weight": (8, 4, 64), "w1.lora_B.weight": (1, 48, 4)},
    "NeMo AutoModel": {"lora_gate_and_up_A": (8, 64, 4), "lora_gate_and_up_B": (8, 4, 96)},
    "Megatron-Bridge": {"gate_proj.lora_A.weight": (1, 4, 64), "0.gate_proj.lora_B.weight": (48, 4)},
}
"""Names below the module of the experts, and shapes, of `build_lora_adapter`'s input, of AutoModel 0.3, and of
`export_adapter_weights` with shared outer factors."""


@pytest.mark.parametrize("tool", GROUPED)
def test_grouped_pairs_are_refused_by_name(tool: str, hf_model: Model, tmp_path: Path) -> None:
    base, adapter = make(hf_model, tmp_path / "adapter", DOWN)
    module = "base_model.model.model.layers.0.mlp.experts"
    tensors = {f"{module}.{name}": torch.ones(shape) for name, shape in GROUPED[tool].items()}
    save_file(tensors, adapter / "adapter_model.safetensors")
    assert refused(adapter, base, tmp_path / "ours", merge=True) == {"adapter-experts-grouped"}
    assert {each.code for each in reshard.inspect(adapter).problems} == {"adapter-experts-grouped"}
