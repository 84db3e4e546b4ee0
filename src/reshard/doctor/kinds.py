"""Entries that know the kind of an exception only: what the log tells of packages and interpreter."""

from __future__ import annotations

import re

from reshard.doctor.finding import Text
from reshard.doctor.log import Log, Traceback

BY_KIND = frozenset({"module-not-found", "import-name-missing", "module-attribute-missing"})
"""They explain the first failure where no other entry does, and never surely."""

_INTERPRETER = re.compile(r"(?<![\w.])(?:[\w./~+-]*/bin/python[\d.]*)(?![\w/])")
_ENVIRONMENT = re.compile(r"([\w./~+-]*)/lib/python[\d.]+/(?:site|dist)-packages/")
_ASKED = re.compile(r"(?:named|from|module) ['\"`‘“]([A-Za-z_]\w*)")
_INSTALLED = re.compile(r"(?:site|dist)-packages/(\w+)")


def filled_in(cure: Text, root: Traceback, log: Log) -> Text:
    """A cure with the packages and the interpreter of the log in place of general words."""
    words: dict[str, str] = {}
    if asked := _ASKED.search(root.message.partition(" (")[0].split("import name")[-1]):
        words |= {"NAME": asked[1], "IMPORTED": asked[1]}
    importer = _INSTALLED.search(root.frames[-1]) if root.frames else None
    other = importer is not None and importer[1] != words.get("IMPORTED")
    words["IMPORTER|"] = f"{importer[1]}|" if importer and other else ""
    if interpreter := _interpreter(log.text):
        words |= {"python -m pip": f"{interpreter} -m pip", "python -c": f"{interpreter} -c"}
    pattern = re.compile("|".join(rf"\b{re.escape(word)}" for word in words))
    return Text(*(pattern.sub(lambda match: words[match[0]], text) for text in (cure.en, cure.zh)))


def _interpreter(text: str) -> str | None:
    """The interpreter that a log names last: the launcher tells which one the workers had."""
    named = _INTERPRETER.findall(text) or [f"{prefix}/bin/python" for prefix in _ENVIRONMENT.findall(text)]
    named = [each for each in named if "/.local/" not in each]  # packages of a user, with no interpreter
    return named[-1] if named else None


def told_of(root: Traceback, log: Log) -> list[str]:
    """Who asks for what is missing, and which versions the log names."""
    importer = [f"{root.frames[-1]} asks for it"] if root.frames else []
    versions = [f"{name} {version}" for name, version in log.versions.items()]
    return [*importer, *([f"the log names {', '.join(versions)}"] if versions else [])]
