"""The table between Hugging Face's `config.json` and the `args` that Megatron-LM stores in a checkpoint.

An entry declares once how some config keys and some arguments express the same fact, and is used in both
directions. `COMMON` has what all families share; a family adds its own entries.

The arguments are those that `--use-checkpoint-args` restores (`load_args_from_checkpoint` in Megatron-LM's
`training/checkpointing.py`) and those that `core_transformer_config_from_args` and `gpt_builder` need to build the
same model. Choices of the run rather than of the model are left to the user: layout, `moe_grouped_gemm`,
`moe_token_dispatcher_type`, loss coefficients.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from reshard.families.config_entries import (
    NEGATED,
    UNSET,
    Activation,
    Args,
    Config,
    ConfigEntry,
    Const,
    DenseFirst,
    ExpertWidth,
    HeadDim,
    Key,
    KeyValueHeads,
    LatentNorms,
    LayerTypes,
    PrecisionFlags,
    RouterGroups,
    SharedExperts,
    SigmoidNorm,
    SlidingWindow,
    SparseStep,
    Values,
    same_key,
)
from reshard.families.dims import MOST_MODULES
from reshard.families.rope import (
    LatentRope,
    RopeLayers,
    both_spellings,
    rope_contradictions,
)


def count_layers(layers: object) -> None:
    """Raise ValueError if there are too many layers to list."""
    if isinstance(layers, int) and layers > MOST_MODULES:
        raise ValueError(f"{layers} layers")


OF_ALL = ("tie_word_embeddings", "dtype", "torch_dtype")
"""Keys at the top level of a larger model's config that also apply to the language model."""


def _nested(config: Config, path: tuple[str, ...], inner: Config) -> Values:
    """The update that replaces the config at `path` by `inner`: its outermost key, with everything around `inner`."""
    if len(path) == 1:
        return {path[0]: inner}
    return {path[0]: {**config[path[0]], **_nested(config[path[0]], path[1:], inner)}}


@dataclass(frozen=True)
class ConfigMap:
    """The entries of one family, for both directions; of its language model only, if that is part of a larger model.

    Values that the given side does not state are absent from the result, never guessed. A missing Megatron-LM switch
    counts as off, and the result states it if transformers would assume on.
    """

    model_type: str
    entries: tuple[ConfigEntry, ...]
    path: tuple[str, ...] = ()

    def text(self, config: Config) -> Config:
        """The config of the language model, at `path`; a config without that path is itself the language model's.

        Top-level values that apply to all parts take precedence. The number of layers is added if transformers 5 only
        lists them.
        """
        inner = self._inner(config)
        text = config if inner is None else {**inner, **{key: config[key] for key in OF_ALL if key in config}}
        layers = text.get("layers_block_type")
        return {"num_hidden_layers": len(layers), **text} if isinstance(layers, list) else text

    def whole(self, config: Config, text: Config) -> Values:
        """`config` with the values of its language model replaced by `text`."""
        inner = self._inner(config)
        if inner is None:
            return dict(text)
        before = self.text(config)
        changed = {key: value for key, value in text.items() if before.get(key, UNSET) != value}
        outer = {key: value for key, value in changed.items() if key in config or key in OF_ALL}
        own = {key: value for key, value in changed.items() if key in inner or key not in OF_ALL}
        return {**config, **outer, **_nested(config, self.path, {**inner, **own})}

    def _inner(self, config: Config) -> Config | None:
        """The config at `path`; None if the config is flat."""
        for key in self.path:
            if not isinstance(config.get(key), Mapping):
                return None
            config = config[key]
        return config if self.path else None

    def to_args(self, config: Config) -> Values:
        """Megatron-LM arguments for a `config.json` of transformers 4 or 5."""
        count_layers(config.get("num_hidden_layers"))
        return {name: value for entry in self.entries for name, value in entry.to_args(config).items()}

    def to_config(self, args: Args) -> Values:
        """A `config.json` in the keys of transformers 5 (see `portable_config`) for Megatron-LM arguments."""
        count_layers(args.get("num_layers"))
        return {key: value for entry in self.entries for key, value in entry.to_config(args).items()}

    def differs(self, config: Config) -> list[tuple[str, str]]:
        """Where Megatron-LM builds a different model than the config describes, without a trace in the tensors.

        Each comes with the config key that describes the difference.
        """
        return [difference for entry in self.entries for difference in entry.differs(config)]

    def notices(self, config: Config) -> list[str]:
        """Where Megatron-LM's model is limited, or needs more than its arguments."""
        return [text for entry in self.entries for text in entry.notices(config)]

    def contradictions(self, config: Config) -> list[str]:
        """Where the config states one fact twice, with different values."""
        return [text for entry in self.entries for text in entry.contradictions(config)]


COMMON: tuple[ConfigEntry, ...] = (
    Key("num_hidden_layers", "num_layers"),
    same_key("hidden_size"),
    Key("intermediate_size", "ffn_hidden_size"),
    same_key("num_attention_heads"),
    KeyValueHeads(),
    same_key("vocab_size"),
    same_key("max_position_embeddings", also=("seq_length",)),
    Key("rms_norm_eps", "norm_epsilon", also=("layernorm_epsilon",)),  # until 0.15, since 0.16
    Key("initializer_range", "init_method_std"),
    same_key("attention_dropout", default=0.0),
    Key(
        "tie_word_embeddings",
        "untie_embeddings_and_output_weights",
        default=False,
        assumed=False,
        values=NEGATED,
    ),
    PrecisionFlags(),
    Const(
        args={
            "normalization": "RMSNorm",
            "apply_layernorm_1p": False,
            "apply_query_key_layer_scaling": False,
            "hidden_dropout": 0.0,
            "position_embedding_type": "rope",
            "add_position_embedding": True,
            "use_rotary_position_embeddings": True,
            "rotary_percent": 1.0,
            "rotary_interleaved": False,
        }
    ),
)
SWIGLU = Activation(args={"swiglu": True, "squared_relu": False}, computed={"hidden_act": "silu"})
NO_BIAS = Const(args={"add_qkv_bias": False, "add_bias_linear": False})
QKV_BIAS = Const(args={"add_qkv_bias": True, "add_bias_linear": False})
QK_NORM = Const(args={"qk_layernorm": True})
NO_QK_NORM = Const(args={"qk_layernorm": False})
# If the config does not say, transformers ties the head of these families.
TIED = Key("tie_word_embeddings", "untie_embeddings_and_output_weights", default=True, values=NEGATED)
GROUPED_HEADS: tuple[ConfigEntry, ...] = (HeadDim(), Const(args={"multi_latent_attention": False}))
DERIVED_HEADS: tuple[ConfigEntry, ...] = (
    HeadDim(written=False),
    Const(args={"multi_latent_attention": False}),
)
NO_WINDOW = Const(args={"window_size": None})
ONE_WINDOW = Const(args={"window_attn_skip_freq": None})
ROPE_EVERYWHERE = Const(args={"no_rope_freq": None})

ROUTER: tuple[ConfigEntry, ...] = (
    Key("num_experts_per_tok", "moe_router_topk"),
    ExpertWidth(),
)
SOFTMAX_ROUTER = Const(args={"moe_router_score_function": "softmax", "moe_router_enable_expert_bias": False})
# Scores are a softmax over all experts. With norm_topk_prob they are normalised over the chosen ones, which equals
# a softmax over the chosen ones alone: Megatron-LM's default.
NORM_TOPK = Key("norm_topk_prob", "moe_router_pre_softmax", default=False, assumed=False, values=NEGATED)
# Experts in every layer, all with the width that the config states.
EXPERTS_EVERYWHERE: tuple[ConfigEntry, ...] = (
    Key("intermediate_size", "moe_ffn_hidden_size", also=("ffn_hidden_size",)),
    SOFTMAX_ROUTER,
    Const(args={"moe_router_pre_softmax": False, "moe_layer_freq": 1}),
)
QWEN_EXPERTS: tuple[ConfigEntry, ...] = (
    *ROUTER,
    Key("num_experts", "num_experts", aliases=("num_local_experts",)),
    SOFTMAX_ROUTER,
    NORM_TOPK,
    SparseStep(),
)


LATENT_ATTENTION: tuple[ConfigEntry, ...] = (
    Const(args={"multi_latent_attention": True}, config={"attention_bias": False}),
    LatentRope(),
    LatentNorms(),
    NO_BIAS,
    QK_NORM,
    same_key("q_lora_rank", none=None),
    same_key("kv_lora_rank"),
    Key("qk_nope_head_dim", "qk_head_dim"),
    Key("qk_rope_head_dim", "qk_pos_emb_head_dim"),
    same_key("v_head_dim"),
)
DEEPSEEK_EXPERTS: tuple[ConfigEntry, ...] = (
    *ROUTER,
    Key("n_routed_experts", "num_experts", aliases=("num_local_experts",)),
    DenseFirst(),
    SharedExperts(),
    Key("routed_scaling_factor", "moe_router_topk_scaling_factor", none=1.0),
    Const(args={"moe_router_dtype": "fp32"}),
)
MTP = Key("num_nextn_predict_layers", "mtp_num_layers", aliases=("num_mtp_layers",), default=0, none=0)
SIGMOID_ROUTER: tuple[ConfigEntry, ...] = (
    Const(args={"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}),
    RouterGroups(),
    SigmoidNorm(),
)


def config_map(
    model_type: str, architecture: str, entries: tuple[ConfigEntry, ...], path: tuple[str, ...] = ()
) -> ConfigMap:
    """The map of a family with this `model_type` and `architectures: [architecture]` in config.json."""
    says = () if path else (Const(config={"model_type": model_type, "architectures": [architecture]}),)
    usual = (
        (Activation, SWIGLU),
        (SlidingWindow, NO_WINDOW),
        (LayerTypes, ONE_WINDOW),
        (RopeLayers, ROPE_EVERYWHERE),
    )
    unless = [const for kind, const in usual if not any(isinstance(entry, kind) for entry in entries)]
    named = {entry.arg: entry.key for entry in entries if isinstance(entry, Key)}
    common = [
        entry
        for entry in COMMON
        if not isinstance(entry, Key) or named.get(entry.arg, entry.key) == entry.key
    ]
    return ConfigMap(model_type, (*says, *common, *entries, *unless), path)


def portable_config(config: Config, dtype: str, table: ConfigMap | None = None) -> Values:
    """A `config.json` that transformers 4 and 5 and serving engines read alike, for weights of `dtype`.

    Nothing in `config` is lost or changed, except the dtype and `use_cache`. Keys that only some readers look for
    are added: both spellings of the rotary embedding and of the dtype, and everything else that
    the `table` of the family provides (`num_experts` in addition to `num_local_experts`, `scoring_func` …).
    """
    text = table.text(config) if table else config
    implied = table.to_config(table.to_args(text)) if table else {}
    written = {"dtype": dtype, "torch_dtype": dtype, "use_cache": True}
    if any(rope_contradictions(text)):  # only the user can know which one is true
        implied.pop("rope_parameters", None)
        text = {**implied, **text, **written}
    else:
        text = {**implied, **text, **both_spellings({**implied, **text}), **written}
    return table.whole(config, text) if table else dict(text)
