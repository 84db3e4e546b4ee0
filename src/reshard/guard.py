"""A guard around a training command, and checks for running code. `reshard guard -- COMMAND` is the same as a command.

In a script, an explained error is raised before a known failure, and others are diagnosed:

    import reshard.guard

    reshard.guard.check(model, optimizer)          # after wrapping the model, before the first step
    with reshard.guard.explained():                # adds cause and fix to any exception inside
        trainer.train()
    trainer.add_callback(reshard.guard.callback()) # checks, saves on a signal, and never saves NaN
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from reshard.base.arguments import takes
from reshard.base.exceptions_to_problems import for_users
from reshard.base.values import several, text
from reshard.runs.guard.in_script import check, explained
from reshard.runs.guard.options import GuardOptions
from reshard.runs.guard.watch.stack_signal import announce

if TYPE_CHECKING:
    from reshard.runs.guard.end.end_report import EndReport

__all__ = ["callback", "check", "explained", "run"]


@for_users()
@takes(GuardOptions, {"words": several(text("torchrun"))}, "guard.run")
def run(words: Sequence[str], options: GuardOptions) -> EndReport:
    """Run a training command under guard, as `reshard guard -- COMMAND` does, with the output of the command.

    Options are described as in `reshard guard --help`: --on-stall is `on_stall`.

    Parameters
    ----------
    words : sequence of str
        The command, for example ["torchrun", "train.py"].
    {options}

    Returns
    -------
    Report
        `status` is the exit status that the command would have; `as_dict()` returns what ``--json`` prints.

    Raises
    ------
    ReshardError
        With every problem that the checks before the start found. Nothing was started.
    """
    from reshard.runs.guard.guarded_run import guarded  # not needed by a script that only checks

    return guarded(words, options)


def callback(nan_steps: int = GuardOptions.nan_steps) -> Any:
    """A TrainerCallback that keeps a run of transformers' or TRL's Trainer safe.

    It checks the model and its optimizer when training begins. After SIGTERM, SIGINT, SIGUSR1 or SIGHUP on any rank,
    all ranks finish the step, save a checkpoint and exit with 128 + N. Weights that are NaN or infinite are never
    saved, and `nan_steps` logged losses in a row that are NaN or infinite end the run; with 0, they do not.
    """
    from reshard.runs.guard.trainer_callback import GuardCallback

    return GuardCallback(nan_steps)


announce()
