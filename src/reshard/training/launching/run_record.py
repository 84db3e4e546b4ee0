"""The record of a run, and the command that starts the same run again."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from reshard.base.options import words_for
from reshard.stores.hub import url_of
from reshard.training import data
from reshard.training.engine_registry import engine_of
from reshard.training.findings_as_problems import version_of
from reshard.training.options import RunOptions
from reshard.training.run import Run
from reshard.version import __version__


def record_of(run: Run, more: Mapping[str, Any]) -> dict[str, Any]:
    """The content of `run.json`. It is the same on all nodes, so they may all write it to the same file."""
    told = replace(run, ranks=replace(run.ranks, node_rank=0)).as_dict()
    digest = {} if "data_digest" in more else {"data_digest": data.digest_of(run.data)}
    if run.eval_data:
        digest["eval_data_digest"] = data.digest_of(run.eval_data)
    more = {name: value for name, value in more.items() if name not in ("run", "problems")}
    versions = {"reshard": __version__, "python": platform.python_version()}
    versions |= {each: found for each in engine_of(run).packages if (found := version_of(each))}
    return {**told, "versions": versions, **digest, **more}


def words_of(run: Run) -> list[str]:
    """The command that starts a run, without options that have their default: the inverse of `request.run_of`."""
    asked = {
        **run.asked,
        "model": url_of(run.model),
        "data": run.data.words,
        "eval_data": run.eval_data and run.eval_data.words,
        "parallel": None if run.parallel in ("ddp", "tp") else run.parallel,  # follows from tp
    }
    words = ["reshard", "train", run.method, *words_for(RunOptions, asked)]
    return [*words, *(word for name, value in run.options.items() for word in _typed(name, value))]


def _typed(name: str, value: Any) -> list[str]:
    """An option of the engine on the command line."""
    if value is True:
        return [f"--{name}"]
    if isinstance(value, (list, tuple)):
        return [f"--{name}", *map(str, value)]
    text = json.dumps(value) if isinstance(value, Mapping) else str(value)
    return [f"--{name}={text}"]
