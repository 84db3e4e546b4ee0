"""Values of a config.json that no model has, or no family reads, in its own words."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Iterator, Mapping
from typing import Any

from reshard.base.errors import type_and_message
from reshard.families.config_map import ConfigMap
from reshard.families.dims import MAX_NUMBER

_NUMBERS = re.compile(
    r".*_(size|dim|rank|heads|layers|experts|groups?|per_tok|replace|window|scalar|theta|factor|eps)"
)
_SCALES = re.compile(
    r".*multipliers?|.*soft_?cap(ping)?|clip_.*|(?!max_).*window(_size|_len)?|scale_(emb|depth|embeddings)|"
    r".*(logits?|residual|embedding|depth|value|route|routed)_scal(e|ing)(_factor)?"
)
"""Names of settings that change what is computed: constants to multiply with, caps, windows."""
_OBJECTS = ("rope_parameters", "rope_scaling", "quantization_config", "text_config")
_LISTS = ("architectures", "layer_types", "mlp_layer_types", "mlp_only_layers", "no_rope_layers")
_SWITCHES = ("tie_word_embeddings", "attention_bias", "mlp_bias", "norm_topk_prob", "use_sliding_window")
_ROPES = ("full_attention", "sliding_attention")
"""Keys of `rope_parameters` for kinds of layers, whose values are objects too."""


def why(error: Exception, config: Mapping[str, Any]) -> str:
    """The unusual values of a config that caused an error; else the numbers that it lacks, or the error itself."""
    lacking = (f"{key}: null" for key, value in config.items() if value is None and _NUMBERS.fullmatch(key))
    return ", ".join(unusual(config)) or ", ".join(lacking) or type_and_message(error)


def unusual(config: Mapping[str, Any], above: str = "") -> Iterator[str]:
    """The values of another kind than a model can have, by key: `head_dim: 'x'`."""
    for key, value in config.items():
        if value is None and not (above and key == "rope_theta"):
            if key not in _ROPES:
                continue
        elif key in (*_OBJECTS, *_ROPES) and isinstance(value, Mapping):
            yield from unusual(value, f"{above}{key}.")
            continue
        if not _is_usual(key, value):
            yield f"{above}{key}: {reprlib.repr(value)}"


def beyond(table: ConfigMap, text: Mapping[str, Any]) -> str:
    """The scales, caps and windows of a model that the family of `table` does not read; empty without any.

    They are known by their names, since nothing else is known of the model.
    """
    size = text.get("head_dim") or (text.get("hidden_size") or 0) // (text.get("num_attention_heads") or 1)
    usual = {"attention_multiplier": size**-0.5 if size else None}
    odd = {
        key: value
        for key, value in text.items()
        if _SCALES.fullmatch(key) and value not in (None, False, 0, 1, [], usual.get(key))
    }
    if text.get("use_sliding_window") is False:
        odd.pop("sliding_window", None)
    args = table.to_args(text)
    unread = [key for key in odd if table.to_args({**text, key: None}) == args]
    return ", ".join(f"{key} is {reprlib.repr(odd[key])}" for key in unread)


def _is_usual(key: str, value: Any) -> bool:
    if key in (*_OBJECTS, *_ROPES):
        return isinstance(value, Mapping)
    if key == "rope_type":
        return isinstance(value, str)
    if key in _LISTS:
        return isinstance(value, list)
    if key in _SWITCHES:
        return isinstance(value, bool)
    if not _NUMBERS.fullmatch(key):
        return True
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    of_whole = not key.endswith(("_theta", "_factor", "_eps", "_scalar"))  # the others count something
    return is_number and 0 <= value < MAX_NUMBER and not (of_whole and isinstance(value, float))
