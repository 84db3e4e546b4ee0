"""`reshard.train`, `export` and `report`: the functions behind the commands of the same name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from reshard.base.argument_checks import Arguments, StrPath
from reshard.base.exceptions_to_problems import for_users
from reshard.base.options import About, takes, takes_also
from reshard.commands.names import NAMES
from reshard.training.methods import TRAINING_METHODS, elsewhere
from reshard.training.options import ExportOptions, ReportOptions, StartOptions

if TYPE_CHECKING:
    from reshard.commands.conversion import Conversion
    from reshard.training.start import Outcome


@dataclass(frozen=True, kw_only=True)
class CallOptions(StartOptions):
    """The options of `train` in Python."""

    options: Annotated[
        Mapping[str, Any] | None,
        About('Options of the engine under its own names, for example {"learning_rate": 1e-5}.', "{}"),
    ] = None
    quiet: Annotated[bool, About("Print warnings and errors only.")] = False
    on_preflight: Annotated[
        Callable[[Any], None] | None, About("Called with the plan and its warnings before anything starts.")
    ] = None


@for_users()
@takes(CallOptions)
def train(method: str, **given: Any) -> Outcome:
    """Fine-tune a model on many processes, and write a Hugging Face folder at the end.

    Package versions, data, tokenizer, batches and memory are checked before anything starts. The ranks run in their
    own processes, under torchrun.

    Parameters
    ----------
    method : str
        Training method, as in ``reshard train sft``; ``reshard train --help`` lists them.

    Returns
    -------
    Outcome
        True if the run and all checks of its output succeeded. `status` is the exit status that the command would have,
        `preflight` the plan (of a dry run for other `gpus`: its `plans` that fit), `submitted` the job of `slurm`.

    Raises
    ------
    ReshardError
        With every problem that prevents the run. Nothing was started.

    Examples
    --------
    >>> try:
    ...     reshard.train("sft", data="chats.jsonl", output="out", options={"learning_rate": 1e-5})
    ... except reshard.ReshardError as error:
    ...     print(error.problems[0].message)
    --model is missing
    """
    arguments = Arguments("train")
    if problem := elsewhere(str(method)):
        arguments.problems.append(problem)
    else:
        arguments.choice("method", str(method), TRAINING_METHODS)
    asked = arguments.options(CallOptions, given)
    call = {name: asked.pop(name) for name in ("options", "quiet", "on_preflight") if name in asked}
    from reshard.training.start import trained

    return trained(method, asked, **call)[1]


@for_users()
@takes_also(ExportOptions)
def export(checkpoint: StrPath, dst: StrPath, **given: Any) -> Conversion:
    """Convert a checkpoint of a training run to a Hugging Face folder.

    Works like `convert`, and takes all other settings from the record of the run in the checkpoint.

    Parameters
    ----------
    checkpoint : str or path-like
        A checkpoint written by `train`, for example "out/checkpoint-200" or "out/iter_0000200".
    dst : str or path-like
        The output folder.

    Returns
    -------
    Conversion
        The plan with its notes and warnings, and a report of what was written.

    Raises
    ------
    ReshardError
        If the checkpoint has no record of a run, or cannot be converted. `dst` is as it was before.

    Examples
    --------
    >>> try:
    ...     reshard.export("run", "exported")
    ... except reshard.ReshardError as error:
    ...     print(error.problems[0].code)
    run-record-missing
    """
    arguments = Arguments("export", NAMES)
    arguments.path("checkpoint", checkpoint)
    arguments.path("dst", dst)
    asked = arguments.options(ExportOptions, given)
    from reshard.training import finish

    return finish.export(Path(checkpoint), Path(dst), **asked)


@takes_also(ReportOptions)
def report(*runs: StrPath, **given: Any) -> Path:
    """Draw one or several training runs on one HTML page, which needs no network.

    Parameters
    ----------
    *runs : str or path-like
        Output folders of `train`; the runs may still be going on.

    Returns
    -------
    Path
        The page.

    Raises
    ------
    ReshardError
        If a folder is not that of a run, or something else is in the place of the page.

    Examples
    --------
    >>> try:
    ...     reshard.report("model")
    ... except reshard.ReshardError as error:
    ...     print(error.problems[0].code)
    report-no-run
    """
    arguments = Arguments("report")
    for each in runs or [None]:
        arguments.path("run", each)
    asked = ReportOptions(**arguments.options(ReportOptions, given))
    from reshard.training.show.html_report import draw

    return draw([Path(run) for run in runs], None if asked.output is None else Path(asked.output))[0]
