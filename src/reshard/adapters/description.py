"""Descriptions of an adapter, for `inspect`."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from reshard.adapters.adapter import Adapter
from reshard.adapters.adapter_settings import AdapterSettings, merge_problems, unknown_alpha
from reshard.base.errors import Problem, listed
from reshard.formats.checkpoint import Checkpoint

MODULES_SHOWN = 12
_LAYER = re.compile(r"^.*\blayers\.\d+\.(self_attn\.)?|\.base_layer$")


def notes(adapter: Adapter) -> Iterator[str]:
    """Notes on rank, alpha, the changed modules, and the base."""
    settings = adapter.settings
    alpha = settings.alpha("")
    known = f"alpha {alpha:g} ({settings.source})" if alpha is not None else "alpha not known"
    patterns = settings.config.get("rank_pattern")
    noted = [settings.config.get("r"), *(patterns.values() if isinstance(patterns, dict) else ())]
    ranks = ", ".join(dict.fromkeys(map(str, noted if settings.written else adapter.ranks)))
    targets = sorted({_LAYER.sub("", module) for module in adapter.pairs})
    yield f"LoRA of rank {ranks}, {known}, on {listed(targets, MODULES_SHOWN)}"
    if any(pair.magnitude is not None for pair in adapter.pairs.values()):
        yield "with magnitudes of its own (DoRA)"
    if adapter.whole:
        yield f"trained whole: {listed(sorted(adapter.whole), MODULES_SHOWN)}"
    if adapter.base:
        yield f"{len(adapter.base)} weights of the base are stored with it"
    if settings.base:
        yield f"the base was {settings.base}{'' if settings.base_is_here else ', which is not here'}"


def warnings(adapter: Adapter) -> list[Problem]:
    """Problems that prevent a merge, but not a conversion as an adapter."""
    unmergeable = [replace(problem, severity="warning") for problem in merge_problems(adapter.settings)]
    return [*unmergeable, *alpha_warnings(adapter.settings)]


def alpha_warnings(settings: AdapterSettings) -> list[Problem]:
    """A warning if no file records alpha."""
    return [] if settings.alpha("") is not None else [replace(unknown_alpha(), severity="warning")]


def fused_notes(checkpoint: Checkpoint, settings: AdapterSettings) -> list[str]:
    """The same notes for an adapter of Megatron-Core, from its tensors alone."""
    linears = sorted(
        {name.split(".adapter.")[0].split(".lora_")[0].rpartition(".")[2] for name in checkpoint.tensors}
    )
    alpha = settings.alpha("")
    known = f"alpha {alpha:g} ({settings.source})" if alpha is not None else "alpha not known"
    return [
        f"LoRA of Megatron-Core, rank {settings.config.get('r', 'not noted')}, {known}, on {', '.join(linears)}"
    ]


def next_command(settings: AdapterSettings, path: Path, *, with_base: bool = True) -> str:
    """The command that merges the adapter; without `with_base`, into the weights in the same checkpoint."""
    target = path.as_posix().rstrip("/") or "/"
    base = settings.base if settings.base and settings.base_is_here else "BASE_FOLDER"
    command = ["reshard", "convert", target, f"{target}-merged", "--merge"]
    command += ["--base", base] if with_base else []
    return shlex.join([*command, *([] if settings.alpha("") is not None else ["--lora-alpha", "ALPHA"])])
