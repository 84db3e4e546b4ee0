"""How LitGPT names the tensors of its models: rules that turn the Hub's names into these.

The rows of queries, keys and values are in one tensor: one after another as `attn.qkv`, and by groups of heads as
`attn.attn` until 0.5.4. Sources: `litgpt/model.py` and the two scripts for converting of LitGPT 0.5.13, and commit
fabf765b, which changed the order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from reshard.families.renaming import Operation, Renaming, begun, inner, rule_of

LAYERS = "transformer.h."
HEAD = ("lm_head.weight", "lm_head.bias")
"""The only names that are the same on the Hub."""
QKV, OLD_QKV = "attn.qkv", "attn.attn"


def kind(settings: Mapping[str, Any]) -> str | None:
    """Which of the rules are for a model; None if none here are.

    LitGPT's own script tells by the name, also of Gemma-2b, which it takes for Gemma 2.
    """
    name, mlp = str(settings.get("name")), settings.get("mlp_class_name")
    if "falcon-" in name or settings.get("latent_attention") or settings.get("n_shared_expert"):
        return None
    if mlp == "GemmaMLP" and settings.get("post_mlp_norm"):
        return "gemma3" if settings.get("norm_qk") else "gemma2"
    begins = {"phi-3": "phi3", "phi-4": "phi3", "phi": "phi", "olmo-2-": "olmo2", "qwen3": "qwen3"}
    matched = next((each for begin, each in begins.items() if name.lower().startswith(begin)), None)
    if matched or mlp in ("LLaMAMLP", "GemmaMLP", "LLaMAMoE"):
        return matched or "llama"
    return "gpt_neox" if mlp == "GptNeoxMLP" else None


def renames(settings: Mapping[str, Any], *, old: bool = False) -> tuple[Renaming, ...] | None:
    """The rules for a model with these settings, whose heads are by group if it is `old`."""
    known = kind(settings)
    if known is None:
        return None
    if known == "gpt_neox":
        return tuple(_neox(old=old))
    norms = _NORMS.get(known, _TWO_NORMS)
    final = "model.final_layernorm." if known == "phi" else "model.norm."
    outer = begun(
        ("model.layers.", LAYERS), ("model.embed_tokens.", "transformer.wte."), (final, "transformer.ln_f.")
    )
    mlp = _mlp(known, has_experts=settings.get("mlp_class_name") == "LLaMAMoE")
    attention = {"self_attn.dense." if known == "phi" else "self_attn.o_proj.": "attn.proj."}
    attention |= {f"self_attn.{each}_norm.": f"attn.norm_{each}." for each in "qk"}
    return (*outer, *inner({**norms, **attention}, LAYERS), *mlp, *_fused_renamings(known, old=old))


_TWO_NORMS = {"input_layernorm.": "norm_1.", "post_attention_layernorm.": "norm_2."}
_AFTER = {
    "post_attention_layernorm.": "post_attention_norm.",
    "post_feedforward_layernorm.": "post_mlp_norm.",
}
_FOUR_NORMS = {"input_layernorm.": "norm_1.", "pre_feedforward_layernorm.": "norm_2.", **_AFTER}
_NORMS = {"gemma2": _FOUR_NORMS, "gemma3": _FOUR_NORMS, "olmo2": _AFTER}


def _mlp(known: str, *, has_experts: bool) -> Iterator[Renaming]:
    if known == "phi":
        yield from inner({"mlp.fc1.": "mlp.fc.", "mlp.fc2.": "mlp.proj."}, LAYERS)
        return
    if known == "phi3":
        halves = ("mlp.fc_1.weight", "mlp.fc_2.weight")
        yield rule_of("mlp.gate_up_proj.weight", halves, {"name": "Chunk", "dim": 0}, below=LAYERS)
        yield from inner({"mlp.down_proj.": "mlp.proj."}, LAYERS)
        return
    hub = ("gate_proj", "up_proj", "down_proj")
    if has_experts and known == "llama":
        hub = ("w1", "w3", "w2")
        yield from inner({"block_sparse_moe.": "mlp."}, LAYERS)
    place = r"(experts\.\d+)" if has_experts else "(mlp)"
    for name, own in zip(hub, ("fc_1", "fc_2", "proj"), strict=True):
        yield rule_of(rf"{place}\.{name}\.", rf"\1\.{own}\.", below=LAYERS)


_GROUPED: Operation = {"name": "UngroupHeads", "inverse": True}
_JOINED: Operation = {"name": "Split", "inverse": True}


def _fused_renamings(known: str, *, old: bool) -> Iterator[Renaming]:
    own, grouped = (OLD_QKV, (_GROUPED,)) if old else (QKV, ())
    for part in ("weight", "bias"):
        if known == "phi3":
            yield rule_of(f"self_attn.qkv_proj.{part}", f"{own}.{part}", *grouped, below=LAYERS)
        else:
            hub = tuple(f"self_attn.{each}_proj.{part}" for each in "qkv")
            yield rule_of(hub, f"{own}.{part}", _JOINED, *grouped, below=LAYERS)


def _neox(*, old: bool) -> Iterator[Renaming]:
    """GPT-NeoX, which has the heads by groups on the Hub, too."""
    yield from begun(
        ("gpt_neox.layers.", LAYERS),
        ("gpt_neox.embed_in.", "transformer.wte."),
        ("gpt_neox.final_layer_norm.", "transformer.ln_f."),
        ("embed_out.", "lm_head."),
    )
    pairs = {
        "attention.dense.": "attn.proj.",
        "mlp.dense_h_to_4h.": "mlp.fc.",
        "mlp.dense_4h_to_h.": "mlp.proj.",
    }
    yield from inner({**_TWO_NORMS, **pairs}, LAYERS)
    own, ungrouped = (OLD_QKV, ()) if old else (QKV, ({"name": "UngroupHeads"},))
    for part in ("weight", "bias"):
        yield rule_of(f"attention.query_key_value.{part}", f"{own}.{part}", *ungrouped, below=LAYERS)
