"""The reward of GRPO, named as `module:function` and imported from where reshard was started."""

from __future__ import annotations

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
            "the module of --reward has no such function" if found is None else "the reward is no function",
            found=name,
            expected=f"def {function}(completions, **columns) -> list of float, in {module}",
            remedy="check the name after the colon",
        )
    reward: Callable[..., Any] = found
    return reward


def _import(module: str, folder: str) -> Any:
    try:
        return import_module(module)
    except Exception as error:
        missing = (
            isinstance(error, ModuleNotFoundError)
            and (error.name or "").split(".")[0] == module.split(".")[0]
        )
        raise ReshardError(
            "the module of --reward is not there" if missing else "the module of --reward cannot be imported",
            found=f"{module}: {type(error).__name__}: {error}",
            expected=f"{module.replace('.', '/')}.py in {folder}, or an installed module",
            remedy="run reshard in the folder of the module"
            if missing
            else "mend the module: python -c 'import …'",
        ) from error
