"""`reshard.train`: the function behind the command of the same name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from reshard.base.arguments import takes
from reshard.base.exceptions_to_problems import for_users
from reshard.base.options import About, part_of
from reshard.base.values import choice
from reshard.runs.train.methods import TRAINING_METHODS
from reshard.runs.train.options import TrainOptions

if TYPE_CHECKING:
    from reshard.runs.train.start import TrainingRun


@dataclass(frozen=True, kw_only=True)
class CallOptions(TrainOptions):
    """The options of `train` in Python."""

    options: Annotated[
        Mapping[str, Any] | None,
        About('Options of the engine under its own names, for example {"learning_rate": 1e-5}.', "{}"),
    ] = None


@for_users()
@takes(CallOptions, {"method": choice([*TRAINING_METHODS])})
def train(method: str, options: CallOptions) -> TrainingRun:
    """Write a recipe that fine-tunes a model, and run it under guard, with its output on stdout and stderr.

    Options are described as in `reshard train --help`: --eval-data is `eval_data`.

    Parameters
    ----------
    method : str
        Training method, as in ``reshard train sft``; ``reshard train --help`` lists them.
    {options}

    Returns
    -------
    TrainingRun
        `folder` has the recipe, the checkpoints and the trained model in final; `status` is the exit status of the run,
        None with `write_only`.

    Raises
    ------
    ReshardError
        With every problem that was found before anything was written.

    Examples
    --------
    >>> try:
    ...     reshard.train("sft", data="chats.jsonl", output="new", options={"learning_rate": 1e-5})
    ... except reshard.ReshardError as error:
    ...     print(error.problems[0].message)
    --model is missing
    """
    from reshard.runs.train.start import prepared, started

    arguments = [word for pair in (options.options or {}).items() for word in _option_arguments(*pair)]
    run = prepared(method, part_of(TrainOptions, options), arguments)
    return run if options.write_only else started(run)


def _option_arguments(name: str, value: Any) -> list[str]:
    values = value if isinstance(value, (list, tuple)) else [value]
    return [f"--{name}", *(str(each).lower() if isinstance(each, bool) else str(each) for each in values)]
