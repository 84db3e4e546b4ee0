"""How mlx-lm names the tensors of a model, where that differs from the Hub, and which of them it quantizes.

A `MlxNaming` has the rules of `sanitize` in mlx-lm 0.32.2 (`mlx_lm/models/*.py`), as `Renaming`s that turn the Hub's
tensors into MLX's; read in reverse, they turn them back. What `sanitize` removes is dropped by a named rule.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from typing import Any, NamedTuple

from reshard.families.outer_model import language_config
from reshard.families.renaming import Operation, Renaming, begun, rule_of


class RemovedTensors(NamedTuple):
    """Tensors that mlx-lm removes, by the beginnings of their names, and the rule for it."""

    rule: str
    names: re.Pattern[str]


REMOVED_VISION = RemovedTensors(
    "vision, which mlx-lm does not have",
    re.compile(
        r"(model\.)?(visual|vision_\w+|embed_vision|multi_modal_projector|mm_projector|patch_merge_mlp"
        r"|audio_tower|embed_audio)\."
    ),
)
REMOVED_MTP = RemovedTensors(
    "multi-token prediction, which mlx-lm does not have", re.compile(r"(model\.)?mtp(_layers)?\.")
)
REMOVED_SHARED = RemovedTensors(
    "keys and values of layers that share those of earlier ones, which mlx-lm does not have",
    re.compile(r".*\.self_attn\.(k_proj|v_proj|k_norm)\."),
)
REMOVED_ROUTER_BIAS = RemovedTensors(
    "the correction bias of routers, which mlx-lm does not have", re.compile(r".*e_score_correction_bias")
)


@dataclass(frozen=True)
class MlxNaming:
    """How mlx-lm names a model's tensors.

    `rules` make its tensors from the Hub's. `left` are those that it removes, REMOVED_SHARED only in the last
    `num_kv_shared_layers`; with `without_mtp`, also layers from `num_hidden_layers` on. It casts all tensors to one
    dtype, except those that stay `exact`. When it quantizes, it leaves the modules `kept` plain, and stores those that
    are `finer` in eight bits. These three are ends of names.
    """

    rules: tuple[Renaming, ...] = ()
    left: tuple[RemovedTensors, ...] = ()
    without_mtp: bool = False
    exact: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    finer: tuple[str, ...] = ()

    @cached_property
    def is_rounded(self) -> bool:
        """Whether a rule adds to tensors, which rounds them."""
        return any(operation["name"] == "Add" for rule in self.rules for operation in rule.operations)

    def leaves_out(self, name: str, config: Mapping[str, Any]) -> str | None:
        """The rule by which a tensor of the Hub is removed, or None."""
        text, found = language_config(config), _LAYER.match(name)
        layers, sharing = (_count(text, key) for key in ("num_hidden_layers", "num_kv_shared_layers"))
        left_of_all = layers - int(found[1]) if found and layers else inf
        if self.without_mtp and left_of_all <= 0:
            return REMOVED_MTP.rule
        others = (each for each in self.left if each is not REMOVED_SHARED or left_of_all <= sharing)
        return next((each.rule for each in others if each.names.match(name)), None)


def _count(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    return value if isinstance(value, int) else 0


_LAYER = re.compile(r"(?:model\.)?(?:language_model\.)?layers\.(\d+)\.")


_STACK = {"name": "MergeModulelist", "dim": 0}
_SWAP = {"name": "Transpose", "dim0": 1, "dim1": 2}
_HALVES = {"name": "Chunk", "dim": 1}
_ROWS = {"name": "Chunk", "dim": 0}
_EVEN_ODD = {"name": "Interleave", "dim": 1}


def _stacked_experts(experts: str, to: str, names: Mapping[str, str] | None = None) -> Iterator[Renaming]:
    """Experts that the Hub has one by one, as one tensor for each projection."""
    names = names or {name: name for name in ("gate_proj", "up_proj", "down_proj")}
    for hub, mlx in names.items():
        yield rule_of(f"{experts}.*.{hub}.weight", f"{to}.{mlx}.weight", _STACK)


def _unfused_experts(experts: str, to: str, *first: Operation) -> Iterator[Renaming]:
    """Experts that the Hub stacks with gate and up in one tensor; `first` are done before these are cut apart."""
    parts = (f"{to}.gate_proj.weight", f"{to}.up_proj.weight")
    yield rule_of(f"{experts}.gate_up_proj", parts, *first, _HALVES)
    yield rule_of(
        f"{experts}.down_proj(?![.\\w])", f"{to}.down_proj.weight", *((_SWAP,) if _SWAP in first else ())
    )


def _linear_experts(module: str, to: str, cut: Operation) -> Iterator[Renaming]:
    """Granite's MLPs, with gate and up in one linear."""
    parts = (f"{to}.gate_proj.weight", f"{to}.up_proj.weight")
    yield rule_of(f"{module}.input_linear.weight", parts, cut)
    yield rule_of(f"{module}.output_linear.weight", f"{to}.down_proj.weight")


_W123 = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_BLOCK_SPARSE = tuple(_stacked_experts("block_sparse_moe.experts", "block_sparse_moe.switch_mlp", _W123))
_SWITCH = tuple(_stacked_experts("mlp.experts", "mlp.switch_mlp"))
SWITCH_RULES = (*_SWITCH, *_BLOCK_SPARSE)
"""The experts of every mixture that the Hub has one by one and MLX stacks below `switch_mlp`."""
_ABSORBED = rule_of("kv_b_proj.weight", ("embed_q.weight", "unembed_out.weight"), {"name": "AbsorbLatent"})
_ROUTER = rule_of("mlp.gate.weight", "mlp.gate.gate_proj.weight")
_LAST = {"name": "ChannelsLast"}
_MOVED = rule_of("conv1d.weight", "conv1d.weight", _LAST)
_CONV = rule_of("conv.conv.weight", "conv.conv.weight", _LAST)
_ONE = {"name": "Add", "by": 1.0}
_PLUS_ONE = tuple(
    rule_of(f"{norm}.weight", f"{norm}.weight", _ONE)
    for norm in (
        *("input_layernorm", "post_attention_layernorm"),
        *("self_attn.q_norm", "self_attn.k_norm", "model.norm"),
    )
)


def _tower(hub: str) -> Iterator[Renaming]:
    """The vision tower, which mlx-vlm keeps."""
    yield from begun((hub, "vision_tower."))
    yield rule_of("patch_embed.proj.weight", "patch_embed.proj.weight", _LAST)


_NESTED = (
    *_tower("model.visual."),
    *begun(("model.language_model.", "language_model.model."), ("lm_head.", "language_model.lm_head.")),
)
_OUTER = (
    *_tower("visual."),
    *begun(("model.", "language_model.model."), ("lm_head.", "language_model.lm_head.")),
)

PLAIN_NAMING = MlxNaming()
MULTIMODAL_NAMING = MlxNaming(left=(REMOVED_VISION,))
MOE_NAMING = MlxNaming(_SWITCH)
ROUTED_NAMING = MlxNaming(_SWITCH, finer=("mlp.gate",))
GATED_NAMING = MlxNaming(_SWITCH, kept=("mlp.gate",))
EXACT_ROUTER_BIAS = ("e_score_correction_bias",)
LATENT_NAMING = MlxNaming(
    (*_SWITCH, _ABSORBED), without_mtp=True, exact=EXACT_ROUTER_BIAS, kept=("mlp.gate",)
)
DELTA_NAMING = MlxNaming(
    (*_SWITCH, _MOVED, *_PLUS_ONE), left=(REMOVED_MTP,), finer=("mlp.gate", "mlp.shared_expert_gate")
)

_AS_ON_THE_HUB = (
    *("cohere", "cohere2", "ernie4_5", "exaone", "exaone4", "gemma", "gemma2", "gemma3_text", "glm", "glm4"),
    *(
        "helium",
        "hunyuan_v1_dense",
        "internlm2",
        "internlm3",
        "iquestcoder",
        "llama",
        "ministral3",
        "mistral",
        "nemotron",
    ),
    *("olmo2", "olmo3", "phi", "phi3", "qwen2", "qwen3", "seed_oss", "smollm3", "stablelm", "starcoder2"),
)
BAILING_NAMING = MlxNaming(
    (*_SWITCH, _ROUTER), without_mtp=True, exact=("expert_bias",), finer=("mlp.gate.gate_proj",)
)
GEMMA4_NAMING = MlxNaming(
    tuple(_unfused_experts("experts", "experts.switch_glu")), left=(REMOVED_SHARED,), finer=("router.proj",)
)
GEMMA4_SEES = replace(
    GEMMA4_NAMING,
    rules=(*begun(("model.language_model.", "language_model.model.")), *GEMMA4_NAMING.rules),
    left=(REMOVED_VISION, REMOVED_SHARED),
)
_STEP = {
    r"moe\.gate\.": r"mlp\.gate\.gate\.",
    "moe.router_bias": "mlp.gate.router_bias",
    "share_expert.": "mlp.share_expert.",
    **{f"moe.{each}.": f"mlp.switch_mlp.{each}." for each in ("gate_proj", "up_proj", "down_proj")},
}
GRANITE_WITHOUT_EXPERTS = MlxNaming((_MOVED, *_linear_experts("shared_mlp", "mlp", _ROWS)))
_KNOWN: dict[str, MlxNaming] = {
    **dict.fromkeys(_AS_ON_THE_HUB, PLAIN_NAMING),
    "granite": MlxNaming(finer=("self_attn.o_proj", "mlp.down_proj", "lm_head")),
    "mimo": MlxNaming(left=(REMOVED_MTP,)),
    **dict.fromkeys(("qwen2_moe", "olmoe"), MOE_NAMING),
    "qwen3_moe": ROUTED_NAMING,
    **dict.fromkeys(("deepseek", "deepseek_v2"), GATED_NAMING),
    **dict.fromkeys(
        ("deepseek_v3", "deepseek_v32", "glm_moe_dsa", "kimi_k2", "joyai_llm_flash", "glm4_moe_lite"),
        LATENT_NAMING,
    ),
    "kimi_k25": replace(LATENT_NAMING, left=(REMOVED_VISION,)),
    "llama4": MlxNaming(
        tuple(_unfused_experts("feed_forward.experts", "feed_forward.experts", _SWAP)), left=(REMOVED_VISION,)
    ),
    "glm4_moe": replace(GATED_NAMING, without_mtp=True, exact=EXACT_ROUTER_BIAS),
    "solar_open": replace(GATED_NAMING, without_mtp=True, exact=EXACT_ROUTER_BIAS),
    "dots1": MlxNaming(tuple(_stacked_experts("mlp.experts", "mlp.experts")), kept=("mlp.gate",)),
    "ernie4_5_moe": MlxNaming(_SWITCH, left=(REMOVED_ROUTER_BIAS, REMOVED_MTP)),
    **dict.fromkeys(("mixtral", "phimoe"), MlxNaming(_BLOCK_SPARSE)),
    "minimax_m2": MlxNaming(_BLOCK_SPARSE, exact=EXACT_ROUTER_BIAS, finer=("block_sparse_moe.gate",)),
    "gpt_oss": MlxNaming(
        (
            *_unfused_experts("mlp.experts", "mlp.experts", _SWAP, _EVEN_ODD),
            rule_of(
                "mlp.experts.gate_up_proj_bias",
                ("mlp.experts.gate_proj.bias", "mlp.experts.up_proj.bias"),
                _EVEN_ODD,
                _HALVES,
            ),
            rule_of("mlp.experts.down_proj_bias", "mlp.experts.down_proj.bias"),
        ),
        finer=("router",),
    ),
    "qwen3_next": DELTA_NAMING,
    "qwen3_5": replace(
        DELTA_NAMING,
        rules=(*_NESTED, _MOVED, *_PLUS_ONE),
        left=(REMOVED_VISION, REMOVED_MTP),
        exact=("A_log",),
        finer=(),
    ),
    "qwen3_5_moe": replace(
        DELTA_NAMING,
        rules=(*_NESTED, *_unfused_experts("mlp.experts", "mlp.switch_mlp"), _MOVED, *_PLUS_ONE),
        left=(REMOVED_VISION, REMOVED_MTP),
        exact=("A_log",),
    ),
    "qwen3_vl": MlxNaming(_NESTED, left=(REMOVED_VISION,)),
    "qwen3_vl_moe": MlxNaming(
        (*_NESTED, *_unfused_experts("mlp.experts", "mlp.switch_mlp", _SWAP)),
        left=(REMOVED_VISION,),
        finer=("mlp.gate",),
    ),
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl"), MlxNaming(_OUTER, left=(REMOVED_VISION,))),
    **dict.fromkeys(("gemma3", "mistral3"), MULTIMODAL_NAMING),
    "gemma4_text": GEMMA4_NAMING,
    **dict.fromkeys(("gemma4", "gemma4_unified"), GEMMA4_SEES),
    "muse_glimmer": MlxNaming(tuple(begun(("model.language_model.", "model."))), left=(REMOVED_VISION,)),
    "minimax_m3_vl": MlxNaming(
        _BLOCK_SPARSE, left=(REMOVED_VISION,), exact=EXACT_ROUTER_BIAS, finer=("block_sparse_moe.gate",)
    ),
    "mimo_v2_flash": MlxNaming(_SWITCH, left=(REMOVED_MTP,), exact=EXACT_ROUTER_BIAS, kept=("mlp.gate",)),
    "step3p5": MlxNaming(
        (*(rule_of(hub, own) for hub, own in _STEP.items()), *_PLUS_ONE),
        left=(REMOVED_MTP,),
        without_mtp=True,
        exact=("router_bias",),
        finer=("mlp.gate.gate",),
    ),
    "bailing_moe": BAILING_NAMING,
    "bailing_hybrid": replace(
        BAILING_NAMING,
        rules=(*BAILING_NAMING.rules, _ABSORBED),
        kept=("attention.embed_q", "attention.unembed_out"),
    ),
    "afmoe": MlxNaming(
        tuple(_stacked_experts("mlp.experts", "mlp.experts")), exact=("expert_bias",), finer=("router.gate",)
    ),
    "exaone_moe": MlxNaming(
        (*_SWITCH, rule_of("mlp.e_score_correction_bias", "mlp.gate.e_score_correction_bias")),
        left=(REMOVED_MTP,),
        exact=EXACT_ROUTER_BIAS,
        kept=("mlp.gate",),
    ),
    "gpt_neox": MlxNaming(
        tuple(
            begun(("gpt_neox.", "model."), ("model.layers.", "model.h."), ("embed_out.", "model.embed_out."))
        )
    ),
    "granitemoehybrid": MlxNaming(
        (_MOVED, *_linear_experts("block_sparse_moe", "block_sparse_moe.switch_mlp", _HALVES)),
        finer=("router.layer",),
    ),
    "kimi_linear": MlxNaming(
        (
            *_stacked_experts("block_sparse_moe.experts", "mlp.switch_mlp", _W123),
            rule_of("block_sparse_moe.shared_experts.", "mlp.shared_experts."),
            rule_of("block_sparse_moe.gate.weight", "mlp.gate.weight"),
            rule_of("block_sparse_moe.gate.e_score_correction_bias", "mlp.e_score_correction_bias"),
            *(rule_of(f"{each}_conv1d.weight", f"{each}_conv.conv.weight", _LAST) for each in "qkv"),
            _ABSORBED,
        ),
        left=(REMOVED_MTP,),
        exact=(*EXACT_ROUTER_BIAS, "A_log", "dt_bias"),
        finer=("mlp.gate",),
    ),
    "gemma3n": MULTIMODAL_NAMING,
    "lfm2": MlxNaming((_CONV,)),
    "lfm2_moe": MlxNaming(
        (
            _CONV,
            *_stacked_experts("feed_forward.experts", "feed_forward.switch_mlp", _W123),
            *(rule_of(f"feed_forward.{hub}.", f"feed_forward.{own}.") for hub, own in _W123.items()),
        ),
        exact=("expert_bias",),
        finer=("feed_forward.gate",),
    ),
    "mellum": ROUTED_NAMING,
    "mistral4": MlxNaming((*_unfused_experts("mlp.experts", "mlp.switch_mlp"), _ABSORBED)),
    "nemotron_h": MlxNaming(
        (
            _MOVED,
            *_stacked_experts("mixer.experts", "mixer.switch_mlp", {"up_proj": "fc1", "down_proj": "fc2"}),
        ),
        left=(REMOVED_MTP,),
        exact=(*EXACT_ROUTER_BIAS, "A_log"),
        kept=("mixer.gate",),
    ),
}
"""By `model_type`."""


def naming(config: Mapping[str, Any]) -> MlxNaming | None:
    """How mlx-lm names the tensors of a config's model; None if that is not declared here."""
    model_type, architectures = config.get("model_type"), config.get("architectures")
    if config.get("norm_head") or architectures == ["BailingMoeV3ForCausalLM"]:
        return None  # rows of a head that mlx-lm normalizes, and another model of the same name
    if model_type == "granitemoehybrid" and not config.get("num_local_experts"):
        return GRANITE_WITHOUT_EXPERTS
    return _KNOWN.get(model_type) if isinstance(model_type, str) else None


def known() -> tuple[str, ...]:
    """The model types whose names are declared."""
    return tuple(sorted(_KNOWN))
