"""Run in an environment with mistral_inference: `run_mistral.py JOBS` does what a JSON file asks, job after job.

A job is an object with `do`: "make" a folder of random weights by mistral_inference's own `Transformer`, with their
logits, or "load" one strictly with `Transformer.from_folder`, and save logits. xformers, whose attention needs a GPU,
is replaced by attention of torch with the same masks.

tests/data/mistral is "made" of the parameters `SAMPLE` of tests/test_mistral.py.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors.torch import save_file


class Mask:
    """The masks of xformers: sequences one after another, causal or not, and with a window or not."""

    is_causal = False

    def __init__(self, lengths: list[int], window: int | None = None) -> None:
        self.lengths, self.window = lengths, window

    @classmethod
    def from_seqlens(cls, q_seqlen: list[int]) -> Mask:
        return cls(q_seqlen)

    def make_local_attention(self, window: int) -> Mask:
        return type(self)(self.lengths, window)

    def dense(self) -> torch.Tensor:
        blocks = []
        for length in self.lengths:
            place = torch.arange(length)
            behind = place[:, None] - place[None]
            seen = behind >= 0 if self.is_causal else torch.ones_like(behind, dtype=torch.bool)
            blocks.append(seen & (behind < self.window) if self.window else seen)
        return torch.block_diag(*blocks).bool()


class CausalMask(Mask):
    is_causal = True


def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Mask | None) -> torch.Tensor:
    """Without a mask for an image: the only one sees all of itself."""
    heads_first = (each.transpose(1, 2) for each in (query, key, value))
    compute = torch.nn.functional.scaled_dot_product_attention
    return compute(*heads_first, attn_mask=mask.dense() if mask else None).transpose(1, 2)


def replace_xformers() -> None:
    names = ["xformers", "xformers.ops", "xformers.ops.fmha", "xformers.ops.fmha.attn_bias"]
    sys.modules.update({name: ModuleType(name) for name in names})
    sys.modules[names[2]].memory_efficient_attention = attention  # type: ignore[attr-defined]
    kinds = {"AttentionBias": Mask, "BlockDiagonalMask": Mask, "BlockDiagonalCausalMask": CausalMask}
    vars(sys.modules[names[3]]).update(kinds, BlockDiagonalCausalWithOffsetPaddedKeysMask=Mask)


replace_xformers()

from mistral_inference.args import TransformerArgs  # noqa: E402
from mistral_inference.cache import BufferCache  # noqa: E402
from mistral_inference.transformer import Transformer  # noqa: E402


def make(folder: str, params: dict[str, Any], old: bool = False) -> None:
    """Random weights, in one file of safetensors or of torch, and their logits."""
    torch.manual_seed(0)
    place = Path(folder)
    place.mkdir(parents=True)
    (place / "params.json").write_text(json.dumps(params))
    model = Transformer(TransformerArgs.from_dict(params))
    for name, each in model.named_parameters():
        torch.nn.init.normal_(each, mean=float("norm" in name or "ln_pre" in name), std=0.05)
    weights = {name: each.bfloat16().contiguous() for name, each in model.state_dict().items()}
    if old:
        torch.save(weights, place / "consolidated.00.pth")
    else:
        save_file(weights, place / "consolidated.safetensors")
    load(folder)


def load(folder: str) -> None:
    """The logits of a few tokens, and of an image between them, computed in float32."""
    model = Transformer.from_folder(folder, device="cpu").float()
    args, tower = model.args, model.args.vision_encoder
    tokens, images = torch.arange(14, 34), []
    if tower:
        side = tower.image_size
        images = [torch.linspace(-1, 1, 3 * side * side).reshape(3, side, side)]
        count = (side // tower.patch_size // tower.spatial_merge_size) ** 2
        tokens = torch.cat([tokens[:4], torch.full((count,), tower.image_token_id), tokens[4:]])
    cache = BufferCache(args.n_layers, 1, 64, args.n_kv_heads, args.head_dim, args.sliding_window)
    cache.to(torch.device("cpu"), torch.float32).reset()
    with torch.no_grad():
        logits = model(tokens, [len(tokens)], cache, images)
    torch.save({"tokens": tokens, "images": images, "logits": logits}, f"{folder}.pt")


if __name__ == "__main__":
    for job in json.loads(Path(sys.argv[1]).read_text()):
        {"make": make, "load": load}[job.pop("do")](**job)
