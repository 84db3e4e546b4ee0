"""Which release of which package a failure requires: a refused version, a missing package."""

from __future__ import annotations

import re
from collections.abc import Iterator

from reshard.base.languages import Text
from reshard.runs.checks import rules
from reshard.runs.checks.finding import Finding
from reshard.runs.checks.history.api_table import PACKAGE_OF_ROOT, PACKAGE_ROOTS
from reshard.runs.checks.phrases import phrase_text
from reshard.runs.doctor.causes.pip_commands import imported_from, installed_for
from reshard.runs.doctor.frame_packages import KNOWN_FOLDERS
from reshard.runs.doctor.text.log import Log, Traceback
from reshard.runs.doctor.text.partial_failures import CUT_OFF_TRACEBACK, EXIT_STATUS

# -------------------------------------------------------------------------------------- a release that is required

_RANGE = r"(?:[<>=!~]=|[<>]) ?\d[\w.]*"
_RANGES = rf"{_RANGE}(?:, ?{_RANGE}){{0,3}}"
_REQUIRED = tuple(
    re.compile(pattern)
    for pattern in (
        rf"The '(?P<package>[A-Za-z][\w.-]*)(?P<range>{_RANGES})' distribution was not found"
        r"(?: and is required by (?P<who>[\w.-]+))?",
        rf"Requirement\.parse\('(?P<package>[A-Za-z][\w.-]*)(?P<range>{_RANGES})'\)(?:, \{{'(?P<who>[\w.-]+)'\}})?",
        r"\b(?i:requires?|needs?|install(?:ed)?|upgrade|update)\b[^.\n]{0,60}?"
        rf"(?<![\w.-])(?P<package>[A-Za-z][\w-]{{0,60}})(?: (?:package )?version )?(?P<range>{_RANGES})(?P<who>)",
    )
)
_KNOWN = "|".join(
    sorted(
        {*PACKAGE_ROOTS, *PACKAGE_OF_ROOT, "pytorch", "ray", "torchao", "torchvision"}, key=len, reverse=True
    )
)
_IN_WORDS = re.compile(
    rf"(?i)(?<![\w./-])(?P<package>{_KNOWN})[`'\"]?(?: [^.\n\d]{{1,40}}?)? "
    r"(?:(?:at least|>=|≥|equal(?: than| to)?|higher than)(?: version)? ?v?(?P<least>\d+(?:\.\d+){1,3})"
    r"|v?(?P<newest>\d+(?:\.\d+){1,3}) (?:or|and) (?:newer|later|higher|above|greater|up)\b)"
)
"""The same in prose, about packages that are known: their names are words of other sentences too."""
_FOUND = re.compile(
    r"(?i:but got|detected(?: version)?|found(?: version)?|installed(?: version)?(?: is)?|you have):? v?"
    r"(?P<has>\d+\.\d[\w.+]*\w)"
)
"""The release that a message says is there."""
_NO_PACKAGE = ("python", "cuda", "gcc", "glibc", "git", "driver", "nvcc", "rocm")
"""What messages require that pip does not install."""


def of_requirement(root: Traceback, log: Log) -> Finding | None:
    """The release of a package that a failure requires; None if it names none."""
    required = _required(root.error_text)
    if required is None:
        return None
    package, spec, who = required
    has = _FOUND.search(root.error_text)
    what = phrase_text("required-by", spec=spec, who=who) if who else phrase_text("required", spec=spec)
    flags = installed_for(package.replace("-", "_")).split()[:-1]
    values = {
        "package": package,
        "spec": spec,
        "flags": "".join(f"{each} " for each in flags if each.startswith("--")),
        "what": phrase_text("and-found", what=what, has=has["has"]) if has else what,
        "newer": phrase_text("or-newer", who=who) if who else Text.same(""),
    }
    return rules.finding("version-required", values=values)


def _required(message: str) -> tuple[str, str, str | None] | None:
    """The package that a message requires, with its releases, and who requires it, if the message says so."""
    match = next((hit for pattern in _REQUIRED if (hit := pattern.search(message))), None)
    if match and match["package"].lower() not in _NO_PACKAGE:
        package = _published(match["package"])
        return package, f"{package}{match['range'].replace(' ', '')}".rstrip("."), match["who"]
    if match := _IN_WORDS.search(message):
        package = _published(match["package"])
        return package, f"{package}>={match['least'] or match['newest']}", None
    return None


def _published(name: str) -> str:
    """What pip calls a package that a message names in words."""
    plain = name.lower().replace("_", "-")
    return {"flash-attention": "flash-attn", "pytorch": "torch"}.get(plain, plain)


# ------------------------------------------------------------------------------------------- packages to install

_PACKAGE = r"[A-Za-z][\w-]*(?:\.[A-Za-z]\w*)*(?:\[[\w,-]+\])?(?:[<>=!~]{1,2}[\w.*]+,?)*"
_INSTALL = re.compile(
    r"\bpip3? install (?P<command>[^`'\"“”\n]{1,300}|['\"][^`“”\n]{1,300})"
    r"|\b(?:requires?|needs?) (?:the )?(?P<needed>[\w-]{2,60})(?: library)?(?: to be| is| be| but it was not)?"
    r" (?:installed|found)\b"
    r"|(?<![\w.-])(?P<lacking>[\w-]{2,60}) (?:needs to|must|has to|should) be installed\b"
    r"|following packages that were not found in your environment: (?P<named>[^\n]{1,200}?)(?:\.\s|\.?$)",
    re.MULTILINE,
)
_OR = re.compile(r"[`'\"]?,? or(?: just)?:? [`'\"]?pip3? install [^`'\"\n]+")
"""A command in place of the one before."""
_OPTION = re.compile(r"(?<!\S)-\S+(?:[ =](?:https?:\S+|\S+\.txt))?")
_PROSE = frozenset(
    ("to", "for", "if", "then", "in", "with", "before", "first", "from", "it", "the", "on", "or")
)
"""Words that end a command inside a sentence."""
_MORE = ("einops", "optimum", "protobuf", "tiktoken", "timm")
"""Packages that sentences name: they ask for drivers and compilers too."""


def of_packages(root: Traceback, log: Log) -> Finding | None:
    """The packages that a failure's message says to install; None if it names none."""
    packages = list(dict.fromkeys(_packages(root.message)))
    if not packages or root.exception in (CUT_OFF_TRACEBACK, EXIT_STATUS):
        return None
    bare = [re.split(r"[<>=!~\[]", each.split()[-1].strip("'"))[0] for each in packages]
    values = {
        "packages": ", ".join(each.split()[-1].strip("'") for each in packages),
        "specs": " ".join(f"'{each}'" if re.search(r"^[^' ]*[<>=!~\[]", each) else each for each in packages),
        "modules": ", ".join(map(imported_from, bare)),
    }
    return rules.finding("packages-to-install", values=values)


def _packages(message: str) -> Iterator[str]:
    """The packages that a message names, in commands or in sentences; of alternatives (`A or B`) the first."""
    for match in _INSTALL.finditer(_OR.sub("", message)):
        if match["command"]:
            yield from _of_command(match["command"])
        elif match["named"]:
            yield from re.findall(_PACKAGE, match["named"])
        else:
            yield from _of_sentence(match["needed"] or match["lacking"])


def _of_sentence(name: str) -> Iterator[str]:
    """A package that a sentence names, if it is known to be one."""
    name, distribution = name.lower(), installed_for(name.lower())
    if name not in _NO_PACKAGE and (
        distribution != name or distribution in {*PACKAGE_ROOTS, *PACKAGE_OF_ROOT, *KNOWN_FOLDERS, *_MORE}
    ):
        yield from [distribution] if distribution.startswith("-") else distribution.split()


def _of_command(args: str) -> Iterator[str]:
    for word in _OPTION.sub("", args).split():
        bare = word.strip("'\"`,;:()").rstrip(".")
        if bare in ("and", "&"):
            continue
        if bare in _PROSE or not re.fullmatch(_PACKAGE, bare):
            return
        yield bare
        if word.endswith((".", ";", ")", ":")):
            return
