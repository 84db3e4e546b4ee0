"""The data of a run, read once on each node: other ranks map what the first one wrote, and what TRL makes of it."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from reshard.train.data import load_dataset
from reshard.train.run import Run
from reshard.train.trl import devices

FOLDER = ".data"
"""Where in the output the data lie as Arrow files while ranks train, one folder for each node."""


@contextmanager
def rows_of(run: Run) -> Iterator[Any]:
    """The data as a `datasets.Dataset`. With several ranks it lies in a file, beside which TRL caches its tokens.

    Otherwise each rank would hold all of them, and make all of them again. Raises ReshardError for wrong records.
    """
    from datasets import Dataset

    if devices.world_size() == 1:
        yield load_dataset(run.data, run.method)
        return
    folder = run.output / f"{FOLDER}-{platform.node()}"
    first = os.environ.get("LOCAL_RANK", "0") == "0"
    if first:
        _write(run, folder)
    devices.barrier()
    try:
        yield Dataset.load_from_disk(str(folder))
        devices.barrier()
    finally:
        if first:
            shutil.rmtree(folder, ignore_errors=True)


def _write(run: Run, folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)  # of a run that was killed
    load_dataset(run.data, run.method).save_to_disk(str(folder))
