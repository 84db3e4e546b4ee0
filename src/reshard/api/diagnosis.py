"""`reshard.doctor`: what is wrong with logs, scripts, configs, checkpoints or an environment."""

from __future__ import annotations

from reshard.base.argument_checks import Arguments, OnBytes, StrPath
from reshard.base.errors import ReshardError
from reshard.checks.finding import Finding
from reshard.diagnosis.diagnose_targets import diagnose
from reshard.diagnosis.remedy_spelling import RunTools, spelled
from reshard.diagnosis.targets.environments import diagnose_environment, look_around


def doctor(
    *targets: StrPath, python: StrPath | None = None, on_bytes: OnBytes = lambda count: None
) -> list[Finding]:
    """Explain what is wrong, why, and how to fix it.

    Several targets are seen together: what one shows and another explains is one finding. The files are never executed.

    Parameters
    ----------
    *targets : str or path-like
        Logs, scripts, notebooks, configs, lists of packages, checkpoints, or the folder of a run; "-" is a log on
        standard input. Without a target, the environment is examined: versions, GPUs, driver and launcher variables.
    python : str or path-like, optional
        Examine the environment of this interpreter, or in this folder, instead of that of this process.
    on_bytes : callable
        Called with the number of bytes of logs as they are read.

    Returns
    -------
    list of Finding
        The one to fix first comes first. `as_dict` of a finding is its part of `reshard doctor --json`.

    Raises
    ------
    ReshardError
        For every target that cannot be read, or if there is no such interpreter.

    Examples
    --------
    >>> found = reshard.doctor("train.log")[0]
    >>> found.code, found.severity
    ('cuda-out-of-memory', 'error')
    """
    given = Arguments("doctor")
    for name, path in (
        *(("target", each) for each in targets),
        *([] if python is None else [("python", python)]),
    ):
        given.path(name, path)
    given.settle()
    if python is None:
        return diagnose(*targets, on_bytes=on_bytes)
    if targets:
        raise ReshardError(
            "python-and-targets",
            "python is the interpreter of an environment to examine, and targets are files",
            remedy="pass either of them",
        )
    return spelled(diagnose_environment(look_around(str(python))), RunTools())
