"""`reshard.doctor`: what is wrong with logs, scripts, configs, checkpoints or an environment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from reshard.base.argument_checks import Arguments, StrPath
from reshard.base.errors import ReshardError
from reshard.base.exceptions_to_problems import for_users
from reshard.base.options import About, takes_also
from reshard.base.shared_options import OnBytesOption
from reshard.runs.checks.environment import look_around
from reshard.runs.checks.finding import Finding
from reshard.runs.checks.machine_checks import check_machine
from reshard.runs.doctor.diagnose_targets import examine
from reshard.runs.doctor.remedy_spelling import RunTools, spelled


@dataclass(frozen=True, kw_only=True)
class DoctorOptions(OnBytesOption):
    """Options of `doctor`."""

    HELP: ClassVar = {"on_bytes": "Called with the number of bytes of logs as they are read."}

    python: Annotated[
        StrPath | None,
        About(
            "Examine the environment of this interpreter, or in this folder, instead of reshard's own.",
            "PATH",
        ),
    ] = None

    def check(self, targets: Sequence[StrPath]) -> None:
        """Raise ReshardError for options that cannot be combined."""
        if self.python is not None and targets:
            raise ReshardError(
                "python-and-targets",
                "--python examines an environment, and takes no target",
                remedy="pass either of them",
            )


@for_users()
@takes_also(DoctorOptions)
def doctor(*targets: StrPath, **given: Any) -> list[Finding]:
    """Explain what is wrong, why, and how to fix it.

    Several targets are seen together: what one shows and another explains is one finding. The files are never executed.

    Parameters
    ----------
    *targets : str or path-like
        Logs, scripts, configs, lists of packages, checkpoints, or the folder of a run; "-" is a log on
        standard input. Without a target, the environment is examined: versions, GPUs, driver and launcher variables.

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
    arguments = Arguments("doctor")
    for each in targets:
        arguments.path("target", each)
    asked = DoctorOptions(**arguments.options(DoctorOptions, given))
    asked.check(targets)
    if asked.python is None:
        return examine(*targets, on_bytes=asked.on_bytes).findings
    return spelled(check_machine(look_around(str(asked.python))), RunTools())
