"""The output folder before a run starts: whether it is free, what --overwrite removes, and its lock."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from reshard.base.errors import Problem, ReshardError, listed
from reshard.guard.end.completeness import RUN_RECORD
from reshard.training.engine_registry import ENGINE_MODULES, engine_named
from reshard.training.run import Run
from reshard.transfer import locks

LOCK_FILE = ".lock"
JOBS_FOLDER = "slurm"
"""The folder for logs of Slurm jobs and submitit's files. Jobs read them, so the folder is not removed."""
RESULT_FOLDERS = ("final", "merged", "final.replaced", "merged.replaced")
"""Folders with what a run has made, to which users may add files of their own."""
RUN_FILES = {
    *(*RESULT_FOLDERS, "*.unchecked", RUN_RECORD, "run-node*.json", "trained.json", "problems.json"),
    *("metrics.jsonl", "report.html", "train*.log", "logs*", "tensorboard"),
}
"""Files that a run of any engine writes to its output."""


def files_there(run: Run) -> list[Path]:
    """The contents of the output, except those of Slurm jobs, and files of other nodes that start before the first."""
    if not run.output.is_dir():
        return []
    several = run.ranks.nnodes > 1
    others = [LOCK_FILE, JOBS_FOLDER, *(path.name for path in run.output.glob("*-node*") if several)]
    return [path for path in run.output.iterdir() if path.name not in others]


def refused(run: Run, *, overwrite: bool) -> Iterator[Problem]:
    """Problems of the output for a new run."""
    from reshard.folders.companions import RECORD as WRITTEN  # which imports numpy, and --help needs none

    found = files_there(run)
    if (run.output / WRITTEN).is_file():
        yield Problem(
            "output-is-a-result",
            "the output is a checkpoint, not the folder of a run",
            file=str(run.output),
            found=f"{WRITTEN}, which reshard writes next to weights",
            remedy="choose another folder with -o; to start its run again, the folder above",
        )
    elif found and not overwrite:
        is_ours = (run.output / RUN_RECORD).is_file()
        again = "pass --resume to continue, or --overwrite to start again, or " if is_ours else "name "
        yield Problem(
            "output-not-empty",
            "the output is not empty",
            file=str(run.output),
            found=", ".join(sorted(path.name for path in found)[:6]),
            remedy=f"{again}another folder with -o",
        )
    elif run.output.exists() and not run.output.is_dir():
        yield Problem(
            "output-is-a-file", "the output is a file", file=str(run.output), remedy="choose a folder with -o"
        )
    else:
        yield from cleared(run)


def made_by_run(run: Run) -> list[Path]:
    """Files that an earlier run left in the output. Engines' copies of the model's files are overwritten."""
    mine, engines = set(files_there(run)), [engine_named(name) for name in ENGINE_MODULES]
    patterns = RUN_FILES | {
        pattern for each in engines for pattern in (each.checkpoints.pattern, *each.leaves)
    }
    return [path for pattern in patterns for path in run.output.glob(pattern) if path in mine]


def clear(run: Run) -> None:
    """Remove the files of an earlier run. Raises ReshardError if the output is not a run's, or this run reads it."""
    if problems := list(cleared(run)):
        raise ReshardError(problems)
    for path in made_by_run(run):
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def cleared(run: Run) -> Iterator[Problem]:
    """Problems unless the output is an earlier run's, has no other files in its results, and this run reads none."""
    output = run.output
    if not files_there(run):
        return
    if not (output / RUN_RECORD).is_file():
        yield Problem(
            "output-foreign-files",
            "the output folder contains files that no run wrote",
            file=str(output),
            expected=f"an empty folder, or one with {RUN_RECORD}",
            remedy="choose another folder with -o, or remove this one yourself",
        )
    foreign = [f"{name}/{each}" for name in RESULT_FOLDERS for each in _foreign(output / name)]
    if foreign:
        yield Problem(
            "output-foreign-results",
            "the results of the earlier run contain files that --overwrite does not delete",
            file=str(output),
            rule="--overwrite deletes what reshard wrote, and nothing else",
            found=listed(foreign),
            remedy="move these files elsewhere, or choose another folder with -o",
        )
    going = [path.resolve() for path in made_by_run(run)]
    for name, source in (("model", run.model), *(("data", path) for path in run.data.paths)):
        if any(source.resolve().is_relative_to(path) for path in going):
            yield Problem(
                "overwrite-would-remove-input",
                f"--overwrite would remove the {name} of this run",
                file=str(source),
                found=f"-o {output} --overwrite",
                remedy="choose another folder with -o",
            )


def _foreign(folder: Path) -> list[str]:
    """Files in a folder that reshard did not write there."""
    from reshard.records.checkpoint_files import foreign_in  # with all formats

    return foreign_in(folder) if folder.is_dir() and not folder.is_symlink() else []


@contextmanager
def held(run: Run) -> Iterator[None]:
    """Hold the lock of a run's output. Raises ReshardError if another run holds it.

    The system releases the lock when its process ends, however it ends. Without file locks, none is held.
    """
    path = run.output / LOCK_FILE
    run.output.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        try:
            stack.enter_context(locks.held(path))
        except BlockingIOError:
            raise ReshardError(
                "output-in-use",
                "another run is writing to the output",
                file=str(run.output),
                found=f"{path} is held by a running process",
                remedy="wait for it, stop it, or choose another folder with -o",
            ) from None
        except OSError:
            pass  # the next write to the output fails with the cause
        yield
