"""Findings of the doctor, of checkpoint readers and about installed packages, as problems of a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from textwrap import shorten

from packaging.specifiers import SpecifierSet

from reshard.base.errors import Problem
from reshard.base.missing_packages import install_command
from reshard.checks.finding import Finding
from reshard.checks.location import Location
from reshard.checks.rules import in_words
from reshard.checks.violation import Violation
from reshard.diagnosis.remedy_spelling import RunTools, spelled

MAX_LINE = 160
"""Maximum characters of a line in a problem: a config can consist of one line."""


def in_short(finding: Finding, severity: str | None = None) -> Problem:
    """A finding as a plain problem with the options of `reshard train`: its first place, and its remedy in one line."""
    (finding,) = spelled([finding], RunTools({"reshard"}))
    where = finding.places[0] if finding.places else Location("")
    lines = (line for line in finding.remedy.en.split("\n") if line and not line.startswith("```"))
    return Problem(
        finding.code,
        finding.message.en,
        file=str(where) or None,
        found=shorten(where.text, MAX_LINE, placeholder=" …") or None,
        rule=finding.rule.en or None,
        remedy=" ".join(lines),
        severity=severity or finding.severity,
    )


def of_violation(violation: Violation, severity: str | None = None) -> Problem:
    """What a check found, as a problem of the run."""
    return in_short(in_words(violation, [Location("environment", None, violation.shows)]), severity)


def lacking(
    floors: Mapping[str, str], installed: Mapping[str, str] | None = None, rule: str | None = None
) -> Iterator[Problem]:
    """Packages that are missing, or of untested versions. `installed` replaces the versions that are installed here."""
    missing = []
    for package, floor in floors.items():
        found = version_of(package) if installed is None else installed.get(package)
        if found is None:
            missing.append(package)
        elif not SpecifierSet(floor).contains(found, prereleases=True):
            yield Problem(
                "package-version-unsupported",
                f"reshard does not train with this version of {package}",
                rule=rule,
                expected=f"{package}{floor}",
                found=found,
                remedy=f"pip install {_LONE.get(package, '')}'{package}{floor}'",
            )
    if missing:
        yield Problem(
            "train-package-not-installed",
            f"not installed: {', '.join(missing)}",
            rule=rule,
            expected=", ".join(f"{package}{floors[package]}" for package in missing),
            remedy=_install(missing),
        )


def version_of(package: str) -> str | None:
    """The installed version of a package."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


_LONE = {"megatron-core": "--no-deps "}
"""How to install packages whose requirements pull in CUDA packages that nothing uses."""


def _install(packages: Sequence[str]) -> str:
    """One command for all of them, with the extra of reshard that contains them."""
    plain = [package for package in packages if package not in _LONE]
    commands = [install_command(*plain)] if plain else []
    return " && ".join(commands + [f"pip install {_LONE[each]}{each}" for each in packages if each in _LONE])
