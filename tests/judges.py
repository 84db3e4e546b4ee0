"""Judgements by the real frameworks, and comparisons of two results."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, Qwen2Config

import reshard
from reshard.algebra.layout import Layout
from reshard.oracle.megatron.logits import MegatronLogits
from tests.genuine.mcore.models import LayerSpec
from tests.genuine.warm import megatron_logits

Array = npt.NDArray[Any]

TOKENS = np.random.default_rng(0).integers(0, 250, (2, 12))
THRESHOLD = 1e-5
"""Largest difference of two logits relative to the largest logit: both sides compute in float32."""


def judged_by_megatron(path: Path, layout: Layout | None = None, spec: LayerSpec = "local") -> MegatronLogits:
    """megatron-core's logits of a Megatron checkpoint that reshard wrote, loaded strictly at `layout`.

    The model is built from the arguments in the checkpoint. TransformerEngine's experts are a grouped linear.
    """
    checkpoint = reshard.open(path).checkpoint
    args = {**checkpoint.description.args, "moe_grouped_gemm": spec == "te"}
    return megatron_logits(
        checkpoint.path,
        TOKENS,
        args=args,
        layout=layout or checkpoint.layout.complete(),
        spec=spec,
    )


def assert_agree(ours: Array, reference: Array, threshold: float = THRESHOLD) -> None:
    """Logits over the common vocabulary, without the padding of either side."""
    vocabulary = min(ours.shape[-1], reference.shape[-1])
    ours, reference = ours[..., :vocabulary], reference[..., :vocabulary]
    assert reference.std() > 0.1
    assert np.abs(ours - reference).max() <= threshold * np.abs(reference).max()


def of_type(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """`tensor` in another dtype; if torch cannot convert to that dtype, the same bytes."""
    dtype: torch.dtype = getattr(torch, name)
    return tensor.to(torch.uint8).view(dtype) if name == "float4_e2m1fn_x2" else tensor.to(dtype)


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a Hugging Face folder, read by the safetensors library."""
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def assert_same_tensors(ours: Mapping[str, torch.Tensor], reference: Mapping[str, torch.Tensor]) -> None:
    """Assert that both have the same names, with the same bits."""
    assert ours.keys() == reference.keys()
    for name, tensor in reference.items():
        assert ours[name].dtype == tensor.dtype, name
        assert torch.equal(ours[name], tensor), name


@lru_cache(maxsize=1)
def products_agree() -> bool:
    """Whether numpy and torch add up products in the same order, which depends on the processor.

    OpenBLAS's AVX2 kernels add up the edges of a matrix in another order than MKL.
    """
    draw = torch.Generator().manual_seed(0)
    sizes = [(64, 48), (100, 64), (32, 96), (96, 32), (64, 64), (283, 32)]
    for (rows, columns), rank in product(sizes, (4, 8, 16, 32, 64, 128, 200)):
        left, right = torch.randn(rows, rank, generator=draw), torch.randn(rank, columns, generator=draw)
        if not np.array_equal(left.numpy() @ right.numpy(), (left @ right).numpy()):
            return False
    return True


def assert_merged(ours: Mapping[str, torch.Tensor], reference: Mapping[str, torch.Tensor]) -> None:
    """Assert PEFT's merge: the same bits, or if products are added up in another order, all but the last bit.

    A sum of 16 bits hides nearly every such bit, so few elements may differ.
    """
    if products_agree():
        assert_same_tensors(ours, reference)
        return
    assert ours.keys() == reference.keys()
    for name, tensor in reference.items():
        assert (ours[name].dtype, ours[name].shape) == (tensor.dtype, tensor.shape), name
        resolution = torch.finfo(tensor.dtype).eps
        gap = (ours[name].double() - tensor.double()).abs()
        assert (gap <= 2 * resolution * tensor.double().abs().max()).all(), name
        if tensor.dtype != torch.float32:
            assert (gap > 0).double().mean() < 0.005, name


def differing_keys(ours: Path, reference: Path) -> set[str]:
    """Settings of the config of `reference` that differ or are missing in that of `ours`, as transformers reads them.

    InternLM3's own code is not run, so its keys are compared unchanged; MiMo's config is Qwen2's.
    """
    was, now = (_stated(folder) for folder in (reference, ours))
    return {key for key, value in was.items() if now.get(key) != value}


def _stated(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    if config["model_type"] == "mimo":
        config = {**Qwen2Config(**config).to_dict(), "model_type": "mimo"}
    elif config["model_type"] != "internlm3":
        config = AutoConfig.from_pretrained(folder).to_dict()
    config.pop("_name_or_path", None)
    for key in ("rope_parameters", "rope_scaling"):
        if config.get(key):
            config[key].pop(
                "type", None
            )  # the older spelling of rope_type, which reshard adds for older readers
    return config
