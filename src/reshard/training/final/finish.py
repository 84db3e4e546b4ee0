"""The end of a run: convert the last checkpoint to a folder that loads, and check it before it gets its name.

`OUT/final` is a Hugging Face folder, or a PEFT adapter if the run uses LoRA; `OUT/merged` is the base with the adapter
merged. Both are written by `reshard.convert` and keep a temporary name until every check has passed.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from reshard.base.arguments import OnBytes
from reshard.base.errors import Problem, ReshardError
from reshard.commands.conversion import Conversion, How, convert
from reshard.folders.companions import CONFIG, find_companions
from reshard.formats import huggingface, open_checkpoint
from reshard.guard import acceptance
from reshard.guard.acceptance import Check, Origin, checked
from reshard.guard.complete import RECORD
from reshard.guard.failure import Failure
from reshard.guard.final import Finished, named
from reshard.guard.finite import assert_finite
from reshard.guard.publish import UNCHECKED
from reshard.hub.pull import here
from reshard.planning import Options
from reshard.training.engine import Trained
from reshard.training.engines import engine_of
from reshard.training.final.dtype import final_dtype
from reshard.training.launching.ending import end
from reshard.training.run import Run, read_record
from reshard.training.worker import TRAINED
from reshard.transfer.sources import Sources

FINAL, MERGED = "final", "merged"


def finish(run: Run, *, on_bytes: OnBytes = lambda count: None) -> Finished:
    """Make and check the final folder of a run that has finished training.

    If a check fails, the folders keep the suffix `.unchecked`, and nothing else changes. What the user has added to
    earlier folders stays. Raises ReshardError if the run has left no checkpoint.
    """
    trained = read_trained(run)
    final, merged = run.output / FINAL, run.output / MERGED if run.lora and run.merge else None
    drafts = {place: place.with_name(place.name + UNCHECKED) for place in (final, merged) if place}
    for draft in drafts.values():
        shutil.rmtree(draft, ignore_errors=True)
    checks = list(_final(run, trained, drafts[final], on_bytes))
    if merged and all(check.right for check in checks):
        checks += _merged(drafts[final], drafts[merged], run, on_bytes)
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
    path = run.output / TRAINED
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


def origin_of(run: Run) -> Origin:
    """What the final folder is compared with."""
    return Origin(run.model, bool(run.options.get("trust_remote_code")))


def _final(run: Run, trained: Trained, draft: Path, on_bytes: OnBytes) -> Iterator[Check]:
    """Make and check the final folder; if it cannot be made, nothing is checked."""
    made = checked("converted", lambda: _made(trained.checkpoint, draft, on_bytes))
    yield made
    if not made.right:
        return
    yield checked("bits", lambda: _bits(run, trained, draft))
    look = acceptance.of_adapter if run.lora else acceptance.of_model
    yield from look(draft, origin_of(run))


def _made(checkpoint: Path, folder: Path, on_bytes: OnBytes, *, merge: bool = False) -> str:
    made = export(checkpoint, folder, merge=merge, on_bytes=on_bytes)
    assert_finite(made, folder, here(Run.read(checkpoint).model))
    plan, source = made.plan, checkpoint.name.removesuffix(UNCHECKED)
    return f"{plan.tensors} tensors, {plan.parameters:,} parameters, from {source}"


def _bits(run: Run, trained: Trained, folder: Path) -> str:
    """Check that the folder stores what was in memory after the last step, by the digests that the ranks took."""
    problems = engine_of(run).check(run, trained, folder)
    if not trained.digests:
        problems.append(
            Problem(
                "digests-missing",
                "the ranks saved no digests of the trained weights",
                file=str(run.output / TRAINED),
            )
        )
    if problems:
        raise ReshardError(problems)
    rounded = f", rounded to {dtype}" if (dtype := final_dtype(run)) else ""
    return f"equal to what was trained{rounded}: {len(trained.digests)} CRC32s after step {trained.step}"


def _merged(final: Path, draft: Path, run: Run, on_bytes: OnBytes) -> Iterator[Check]:
    """Make the merged model from the final adapter, and check it."""
    made = checked("merged: converted", lambda: _made(final, draft, on_bytes, merge=True))
    yield made
    if made.right:
        yield from acceptance.of_model(draft, origin_of(run), of="merged: ")


def export(
    checkpoint: Path, destination: Path, *, merge: bool = False, dtype: str | None = None, **how: Any
) -> Conversion:
    """Convert a checkpoint of a run to a Hugging Face folder or a PEFT adapter, by the record stored in it.

    `dtype` is that of the base by default. `merge` merges the adapter of a LoRA run into its base; `how` are fields of
    `conversion.How`. Raises ReshardError if there is no record.
    """
    run = Run.of_dict(read_record(checkpoint / RECORD))
    run = replace(run, model=here(run.model))
    if merge and not run.lora:
        raise ReshardError(
            "final-adapter-missing",
            "no adapter to merge",
            file=str(checkpoint),
            found="a run that trained all weights",
            remedy="leave out --merge",
        )
    if run.lora and open_checkpoint(checkpoint).format == huggingface.NAME:
        raise ReshardError(
            "adapter-already-merged",
            "the adapter is already merged into this model",
            file=str(checkpoint),
            remedy="use the folder as it is; to export the adapter, pass a checkpoint of the run or its final folder",
        )
    options = Options(
        to="peft" if run.lora and not merge else "huggingface",
        base=_base(run, checkpoint),
        dtype=dtype or final_dtype(run),
        merge=merge,
        beside=_beside(run, checkpoint, merge=merge),
    )
    return convert(checkpoint, destination, options, How(**how))


def _base(run: Run, checkpoint: Path) -> Path | None:
    """The base, if it is needed: for an adapter, or for a checkpoint without config or tokenizer."""
    if run.lora:
        return run.model
    beside = find_companions(Sources(), open_checkpoint(checkpoint).root)
    return None if beside.config and beside.has_tokenizer else run.model


def _beside(run: Run, checkpoint: Path, *, merge: bool) -> dict[str, Path]:
    """Files to write next to the weights: the record, and for an adapter also the base's config, which PEFT ignores."""
    files = {RECORD: checkpoint / RECORD}
    if (
        run.lora
        and not merge
        and (config := find_companions(Sources(), checkpoint, run.model).files.get(CONFIG))
    ):
        files[CONFIG] = config
    return files
