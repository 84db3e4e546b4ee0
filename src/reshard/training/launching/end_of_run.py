"""The end of a run: in its metrics and its report, and on the screen as `reshard guard` prints it."""

from __future__ import annotations

import shlex
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from reshard.base.word_wrap import WrappingConsole
from reshard.training.engine_registry import engine_of
from reshard.training.launching.rank_environment import LaunchedRank
from reshard.training.rewards import named_rewards
from reshard.training.run import Run
from reshard.training.show import html_report
from reshard.training.show.metrics import append
from reshard.training.worker import PROBLEMS_FILE, claim

if TYPE_CHECKING:
    from reshard.guard.end.failure import Failure

OTHER_FAILURE_SECONDS = 2.0
"""Seconds that a rank waits for another rank to report the failure by which this one ended."""
CONTINUABLE_STATES = ("failed", "interrupted")
"""Outcomes after which a run can be continued."""


@dataclass(frozen=True)
class RunScreen:
    """The output of a launch. `language` is that of causes and remedies, "en" or "zh"."""

    console: Console = field(
        default_factory=partial(WrappingConsole, stderr=True, soft_wrap=True, highlight=False)
    )
    quiet: bool = False
    language: str = "en"


def end(
    run: Run,
    outcome: str,
    failure: Failure | None = None,
    language: str = "en",
    place: LaunchedRank | None = None,
    **more: Any,
) -> None:
    """Record how a run ended, on the first node only. `more` is added to the row of the metrics."""
    if run.ranks.node_rank:
        return
    if failure:
        more["failure"] = failure.as_dict(language)
    if outcome in CONTINUABLE_STATES and engine_of(run).checkpoints.last(run.output):
        more["resume"] = resuming(run, place)
    with suppress(OSError):  # on a full disk, the failure of the ranks or of the checks says so
        append(run.output, {"event": "end", "outcome": outcome, **more})
        html_report.write(run.output)


def print_end(
    run: Run,
    failure: Failure | None,
    screen: RunScreen,
    log: Path | None = None,
    place: LaunchedRank | None = None,
) -> None:
    """Print why a run ended, the last checkpoint, and how to continue with the launcher of `place`."""
    from reshard.guard.end.end_report import EndReport
    from reshard.guard.end.resume import Resume
    from reshard.guard.end.saved_checkpoints import FoundCheckpoint, SavedCheckpoints
    from reshard.guard.supervise.supervision import CommandOutcome

    saved = None
    if run.ranks.node_rank == 0:
        checkpoints = engine_of(run).checkpoints
        last, lost = checkpoints.last(run.output), checkpoints.damaged(run.output)
        saved = SavedCheckpoints([FoundCheckpoint(last, None, "", 0.0)] if last else [], lost)
    told = EndReport(
        CommandOutcome(1, began=0.0), log, run.output, failure, saved, Resume(advice=resuming(run, place))
    )
    with suppress(OSError):  # a closed terminal cannot be written to
        told.print(screen.console, screen.language)


def resuming(run: Run, place: LaunchedRank | None) -> str:
    """The command that continues a run, with the launcher of a rank: all other options are read from its record."""
    node = ["--node-rank", str(run.ranks.node_rank)] if run.ranks.nnodes > 1 else []
    words = shlex.join(["reshard", "train", run.method, "--resume", "-o", str(run.output), *node])
    return f"{place.launcher} … {words}" if place else words


def failure_of_ranks(run: Run, log: Path, status: int, *, ranks: int = 0) -> Failure:
    """Why the ranks failed, from their log; or the signal that ended their parent, and all ranks with it.

    `ranks` is their number, 0 if unknown, and `status` that of their parent.
    """
    from reshard.guard.end.failure import Failure, RunEvidence, read_failure
    from reshard.guard.supervise.signal_passing import signal_name

    if status < 0:
        return Failure(
            "the parent of the ranks", ("all have ended",), (), f"was killed by {signal_name(-status)}"
        )
    seen = RunEvidence(frozenset({"reshard"}), _scripts(run), run.output, ranks=ranks, status=status)
    return read_failure(log, seen)


def failure_of_rank(run: Run, rank: int, error: Exception) -> Failure | None:
    """Why this rank failed, under a foreign launcher; None if another rank tells why the run failed."""
    from reshard.guard.end.failure import RunEvidence, failure_in

    words = "".join(traceback.format_exception(error))
    failure = failure_in("this rank", words, RunEvidence(frozenset({"reshard"}), _scripts(run), run.output))
    if (failure.follows and _another_tells(run)) or not claim(run.output, []):
        return None
    return replace(failure, who=f"rank {rank}")


def _scripts(run: Run) -> tuple[Path, ...]:
    return tuple(named_rewards(each).file for each in run.reward)


def _another_tells(run: Run) -> bool:
    """Whether the rank whose end made this one fail has reported the failure."""
    deadline = time.monotonic() + OTHER_FAILURE_SECONDS
    while time.monotonic() < deadline:
        if (run.output / PROBLEMS_FILE).exists():
            return True
        time.sleep(0.05)
    return False
