"""An adapter in words, for `inspect`."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from reshard.adapters.adapter import Adapter
from reshard.adapters.settings import merge_problems
from reshard.errors import Problem

SHOWN = 12
_LAYER = re.compile(r"^.*\blayers\.\d+\.(self_attn\.)?|\.base_layer$")


def notes(adapter: Adapter) -> list[str]:
    """Rank, alpha, what it changes, and where its base was."""
    settings = adapter.settings
    alpha = settings.alpha("")
    known = f"alpha {alpha:g} ({settings.source})" if alpha is not None else "alpha not known"
    noted = [settings.config.get("r"), *(settings.config.get("rank_pattern") or {}).values()]
    ranks = ", ".join(str(rank) for rank in dict.fromkeys(noted if settings.written else adapter.ranks))
    targets = sorted({_LAYER.sub("", module) for module in adapter.pairs})
    more = f" and {len(targets) - SHOWN} more" if len(targets) > SHOWN else ""
    found = [f"LoRA of rank {ranks}, {known}, on {', '.join(targets[:SHOWN])}{more}"]
    if any(pair.magnitude is not None for pair in adapter.pairs.values()):
        found.append("with magnitudes of its own (DoRA)")
    if adapter.whole:
        found.append(f"trained whole: {', '.join(sorted(adapter.whole)[:SHOWN])}")
    if adapter.base:
        found.append(f"{len(adapter.base)} weights of the base lie beside it")
    if settings.base:
        found.append(
            f"the base was {settings.base}{'' if Path(settings.base).is_dir() else ', which is not here'}"
        )
    return found


def warnings(adapter: Adapter) -> list[Problem]:
    """What stands in the way of a merge, but not of carrying the adapter as it is."""
    problems = list(merge_problems(adapter.settings))
    if adapter.settings.alpha("") is None:
        problems.append(
            Problem(
                "lora_alpha is not known",
                rule="no file beside the adapter notes it, and the tensors do not tell it",
                remedy="give the alpha that the adapter was trained with: --lora-alpha N",
            )
        )
    return [_as_warning(problem) for problem in problems]


def _as_warning(problem: Problem) -> Problem:
    return Problem(**{**problem.as_dict(), "severity": "warning"})


def next_command(adapter: Adapter, path: Path) -> str:
    """The command that merges the adapter."""
    target = path.as_posix().rstrip("/") or "/"
    base = adapter.settings.base
    words = ["reshard", "convert", target, f"{target}-merged", "--merge"]
    words += ["--base", base if base and Path(base).is_dir() else "BASE_FOLDER"]
    return shlex.join(
        [*words, *([] if adapter.settings.alpha("") is not None else ["--lora-alpha", "ALPHA"])]
    )
