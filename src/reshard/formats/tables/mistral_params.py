"""`params.json` of Mistral's own code, and the `config.json` of transformers that says the same.

Sources: `TransformerArgs` of mistral_inference 1.6, transformers' converters, and vLLM's `configs/mistral.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

from reshard.base.errors import Problem, ReshardError
from reshard.families.config_map import count_layers
from reshard.families.dialects.mistral import ARCHITECTURES, SEEING
from reshard.families.rope import rope_parameters

Values = dict[str, Any]

SIZE_KEYS = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "head_dim": "head_dim",
    "hidden_dim": "intermediate_size",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "norm_eps": "rms_norm_eps",
    "vocab_size": "vocab_size",
}
VISION_KEYS = (
    *("hidden_size", "num_channels", "image_size", "patch_size", "intermediate_size"),
    *("num_hidden_layers", "num_attention_heads"),
)
"""Sizes of the vision tower, which have the same names on both sides."""
YARN_KEYS = {
    "factor": "factor",
    "original_max_position_embeddings": "original_max_position_embeddings",
    "beta": "beta_fast",
    "alpha": "beta_slow",
}
EXPERT_KEYS = {"num_experts": "num_local_experts", "num_experts_per_tok": "num_experts_per_tok"}
REQUIRED_VALUES: Values = {
    "model_type": "transformer",
    "activation": "silu",
    **dict.fromkeys(
        ("quantization", "multimodal", "lora", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim")
    ),
}
"""Keys that tell another model if they have other values."""
MERGER = "patch_merge"
"""What Mistral calls the projector of mistral3."""
LENGTH_KEYS = ("max_position_embeddings", "max_seq_len")
LENGTH_OF_TYPE = {"ministral3": 262144, "mistral3": 131072, "llava": 131072}
USUAL_LENGTH = 32768
"""What transformers' converters set where `params.json` has no length."""
ROPE_THETA_OF_TYPE = {"mixtral": 1000000.0, "ministral3": 1000000.0}
"""The rotary bases of transformers if a config has none; 10000 for the others."""
HEAD, BIAS = "output.weight", "vision_language_adapter.w_in.bias"
TOKEN_IDS = {"bos_token_id": 1, "eos_token_id": 2}
"""Those of all tokenizers of Mistral."""
IMAGE, BREAK, END = 10, 12, 13
"""The tokens of images in all tokenizers of Mistral."""


class DerivedConfig(NamedTuple):
    """A config.json, notes on what is assumed, and the keys of the language model that `params.json` records."""

    config: Values
    notes: list[str]
    recorded: Values


def config_of(params: Mapping[str, Any], tensors: Collection[str], file: str) -> DerivedConfig:
    """The config.json of the model with these parameters and tensors, which tell its biases. Raises ReshardError."""
    stated = {key: value for key, value in params.items() if value is not None}
    beyond = [
        f"{key} {stated[key]}"
        for key in REQUIRED_VALUES
        if key in stated and stated[key] != REQUIRED_VALUES[key]
    ]
    beyond += [f"moe.{key}" for key in stated.get("moe", ()) if key not in EXPERT_KEYS]
    beyond += _odd_rope(stated)
    if "moe" in stated and "vision_encoder" in stated:
        beyond.append("moe beside vision_encoder")
    if len({each for each in _window_list(stated) if each is not None}) > 1:
        beyond.append("windows of several sizes")
    if beyond:
        raise unsupported(beyond, file)
    try:
        return _derived_config(stated, BIAS in tensors)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ReshardError(
            "mistral-params-unreadable",
            "params.json does not describe a model",
            file=file,
            expected=f"{', '.join(SIZE_KEYS)} as numbers",
            found=f"no {error}" if isinstance(error, KeyError) else str(error),
            remedy="copy or download it again, or put the model's config.json beside it",
        ) from None


def _odd_rope(params: Mapping[str, Any]) -> Iterator[str]:
    """What is unlike Ministral 3, the only model with a scaled rotary embedding in both configs."""
    yarn, scaling = params.get("yarn"), params.get("llama_4_scaling")
    if not yarn and not scaling:
        return
    if not (isinstance(yarn, Mapping) and isinstance(scaling, Mapping)):
        yield "only one of yarn and llama_4_scaling"
    elif yarn.get("apply_scale") is not False:
        yield "yarn without apply_scale false"
    elif yarn.get(_ORIGINAL) != scaling.get(_ORIGINAL):
        yield f"two values of {_ORIGINAL}"


def _window_list(params: Mapping[str, Any]) -> list[Any]:
    """The windows of layers, if they are in a list."""
    window = params.get("sliding_window", params.get("_sliding_window"))
    return window if isinstance(window, list) else []


_ORIGINAL = "original_max_position_embeddings"


def unsupported(settings: list[str], file: str | None = None) -> ReshardError:
    """The error for a model that is only in one of the two layouts, or that both describe differently."""
    return ReshardError(
        Problem(
            "mistral-model-unsupported",
            "reshard does not convert this model between Mistral's own layout and the Hub's",
            file=file,
            expected="Mistral, Mixtral, Ministral, Ministral 3, Mistral 3 or Pixtral, as Mistral's code computes them",
            found=", ".join(settings),
            remedy="use the files of the Hub's layout, which most repositories have, too"
            if file
            else "pass --to huggingface, which keeps the model as it is",
        )
    )


def _derived_config(params: Mapping[str, Any], bias: bool) -> DerivedConfig:
    notes: list[str] = []
    text = _text(params, notes)
    tied = bool(params.get("tied_embeddings"))
    text["tie_word_embeddings"] = tied
    vision = params.get("vision_encoder")
    kind = text["model_type"] if vision is None else _seeing(vision)
    length = next((_number(params[key], key) for key in LENGTH_KEYS if key in params), None)
    if length is None:
        length = LENGTH_OF_TYPE.get(kind, USUAL_LENGTH)
        notes.append(f"params.json has no length of sequences: {length}, as transformers' converter sets it")
    text["max_position_embeddings"] = length
    recorded = dict(text)
    if "rope_theta" not in params:
        del recorded["rope_parameters"]
    if vision is None:
        config = {"architectures": [ARCHITECTURES[kind]], **text, **TOKEN_IDS}
        return DerivedConfig(config, notes, recorded)
    whole = {**_with_vision(kind, vision, bias), "tie_word_embeddings": tied, "text_config": text}
    return DerivedConfig(whole, notes, recorded)


def _seeing(vision: Mapping[str, Any]) -> str:
    return "mistral3" if vision.get("mm_projector_id") == MERGER else "llava"


def _text(params: Mapping[str, Any], notes: list[str]) -> Values:
    """The config of the language model; adds to `notes`."""
    params = {"n_kv_heads": params["n_heads"], **params}
    config: Values = {key: _number(params[own], own) for own, key in SIZE_KEYS.items()}
    window = params.get("sliding_window", params.get("_sliding_window"))
    layers = config["num_hidden_layers"]
    count_layers(layers)
    if "moe" in params:
        kind = "mixtral"
        config |= {key: _number(params["moe"][own], own) for own, key in EXPERT_KEYS.items()}
    elif isinstance(window, list):
        kind = "ministral"
        if layers % len(window):
            raise ValueError(f"{len(window)} windows for {layers} layers")
        windows = window * (layers // len(window))
        config["layer_types"] = [
            "full_attention" if each is None else "sliding_attention" for each in windows
        ]
        window = next(iter({each for each in window if each is not None}), None)
    else:
        kind = "ministral3" if "llama_4_scaling" in params else "mistral"
    theta = params.get("rope_theta")
    if theta is None:
        theta = 10000.0 if window else 1000000.0
        notes.append(
            f"params.json has no rope_theta: {theta:.0f}, as mistral_inference took it for such a model"
        )
    config["rope_parameters"] = _rope(params, float(theta))
    return {
        "model_type": kind,
        **config,
        "hidden_act": "silu",
        "sliding_window": None if window is None else int(window),
    }


def _rope(params: Mapping[str, Any], theta: float) -> Values:
    if "yarn" not in params:
        return {"rope_type": "default", "rope_theta": theta}
    yarn = {key: params["yarn"][own] for own, key in YARN_KEYS.items()}
    scale = params["llama_4_scaling"]["beta"]
    # Both scales are the same, and their ratio, which transformers computes with, is one.
    return {
        "rope_type": "yarn",
        "rope_theta": theta,
        **yarn,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": scale,
    }


def _with_vision(kind: str, vision: Mapping[str, Any], bias: bool) -> Values:
    tower = {key: _number(vision[key], key) for key in VISION_KEYS}
    theta = float(vision.get("rope_theta", 10000.0))
    config: Values = {
        "architectures": [ARCHITECTURES[kind]],
        "model_type": kind,
        "image_token_index": vision.get("image_token_id", IMAGE),
        "multimodal_projector_bias": bias,
        "projector_hidden_act": "gelu",
        "vision_feature_layer": -1,
        "vision_config": {"model_type": "pixtral", **tower, "rope_theta": theta, "hidden_act": "silu"},
    }
    if kind == "mistral3":
        return {**config, "spatial_merge_size": _number(vision["spatial_merge_size"], "spatial_merge_size")}
    return {**config, "vision_feature_select_strategy": "full", "image_seq_length": 1}


def _number(value: Any, key: str) -> int | float:
    kinds = (int, float) if key == "norm_eps" else (int,)
    if type(value) not in kinds or value <= 0:
        raise ValueError(f"{key} {value}")
    number: int | float = value
    return number


def params_of(config: Mapping[str, Any], tensors: Collection[str]) -> Values:
    """The params.json of a config's model with these tensors. Raises ReshardError for what has no place there."""
    is_seeing = config.get("model_type") in SEEING
    text = config["text_config"] if is_seeing else config
    odd = [*_odd_text(text), *(_odd_vision(config) if is_seeing else ())]
    if odd:
        raise unsupported(odd)
    heads = text["num_attention_heads"]
    sizes = {
        "head_dim": text.get("head_dim") or text["hidden_size"] // heads,
        "num_key_value_heads": text.get("num_key_value_heads") or heads,
    }
    params: Values = {own: sizes.get(key, text.get(key)) for own, key in SIZE_KEYS.items()}
    params |= _own_rope(text)
    window = _windows(text)
    if window is not None:
        params["sliding_window"] = window
    if text.get("model_type") == "mixtral":
        params["moe"] = {own: text[key] for own, key in EXPERT_KEYS.items()}
    if HEAD not in tensors:
        params["tied_embeddings"] = True
    if length := text.get("max_position_embeddings"):
        params |= dict.fromkeys(LENGTH_KEYS, length)
    if is_seeing:
        params["vision_encoder"] = _own_vision(config, BIAS in tensors)
    return params


def _odd_text(text: Mapping[str, Any]) -> Iterator[str]:
    """Settings of a language model that Mistral's own code does not have."""
    needed = (*(set(SIZE_KEYS.values()) - {"head_dim", "num_key_value_heads"}),)
    yield from (f"no {key}" for key in sorted(needed) if text.get(key) is None)
    if text.get("hidden_act", "silu") != "silu":
        yield f"hidden_act {text['hidden_act']}"
    rope = rope_parameters(text)
    kind = rope.get("rope_type", "default")
    if text.get("model_type") != "ministral3":
        yield from () if kind == "default" else (f"rope_type {kind}",)
    elif (
        kind != "yarn"
        or rope.get("mscale") != rope.get("mscale_all_dim")
        or "llama_4_scaling_beta" not in rope
    ):
        yield "a rotary embedding unlike that of Ministral 3"


def _odd_vision(config: Mapping[str, Any]) -> Iterator[str]:
    vision = config["vision_config"]
    yield from (f"no {key} in vision_config" for key in VISION_KEYS if vision.get(key) is None)
    if vision.get("hidden_act") != "silu":
        yield f"hidden_act {vision.get('hidden_act')} in vision_config"
    if config.get("vision_feature_layer", -1) != -1:
        yield f"vision_feature_layer {config['vision_feature_layer']}"


def _own_rope(text: Mapping[str, Any]) -> Values:
    rope, kind = rope_parameters(text), str(text.get("model_type"))
    params: Values = {"rope_theta": rope.get("rope_theta", ROPE_THETA_OF_TYPE.get(kind, 10000.0))}
    if kind == "ministral3":
        original = rope[_ORIGINAL]
        params["yarn"] = {**{own: rope[key] for own, key in YARN_KEYS.items()}, "apply_scale": False}
        params["llama_4_scaling"] = {_ORIGINAL: original, "beta": rope["llama_4_scaling_beta"]}
    return params


def _windows(text: Mapping[str, Any]) -> int | list[int | None] | None:
    """The window of attention: one for all layers, or one for each."""
    kind = text.get("model_type")
    window: int | None = text.get("sliding_window", 4096 if kind in ("mistral", "ministral") else None)
    if kind != "ministral":
        return window
    layers = text.get("layer_types") or ["sliding_attention"] * text["num_hidden_layers"]
    return [window if each == "sliding_attention" else None for each in layers]


def _own_vision(config: Mapping[str, Any], bias: bool) -> Values:
    vision = config["vision_config"]
    image = config.get("image_token_index", config.get("image_token_id", IMAGE))
    params: Values = {
        **{key: vision[key] for key in VISION_KEYS},
        "rope_theta": rope_parameters(vision).get("rope_theta", 10000.0),
        "max_image_size": vision["image_size"],
        "image_token_id": image,
        "image_break_token_id": BREAK,
        "image_end_token_id": END,
        "adapter_bias": bias,
    }
    if config["model_type"] == "mistral3":
        merge = config.get("spatial_merge_size", 2)
        return {
            **params,
            "mm_projector_id": MERGER,
            "spatial_merge_size": merge,
            "add_pre_mm_projector_layer_norm": True,
        }
    return params
