"""How Mistral's own code names the tensors of its models: rules that turn the Hub's names into these.

The rows of queries and keys are in neighbouring pairs, which the Hub has half a head apart. Sources: the modules of
mistral_inference 1.6, and transformers' converters of Mistral, Mistral 3, Ministral 3 and Pixtral.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from reshard.families.renaming import Renaming, begun, in_all_layers, inner, rule_of

ARCHITECTURES = {
    "mistral": "MistralForCausalLM",
    "ministral": "MinistralForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "mistral3": "Mistral3ForConditionalGeneration",
    "llava": "LlavaForConditionalGeneration",
}
"""The classes of transformers, by `model_type`; Pixtral 12B is a llava."""
SEEING = ("mistral3", "llava")
TEXT = tuple(each for each in ARCHITECTURES if each not in SEEING)
DENSE = tuple(each for each in TEXT if each != "mixtral")
LAYERS, TOWER = "layers.", "vision_encoder."


def renames(config: Mapping[str, Any]) -> tuple[Renaming, ...] | None:
    """The rules for the model of a config; None for a model that Mistral's own code does not have."""
    text, vision = config.get("text_config"), config.get("vision_config")
    if config.get("model_type") in TEXT:
        mlp = _EXPERTS if config.get("model_type") == "mixtral" else _MLP
        return (*_outer_renamings("model.", ""), *_layers(mlp))
    if (
        config.get("model_type") not in SEEING
        or not isinstance(text, Mapping)
        or not isinstance(vision, Mapping)
    ):
        return None
    if text.get("model_type") not in DENSE or vision.get("model_type") != "pixtral":
        return None
    return (*_outer_renamings("language_model.model.", "language_model."), *_tower(), *_layers(_MLP))


def _outer_renamings(model: str, head: str) -> Iterator[Renaming]:
    """What is outside the layers of the language model, which are below `model` on the Hub."""
    yield from begun((f"{model}layers.", LAYERS), (f"{model}embed_tokens.", "tok_embeddings."))
    yield from begun((f"{model}norm.", "norm."), (f"{head}lm_head.", "output."))


_W123 = (("gate_proj", "w1"), ("down_proj", "w2"), ("up_proj", "w3"))


_MLP = {f"mlp.{hub}.": f"feed_forward.{own}." for hub, own in _W123}
_EXPERTS = {"block_sparse_moe.": "feed_forward."}


def _layers(mlp: Mapping[str, str]) -> Iterator[Renaming]:
    pairs = {
        "input_layernorm.": "attention_norm.",
        "post_attention_layernorm.": "ffn_norm.",
        **{f"self_attn.{each}_proj.": f"attention.w{each}." for each in "vo"},
        **mlp,
    }
    yield from inner(pairs, LAYERS)
    for each, heads in (("q", "num_attention_heads"), ("k", "num_key_value_heads")):
        names = (f"self_attn.{each}_proj.weight", f"attention.w{each}.weight")
        yield rule_of(*names, {**_IN_PAIRS, "heads": heads}, below=LAYERS)


_IN_PAIRS = {"name": "PermuteForRope", "inverse": True}


def _tower() -> Iterator[Renaming]:
    """The vision tower, and what is between it and the language model."""
    yield from begun(
        ("vision_tower.", TOWER),
        ("multi_modal_projector.linear_1.", "vision_language_adapter.w_in."),
        ("multi_modal_projector.linear_2.", "vision_language_adapter.w_out."),
        ("multi_modal_projector.patch_merger.", "patch_merger."),
        ("multi_modal_projector.norm.", "pre_mm_projector_norm."),
    )
    yield from inner({f"attention.{each}_proj.": f"attention.w{each}." for each in "vo"}, TOWER)
    yield from inner({f"feed_forward.{hub}.": f"feed_forward.{own}." for hub, own in _W123}, TOWER)
    for each in "qk":
        names = (f"attention.{each}_proj.weight", f"attention.w{each}.weight")
        yield rule_of(*names, {**_IN_PAIRS, "subconfig_key": "vision_config"}, below=TOWER)


def wanted(config: Mapping[str, Any], tensors: Collection[str]) -> set[str]:
    """The tensors that a model of this config has at least, whose layers are alike: those of any are of all."""
    text, vision = config.get("text_config", config), config.get("vision_config", {})
    tied = config.get("tie_word_embeddings", text.get("tie_word_embeddings"))
    names = {"tok_embeddings.weight", "norm.weight", *(() if tied else ("output.weight",))}
    for place, part in ((LAYERS, text), (f"{TOWER}transformer.{LAYERS}", vision)):
        names |= in_all_layers(place, part.get("num_hidden_layers", 0), tensors)
    return names
