"""Options by their own names: the fields of a method's config, and ModelConfig's fields for LoRA."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from functools import cache
from typing import Any, get_args, get_type_hints

from reshard.base.errors import Problem, ReshardError
from reshard.base.plain import json_of
from reshard.diagnosis.history.calls import refused
from reshard.diagnosis.history.table import table
from reshard.diagnosis.history.versions import Versions
from reshard.training.engine import Option
from reshard.training.names import ALIASES, nearest
from reshard.training.option_checks import mistyped
from reshard.training.run import Run
from reshard.training.trl import defaults, limits, optimizers, packages, quantized, refusals, reward
from reshard.training.trl.methods import WAYS

LORA = (
    *("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "lora_target_parameters"),
    *("lora_modules_to_save", "use_rslora", "use_dora"),
)
MODEL = ("dtype", "attn_implementation", *quantized.OPTIONS)
"""Supported fields of TRL's ModelConfig."""


@dataclass
class Added:
    """Our own options, for features of a package that no config of TRL offers."""

    loraplus_lr_ratio: float | None = field(
        default=None,
        metadata={
            "help": "LoRA+: how many times the learning rate of lora_A that of lora_B is; 16 is usual."
        },
    )


ADDED = tuple(each.name for each in fields(Added))


def config_class(method: str) -> Any:
    """TRL's config of a method."""
    return WAYS[method].config_class()


def _fields(method: str) -> dict[str, Field[Any]]:
    """Every field by name: the method's config, then supported fields of ModelConfig, then our own."""
    from trl import ModelConfig

    own = {each.name: each for each in fields(config_class(method)) if each.init and each.name not in ALIASES}
    taken = (*LORA, *MODEL)
    model = {each.name: each for each in fields(ModelConfig) if each.name in taken}
    return own | model | {each.name: each for each in fields(Added)}


def known(method: str) -> list[Option]:
    """Every option of a method, with its type, its default and TRL's help text."""
    hints = _hints(method)
    found = {name: field for name, field in _fields(method).items() if name not in refusals.REFUSED}
    taken = {name: _default(field) for name, field in found.items()} | defaults.ALWAYS
    taken |= defaults.OF_SFT if method == "sft" else {}
    return [
        Option(name, _kind(hints[name]), str(taken[name]), _help(field.metadata.get("help", "")))
        for name, field in sorted(found.items())
    ]


def _hints(method: str) -> dict[str, Any]:
    """The type of every field by name."""
    from trl import ModelConfig

    return get_type_hints(ModelConfig) | get_type_hints(config_class(method)) | get_type_hints(Added)


def _default(field: Field[Any]) -> Any:
    if field.default is not MISSING:
        return field.default
    return field.default_factory() if field.default_factory is not MISSING else None


def _help(text: object) -> str:
    """A field's help, in which argparse has percent signs twice."""
    return " ".join(str(text).split()).replace("%%", "%")


def _kind(hint: Any) -> str:
    """A type in words: `int`, `float or none`, `list[str]`."""
    parts = [part for part in get_args(hint) if part is not type(None)] if "|" in str(hint) else [hint]
    names = [str(part) if get_args(part) else getattr(part, "__name__", str(part)) for part in parts]
    return " or ".join(dict.fromkeys(names))


def options_of(run: Run) -> dict[str, Any]:
    """All options of a run, typed: the given ones, then our defaults, then TRL's.

    Raises ReshardError naming every option that is unknown, mistyped, or would break what reshard promises.
    """
    there = _fields(run.method)
    problems = [*_unknown(run, there), *refusals.refused(run)]
    typed: dict[str, Any] = {}
    parser, hints = _parser(run.method), _hints(run.method)
    for name, value in run.options.items():
        if name in there and name not in refusals.REFUSED:
            try:
                typed[name] = _typed(parser, name, value, hints[name])
            except ValueError as error:
                problems.append(_mistyped(name, value, str(error), hints[name]))
    problems += limits.wrong_values(typed)
    problems += refusals.contradictions(run, typed)
    if run.reward:
        problems += reward.problems(run.reward, typed.get("reward_weights"))
    stated = {name: _default(field) for name, field in there.items()}
    problems += packages.lacking(typed, stated | typed)
    if not problems:
        problems += optimizers.refused(typed, stated | typed)
    if problems:
        raise ReshardError(problems)
    told = stated | defaults.defaults_of(run, typed) | typed
    return _renamed(told | defaults.of_evaluation(run, told, typed) | typed)


def _renamed(options: dict[str, Any]) -> dict[str, Any]:
    """Options that transformers has renamed, under both names: the new one takes precedence, the old one warns."""
    for suffix in ("", "_kwargs"):
        old, new = f"gradient_checkpointing{suffix}", f"activation_checkpointing{suffix}"
        if new in options:
            chosen = options[old] if options[new] is None else options[new]
            options |= {old: chosen, new: chosen}
    return options


def _unknown(run: Run, there: Mapping[str, Any]) -> Iterator[Problem]:
    names = [name for name in there if name not in refusals.REFUSED]
    for name in run.options:
        if name in there or name in refusals.REFUSED:
            continue
        other = _of_other_release(WAYS[run.method].config, name)
        cure = other or nearest(name, names, _ELSEWHERE) or "--options lists those that there are"
        yield Problem(
            "option-not-in-config",
            f"{WAYS[run.method].config} has no option {name}",
            found=f"--{name} {run.options[name]}",
            remedy=cure,
        )


def _of_other_release(config: str, name: str) -> str:
    """What to do about an option that other releases have; "" if none has it."""
    found = table("trl")
    why = refused(found, f"{config}.__init__", name, Versions()) if found else None
    if why is None or why.bounds is None:
        return ""
    if why.bounds.since:
        return f"it came with {why.table.package} {why.bounds.shown}: update it"
    return f"it is called {why.renamed} now" if why.renamed else "leave it out: it was removed"


_ELSEWHERE = {
    "lr": "learning_rate",
    "train_iters": "max_steps",
    "train_epochs": "num_train_epochs",
    "micro_batch_size": "per_device_train_batch_size",
    "batch_size": "per_device_train_batch_size",
    "global_batch_size": "gradient_accumulation_steps",
    "seq_length": "max_length",
    "clip_grad": "max_grad_norm",
    "lr_warmup_fraction": "warmup_steps",
    "lr_warmup_iters": "warmup_steps",
    "lr_decay_style": "lr_scheduler_type",
    "save_interval": "save_steps",
    "pack": "packing",
    "recompute_granularity": "gradient_checkpointing",
    "epochs": "num_train_epochs",
}
"""Names of the same options in Megatron-LM or in common use."""


def _mistyped(name: str, value: Any, why: str, hint: Any) -> Problem:
    """`why` is what argparse says, which quotes the choices there are."""
    choices = re.findall(r"'([^']*)'", why.partition("(choose from ")[2])
    return mistyped(name, value, _WORDS_FOR.get(_kind(hint)) or why.split(": ", 1)[-1], choices)


_WORDS_FOR = {"bool": "true or false", "int": "an integer", "float": "a number"}


@cache
def _parser(method: str) -> Any:
    """transformers' parser of these fields, which raises ValueError where argparse would end the process."""
    from transformers import HfArgumentParser
    from trl import ModelConfig

    class Parser(HfArgumentParser):  # type: ignore[misc]
        def error(self, message: str) -> Any:
            raise ValueError(message)

    return Parser(
        [config_class(method), ModelConfig, Added],
        add_help=False,
        conflict_handler="resolve",
        allow_abbrev=False,
    )


def _typed(parser: Any, name: str, value: Any, hint: Any) -> Any:
    """A value from the command line or from YAML, converted to the field's type. Raises ValueError."""
    optional, listed = type(None) in get_args(hint), "list[" in str(hint)
    if isinstance(value, str) and value.lower() == "none" and optional and name != "report_to":
        return None
    if value is None or isinstance(value, dict):
        return value
    if isinstance(value, str) and value.lstrip().startswith("{"):
        return json_of(value.encode())
    if isinstance(value, str) and listed and _WORDS.fullmatch(value):
        value = value.split(",")
    words = [str(word) for word in value] if isinstance(value, list) else [str(value)]
    known, rest = parser.parse_known_args(
        [f"--{name}={words[0]}"] if len(words) == 1 else [f"--{name}", *words]
    )
    if rest and not listed:
        raise ValueError(f"one value, not {len(words)}")
    return words if rest else getattr(known, name)


_WORDS = re.compile(r"[\w.-]+(,[\w.-]+)+")
"""Words separated by commas, as opposed to a regular expression."""
