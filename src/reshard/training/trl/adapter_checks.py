"""The adapter of a run, made on the meta device: options that PEFT, TRL or the ranks would refuse, or ignore."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from reshard.base.errors import Problem, ReshardError, listed
from reshard.base.suggest import did_you_mean
from reshard.training.trl.trl_methods import TrlMethod


def adapted(model: Any, options: Mapping[str, Any], way: TrlMethod) -> Any:
    """A model on the meta device with the adapter that the options describe. Raises ReshardError."""
    config = adapter_config(
        {name: list(value) if isinstance(value, tuple) else value for name, value in options.items()}, model
    )
    linears = _linears(model)
    tied = _is_tied(model)
    found = _made(model, config, options, linears)
    _check_head(found, way, linears)
    if tied and not _is_tied(found):
        raise ReshardError(
            "adapter-unties-head",
            "the adapter would train a copy of only one of two tied weights",
            rule="the head is the embedding (tie_word_embeddings); the copies that PEFT saves would differ",
            found=f"--lora_modules_to_save {' '.join(options['lora_modules_to_save'] or ())}",
            remedy="leave out --lora_modules_to_save; or leave out --lora and --lora_modules_to_save to train all "
            "weights",
        )
    return found


def adapter_config(options: Mapping[str, Any], model: Any) -> Any:
    """PEFT's config for the adapter of a model that the options describe. `all-linear` means its language model."""
    from peft import LoraConfig

    return LoraConfig(
        task_type="CAUSAL_LM",
        r=options["lora_r"],
        lora_alpha=options["lora_alpha"],
        lora_dropout=options["lora_dropout"],
        target_modules=_targets(options["lora_target_modules"]),
        exclude_modules=_outside(model) if options["lora_target_modules"] == ["all-linear"] else None,
        target_parameters=options["lora_target_parameters"],
        modules_to_save=options["lora_modules_to_save"],
        use_rslora=options["use_rslora"],
        use_dora=options["use_dora"],
    )


def _outside(model: Any) -> str | None:
    """A regular expression for the modules outside of the language model, if the model sees images."""
    decoder = model.get_decoder() if getattr(model.config, "vision_config", None) else None
    name = next((name for name, module in model.named_modules() if module is decoder), "")
    return rf"(?!{re.escape(name)}\.).*" if name else None


_NAME = re.compile(r"[\w.-]+")
"""A module's name, as opposed to a regular expression."""


def _targets(given: Any) -> Any:
    """The modules to adapt: a list of names, or a text, which PEFT reads as all-linear or as a regular expression."""
    if not (isinstance(given, list) and len(given) == 1):
        return given
    (only,) = given
    return given if _NAME.fullmatch(only) and only.lower() != "all-linear" else only


def _is_tied(model: Any) -> bool:
    """Whether head and embedding are one weight."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    weight = getattr(head, "weight", None)
    return weight is not None and weight is getattr(embedding, "weight", None)


_CHOOSE = ("lora_target_modules", "lora_target_parameters", "lora_modules_to_save")
"""Options that choose what is adapted."""


def _made(model: Any, config: Any, options: Mapping[str, Any], linears: list[str]) -> Any:
    """PEFT's model. It refuses options only if nothing is adapted, and has then translated the names in its config."""
    import torch
    from peft import NoMatchingPeftModuleError, get_peft_model

    # Those of tied parts more than once, and before PEFT changes them.
    modules = [name for name, _ in model.named_modules(remove_duplicate=False) if name]
    parameters = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    refusal, made = None, None
    try:
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PEFT looks up names that transformers has changed
            made = get_peft_model(model, config)
    except (ValueError, RuntimeError, AttributeError, KeyError, NotImplementedError) as error:
        refusal = error
    unmatched = isinstance(refusal, NoMatchingPeftModuleError)
    wrong = _unmatched(modules, parameters, config, options, linears)
    if (refusal is None or unmatched) and (problems := [*wrong]):
        raise ReshardError(problems)
    if refusal is not None:
        given = [f"--{name}" for name in _CHOOSE if options.get(name)] or [f"--{_CHOOSE[0]}"]
        raise ReshardError(
            "peft-cannot-adapt",
            "PEFT cannot adapt the model with these options",
            found=str(refusal).split("\n")[0],
            expected=_expected(linears) if unmatched else None,
            remedy=f"correct {' or '.join(given)}",
        )
    return made


def _unmatched(
    modules: Sequence[str],
    parameters: Sequence[str],
    config: Any,
    options: Mapping[str, Any],
    linears: list[str],
) -> Iterator[Problem]:
    """A problem for each name that matches nothing: PEFT ignores it if another one matches."""
    whole = sorted({name.rpartition(".")[0].rpartition(".")[2] for name in parameters})
    for option, matches, there, known in (
        ("lora_target_modules", _is_end, modules, linears),
        ("lora_target_parameters", _is_end, parameters, _ends(parameters, 2)),
        ("lora_modules_to_save", str.endswith, modules, whole),
    ):
        for name in _asked(options.get(option), getattr(config, option.removeprefix("lora_"))):
            if not any(matches(each, name) for each in there):
                yield Problem(
                    "adapter-name-matches-nothing",
                    f"--{option} names a part that the model does not have",
                    expected=listed(known),
                    found=name,
                    remedy=did_you_mean(
                        name, {*known, *_ends(there, name.count(".") + 1)}, "correct the name"
                    ),
                )


def _is_end(name: str, end: str) -> bool:
    return name == end or name.endswith(f".{end}")


def _ends(names: Iterable[str], parts: int) -> list[str]:
    """The last parts of names, each once."""
    return list(dict.fromkeys(".".join(name.split(".")[-parts:]) for name in names))


def _asked(given: Any, config: Any) -> list[str]:
    """Names that were given and that PEFT looks for; it translates those of modules that transformers has merged.

    A text is all-linear or a regular expression; if it matches nothing, PEFT says so.
    """
    if isinstance(config, str) or isinstance(given, str) or not given:
        return []
    return [name for name in given if any(_is_end(name, each) for each in config or ())]


def _expected(linears: list[str]) -> str:
    return f"--lora_target_modules: all-linear, or names of layers, as {', '.join(linears)}"


def _linears(model: Any) -> list[str]:
    """The last parts of the names of the linear layers that `all-linear` adapts: not the head."""
    from torch.nn import Linear

    head = model.get_output_embeddings()
    linear = [
        name for name, module in model.named_modules() if isinstance(module, Linear) and module is not head
    ]
    return list(dict.fromkeys(name.rsplit(".", 1)[-1] for name in linear))


def _check_head(model: Any, way: TrlMethod, linears: list[str]) -> None:
    """Raise ReshardError if a trainer that multiplies by the weight of the head would ignore the head's adapter."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    if not isinstance(model.get_output_embeddings(), BaseTunerLayer):
        return
    raise ReshardError(
        "adapter-of-head-ignored",
        f"{way.name} cannot train an adapter of the head",
        rule="TRL computes the logits from the head's own weight, tile by tile",
        expected=_expected(linears),
        found="the head in --lora_target_modules",
        remedy="leave it out",
    )
