"""The rotary embedding, in the spellings of transformers 4, transformers 5 and Megatron-LM."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from reshard.families.config_entries import Args, Config, ConfigEntry, Values, contradiction, first


def rope_parameters(config: Config) -> Values:
    """The rotary embedding in the format of transformers 5, from its own keys or from those of transformers 4.

    Empty if the config has none. As in transformers 5, `rope_scaling` takes precedence over `rope_parameters`, and a
    `rope_theta` inside them over one next to them. Parameters by layer type are returned unchanged.
    """
    stated = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})
    if any(isinstance(value, Mapping) for value in stated.values()):
        return stated
    values = {**(config.get("rope_parameters") or {}), **config, **stated}
    base = {key: values[key] for key in ("rope_theta", PARTIAL_ROTARY_KEY) if values.get(key) is not None}
    if not base and not stated:
        return {}
    kind = first(stated, ("rope_type", "type"), "default")
    rest = {key: value for key, value in stated.items() if key not in ("type", "rope_type", *base)}
    return {"rope_type": kind, **base, **rest}


PARTIAL_ROTARY_KEY = "partial_rotary_factor"
"""The fraction of a head that is rotated. transformers 4 writes it next to `rope_theta`, transformers 5 within it."""


ROPE_TYPE_ALIASES = {"su": "longrope", "mrope": "default"}
"""Other names of rope types. The multimodal part of "mrope" is in `mrope_section`."""


def rope_contradictions(config: Config) -> Iterator[str]:
    """Contradictions between the spellings of the rotary embedding in one config, of which a reader uses only one."""
    stated: dict[str, Values] = {key: {key: config.get(key)} for key in ("rope_theta", PARTIAL_ROTARY_KEY)}
    for place in ("rope_scaling", "rope_parameters"):
        values = config.get(place)
        for key, value in values.items() if isinstance(values, Mapping) else ():
            same = "rope_type" if key == "type" else key
            stated.setdefault(same, {})[f"{place}.{key}"] = (
                ROPE_TYPE_ALIASES.get(value, value) if same == "rope_type" else value
            )
    for values in stated.values():
        yield from contradiction(values)


def rotary_base(rope: Config, default: float) -> int | float:
    """The rotary base, an integer if possible: Megatron-LM declares `--rotary-base` as an integer."""
    return _as_integer(rope.get("rope_theta", default))


def _as_integer(number: Any) -> int | float:
    """A number, as an integer if possible."""
    value = float(number)
    return int(value) if value.is_integer() else value


INTERPOLATION_ARGUMENT = "rotary_seq_len_interpolation_factor"
"""Megatron-LM's argument for the factor of a linear rope, by which positions are divided: an integer."""


# Megatron-Core's RotaryEmbedding fixes these constants of Llama 3; only the factor is an argument.
LLAMA3_DEFAULTS = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


class RotaryEmbedding(ConfigEntry):
    """The base of all rotary embeddings: keys of transformers 4 that `rope_parameters` replaces."""

    def spellings(self) -> tuple[str, ...]:
        return ("rope_theta", "rope_scaling", PARTIAL_ROTARY_KEY)


@dataclass(frozen=True)
class Rope(RotaryEmbedding):
    """The rotary embedding of all families but DeepSeek's: plain, linear, or scaled as in Llama 3.

    `fraction` is the default `partial_rotary_factor` of a family that has one; `assumed` is the complete rope if the
    config has none.
    """

    default_theta: float = 10000.0
    fraction: float | None = None
    assumed: Mapping[str, Any] = field(default_factory=dict)

    def contradictions(self, config: Config) -> Iterator[str]:
        yield from rope_contradictions(config)

    def to_args(self, config: Config) -> Values:
        rope = rope_parameters(config) or self.assumed
        args: Values = {
            "rotary_base": rotary_base(rope, self.default_theta),
            "use_rope_scaling": False,
            INTERPOLATION_ARGUMENT: None,
        }
        if self.fraction is not None:
            args["rotary_percent"] = first(rope, (PARTIAL_ROTARY_KEY,), self.fraction)
        if rope.get("rope_type") == "llama3":
            args.update(use_rope_scaling=True, rope_scaling_factor=rope["factor"])
        if rope.get("rope_type") == "linear":
            args[INTERPOLATION_ARGUMENT] = _as_integer(rope["factor"])
        return args

    def to_config(self, args: Args) -> Values:
        rope: Values = {"rope_theta": float(first(args, ("rotary_base",), self.default_theta))}
        if self.fraction is not None:
            rope[PARTIAL_ROTARY_KEY] = first(args, ("rotary_percent",), 1.0)
        divisor = float(first(args, (INTERPOLATION_ARGUMENT,), 1))
        if args.get("use_rope_scaling"):
            factor = first(args, ("rope_scaling_factor",), 8.0)
            return {"rope_parameters": {"rope_type": "llama3", **rope, "factor": factor, **LLAMA3_DEFAULTS}}
        if divisor != 1:
            return {"rope_parameters": {"rope_type": "linear", **rope, "factor": divisor}}
        return {"rope_parameters": {"rope_type": "default", **rope}}

    def differs(self, config: Config) -> Iterator[tuple[str, str]]:
        rope = rope_parameters(config)
        kind = ROPE_TYPE_ALIASES.get(rope.get("rope_type", "default"), rope.get("rope_type", "default"))
        if kind == "llama3":
            for name, value in LLAMA3_DEFAULTS.items():
                if rope.get(name, value) != value:
                    yield (
                        "rope_parameters",
                        f"{name} of the llama3 rope is {rope[name]}; Megatron-LM computes with {value}",
                    )
        elif kind not in ("default", "dynamic", "linear"):
            yield (
                "rope_parameters",
                f"rope_type is {kind!r}; Megatron-LM has no argument for it and computes an unscaled rope",
            )

    def notices(self, config: Config) -> Iterator[str]:
        rope = rope_parameters(config)
        if rope.get("rope_type") == "dynamic":
            yield DYNAMIC_ROPE_NOTE
        if rope.get("rope_type") == "linear" and not isinstance(_as_integer(rope["factor"]), int):
            yield f"factor of the linear rope is {rope['factor']}; Megatron-LM's command line has only integers"


class MultimodalRope(Rope):
    """A rope for time, height and width of an image, with the number of frequencies for each in `mrope_section`."""

    def to_args(self, config: Config) -> Values:
        section = rope_parameters(config).get("mrope_section")
        return {**super().to_args(config), "position_embedding_type": "mrope", "mrope_section": section}

    def to_config(self, args: Args) -> Values:
        rope = super().to_config(args)["rope_parameters"]
        section = first(args, ("mrope_section",))
        return {"rope_parameters": rope if section is None else {**rope, "mrope_section": list(section)}}


def yarn_of(args: Args) -> Values:
    """The YaRN that Megatron-Bridge notes in the fields of a model's config; empty for another rope.

    Source: `GPTModelProvider` of Megatron-Bridge 0.6.2, and its `yarn_*` fields.
    """
    if args.get("position_embedding_type") != "yarn":
        return {}
    names = {key: f"yarn_{key}" for key in ("original_max_position_embeddings", "beta_fast", "beta_slow")}
    names["factor"] = "yarn_rotary_scaling_factor"
    return {"rope_type": "yarn", **{key: args[name] for key, name in names.items() if args.get(name)}}


DYNAMIC_ROPE_NOTE = "dynamic rope scaling; Megatron-LM agrees up to max_position_embeddings, and not beyond"


class RopeLayers(ConfigEntry):
    """SmolLM3: which layers apply the rotary embedding; Megatron-LM's `no_rope_freq` lists those that do not.

    Source: `TransformerConfig` of megatron-core 0.13 to 0.16, `no_rope_freq_type` of Megatron-LM's arguments.py.
    """

    def to_args(self, config: Config) -> Values:
        layers = config.get("num_hidden_layers", 0)
        interval = first(config, ("no_rope_layer_interval",), 4)
        turned = config.get("no_rope_layers") or [(layer + 1) % interval for layer in range(layers)]
        if len(turned) < layers:
            raise ValueError(f"no_rope_layers is {turned!r}, for {layers} layers")
        return {"no_rope_freq": [int(not each) for each in turned[:layers]]}

    def to_config(self, args: Args) -> Values:
        skipped, layers = first(args, ("no_rope_freq",), 0), args.get("num_layers", 0)
        if isinstance(skipped, int):  # every N-th layer, counted from one; 0 means none
            skipped = [bool(skipped) and (layer + 1) % skipped == 0 for layer in range(layers)]
        return {"no_rope_layers": [int(not each) for each in skipped]}


# (key of the rope parameters, Megatron-LM's argument, default of both transformers and the DeepSeek-V3 code)
YARN_FIELDS = (
    ("factor", "rotary_scaling_factor", 1.0),
    ("original_max_position_embeddings", "original_max_position_embeddings", 4096),
    ("beta_fast", "beta_fast", 32.0),
    ("beta_slow", "beta_slow", 1.0),
    ("mscale", "mscale", 1.0),
    ("mscale_all_dim", "mscale_all_dim", 0.0),
)


@dataclass(frozen=True)
class LatentRope(RotaryEmbedding):
    """The rotary embedding of latent attention: plain or YaRN, whose parameters are fields of MLATransformerConfig.

    For a plain one, the YaRN parameters are set to neutral values, because Megatron-Core scales the
    softmax by them for any `rope_type`.
    """

    default_theta: float = 10000.0

    def contradictions(self, config: Config) -> Iterator[str]:
        yield from rope_contradictions(config)

    def to_args(self, config: Config) -> Values:
        rope = rope_parameters(config)
        args: Values = {"rotary_base": rotary_base(rope, self.default_theta), "use_rope_scaling": False}
        if rope.get("rope_type") != "yarn":
            return {
                **args,
                "rope_type": "rope",
                "rotary_scaling_factor": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 0.0,
            }
        return {
            **args,
            "rope_type": "yarn",
            **{arg: first(rope, (key,), default) for key, arg, default in YARN_FIELDS},
        }

    def to_config(self, args: Args) -> Values:
        rope: Values = {"rope_theta": float(first(args, ("rotary_base",), self.default_theta))}
        if first(args, ("rope_type",), "yarn") != "yarn":
            return {"rope_parameters": {"rope_type": "default", **rope}}
        yarn = {key: first(args, (arg,), default) for key, arg, default in YARN_FIELDS}
        return {"rope_parameters": {"rope_type": "yarn", **rope, **yarn}}

    def differs(self, config: Config) -> Iterator[tuple[str, str]]:
        rope = rope_parameters(config)
        if rope.get("rope_type", "default") not in ("default", "dynamic", "yarn"):
            yield (
                "rope_parameters",
                f"rope_type is {rope['rope_type']!r}; Megatron-LM's latent attention knows plain and yarn",
            )
        if rope.get("mscale", 1.0) != 1.0 and not rope.get("mscale_all_dim"):
            yield (
                "rope_parameters",
                "mscale without mscale_all_dim; transformers ignores it, Megatron-Core does not",
            )
        for key, default in (("attention_factor", None), ("truncate", True)):
            if rope.get(key) not in (None, default):
                yield (
                    "rope_parameters",
                    f"{key} of the yarn rope is {rope[key]}; Megatron-LM has no argument for it",
                )

    def notices(self, config: Config) -> Iterator[str]:
        rope = rope_parameters(config)
        if rope.get("rope_type") == "dynamic":
            yield DYNAMIC_ROPE_NOTE
        for key, arg, default in YARN_FIELDS:
            # Fields of MLATransformerConfig that have no flag in Megatron-LM and keep their defaults.
            if key == arg and "mscale" not in key and first(rope, (key,), default) != default:
                yield f"{key} of the yarn rope is {rope[key]}; Megatron-LM's command line has {default}"


def both_spellings(config: Config) -> Values:
    """`rope_parameters` of transformers 5 plus the equivalent `rope_theta` and `rope_scaling` of transformers 4.

    DeepSeek's and older remote code read `type` instead of `rope_type`, which transformers reads. Nothing is added to
    parameters by layer or type of layer, whose spellings differ from family to family.
    """
    rope = rope_parameters(config)
    stated = [*rope.values(), *(config.get("rope_parameters") or {}).values()]
    by_layer = isinstance(rope.get("rope_theta"), list) or any(isinstance(each, Mapping) for each in stated)
    if "rope_theta" not in rope or by_layer:
        return {}
    settings = {key: rope[key] for key in ("rope_theta", PARTIAL_ROTARY_KEY) if key in rope}
    scaling = {key: value for key, value in rope.items() if key not in settings}
    kind = (config.get("rope_scaling") or {}).get("type", rope["rope_type"])  # keep "mrope"
    legacy = None if scaling == {"rope_type": "default"} else {"type": kind, **scaling}
    return {"rope_parameters": rope, **settings, "rope_scaling": legacy}
