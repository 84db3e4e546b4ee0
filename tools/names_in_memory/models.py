"""Where each model has parts with rules of their own, and which of its weights are one tensor under two names."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from reshard.families.in_memory import renamings
from reshard.families.renaming import saved
from tests.genuine.every_type import small_configs


def models(rules: dict[str, Any], tell: Callable[[str], None]) -> dict[str, Any]:
    """By class: its model type, the prefix of its base model, its parts, and its tied weights.

    A part has the class and the model type that it always has, or the key of the config that names its type.
    """
    import transformers
    from transformers.utils import logging

    logging.set_verbosity_error()
    found: dict[str, Any] = {}
    for name in sorted({*_classes()}):
        kind = getattr(transformers, name, None)
        if kind is None:
            continue
        found[name] = next((each for each in _entries(kind, rules)), None) or _of_class(kind)
        tell(name)
    return found


def _entries(kind: Any, rules: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """What is known of a model with the default config, or else with small ones."""
    import torch

    makers = (lambda: [kind.config_class()], lambda: small_configs(kind))
    for make in makers:
        with suppress(Exception):  # a package that is not installed, or a config without defaults
            for config in make():
                with torch.device("meta"):
                    yield entry(kind._from_config(config), rules)


def _of_class(kind: Any) -> dict[str, Any]:
    """What a class tells without a model of it."""
    pairs = getattr(kind, "_tied_weights_keys", None) or {}
    return {
        "type": kind.config_class.model_type,
        "base": kind.base_model_prefix,
        "tied": {again: [first, "", False] for again, first in pairs.items() if not set("()[]*") & {*again}},
        "parts": {},
    }


def _names(value: Any) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)


def _classes() -> Iterator[str]:
    from transformers.models.auto import modeling_auto as auto

    tables = (
        auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    )
    for table in tables:
        for names in table.values():
            yield from _names(names)


def entry(model: Any, rules: dict[str, Any]) -> dict[str, Any]:
    """What is known of one model."""
    from transformers import PreTrainedModel
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    nested = {id(value): key for key, value in vars(model.config).items() if hasattr(value, "model_type")}
    parts: dict[str, Any] = {}
    for path, module in model.named_modules():
        if not path or not isinstance(module, PreTrainedModel):
            continue
        name, model_type = type(module).__name__, module.config.model_type
        key = nested.get(id(module.config))
        if key and name in _names(MODEL_MAPPING_NAMES.get(model_type, ())):
            parts[path] = key
        elif {name, model_type} & rules.keys():
            parts[path] = [name, model_type]
    found = {
        "type": model.config.model_type,
        "base": model.base_model_prefix,
        "tied": _tied(model, nested),
        "parts": parts,
    }
    return found | kept(model, found, rules)


def kept(model: Any, found: dict[str, Any], rules: dict[str, Any]) -> dict[str, Any]:
    """Names that rules match by accident: transformers leaves them alone because the model has them as they are."""
    name = type(model).__name__
    table = {"rules": rules, "models": {name: found}, "parts": {}}
    renames = [
        rule
        for rule in renamings({**model.config.to_dict(), "architectures": [name]}, table)
        if not rule.operations and not rule.is_prefix
    ]
    names = set()
    for each in model.state_dict():
        hub = each
        for rule in saved(renames):
            hub = rule.applied(hub).name
        back = hub
        for rule in renames:
            back = rule.applied(back).name
        if hub == each != back:
            names.add(_NUMBER.sub(".*.", each))
    return {"kept": sorted(names)} if names else {}


def _tied(model: Any, nested: dict[int, str]) -> dict[str, Any]:
    """The names of tied weights: the names that they are saved under, the config that ties them, its default."""
    from transformers import PreTrainedModel

    found: dict[str, Any] = {}
    for path, module in model.named_modules():
        if isinstance(module, PreTrainedModel):
            default = bool(getattr(module.config, "tie_word_embeddings", False))
            module.config.tie_word_embeddings = True
            pairs = module.get_expanded_tied_weights_keys() or {}
            module.config.tie_word_embeddings = default
            prefix, key = f"{path}." if path else "", nested.get(id(module.config), "")
            found |= {
                f"{prefix}{again}": [f"{prefix}{first}", key, default] for again, first in pairs.items()
            }
    names = {name for name in model.state_dict() if not _LAYER.search(name)}
    return {again: each for again, each in found.items() if again in names and each[0] in names}


_NUMBER = re.compile(r"\.\d+\.")
_LAYER = re.compile(r"\blayers\.\d+\.")
"""In the names of layers, of which another config has others."""


def types_of_parts(rules: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """By model type: the class of a part, and its own parts, if any has rules."""
    import torch
    from transformers import CONFIG_MAPPING, MODEL_MAPPING

    result: dict[str, Any] = {}
    for model_type in CONFIG_MAPPING:
        try:
            kind = MODEL_MAPPING[CONFIG_MAPPING[model_type]]
            with torch.device("meta"):
                model = kind._from_config(kind.config_class())
        except Exception:
            continue
        parts = {path: part for path, part in entry(model, rules)["parts"].items() if isinstance(part, list)}
        if parts or {kind.__name__, model_type} & rules.keys():
            result[model_type] = {"class": kind.__name__, "parts": parts}
    return result
