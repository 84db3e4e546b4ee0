"""Facts that a `config.json` and the arguments of Megatron-LM both express, each declared once for both directions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from reshard.base.errors import ReshardError
from reshard.families.dims import sparse_layers

Config = Mapping[str, Any]
Args = Mapping[str, Any]
Values = dict[str, Any]

RULE = "config.json and Megatron-LM arguments"
NEGATED = {True: False, False: True}
UNSET = object()


def first(source: Mapping[str, Any], names: Iterable[str], default: Any = None) -> Any:
    """The first of `names` that has a value in `source`."""
    return next((source[name] for name in names if source.get(name) is not None), default)


class ConfigEntry:
    """A fact that both sides express, or a remark. What the given side does not state is left out of the other."""

    def to_args(self, config: Config) -> Values:
        """The arguments that express `config`."""
        return {}

    def to_config(self, args: Args) -> Values:
        """The config that expresses `args`."""
        return {}

    def completed(self, wanted: Args, args: Args) -> Values:
        """The config that expresses `args`, with missing arguments taken from `wanted`."""
        return self.to_config({**wanted, **args})

    def spellings(self) -> tuple[str, ...]:
        """Other config keys with the same meaning."""
        return ()

    def differs(self, config: Config) -> Iterator[tuple[str, str]]:
        """Where Megatron-LM computes a different model than the config describes, without a trace in the tensors.

        Each comes with the config key that describes the difference.
        """
        yield from ()

    def notices(self, config: Config) -> Iterator[str]:
        """Where Megatron-LM's model is limited, or needs more than its arguments."""
        yield from ()

    def contradictions(self, config: Config) -> Iterator[str]:
        """Where the config states one fact twice, with different values."""
        yield from ()


def contradiction(stated: Mapping[str, Any]) -> Iterator[str]:
    """A description of the values, each with the place that states it, if they are not all the same."""
    values = [value for value in stated.values() if value is not None]
    if any(value != values[0] for value in values):
        yield ", ".join(f"{place} is {value!r}" for place, value in stated.items() if value is not None)


@dataclass(frozen=True)
class Key(ConfigEntry):
    """One value under two names.

    `also` are further arguments with the same value, `aliases` alternative config keys. `default` is the value that
    transformers assumes if the key is absent; `assumed` is Megatron-LM's default for a missing argument, if
    transformers would assume something else; `none` is the config value that Megatron-LM spells None; `values` is a
    one-to-one translation of values. Raises ReshardError for a value that has no translation.
    """

    key: str
    arg: str
    also: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    default: Any = None
    assumed: Any = None
    none: Any = UNSET
    values: Mapping[Any, Any] | None = None

    def to_args(self, config: Config) -> Values:
        value = first(config, (self.key, *self.aliases), self.default)
        if value == self.none:
            return {self.arg: None}
        if value is None:
            return {}
        return dict.fromkeys((self.arg, *self.also), _translate(self.key, value, self.values))

    def to_config(self, args: Args) -> Values:
        value = first(args, (self.arg, *self.also), self.assumed)
        if value is None:
            return {} if self.none is UNSET else {self.key: self.none}
        inverse = self.values and {new: old for old, new in self.values.items()}
        return {self.key: _translate(self.arg, value, inverse)}

    def completed(self, wanted: Args, args: Args) -> Values:
        return self.to_config(args if any(name in args for name in (self.arg, *self.also)) else wanted)

    def spellings(self) -> tuple[str, ...]:
        return self.aliases

    def contradictions(self, config: Config) -> Iterator[str]:
        yield from contradiction({name: config.get(name) for name in (self.key, *self.aliases)})


def _translate(name: str, value: Any, values: Mapping[Any, Any] | None) -> Any:
    if values is None:
        return value
    if value not in values:
        raise ReshardError(
            "config-value-not-expressible",
            f"{name} has a value that the other side cannot express",
            rule=RULE,
            expected=", ".join(map(repr, values)),
            found=repr(value),
        )
    return values[value]


def same_key(name: str, **options: Any) -> Key:
    """One value with the same name on both sides."""
    return Key(name, name, **options)


@dataclass(frozen=True)
class Const(ConfigEntry):
    """Constants of a family: these arguments, and these config keys.

    Keys in `computed` are in the config too, and affect the computation without a trace in names and shapes of tensors.
    """

    args: Values = field(default_factory=dict)
    config: Values = field(default_factory=dict)
    computed: Values = field(default_factory=dict)

    def to_args(self, config: Config) -> Values:
        return dict(self.args)

    def to_config(self, args: Args) -> Values:
        return {**self.config, **self.computed}

    def differs(self, config: Config) -> Iterator[tuple[str, str]]:
        yield from _otherwise(config, self.computed)

    def notices(self, config: Config) -> Iterator[str]:
        says = {
            key: value for key, value in self.config.items() if key not in ("model_type", "architectures")
        }
        yield from (text for _, text in _otherwise(config, says))


class Activation(Const):
    """The computation of the MLP, in Megatron-LM's arguments and in config keys."""


SYNONYMS = {"swish": "silu"}
"""Config values that mean the same as others, as in transformers."""


def _otherwise(config: Config, values: Values) -> Iterator[tuple[str, str]]:
    for key, value in values.items():
        stated = config.get(key)
        if (
            stated is not None
            and stated != value
            and not (isinstance(stated, str) and SYNONYMS.get(stated) == value)
        ):
            yield key, f"{key} is {stated!r}; Megatron-LM's model of this family computes {value!r}"


class KeyValueHeads(ConfigEntry):
    """`num_key_value_heads`; Megatron-LM reads the number of groups only if grouped attention is on."""

    def to_args(self, config: Config) -> Values:
        heads = config.get("num_attention_heads")
        groups = first(config, ("num_key_value_heads",), heads)
        return (
            {} if groups is None else {"num_query_groups": groups, "group_query_attention": groups != heads}
        )

    def to_config(self, args: Args) -> Values:
        name = "num_query_groups" if args.get("group_query_attention", True) else "num_attention_heads"
        groups = first(args, (name, "num_attention_heads"))
        return {} if groups is None else {"num_key_value_heads": groups}


@dataclass(frozen=True)
class HeadDim(ConfigEntry):
    """`head_dim`, by default the hidden size divided by the heads.

    For families whose config lacks that key (though their code reads it), it is written only if it is not the default.
    """

    written: bool = True

    def to_args(self, config: Config) -> Values:
        size = config.get("head_dim") or _quotient(config, "hidden_size", "num_attention_heads")
        return {} if size is None else {"kv_channels": size}

    def to_config(self, args: Args) -> Values:
        default = _quotient(args, "hidden_size", "num_attention_heads")
        size = args.get("kv_channels") or default
        return {} if size is None or (not self.written and size == default) else {"head_dim": size}


def _quotient(source: Mapping[str, Any], dividend: str, divisor: str) -> int | None:
    if not source.get(dividend) or not source.get(divisor):
        return None
    return int(source[dividend] // source[divisor])


@dataclass(frozen=True)
class Biases(ConfigEntry):
    """Biases of the query, key and value projection (`qkv`), and of all linear layers (`linear`).

    transformers saves those of InternLM3 as Llama's, whose `attention_bias` is also that of the output projection.
    Megatron-LM's `add_bias_linear` is for the output projection and the MLP, and implies a bias of linear_qkv. Biases
    that it cannot build are described by two more arguments, which only reshard reads.
    """

    qkv: str
    linear: str

    def to_args(self, config: Config) -> Values:
        qkv, linear, output = self._of(config)
        args = {"add_qkv_bias": qkv, "add_bias_linear": linear}
        return {**args, "linear_qkv_bias": qkv, "linear_proj_bias": output} if self._unbuilt(config) else args

    def spellings(self) -> tuple[str, ...]:
        return ("attention_bias", "mlp_bias")

    def _of(self, config: Config) -> tuple[bool, bool, bool]:
        """Whether queries, keys and values have biases, whether the MLP has, and the output projection."""
        names = ((self.qkv, "attention_bias"), (self.linear, "mlp_bias"))
        qkv, linear = (bool(first(config, each, False)) for each in names)
        output = first(config, ("attention_out_bias",), qkv if self.qkv == "attention_bias" else linear)
        return qkv, linear, bool(output)

    def _unbuilt(self, config: Config) -> bool:
        qkv, linear, output = self._of(config)
        return output != linear or (linear and not qkv)

    def to_config(self, args: Args) -> Values:
        linear = bool(args.get("add_bias_linear", False))
        qkv = first(args, ("linear_qkv_bias",), linear or args.get("add_qkv_bias", False))
        return {self.qkv: bool(qkv), self.linear: linear}

    def differs(self, config: Config) -> Iterator[tuple[str, str]]:
        if self._unbuilt(config):
            qkv, linear, output = self._of(config)
            biases = {"linear_qkv": qkv, "linear_proj": output, "the MLP": linear}
            has = " and ".join(name for name, biased in biases.items() if biased)
            yield (
                self.qkv,
                f"only {has} have biases; Megatron-Core builds them in linear_qkv only (add_qkv_bias), or in "
                "linear_qkv, linear_proj and the MLP (add_bias_linear)",
            )


def is_latent(args: Args) -> bool:
    """Whether attention is multi-head latent attention."""
    return bool(args.get("multi_latent_attention"))


def window_of(args: Args) -> int | None:
    """The tokens before its own that a token attends to; None if it attends to all, which -1 says too."""
    size = args.get("window_size")
    return size[0] if size and size[0] >= 0 else None


@dataclass(frozen=True)
class SlidingWindow(ConfigEntry):
    """`sliding_window` counts the token itself; the left side of Megatron-LM's `window_size` does not.

    If the layers with a window are `listed` (see `LayerTypes`), a model without one lists none, and keeps the default
    here: transformers needs a number even then.
    """

    default: int | None
    listed: bool = False

    def to_args(self, config: Config) -> Values:
        window = config.get("sliding_window", self.default)
        return {"window_size": (window - 1, 0)} if window else {}

    def to_config(self, args: Args) -> Values:
        window = window_of(args)
        if window is None:
            return {} if self.listed else {"sliding_window": None}
        return {"sliding_window": window + 1}


@dataclass(frozen=True)
class FullAttention(ConfigEntry):
    """Every layer has full attention, unless Qwen's `use_sliding_window` is on or dots1 (`switched` off) has a window.

    With `late`, the window applies to layers from `max_window_layers` on; transformers 5 lists them as `layer_types`.
    """

    late: bool = True
    switched: bool = True

    def to_config(self, args: Args) -> Values:
        return {"use_sliding_window": False} if self.switched else {"sliding_window": None}

    def differs(self, config: Config) -> Iterator[tuple[str, str]]:
        window, context = config.get("sliding_window", 4096), config.get("max_position_embeddings")
        if window and self._is_windowed(config) and (context is None or window < context):
            difference = f"some layers attend to {window} tokens"
            yield "sliding_window", f"{difference}; Megatron-LM's model of this family attends to all"

    def _is_windowed(self, config: Config) -> bool:
        if config.get("layer_types"):
            return "sliding_attention" in config["layer_types"]
        late = first(config, ("max_window_layers",), 28 if self.switched else 62)
        begin = late if self.late else 0
        on = bool(config.get("use_sliding_window")) or not self.switched
        return on and begin < config["num_hidden_layers"]


@dataclass(frozen=True)
class LayerTypes(ConfigEntry):
    """Which layers have sliding-window attention; by default, every `full`-th layer has full attention.

    `assumed` is the engine's default if its arguments do not say: the window in all layers (0), or in all but every
    N-th layer.
    """

    full: int = 2
    assumed: int = 0

    def to_args(self, config: Config) -> Values:
        windowed = [int(kind == "sliding_attention") for kind in config.get("layer_types") or ()]
        full = first(config, ("sliding_window_pattern", "_sliding_window_pattern"), self.full)
        return {"window_attn_skip_freq": windowed or full}

    def to_config(self, args: Args) -> Values:
        skip, layers = first(args, ("window_attn_skip_freq",), self.assumed), args.get("num_layers", 0)
        if window_of(args) is None:
            skip = [0] * layers
        if isinstance(skip, int):  # every skip-th layer has full attention, counted from one; 0 means none
            skip = [not skip or (layer + 1) % skip for layer in range(layers)]
        return {"layer_types": ["sliding_attention" if each else "full_attention" for each in skip]}


class PrecisionFlags(ConfigEntry):
    """The dtype, which Megatron-LM keeps as two flags."""

    def to_args(self, config: Config) -> Values:
        dtype = first(config, ("dtype", "torch_dtype"))
        return {} if dtype is None else {"bf16": dtype == "bfloat16", "fp16": dtype == "float16"}

    def to_config(self, args: Args) -> Values:
        if args.get("bf16") is None and args.get("fp16") is None:
            return {}
        if args.get("bf16"):
            return {"dtype": "bfloat16"}
        return {"dtype": "float16" if args.get("fp16") else "float32"}


def moe_layer_freq(sparse: Sequence[bool]) -> int | list[int]:
    """1 if all layers are sparse: with 1, Megatron-Core stacks the layers in a checkpoint; with a list, it does not."""
    return 1 if all(sparse) else [int(layer) for layer in sparse]


class SparseStep(ConfigEntry):
    """Qwen: every `decoder_sparse_step`-th layer has experts, except those in `mlp_only_layers`."""

    def to_args(self, config: Config) -> Values:
        step, dense = first(config, ("decoder_sparse_step",), 1), first(config, ("mlp_only_layers",), ())
        layers = range(config.get("num_hidden_layers", 0))
        return {"moe_layer_freq": moe_layer_freq([i not in dense and (i + 1) % step == 0 for i in layers])}

    def to_config(self, args: Args) -> Values:
        layers = args.get("num_layers", 0)
        sparse = sparse_layers(first(args, ("moe_layer_freq",), 1), layers)
        return {"decoder_sparse_step": 1, "mlp_only_layers": [i for i in range(layers) if i not in sparse]}


@dataclass(frozen=True)
class DenseFirst(ConfigEntry):
    """DeepSeek: the first `first_k_dense_replace` layers (or `default`) have no experts, all others have.

    The argument is a list even if all layers are sparse, as in mcore-bridge (`hf_to_mcore_config`) and Megatron-Bridge:
    with a list, Megatron-Core does not stack the layers in a checkpoint.
    For some families, transformers reads only `mlp_layer_types`, so it is `listed` as well.
    """

    default: int = 0
    listed: bool = False

    def to_args(self, config: Config) -> Values:
        dense = first(config, ("first_k_dense_replace",), self.default)
        layers = config.get("num_hidden_layers", 0)
        sparse = [i >= dense for i in range(layers)]
        if config.get("first_k_dense_replace") is None and config.get("mlp_layer_types"):  # glm4_moe_lite
            sparse = [kind == "sparse" for kind in config["mlp_layer_types"][:layers]]
        return {"moe_layer_freq": [int(layer) for layer in sparse]}

    def to_config(self, args: Args) -> Values:
        layers = args.get("num_layers", 0)
        sparse = sparse_layers(first(args, ("moe_layer_freq",), 1), layers)
        if sparse != tuple(range(layers - len(sparse), layers)):
            raise ReshardError(
                "dense-layers-not-leading",
                "config.json of this family can only say that the leading layers are dense",
                rule=RULE,
                found=f"moe_layer_freq={args.get('moe_layer_freq')}",
            )
        types = ["sparse" if layer in sparse else "dense" for layer in range(layers)]
        return {"first_k_dense_replace": layers - len(sparse)} | (
            {"mlp_layer_types": types} if self.listed else {}
        )


def _expert_width(args: Args) -> Any:
    """The width of experts; Megatron-LM's default is that of a dense MLP."""
    return first(args, ("moe_ffn_hidden_size", "ffn_hidden_size"))


class ExpertWidth(ConfigEntry):
    """`moe_intermediate_size`, the width of one expert."""

    def to_args(self, config: Config) -> Values:
        width = config.get("moe_intermediate_size")
        return {} if width is None else {"moe_ffn_hidden_size": width}

    def to_config(self, args: Args) -> Values:
        width = _expert_width(args)
        return {} if width is None else {"moe_intermediate_size": width}


@dataclass(frozen=True)
class SharedExperts(ConfigEntry):
    """DeepSeek states the number of shared experts, Megatron-LM their total width.

    None are written as 0: transformers multiplies by the number, so null fails.
    """

    key: str = "n_shared_experts"

    def to_args(self, config: Config) -> Values:
        count, size = config.get(self.key), config.get("moe_intermediate_size")
        return {"moe_shared_expert_intermediate_size": count * size} if count and size else {}

    def to_config(self, args: Args) -> Values:
        width, size = args.get("moe_shared_expert_intermediate_size"), _expert_width(args)
        if not width or not size:
            return {self.key: 0}
        if width % size:
            raise ReshardError(
                "shared-experts-not-whole",
                "the shared experts are not a whole number of experts",
                rule=RULE,
                found=f"moe_shared_expert_intermediate_size={width}, experts of width {size}",
            )
        return {self.key: width // size}


class RouterGroups(ConfigEntry):
    """Group-limited routing; one group means no grouping. DeepSeek-V3 scores a group by its 2 best experts."""

    best = 2

    def to_args(self, config: Config) -> Values:
        if first(config, ("n_group",), 1) == 1:
            return {"moe_router_num_groups": None, "moe_router_group_topk": None}
        return {"moe_router_num_groups": config["n_group"], "moe_router_group_topk": config["topk_group"]}

    def to_config(self, args: Args) -> Values:
        if not args.get("moe_router_group_topk"):  # without it, Megatron-Core ignores the number of groups
            return {"n_group": 1, "topk_group": 1}
        groups = first(args, ("moe_router_num_groups",), 1)
        return {"n_group": groups, "topk_group": args["moe_router_group_topk"]}

    def differs(self, config: Config) -> Iterator[tuple[str, str]]:
        groups, chosen = first(config, ("n_group",), 1), config.get("topk_group") or 1
        best = config.get("num_experts_per_tok", 0) // chosen
        if groups > chosen and best != self.best:
            scored = "best expert" if self.best == 1 else f"{self.best} best experts"
            yield (
                "n_group",
                f"a group is scored by its {scored}; Megatron-Core takes topk / group_topk = {best}",
            )


@dataclass(frozen=True)
class SigmoidNorm(ConfigEntry):
    """`norm_topk_prob` of a sigmoid router: Megatron-Core normalises the scores of chosen experts if topk is above 1.

    Source: `topk_routing_with_score_function` of megatron-core 0.16.1.
    """

    key: str = "norm_topk_prob"

    def to_args(self, config: Config) -> Values:
        return {"moe_router_pre_softmax": True}

    def to_config(self, args: Args) -> Values:
        return {self.key: first(args, ("moe_router_topk",), 2) > 1}

    def differs(self, config: Config) -> Iterator[tuple[str, str]]:
        several = first(config, ("num_experts_per_tok",), 2) > 1
        if bool(first(config, (self.key,), True)) != several:
            does = "always normalises them" if several else "does not normalise one"
            yield self.key, f"{self.key} is {not several}; Megatron-Core's sigmoid router {does}"


class LatentNorms(ConfigEntry):
    """transformers normalises low-rank queries, keys and values with an epsilon of its own."""

    def notices(self, config: Config) -> Iterator[str]:
        epsilon = config.get("rms_norm_eps", 1e-6)
        if epsilon != 1e-6:
            yield f"rms_norm_eps is {epsilon}; inside latent attention transformers takes 1e-06, Megatron-Core does not"
