"""The reward of GRPO, named as `module:function` and imported from where reshard was started."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from reshard.errors import Problem, ReshardError


def problems(name: str) -> list[Problem]:
    """What is wrong with a reward."""
    try:
        load(name)
    except ReshardError as error:
        return error.problems
    return []


def load(name: str) -> Callable[..., Any]:
    """The function. Raises ReshardError saying which of module and function is missing."""
    module, colon, function = name.partition(":")
    if not (module and colon and function):
        raise ReshardError(
            "reward-names-no-function",
            "--reward names no function",
            found=name,
            expected="module:function",
            remedy="as rewards:score for rewards.py",
        )
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    found = getattr(_import(module, folder), function, None)
    if not callable(found):
        raise ReshardError(
            "reward-function-missing" if found is None else "reward-not-a-function",
            "the module of --reward has no such function" if found is None else "the reward is no function",
            found=name,
            expected=f"def {function}(completions, **columns) -> list of float, in {module}",
            remedy="check the name after the colon",
        )
    if not _takes_all(found):
        raise ReshardError(
            "reward-signature-wrong",
            "the reward does not take what TRL gives it",
            found=f"def {function}{inspect.signature(found)}",
            expected=f"def {function}(completions, **columns) -> list of float",
            rule=f"TRL calls it with {', '.join(GIVEN)} and the columns of the data, each by its name",
            remedy="add **columns to its arguments",
        )
    reward: Callable[..., Any] = found
    return reward


GIVEN = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
"""What TRL gives a reward besides the columns of the data (`GRPOTrainer._calculate_rewards`)."""


def _takes_all(function: Callable[..., Any]) -> bool:
    """Whether a function can be called with `GIVEN`; those whose arguments nobody knows are believed."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return True
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters):
        return True
    named = {each.name for each in parameters if each.kind is not inspect.Parameter.POSITIONAL_ONLY}
    return named.issuperset(GIVEN)


def _import(module: str, folder: str) -> Any:
    try:
        return import_module(module)
    except Exception as error:
        missing = (
            isinstance(error, ModuleNotFoundError)
            and (error.name or "").split(".")[0] == module.split(".")[0]
        )
        raise ReshardError(
            "reward-module-missing" if missing else "reward-module-fails",
            "the module of --reward is not there" if missing else "the module of --reward cannot be imported",
            found=f"{module}: {type(error).__name__}: {error}",
            expected=f"{module.replace('.', '/')}.py in {folder}, or an installed module",
            remedy="run reshard in the folder of the module"
            if missing
            else "fix the module: python -c 'import …'",
        ) from error
