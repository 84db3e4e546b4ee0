"""Where a `config.json` and the arguments in a Megatron checkpoint describe different models, and which one counts.

A difference that the weights depend on is an error: one of the two belongs to another checkpoint. A difference that
only affects how the model computes is a warning, and the user chooses the right side.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from reshard.base.errors import Problem, ReshardError
from reshard.families.config_entries import RULE, Args, Config, Const, Values
from reshard.families.config_map import ConfigMap
from reshard.families.mechanisms import MECHANISMS, REARRANGED

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
    found = differences(table, config, args)
    problems = [each.problem() for each in found if not each.is_computed]
    warnings = [each.warning(trust) for each in found if each.is_computed]
    for name, problem in foreign(table, config, args):
        if trust == "config" and name not in REARRANGED:
            args = {key: value for key, value in args.items() if key != name}
            warnings.append(replace(problem, severity="warning", remedy=None))
        else:
            problems.append(problem)
    if problems:
        raise ReshardError([replace(each, file=file) for each in problems])
    if trust == "config":
        for each in found:
            args = {**args, **each.wanted}
    else:
        config = changed(table, config, found)
    return config, {**table.to_args(config), **args}, [replace(each, file=file) for each in warnings]


class ConfigDifference(NamedTuple):
    """A key of the config and its two values. `wanted` are the arguments that correspond to the config's value."""

    key: str
    config: Any
    args: Any
    wanted: Values

    @property
    def is_computed(self) -> bool:
        """Whether it only affects how the model computes: the same weights fit both values."""
        return self.key in COMPUTED

    def problem(self) -> Problem:
        """The error for a value that the weights depend on."""
        return Problem(
            "config-contradicts-arguments",
            "config.json and the checkpoint describe different models",
            rule=RULE,
            expected=f"{self.key}={self.config} (config.json)",
            found=f"{self.key}={self.args} (arguments in the checkpoint)",
            remedy="pass the config that belongs to this checkpoint: --base DIR",
        )

    def warning(self, trusted: str) -> Problem:
        """The warning for a value that does not change the weights, where the value of `trusted` is used."""
        other = "config" if trusted == "checkpoint" else "checkpoint"
        return Problem(
            "config-differs-from-arguments",
            f"config.json and the checkpoint's arguments disagree on {self.key}, which changes no weight",
            rule=RULE,
            found=f"{self.config} (config.json), {self.args} (arguments in the checkpoint)",
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
    said = {key: (value, entry) for entry in table.entries for key, value in entry.told(wanted, args).items()}
    return [
        ConfigDifference(key, expected[key], value, entry.to_args(config))
        for key, (value, entry) in said.items()
        if key in expected and key not in RUN_CHOICES and expected[key] != value
    ]


def changed(table: ConfigMap, config: Config, differences: Iterable[ConfigDifference]) -> Values:
    """`config` with the values of the arguments, and without other spellings of the same facts."""
    values, args = {each.key: each.args for each in differences}, table.to_args(config)
    told = (entry for entry in table.entries if values.keys() & entry.to_config(args).keys())
    gone = {spelling for entry in told for spelling in entry.spellings()}
    return {**{key: value for key, value in config.items() if key not in gone}, **values}


def foreign(table: ConfigMap, config: Config, args: Args) -> Iterator[tuple[str, Problem]]:
    """Arguments of a model that no config of this family can describe, though its tensors look alike.

    Each comes with its name.
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
        if name not in fixed and _describes(table, whole, name, mechanism.default):
            continue
        insist = "" if name in REARRANGED else "pass --trust config if the argument is wrong; "
        yield (
            name,
            Problem(
                "model-type-cannot-describe",
                f"the checkpoint is of a model that {table.model_type} cannot describe",
                rule=RULE,
                expected=f"{name}={expected}, as all models of this family have",
                found=f"{name}={value} (arguments in the checkpoint)",
                remedy=f"{insist}if no family fits, declare it: see docs/add-a-family.md",
                values={"family": table.model_type},
            ),
        )


def _describes(table: ConfigMap, args: Args, name: str, default: Any) -> bool:
    """Whether the config of this family depends on an argument, given the others."""
    return table.to_config(args) != table.to_config({**args, name: default})
