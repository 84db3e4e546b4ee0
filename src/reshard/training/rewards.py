"""Reward functions: their names, `module:function` or `file.py:function` and perhaps a weight, and their import.

They are imported from the folder in which reshard was started, or from the files they name.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from reshard.base.errors import Problem, ReshardError, when


@dataclass(frozen=True)
class NamedReward:
    """The name of a reward. `source` is a module, or a file that ends in .py."""

    source: str
    function: str
    weight: float | None = None

    @property
    def file(self) -> Path:
        """The file of its code, if it is in the folder of the run; a module may also be installed."""
        return Path(self.source if self.in_file else f"{self.source.replace('.', '/')}.py")

    @property
    def in_file(self) -> bool:
        """Whether the reward is named by its file."""
        return self.source.endswith(".py")


def named_rewards(text: str) -> NamedReward:
    """The reward that a `--reward` names. Raises ReshardError."""
    source, _, rest = text.partition(":")
    function, _, weight = rest.partition(":")
    if not (source and function.isidentifier()):
        raise ReshardError(
            "reward-names-no-function",
            "--reward does not name a function",
            found=text,
            expected="module:function, or FILE.py:function; a weight may follow, as rewards:score:0.5",
            remedy="for example rewards:score for the function score in rewards.py",
        )
    try:
        return NamedReward(source, function, float(weight) if weight else None)
    except ValueError:
        raise ReshardError(
            "reward-weight-no-number",
            "the weight of a reward is not a number",
            found=text,
            expected=f"{source}:{function}:0.5",
            remedy="correct it, or leave it out for a weight of 1",
        ) from None


def problems(names: Sequence[str], given: Any = None) -> list[Problem]:
    """Problems of rewards; `given` are the weights of `--reward_weights`, if any."""
    if found := [problem for name in names for problem in _of_one(name)]:
        return found
    weighted = [name for name in names if named_rewards(name).weight is not None]
    repeated = [each for each in names if names.count(each) > 1]
    return [
        *when(
            repeated,
            "reward-named-twice",
            "a reward is passed twice",
            found=", ".join(dict.fromkeys(repeated)),
            remedy="leave one out, or give one of them a weight of 2",
        ),
        *when(
            given is not None and (weighted or len(given) != len(names)),
            "reward-weights-disagree",
            "the weights of the rewards disagree",
            expected=f"one weight for each of {len(names)} rewards, set once",
            found=" ".join(
                map(str, ["--reward_weights", *(given or ()), *(f"--reward {name}" for name in weighted)])
            ),
            remedy="leave out --reward_weights, and write --reward module:function:0.5",
        ),
    ]


def _of_one(name: str) -> list[Problem]:
    try:
        load(name)
    except ReshardError as error:
        return error.problems
    return []


def weights(names: Sequence[str]) -> list[float] | None:
    """The weight of each reward, 1 by default; None if no reward has one."""
    found = [named_rewards(name).weight for name in names]
    if all(each is None for each in found):
        return None
    return [1.0 if each is None else each for each in found]


def load(name: str) -> Callable[..., Any]:
    """The function. Raises ReshardError saying whether the module or the function is missing."""
    reward = named_rewards(name)
    module, function = reward.source, reward.function
    folder = str(reward.file.expanduser().absolute().parent if reward.in_file else Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    found = getattr(_import(reward, folder), function, None)
    if not callable(found):
        raise ReshardError(
            "reward-function-missing" if found is None else "reward-not-a-function",
            "the module of --reward has no such function"
            if found is None
            else "the reward is not a function",
            found=name,
            expected=f"def {function}(completions, **columns) -> list of float, in {module}",
            remedy="check the name after the colon",
        )
    if not _takes_all(found):
        raise ReshardError(
            "reward-signature-wrong",
            "the reward does not accept TRL's arguments",
            found=f"def {function}{inspect.signature(found)}",
            expected=f"def {function}(completions, **columns) -> list of float",
            rule=f"TRL calls it with {', '.join(REWARD_ARGUMENTS)} and the columns of the data, each by its name",
            remedy="add **columns to its arguments",
        )
    loaded: Callable[..., Any] = found
    return loaded


REWARD_ARGUMENTS = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
"""What TRL passes to a reward besides the columns of the data (`_calculate_rewards` of GRPOTrainer and RLOOTrainer)."""


def _takes_all(function: Callable[..., Any]) -> bool:
    """Whether a function can be called with `REWARD_ARGUMENTS`; assumed if its signature is unknown."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return True
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters):
        return True
    named = {each.name for each in parameters if each.kind is not inspect.Parameter.POSITIONAL_ONLY}
    return named.issuperset(REWARD_ARGUMENTS)


def _import(reward: NamedReward, folder: str) -> Any:
    module = reward.source
    try:
        return _of_file(reward.file) if reward.in_file else import_module(module)
    except Exception as error:
        absent = FileNotFoundError if reward.in_file else ModuleNotFoundError
        root = str(getattr(error, "name", "")).partition(".")[0]
        missing = isinstance(error, absent) and (reward.in_file or root == module.partition(".")[0])
        raise ReshardError(
            "reward-module-missing" if missing else "reward-module-fails",
            "the module of --reward is not there" if missing else "the module of --reward cannot be imported",
            found=f"{module}: {type(error).__name__}: {error}",
            expected=f"{reward.file.name} in {folder}"
            + ("" if reward.in_file else ", or an installed module"),
            remedy="run reshard in the folder of the module"
            if missing
            else "fix the module: python -c 'import …'",
        ) from error


def _of_file(file: Path) -> Any:
    """The module in a file, imported once per process under a name that no installed module has."""
    path = file.expanduser().absolute()
    name = f"reshard_reward_{path.stem}_{abs(hash(str(path))):x}"
    if name not in sys.modules:
        spec = spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None  # it ends in .py
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
        sys.modules[name] = module
    return sys.modules[name]
