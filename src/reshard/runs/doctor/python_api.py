"""`reshard.doctor`: what is wrong with logs, scripts, configs, checkpoints or an environment."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, TypeVar

from reshard.base.arguments import with_options
from reshard.base.errors import ReshardError
from reshard.base.exceptions_to_problems import for_users
from reshard.base.options import About
from reshard.base.shared_options import OnBytesOption
from reshard.base.values import PATH, StrPath, several
from reshard.runs.checks.environment import look_around
from reshard.runs.checks.finding import Finding
from reshard.runs.checks.machine_checks import check_machine
from reshard.runs.doctor.diagnose_targets import examine
from reshard.runs.doctor.remedy_spelling import RunTools, spelled

R = TypeVar("R")


@dataclass(frozen=True, kw_only=True)
class DoctorOptions(OnBytesOption):
    """Options of `doctor`."""

    HELP: ClassVar[dict[str, str]] = {"on_bytes": "Called with the number of bytes of logs as they are read."}

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


def _takes_options(function: Callable[..., R]) -> Callable[..., R]:
    return with_options(DoctorOptions, {"targets": several(PATH)})(function)  # type: ignore[no-any-return]


@for_users()
@_takes_options
def doctor(*targets: StrPath, options: DoctorOptions) -> list[Finding]:
    """Explain what is wrong, why, and how to fix it.

    Several targets are seen together: what one shows and another explains is one finding. The files are never executed.
    Options are described as in `reshard doctor --help`: --python is `python`.

    Parameters
    ----------
    *targets : str or path-like
        Logs, scripts, configs, checkpoints, or the folder of a run; "-" is a log on
        standard input. Without a target, the environment is examined: versions, GPUs, driver and launcher variables.
    {options}

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
    options.check(targets)
    if options.python is None:
        return examine(*targets, on_bytes=options.on_bytes).findings
    return spelled(check_machine(look_around(str(options.python))), RunTools())
