"""Names of a run's options: reshard's own, and those of TRL's scripts and Hugging Face.

Dashes and underscores mean the same in all of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from reshard.base.errors import ReshardError, given_twice
from reshard.base.options import options_of
from reshard.base.suggest import closest
from reshard.training.options import RUN_OPTIONS, StartOptions

NEEDED_OPTIONS = ("model", "data", "output")
COMMAND_OPTIONS = (
    *(each.name for each in options_of(StartOptions) if each.name not in RUN_OPTIONS),
    *("options", "quiet", "json", "debug", "help"),
)
"""Flags that do not describe the run."""
OPTION_ALIASES = {
    "model_name_or_path": "model",
    "dataset_name": "data",
    "output_dir": "output",
    "use_peft": "lora",
}
"""Names in TRL's `ModelConfig` and `ScriptArguments` and in transformers' `TrainingArguments` for our options."""


def flag(name: str) -> str:
    """An option as users type it: reshard's own flags have dashes, options of engines underscores."""
    return f"--{name.replace('_', '-') if name in RUN_OPTIONS or name in COMMAND_OPTIONS else name}"


def renamed(given: Iterable[tuple[str, Any]], file: str = "") -> dict[str, Any]:
    """Options of a file or of a command line under our names. Raises ReshardError if one is set to different values."""
    spelled: dict[str, dict[str, str]] = {}
    found: dict[str, Any] = {}
    for name, value in given:
        ours = OPTION_ALIASES.get(name.replace("-", "_"), name.replace("-", "_"))
        text = " ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
        text = text.lower() if isinstance(value, bool) else text
        spelled.setdefault(ours, {}).setdefault(text, f"{name}: {text}" if file else f"--{name} {text}")
        found[ours] = value
    problems = [
        given_twice(flag(name), texts.values(), file or None)
        for name, texts in spelled.items()
        if len(texts) > 1
    ]
    if problems:
        raise ReshardError(problems)
    return found


def misspelled(wanted: str, given: Iterable[str]) -> str | None:
    """The given name that may be a misspelling of one of ours."""
    spellings = [wanted, *(alias for alias, ours in OPTION_ALIASES.items() if ours == wanted)]
    return next((name for name in given if closest(name, spellings, cutoff=0.75)), None)


def nearest(name: str, known: Collection[str], elsewhere: Mapping[str, str]) -> str | None:
    """What to type instead of an unknown option; `elsewhere` are names for it in other tools."""
    if name.removeprefix("no_") in known:
        return f"--{name.removeprefix('no_')} false switches it off"
    names = [*known, *sorted(RUN_OPTIONS), *COMMAND_OPTIONS, *OPTION_ALIASES]
    near = closest(elsewhere.get(name, name), names)
    return f"did you mean {flag(near[0])}?" if near else None
