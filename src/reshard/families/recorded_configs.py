"""Where the config of a base and the config that a checkpoint records of itself differ.

Both are in the keys of config.json, and only keys that were recorded are compared. As with Megatron-LM's arguments, a
difference that the weights depend on is an error, and any other one is a warning (see `disagreements`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from reshard.base.errors import Problem, raise_all
from reshard.families.config_entries import Config, Key, Values
from reshard.families.config_map import COMMON, GROUPED_HEADS, OF_ALL, ConfigMap
from reshard.families.disagreements import RUN_CHOICES, ConfigDifference, changed, moves_weights
from reshard.families.rope import PARTIAL_ROTARY_KEY, ROPE_TYPE_ALIASES, Rope, rope_parameters

OF_ANY_FAMILY = ConfigMap("", (*COMMON, *GROUPED_HEADS, Rope()))
"""The keys that are compared if the family is not declared."""
ROPE = "rope_parameters"
_FULL = "full_attention"
"""The key of the rotary embedding of most layers, where it differs by kind of layer."""
_ROPE_KEYS = (ROPE, "rope_scaling", "rope_theta", PARTIAL_ROTARY_KEY, "rope_local_base_freq")
_NOT_COMPARED = {*RUN_CHOICES, *OF_ALL, *_ROPE_KEYS}
"""What a run may change, what tensors show (a tied head), and the rotary embedding, which is compared by itself."""
WHERE = "config that the checkpoint records"


def agreed_configs(
    table: ConfigMap, config: Config, recorded: Config, trust: str, file: str
) -> tuple[Config, list[Problem]]:
    """A base's `config` made consistent with the one that was `recorded`, and a warning for each difference.

    Both are of the language model alone. `trust` names the side whose value is used ("config" or "checkpoint"). Raises
    ReshardError if the weights fit only one of them.
    """
    differing = recorded_differences(table, config, recorded)
    raise_all(replace(each.problem(), file=file) for each in differing if each.moves_weights)
    values = {each.key: each.checkpoint for each in differing} if trust == "checkpoint" else {}
    warnings = [replace(each.warning(trust), file=file) for each in differing]
    return changed(table, config, values) if values else config, warnings


def recorded_differences(table: ConfigMap, config: Config, recorded: Config) -> list[ConfigDifference]:
    """The recorded keys that have another value in `config`."""
    names = [{entry.key, *entry.aliases} for entry in table.entries if isinstance(entry, Key)]
    gone = {name for each in names if each & recorded.keys() for name in each}
    compared = {key: value for key, value in recorded.items() if key not in _NOT_COMPARED}
    whole = {**{key: value for key, value in config.items() if key not in gone}, **compared}
    expected, stated = (table.to_config(table.to_args(each)) for each in (config, whole))
    differing = [
        ConfigDifference(key, expected[key], value, moves_weights(table, config, key, value), {}, WHERE)
        for key, value in stated.items()
        if key in expected and key not in _NOT_COMPARED and expected[key] != value
    ]
    return [*differing, *_rope_differences(expected, config, recorded)]


def _rope_differences(expected: Config, config: Config, recorded: Config) -> Iterator[ConfigDifference]:
    """Whether the type of the rotary embedding differs, or else any other setting of it that was recorded.

    `expected` is the config with what it leaves to defaults.
    """
    own = _by_layer(_recorded_rope(recorded))
    base = _with_defaults(rope_parameters(config), expected.get(ROPE) or {})
    shared = [(_by_layer(base)[kind], own[kind]) for kind in _by_layer(base).keys() & own.keys()]
    pairs = [pair for pair in shared if None not in pair]  # a kind of layer may have none
    for theirs, each in pairs:
        if "rope_type" in each and _type(theirs) != _type(each):
            yield ConfigDifference("rope_type", _type(theirs), _type(each), True, {}, WHERE)
            return
    if any(
        theirs.get(key, each[key]) != each[key]
        for theirs, each in pairs
        for key in each.keys() - {"rope_type"}
    ):
        yield ConfigDifference(ROPE, base, _overlaid(base, own), False, {}, WHERE)


def _recorded_rope(recorded: Config) -> Values:
    """The rotary embedding, with its type only where it was recorded, too."""
    rope = rope_parameters(recorded)
    has_type = "rope_scaling" in recorded or "rope_type" in (recorded.get(ROPE) or {})
    return rope if has_type else {key: value for key, value in rope.items() if key != "rope_type"}


def _by_layer(rope: Config) -> Config:
    """A rotary embedding by kind of layer. If it is the same for all, it is that of layers with full attention."""
    return rope if any(isinstance(each, Mapping) for each in rope.values()) else {_FULL: rope}


def _with_defaults(rope: Config, complete: Config) -> Config:
    """A rotary embedding that a config states, with what it leaves to defaults from the `complete` one."""
    if _by_layer(rope) is rope:
        return rope
    return complete if _by_layer(complete) is complete else {**complete, **rope}


def _overlaid(rope: Config, own: Config) -> Values:
    """A rotary embedding with the settings of another one, which is by kind of layer."""
    if _by_layer(rope) is rope:
        return {kind: {**each, **own.get(kind, {})} for kind, each in rope.items()}
    return {**rope, **own.get(_FULL, {})}


def _type(rope: Config) -> Any:
    """The rope type by its usual name. A dynamic rope agrees with the plain one up to the model's context length."""
    named = rope.get("rope_type", "default")
    return "default" if named == "dynamic" else ROPE_TYPE_ALIASES.get(named, named)
