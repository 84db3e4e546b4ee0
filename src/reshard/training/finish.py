"""The end of a run: convert the last checkpoint to a folder that loads, and check it before it gets its name.

`OUT/final` is a Hugging Face folder, or a PEFT adapter if the run uses LoRA; `OUT/merged` is the base with the adapter
merged. Both are written by `reshard.convert` and keep a temporary name until every check has passed.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from reshard.base.errors import Problem, ReshardError
from reshard.commands.conversion import Conversion, convert
from reshard.commands.options import RunOptions
from reshard.formats import huggingface, open_checkpoint
from reshard.guard.end.acceptance import Origin
from reshard.guard.end.completeness import RUN_RECORD
from reshard.guard.end.failure import Failure
from reshard.guard.end.final_folder import FinishedRun, made, named, options_for
from reshard.guard.end.publish import UNCHECKED_SUFFIX
from reshard.hub.pull import here
from reshard.training.engine import Trained
from reshard.training.engine_registry import engine_of, final_dtype
from reshard.training.launching.end_of_run import end
from reshard.training.run import Run
from reshard.training.worker import TRAINED_FILE

FINAL, MERGED = "final", "merged"


def finish(run: Run) -> FinishedRun:
    """Make and check the final folder of a run that has finished training.

    If a check fails, the folders keep the suffix `.unchecked`, and nothing else changes. What the user has added to
    earlier folders stays. Raises ReshardError if the run has left no checkpoint.
    """
    trained = read_trained(run)
    final, merged = run.output / FINAL, run.output / MERGED if run.lora and run.merge else None
    drafts = {place: place.with_name(place.name + UNCHECKED_SUFFIX) for place in (final, merged) if place}
    for draft in drafts.values():
        shutil.rmtree(draft, ignore_errors=True)
    origin = Origin(run.model, bool(run.options.get("trust_remote_code")))
    checks = list(
        made(
            lambda: export(trained.checkpoint, drafts[final]),
            trained.checkpoint,
            drafts[final],
            origin,
            is_adapter=run.lora,
            bits=lambda: _bits(run, trained, drafts[final]),
        )
    )
    if merged and all(check.right for check in checks):
        merge = partial(export, drafts[final], drafts[merged], merge=True)
        checks += made(merge, final, drafts[merged], origin, is_adapter=False, of="merged: ")
    finished = named(drafts, final, merged, checks)
    problems = finished.problems
    failure = (
        Failure.of_problems(problems, "the final folder", "did not pass its checks") if problems else None
    )
    rows = [[check.name, check.found, check.right] for check in finished.checks]
    end(run, "done" if finished.whole else "failed", failure, checks=rows)
    return finished


def read_trained(run: Run) -> Trained:
    """What the run recorded after its last step. Raises ReshardError if training did not finish."""
    path = run.output / TRAINED_FILE
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return Trained(Path(content["checkpoint"]), int(content["step"]), dict(content["digests"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ReshardError(
            "run-unfinished",
            "the run is not finished",
            file=str(path),
            found=f"{type(error).__name__}: {error}",
            remedy="continue with --resume, or export one of its checkpoints: reshard export CHECKPOINT DST",
        ) from None


def _bits(run: Run, trained: Trained, folder: Path) -> str:
    """Check that the folder stores what was in memory after the last step, by the digests that the ranks took."""
    problems = engine_of(run).check(run, trained, folder)
    if not trained.digests:
        problems.append(
            Problem(
                "digests-missing",
                "the ranks saved no digests of the trained weights",
                file=str(run.output / TRAINED_FILE),
            )
        )
    if problems:
        raise ReshardError(problems)
    rounded = f", rounded to {dtype}" if (dtype := final_dtype(run)) else ""
    return f"equal to what was trained{rounded}: {len(trained.digests)} CRC32s after step {trained.step}"


def export(
    checkpoint: Path, destination: Path, *, merge: bool = False, dtype: str | None = None, **how: Any
) -> Conversion:
    """Convert a checkpoint of a run to a Hugging Face folder or a PEFT adapter, by the record stored in it.

    `dtype` is that of the base by default. `merge` merges the adapter of a LoRA run into its base; `how` are fields of
    `RunOptions`. Raises ReshardError if there is no record.
    """
    run, opened = Run.read(checkpoint / RUN_RECORD), open_checkpoint(checkpoint)
    if run.lora and opened.format == huggingface.NAME:
        raise ReshardError(
            "adapter-already-merged",
            "the adapter is already merged into this model",
            file=str(checkpoint),
            remedy="use the folder as it is; to export the adapter, pass a checkpoint of the run or its final folder",
        )
    options = options_for(opened, here(run.model), merge=merge, is_adapter=run.lora)
    options = replace(
        options,
        dtype=dtype or final_dtype(run),
        no_tokenizer=False,
        beside={**options.beside, RUN_RECORD: checkpoint / RUN_RECORD},
    )
    return convert(checkpoint, destination, options, RunOptions(**how))
