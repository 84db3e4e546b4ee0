"""The texts of the doctor's own rules, in this folder: what happens, why, and what to do.

Code computes when a rule applies, and fills in its braces. `certainty` is the most that a rule may claim: "possible"
for those that say where to look rather than why. `covers` are the codes of causes that it knows better than they do.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from reshard.base.data_files import read_data
from reshard.base.errors import Problem
from reshard.base.languages import Text
from reshard.base.translations import translated
from reshard.runs.checks.finding import CERTAINTIES, Finding
from reshard.runs.checks.location import Location
from reshard.runs.checks.phrases import filled, phrase_text

RULES_COVERED: dict[str, tuple[str, ...]] = {
    "env-device-map-tp": (
        "dtensor-mixed-cat-ddp",
        "dtensor-sharded-then-ddp",
        "dtensor-mixed-copy",
        "dtensor-ddp",
    ),
    "script-device-map": (
        *("device-map-distributed", "device-map-zero3", "dtensor-mixed-cat-ddp", "dtensor-ddp"),
        *("dtensor-mixed-copy", "dtensor-sharded-then-ddp", "devices-mixed"),
        *("dtensor-mixed-cat", "dtensor-mixed", "dtensor-mixed-clip", "dtensor-mixed-submodule"),
        "data-parallel-spread-model",
    ),
    "script-export-device-map": ("dtensor-mixed-copy", "dtensor-copy-sharded", "dtensor-mixed"),
    "script-first-rank-only": ("internlm-convert-tp", "shape-shard", "shape-rows-fewer"),
    "checkpoint-lacks": ("export-without-tokenizer", "tokenizer-not-found", "hf-no-config"),
    "safetensors-truncated": ("checkpoint-damaged",),
    "safetensors-bad-header": ("checkpoint-damaged",),
    "torch-load-truncated": ("checkpoint-damaged",),
    "dcp-no-metadata": ("checkpoint-damaged",),
    "dcp-shard-missing": ("checkpoint-damaged",),
    "hf-missing-shard": ("checkpoint-damaged",),
    "verl-rank-missing": ("checkpoint-damaged",),
    "checkpoint-old-gradient-checkpointing": ("old-gc", "old-gc-crash"),
    "checkpoint-tokenizer-of-5": ("tok5",),
    "checkpoint-vocabulary": ("vocab-index", "shape-rows-more", "shape-rows-fewer", "shape-rows-padded"),
    "env-no-bf16": ("bf16", "gpu-too-old"),
    "env-more-processes-than-gpus": ("dup-gpu", "cuda-invalid-ordinal"),
    "script-removed-keyword": ("api-is-gone",),
    "script-name-gone": ("api-is-gone", "api-between"),
    "script-name-later": ("api-came-later",),
    "script-rank-guard": ("hang-gloo", "hang-nccl"),
    "script-optimizer-before-sharding": ("fsdp2-optimizer",),
}
"""What a script, an environment or a checkpoint breaks, and the catalogue entries for its effects in a log."""


def finding(
    code: str,
    places: Iterable[Location] = (),
    values: Mapping[str, object] | None = None,
    *,
    severity: str | None = None,
    certainty: str = "sure",
    evidence: Iterable[Text] = (),
) -> Finding:
    """What the rule `code` says; `values` fill the braces of its texts, a `Text` among them in each language.

    The finding keeps them; `compared` among them are numbers of the message, by what they are. It is as certain as the
    rule allows, and at most `certainty`; `severity` is set if it differs from the rule's.
    """
    rule = rules()[code]

    def text(key: str) -> Text:
        return filled(rule[key], values or {})

    return Finding(
        code=code,
        message=text("title"),
        rule=text("cause"),
        remedy=text("cure"),
        certainty=max(certainty, rule.get("certainty", "sure"), key=CERTAINTIES.index),
        severity=severity or rule["severity"],
        places=tuple(places),
        evidence=tuple(evidence),
        sources=tuple(rule["sources"]),
        values=values or {},
    )


def of_problem(problem: Problem, folder: Path) -> Finding:
    """The finding of a problem that has texts of its own: of the checkpoint or the run in `folder`."""
    return Finding(
        code=problem.code,
        message=translated(problem, "message"),
        rule=Text.lines(field_texts(problem, "rule", "expected", "found")),
        remedy=translated(problem, "remedy") if problem.remedy else Text.same(""),
        severity=problem.severity,
        places=(place_of(problem, folder),),
    )


def place_of(problem: Problem, folder: Path) -> Location:
    """Where a problem is."""
    return Location(problem.file or str(folder), None, problem.tensor or "")


def field_texts(problem: Problem, *fields: str) -> Iterator[Text]:
    """The fields of a problem that are set, one line each."""
    for field in fields:
        if value := getattr(problem, field):
            yield phrase_text(
                f"problem-{field}", value=value if field == "tensor" else translated(problem, field)
            )


def covered_by(identifier: str) -> frozenset[str]:
    """The codes of causes that a rule knows better than they do."""
    return frozenset(rules().get(identifier, {}).get("covers", ()))


@lru_cache(maxsize=1)
def rules() -> dict[str, dict[str, Any]]:
    """All rules by id."""
    content: dict[str, dict[str, Any]] = {}
    for file in sorted(Path(__file__).parent.glob("*.yaml")):
        content |= read_data(file)
    return content
