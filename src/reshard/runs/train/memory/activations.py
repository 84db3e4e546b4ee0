"""What a forward pass keeps for the backward pass, in bytes per token: counted from the operations of a layer.

The layer is that of transformers 5 (`Qwen3DecoderLayer` and similar ones). Each
operation keeps what its gradient needs: a product both factors, a linear layer its input, a norm the input
in float32 and the normalized values, attention its queries, keys, values and output.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from reshard.base.errors import UNUSABLE, Problem, ReshardError
from reshard.families import declared
from reshard.families.outer_model import language_config
from reshard.families.rules import Dims


@dataclass(frozen=True)
class LayerWidths:
    """Widths of a layer, in elements. `experts` are the active experts per token; 0 in a dense layer."""

    layers: int
    hidden: int
    heads: int
    query: int
    key: int
    value: int
    ffn: int
    vocab: int
    qk_norm: bool = False
    router: int = 0
    experts: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0
    sparse: int = 0
    """Number of layers with experts."""

    @property
    def groups(self) -> int:
        """Number of key-value heads."""
        return self.heads * self.key // self.query

    @staticmethod
    def of(config: Mapping[str, Any]) -> LayerWidths:
        """The widths in a config.json, or in its text model's config. Raises ReshardError if a size is missing."""
        try:
            return LayerWidths._of(language_config(config))
        except UNUSABLE as error:
            raise ReshardError(
                Problem(
                    "activations-unknown",
                    "config.json does not say how much memory activations take",
                    found=f"{type(error).__name__}: {error}",
                    remedy="watch the memory of the first step",
                    severity="warning",
                )
            ) from None

    @staticmethod
    def _of(config: Mapping[str, Any]) -> LayerWidths:
        family = declared(config.get("model_type"))
        if family is None:
            return _plain(config)
        args = family.config.to_args(config)
        dims = Dims.from_args(args, int(config["vocab_size"]))
        latent = dims.kv_lora > 0
        return LayerWidths(
            layers=dims.layers,
            hidden=dims.hidden,
            heads=dims.heads,
            query=dims.heads * (dims.qk_nope + dims.qk_rope if latent else dims.head_dim),
            key=dims.heads * (dims.qk_nope + dims.qk_rope) if latent else dims.groups * dims.head_dim,
            value=dims.heads * dims.v_head if latent else dims.groups * dims.head_dim,
            ffn=dims.ffn,
            vocab=dims.vocab,
            qk_norm=dims.qk_norm,
            router=dims.experts,
            experts=int(args.get("moe_router_topk") or 0) if dims.experts else 0,
            expert_ffn=dims.expert_ffn,
            shared_ffn=dims.shared_ffn,
            sparse=len(dims.sparse),
        )


def _plain(config: Mapping[str, Any]) -> LayerWidths:
    """The widths of a dense model, under the names that nearly all configs use."""
    hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    size = int(config.get("head_dim") or hidden // heads)
    groups = int(config.get("num_key_value_heads") or heads)
    return LayerWidths(
        layers=int(config["num_hidden_layers"]),
        hidden=hidden,
        heads=heads,
        query=heads * size,
        key=groups * size,
        value=groups * size,
        ffn=int(config.get("intermediate_size") or 4 * hidden),
        vocab=int(config["vocab_size"]),
    )


@dataclass(frozen=True)
class KeptBytes:
    """How tensors are kept: bytes per element of computations, and of the residual stream.

    They differ under autocast, where weights and residual stream have 32 bits. `frozen` weights need no gradient, so
    nothing is kept for it. `repeated` keys and values are as wide as queries: sdpa needs that if there is a mask.
    `scores` is the bytes per element of the attention matrix, if it is kept.
    """

    computed: int = 2
    residual: int = 2
    frozen: bool = False
    repeated: bool = False
    scores: int = 0


def of_layers(widths: LayerWidths, kept: KeptBytes, length: int) -> int:
    """Bytes per token that all layers keep together. `length` is that of a sequence, in tokens."""
    dense = widths.layers - widths.sparse
    attention = _attention(widths, kept, length)
    return (
        widths.layers * attention
        + dense * _mlp(widths.hidden, widths.ffn, kept)
        + widths.sparse * _experts(widths, kept)
    )


def of_one_layer(widths: LayerWidths, kept: KeptBytes, length: int) -> int:
    """Bytes per token that the largest layer keeps."""
    mlps = [_experts(widths, kept)] if widths.sparse else []
    if widths.sparse < widths.layers:
        mlps.append(_mlp(widths.hidden, widths.ffn, kept))
    return _attention(widths, kept, length) + max(mlps)


def of_ends(widths: LayerWidths, kept: KeptBytes) -> int:
    """Bytes per token that the last norm keeps, and the head for its input."""
    return _norm(widths.hidden, kept) + kept.computed * widths.hidden


def between_layers(widths: LayerWidths, kept: KeptBytes) -> int:
    """Bytes per token passed from layer to layer: all that is kept if layers are recomputed."""
    return kept.residual * widths.hidden


def _norm(width: int, kept: KeptBytes) -> int:
    """The input in float32, and unless the weight is frozen, the factor that is multiplied with it."""
    return width * (4 + (0 if kept.frozen else kept.residual))


def _linears(width: int, count: int, kept: KeptBytes) -> int:
    """The input of `count` linear layers that share it; the adapters of frozen layers each cast it separately."""
    copies = count if kept.frozen and kept.computed < 4 else 1
    return copies * width * kept.computed


def _attention(widths: LayerWidths, kept: KeptBytes, length: int) -> int:
    w, c = widths, kept.computed
    key, value = (w.query, w.query) if kept.repeated else (w.key, w.value)
    inner = c * (w.query + key + value + w.query)  # the input and output of attention
    inner += w.heads * (4 + kept.scores * length)  # the sum of each row; the matrix, unless it is recomputed
    if w.qk_norm:
        inner += _norm(w.query, kept) + _norm(w.key, kept)
    return _norm(w.hidden, kept) + _linears(w.hidden, 3, kept) + inner


def _mlp(hidden: int, ffn: int, kept: KeptBytes) -> int:
    """Gate, activated gate and up, and their product, which is the input of the last linear layer."""
    inner = kept.computed * 3 * ffn + _linears(ffn, 1, kept)
    return _norm(hidden, kept) + _linears(hidden, 2, kept) + inner


def _experts(widths: LayerWidths, kept: KeptBytes) -> int:
    """Each expert has its own tokens: their input and output are kept in addition to what an MLP keeps."""
    w, c = widths, kept.computed
    routed = w.experts * c * (2 * w.hidden + 4 * w.expert_ffn)
    return _norm(w.hidden, kept) + c * w.hidden + (4 + c) * w.router + routed + 4 * c * w.shared_ffn
