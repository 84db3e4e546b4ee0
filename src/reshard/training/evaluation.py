"""The evaluation data of a run, before it starts: read like the training data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from reshard.base.errors import Problem, when
from reshard.training import data
from reshard.training.data.tokens import RecordLengths
from reshard.training.methods import is_rewarded
from reshard.training.run import Run


@dataclass(frozen=True)
class Evaluation:
    """The size of an evaluation, and when it runs."""

    records: int
    when: str
    """For example `once an epoch, 8 records at a time`."""
    lengths: RecordLengths | None = None

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
        lengths = self.lengths.as_dict() if self.lengths else None
        return {"records": self.records, "when": self.when, "lengths": lengths}


def evaluated(run: Run) -> Run:
    """The run with its evaluation data as training data: so it is read in the same way."""
    assert run.eval_data is not None
    return replace(run, data=run.eval_data, eval_data=None)


def held_out(run: Run) -> Iterator[Problem]:
    """Training files that look like evaluation data. Raises ReshardError if a folder has no data."""
    if not run.data.exists():
        return
    apart = run.eval_data.paths if run.eval_data and run.eval_data.exists() else []
    trained = {file for path in run.data.paths for file in data.files_of(path)}
    both = trained & {file for path in apart for file in data.files_of(path)}
    for file in sorted(both):
        yield Problem(
            "file-trained-and-evaluated-on",
            "a file is used for both training and evaluation",
            file=str(file),
            rule="data that the model was trained on do not measure how it generalizes",
            remedy="move it out of the folder of --data",
            severity="warning",
        )
    for file in [file for path in run.data.paths for file in data.held_out(path)]:
        if file not in both:
            cure = "leave it out" if run.eval_data else "give it with --eval-data"
            yield Problem(
                "held-out-file-trained-on",
                "a file whose name suggests evaluation data is used for training",
                file=str(file),
                remedy=f"move it out of the folder and {cure}, or name the other files with --data",
                severity="warning",
            )


def lacking(run: Run, trained: Mapping[str, Any], read: Mapping[str, Any]) -> list[Problem]:
    """A problem if records of the evaluation lack columns of training records."""
    columns = trained.keys() - read.keys() if is_rewarded(run.method) else set()
    return when(
        columns,
        "evaluation-data-lack-columns",
        "the evaluation data lack columns of the training data",
        file=str(run.eval_data),
        rule="the reward gets all columns by their names",
        found=f"no {', '.join(sorted(columns))}",
        remedy="add them, unless the reward does not need them",
        severity="warning",
    )
