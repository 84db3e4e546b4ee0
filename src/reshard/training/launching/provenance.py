"""The record of a run, and the command that starts the same run again."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from reshard.stores.hub import url_of
from reshard.training import data
from reshard.training.engines import engine_of
from reshard.training.findings import version_of
from reshard.training.run import SIZES, Ranks, Run
from reshard.version import __version__

DEFAULTS = {
    **dict.fromkeys(SIZES, 1),
    **{each.name: each.default for each in (*fields(Ranks), *fields(Run))},
}
for _name in ("method", "model", "output", "layout", "ranks", "options"):
    del DEFAULTS[_name]
IMPLIED = {"parallel": "tp"}
"""By --tp."""


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
    given = {**vars(run), **vars(run.ranks), **{name: getattr(run.layout, name) for name in SIZES}}
    given |= {"data": run.data.words, "eval_data": run.eval_data.words if run.eval_data else None}
    words = ["reshard", "train", run.method, "--model", url_of(run.model), "-o", str(run.output)]
    for name, default in DEFAULTS.items():
        if given[name] not in (default, IMPLIED.get(name)):
            words += _flag(name.replace("_", "-"), given[name])
    return [*words, *(word for name, value in run.options.items() for word in _typed(name, value))]


def _flag(name: str, value: Any) -> list[str]:
    """An option of reshard on the command line."""
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    several = value if isinstance(value, (list, tuple)) else [value]
    return [word for each in several for word in (f"--{name}", str(each))]


def _typed(name: str, value: Any) -> list[str]:
    """An option of the engine on the command line."""
    if value is True:
        return [f"--{name}"]
    if isinstance(value, (list, tuple)):
        return [f"--{name}", *map(str, value)]
    text = json.dumps(value) if isinstance(value, Mapping) else str(value)
    return [f"--{name}={text}"]
