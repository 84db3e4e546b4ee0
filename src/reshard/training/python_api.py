"""`reshard.train`, `export` and `report`: the functions behind the commands of the same name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from reshard.base.argument_checks import Arguments, OnBytes, StrPath
from reshard.base.exceptions_to_problems import for_users
from reshard.base.options import About, takes
from reshard.planning.target_tensors import OutputTypes
from reshard.training.methods import TRAINING_METHODS, elsewhere
from reshard.training.options import StartOptions

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
    method : {"sft", "dpo", "kto", "reward", "distillation", "grpo", "rloo"}
        Training method, as in ``reshard train sft``.

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
def export(
    checkpoint: StrPath,
    dst: StrPath,
    *,
    merge: bool = False,
    dtype: str | None = None,
    overwrite: bool = False,
    no_resume: bool = False,
    on_bytes: OnBytes = lambda count: None,
) -> Conversion:
    """Convert a checkpoint of a training run to a Hugging Face folder.

    Works like `convert`, and takes all other settings from the record of the run in the checkpoint.

    Parameters
    ----------
    checkpoint : str or path-like
        A checkpoint written by `train`, for example "out/checkpoint-200" or "out/iter_0000200".
    dst : str or path-like
        The output folder.
    merge : bool
        Merge the adapter of a LoRA run into its base.
    dtype : str, optional
        Convert weights to "float32", "bfloat16" or "float16".
    overwrite : bool
        Replace the one checkpoint at `dst`.
    no_resume : bool
        Start over, and keep nothing if the export is interrupted.
    on_bytes : callable
        Called with the number of bytes of each window that was written.

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
    given = Arguments("export")
    given.path("checkpoint", checkpoint)
    given.path("dst", dst)
    given.known("dtype", dtype, OutputTypes)
    given.switches(merge=merge, overwrite=overwrite, no_resume=no_resume)
    given.callbacks(on_bytes=on_bytes)
    given.settle()
    from reshard.training import finish

    return finish.export(
        Path(checkpoint),
        Path(dst),
        merge=merge,
        dtype=dtype,
        overwrite=overwrite,
        no_resume=no_resume,
        on_bytes=on_bytes,
    )


def report(*runs: StrPath, output: StrPath | None = None) -> Path:
    """Draw one or several training runs on one HTML page, which needs no network.

    Parameters
    ----------
    *runs : str or path-like
        Output folders of `train`; the runs may still be going on.
    output : str or path-like, optional
        Page to write. By default `report.html` in the folder of the run, or `runs.html` for several runs.

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
    given = Arguments("report")
    for name, path in (*(("run", each) for each in runs), *([] if output is None else [("output", output)])):
        given.path(name, path)
    if not runs:
        given.path("run", None)
    given.settle()
    from reshard.training.show.html_report import draw

    return draw([Path(run) for run in runs], None if output is None else Path(output))[0]
