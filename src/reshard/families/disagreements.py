"""Where a `config.json` and what a checkpoint records of its model differ, and which one counts.

A checkpoint records Megatron-LM's arguments, or a config of its own (`recorded_configs`). A difference that the weights
depend on is an error: one of the two belongs to another checkpoint. A difference that only affects how the model
computes is a warning, and the user chooses the right side.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from reshard.base.errors import UNUSABLE, Problem, raise_all
from reshard.families.config_entries import RULE, Args, Config, Const, Values
from reshard.families.config_map import ConfigMap
from reshard.families.dims import Dims
from reshard.families.mechanisms import MECHANISMS, REARRANGED
from reshard.families.rope import rope_parameters

RUN_CHOICES = {
    "vocab_size",
    "max_position_embeddings",
    "attention_dropout",
    "initializer_range",
    "dtype",
    "num_nextn_predict_layers",
}

# Keys that affect how the model computes, but neither which weights exist nor their layout.
COMPUTED = {
    *(
        "rope_parameters",
        "rotary",
        "rms_norm_eps",
        "sliding_window",
        "layer_types",
        "no_rope_layers",
        "swiglu_limit",
    ),
    *("num_experts_per_tok", "num_experts_per_token", "norm_topk_prob", "routed_scaling_factor"),
    *("router_scaling_factor", "route_norm"),
    *("scoring_func", "n_group", "topk_group"),
}


def agreed(
    table: ConfigMap, config: Mapping[str, Any], args: Mapping[str, Any], trust: str, file: str
) -> tuple[Mapping[str, Any], Mapping[str, Any], list[Problem]]:
    """Config and arguments made consistent, and a warning for each difference: `trust` names the right side.

    Raises ReshardError if the weights fit only one of them.
    """
    differing = differences(table, config, args)
    problems = [each.problem() for each in differing if each.moves_weights]
    warnings = [each.warning(trust) for each in differing if not each.moves_weights]
    for name, problem in foreign(table, config, args):
        if trust == "config" and name not in REARRANGED:
            args = {key: value for key, value in args.items() if key != name}
            warnings.append(replace(problem, severity="warning", remedy=None))
        else:
            problems.append(problem)
    raise_all(replace(each, file=file) for each in problems)
    if trust == "config":
        for each in differing:
            args = {**args, **each.wanted}
    else:
        config = changed(table, config, {each.key: each.checkpoint for each in differing})
    return config, {**table.to_args(config), **args}, [replace(each, file=file) for each in warnings]


ARGUMENTS = "arguments in the checkpoint"


class ConfigDifference(NamedTuple):
    """A key of the config, its value there, and the value in the checkpoint.

    `moves_weights` tells whether weights that fit one value do not fit the other. `wanted` are the arguments that
    correspond to the config's value. `where` is what has the checkpoint's value.
    """

    key: str
    config: Any
    checkpoint: Any
    moves_weights: bool
    wanted: Values
    where: str = ARGUMENTS

    def problem(self) -> Problem:
        """The error for a value that the weights depend on."""
        return Problem(
            "config-contradicts-arguments",
            "config.json and the checkpoint describe different models",
            rule=f"config.json must agree with the {self.where}",
            expected=f"{self.key}={self.config} (config.json)",
            found=f"{self.key}={self.checkpoint} ({self.where})",
            remedy="pass the config that belongs to this checkpoint: --base DIR",
        )

    def warning(self, trusted: str) -> Problem:
        """The warning for a value that does not change the weights, where the value of `trusted` is used."""
        other = "config" if trusted == "checkpoint" else "checkpoint"
        return Problem(
            "config-differs-from-arguments",
            f"config.json and the checkpoint disagree on {self.key}, which changes no weight",
            rule=f"config.json must agree with the {self.where}",
            found=f"{self.config} (config.json), {self.checkpoint} ({self.where})",
            remedy=f"the value of the {trusted} is used; pass --trust {other} for the other one",
            severity="warning",
            values={"key": self.key},
        )


def differences(table: ConfigMap, config: Config, args: Args) -> list[ConfigDifference]:
    """Where a config and the arguments of a checkpoint describe different models.

    Missing arguments are ignored. The vocabulary is not compared, because Megatron-LM pads it, nor is
    anything that a training run may change: context length, dropout, dtype, multi-token prediction.
    """
    wanted = table.to_args(config)
    expected = table.to_config(wanted)
    stated = {
        key: (value, entry) for entry in table.entries for key, value in entry.completed(wanted, args).items()
    }
    return [
        ConfigDifference(
            key, expected[key], value, moves_weights(table, config, key, value), entry.to_args(config)
        )
        for key, (value, entry) in stated.items()
        if key in expected and key not in RUN_CHOICES and expected[key] != value
    ]


def moves_weights(table: ConfigMap, config: Config, key: str, value: Any) -> bool:
    """Whether names, shapes or the order of weights are others with another `value` of a key."""
    if key in COMPUTED:
        return False
    try:
        configs = (config, changed(table, config, {key: value}))
        before, after = (Dims.from_args(table.to_args(each), vocab=1) for each in configs)
    except UNUSABLE:
        return True
    return before != after


def changed(table: ConfigMap, config: Config, values: Values) -> Values:
    """`config` with other values, and without other spellings of the same facts."""
    args = table.to_args(config)
    entries = (entry for entry in table.entries if values.keys() & entry.to_config(args).keys())
    gone = {spelling for entry in entries for spelling in entry.spellings()}
    return {**{key: value for key, value in config.items() if key not in gone}, **values}


def foreign(
    table: ConfigMap, config: Config, args: Args, where: str = ARGUMENTS
) -> Iterator[tuple[str, Problem]]:
    """Arguments of a model that no config of this family can describe, though its tensors look alike.

    Each comes with its name. `where` is what has them.
    """
    wanted = table.to_args(config)
    whole = {**wanted, **args}
    constants = [entry for entry in table.entries if isinstance(entry, Const)]
    fixed = {name for entry in constants for name in entry.args}
    for name, mechanism in MECHANISMS.items():
        value = args.get(name)
        expected = wanted[name] if name in fixed else mechanism.default
        if value is None or value == expected or not mechanism.used(whole):
            continue
        if mechanism.changes_nothing(value, whole) and mechanism.changes_nothing(expected, whole):
            continue
        if name == "position_embedding_type" and value == rope_parameters(config).get("rope_type"):
            continue
        if _describes(table, whole, name, expected):
            continue
        insist = "" if name in REARRANGED else "pass --trust config if the argument is wrong; "
        yield (
            name,
            Problem(
                "model-type-cannot-describe",
                f"the checkpoint is of a model that {table.model_type} cannot describe",
                rule=RULE,
                expected=f"{name}={expected}, as all models of this family have",
                found=f"{name}={value} ({where})",
                remedy=f"{insist}if no family fits, declare it: see docs/add-a-family.md",
                values={"family": table.model_type},
            ),
        )


def _describes(table: ConfigMap, args: Args, name: str, expected: Any) -> bool:
    """Whether the config of this family would be another one if an argument had the expected value."""
    return table.to_config(args) != table.to_config({**args, name: expected})
