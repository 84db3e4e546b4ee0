"""Problems of a run that others found: the doctor, checkpoint readers, the list of installed packages."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from textwrap import shorten

from packaging.specifiers import SpecifierSet

from reshard.doctor.environment import Environment, diagnose_environment
from reshard.doctor.finding import Finding, Place, Text
from reshard.doctor.spelling import Usage, spelled
from reshard.errors import Problem

LONGEST = 160
"""Maximum characters of a line in a problem: a config can consist of one line."""


def in_short(finding: Finding, severity: str | None = None) -> Problem:
    """A finding as a problem with the options of `reshard train`: its first place, and its remedy in one line."""
    (finding,) = spelled([finding], Usage({"reshard"}))
    where = finding.places[0] if finding.places else Place("")
    lines = (line for line in finding.remedy.en.split("\n") if line and not line.startswith("```"))
    return replace(
        finding,
        file=str(where) or None,
        found=shorten(where.text, LONGEST, placeholder=" …") or None,
        remedy=Text.same(" ".join(lines)),
        severity=severity or finding.severity,
    )


def without_bf16(environment: Environment) -> Iterator[Problem]:
    """A problem if the GPUs are too old for bfloat16 and flash-attention."""
    found = diagnose_environment(environment)
    yield from (in_short(finding, "error") for finding in found if finding.code == "env-no-bf16")


def lacking(
    floors: Mapping[str, str], installed: Mapping[str, str] | None = None, rule: str | None = None
) -> Iterator[Problem]:
    """Packages that are missing or too old; `installed` replaces what is installed here."""
    for package, floor in floors.items():
        found = _version(package) if installed is None else installed.get(package)
        if found is None or not SpecifierSet(floor).contains(found, prereleases=True):
            yield Problem(
                "train-package-not-installed" if found is None else "package-too-old",
                f"{package} is not installed" if found is None else f"this {package} is too old",
                rule=rule,
                expected=f"{package}{floor}",
                found=found,
                remedy=_install(package, floor),
            )


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


WITHOUT_THEIR_OWN = ("megatron-core",)
"""Packages whose requirements install CUDA packages that are not needed."""


def _install(package: str, floor: str) -> str:
    return f"pip install {'--no-deps ' * (package in WITHOUT_THEIR_OWN)}'{package}{floor}'"


_ELSEWHERE = (
    (r": --base DIR", ": put its config.json into the folder"),
    (r" \(--base DIR\), or force --family NAME", ": put its config.json into the folder"),
    (r", or name the layers of each stage: --stages \S+", ""),
    (r"if it computes the same as \w+: --family .*", "correct config.json, or train it with --engine trl"),
    (r"; to convert the weights anyway: --family \w+", ", or train it with --engine trl"),
)
"""Options of `convert` in remedies that `train` does not have, and their replacements."""


def in_training(problem: Problem) -> Problem:
    """A problem of a checkpoint or a layout, with a remedy that works in training."""
    remedy, expected = problem.remedy, problem.expected
    for pattern, instead in _ELSEWHERE:
        remedy = re.sub(pattern, instead, remedy) if remedy else remedy
    expected = re.sub(r", or \d+ numbers that add up to \d+", "", expected) if expected else expected
    return replace(problem, remedy=remedy, expected=expected)
