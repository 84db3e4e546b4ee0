"""The record of a run, and the command that starts the same run again."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from reshard.stores.hub import url_of
from reshard.training import data
from reshard.training.engines import engine_of
from reshard.training.run import Run
from reshard.training.signals import SECONDS
from reshard.version import __version__

FLAGS = ("nproc", "nnodes", "rendezvous")


def versions(run: Run) -> dict[str, str]:
    """Versions of the packages that a run depends on."""
    found = {"reshard": __version__, "python": platform.python_version()}
    for package in engine_of(run).packages:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def record_of(run: Run, more: Mapping[str, Any]) -> dict[str, Any]:
    """The content of `run.json`. It is the same on all nodes, so they may all write it to the same file."""
    told = replace(run, ranks=replace(run.ranks, node_rank=0)).as_dict()
    digest = {} if "data_digest" in more else {"data_digest": data.digest_of(run.data)}
    if run.eval_data:
        digest["eval_data_digest"] = data.digest_of(run.eval_data)
    more = {name: value for name, value in more.items() if name not in ("run", "problems")}
    return {**told, "versions": versions(run), **digest, **more}


def words_of(run: Run) -> list[str]:
    """The command that starts a run: the inverse of `request.run_of`."""
    words = ["reshard", "train", run.method, "--model", url_of(run.model)]
    words += [word for each in run.data.words for word in ("--data", each)]
    words += [
        word for each in (run.eval_data.words if run.eval_data else []) for word in ("--eval-data", each)
    ]
    words += ["--data-shape", run.data_shape] if run.data_shape else []
    words += ["--system", run.system] if run.system else []
    words += [] if run.token_cache else ["--no-token-cache"]
    words += ["-o", str(run.output)]
    words += ["--engine", run.engine] if run.engine != Run.engine else []
    words += ["--lora"] if run.lora else []
    words += ["--parallel", run.parallel] if run.parallel not in ("ddp", "tp") else []
    for name in ("tp", "pp", "vpp", "ep", "cp"):
        size = getattr(run.layout, name)
        words += [f"--{name}", str(size)] if size > 1 else []
    for name in FLAGS:
        value = getattr(run.ranks, name)
        words += (
            [f"--{name}", str(value)] if value not in (0, 1, None) or (name, value) == ("nproc", 1) else []
        )
    words += ["--max-restarts", str(run.ranks.max_restarts)] if run.ranks.max_restarts else []
    words += ["--node-rank", str(run.ranks.node_rank)] if run.ranks.nnodes > 1 else []
    words += [word for each in run.reward for word in ("--reward", each)]
    words += ["--nan-steps", str(run.nan_steps)] if run.nan_steps > 1 else []
    if run.save_on_signal != SECONDS:
        words += ["--save-on-signal", str(run.save_on_signal)]
    words += [] if run.merge else ["--no-merge"]
    words += ["--resume"] if run.resume else []
    return [*words, *(word for name, value in run.options.items() for word in _typed(name, value))]


def _typed(name: str, value: Any) -> list[str]:
    """An option of the engine on the command line."""
    if value is True:
        return [f"--{name}"]
    if isinstance(value, (list, tuple)):
        return [f"--{name}", *map(str, value)]
    text = json.dumps(value) if isinstance(value, Mapping) else str(value)
    return [f"--{name}={text}"]
