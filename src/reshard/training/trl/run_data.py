"""The data of a run, read once on each node: other ranks map what the first one wrote, and what TRL makes of it.

A `RunData` has the training and the evaluation data. SFT gets tokens (`data/token_files.py`), which TRL truncates and
packs; other methods get records, which TRL tokenizes.
"""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from reshard.training.collectives import meet
from reshard.training.data import load_dataset
from reshard.training.data.mix import DataMix
from reshard.training.data.token_files import TOKENS_SUFFIX, folder_of, tokenize
from reshard.training.data.tokens import LossCoverage
from reshard.training.run import Run
from reshard.training.show.metrics import MetricsWriter
from reshard.training.trl import image_training

DATA_FOLDER = ".data"
"""Prefix of the folders in the output with Arrow files while ranks train, one folder for each node."""


class RunData(NamedTuple):
    """Each a `datasets.Dataset`; `evaluation` is None if the run is not evaluated."""

    train: Any
    evaluation: Any


def learning_of(options: Mapping[str, Any]) -> LossCoverage:
    """What the loss covers according to TRL's options."""
    return LossCoverage(
        bool(options.get("assistant_only_loss")), options.get("completion_only_loss") is not False
    )


@contextmanager
def rows_of(
    run: Run, options: Mapping[str, Any], tokenizer: Any, monitor: MetricsWriter
) -> Iterator[RunData]:
    """The data of a run, mapped from files, next to which TRL caches its own.

    Otherwise each rank would keep and process all of it. Raises ReshardError for faulty records.
    """
    folder = run.output / f"{DATA_FOLDER}-{platform.node()}"
    first = os.environ.get("LOCAL_RANK", "0") == "0"
    mixes = {"train": run.data, "eval": run.eval_data}
    if first:
        shutil.rmtree(folder, ignore_errors=True)  # of a run that was killed
        write = _write_images if image_training.is_seen(run, *mixes.values()) else _write
        for name, mix in mixes.items():
            if mix:
                write(replace(run, data=mix), options, tokenizer, folder / name, monitor)
    meet()
    try:
        yield RunData(*(mix and _mapped(run, mix, folder / name) for name, mix in mixes.items()))
        meet()
    finally:
        if first:
            shutil.rmtree(folder, ignore_errors=True)


def _write(
    run: Run, options: Mapping[str, Any], tokenizer: Any, folder: Path, monitor: MetricsWriter
) -> None:
    if run.method != "sft":
        load_dataset(run.data, run.method, **run.reading).save_to_disk(str(folder))
        return
    folder.mkdir(parents=True)
    kept = folder_of(run, folder / "tokens")
    found = tokenize(run, tokenizer, learning_of(options), kept)
    for number, file in enumerate(found.files):
        (folder / f"{number:04}{TOKENS_SUFFIX}").symlink_to(file)  # TRL caches its results next to the link
    if run.token_cache:
        monitor.note(found.in_words(kept))


def _write_images(run: Run, options: Any, tokenizer: Any, folder: Path, monitor: MetricsWriter) -> None:
    """Write records with images as they are: pixels take much more room than files."""
    folder.mkdir(parents=True)
    for number, path in enumerate(run.data.paths):
        image_training.store(run, path, folder / f"{number:04}{TOKENS_SUFFIX}")


def _mapped(run: Run, mix: DataMix, folder: Path) -> Any:
    from datasets import Dataset, concatenate_datasets

    if run.method != "sft":
        return Dataset.load_from_disk(str(folder))
    parts = [Dataset.from_file(str(file)) for file in sorted(folder.glob(f"*{TOKENS_SUFFIX}"))]
    whole, picks = concatenate_datasets(parts), mix.picks([len(part) for part in parts])
    if "images" in whole.column_names:
        whole = whole.with_transform(image_training.opened)
    return whole if picks is None else whole.select(picks)
