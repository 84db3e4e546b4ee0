"""Entries that depend only on the kind of an exception, completed with packages and interpreter from the log."""

from __future__ import annotations

import re
from dataclasses import replace

from packaging.specifiers import SpecifierSet

from reshard.diagnosis.finding import Finding, Text
from reshard.diagnosis.log import Log, Traceback
from reshard.diagnosis.packages import installed_for
from reshard.diagnosis.words import words

BY_KIND = frozenset({"module-not-found"})
"""They explain the first failure if nothing else does, and never with certainty."""

_INTERPRETER = re.compile(r"(?<![\w./~+-])(?:[\w./~+-]*/bin/python[\d.]*)(?![\w/])")
_ENVIRONMENT = re.compile(r"(?<![\w./~+-])([\w./~+-]*)/lib/python[\d.]+/(?:site|dist)-packages/")
_ASKED = re.compile(r"(?:named|from|module) ['\"`‘“]([A-Za-z_]\w*)")
_INSTALLED = re.compile(r"(?:site|dist)-packages/(\w+)")


def filled_in(cure: Text, root: Traceback, log: Log) -> Text:
    """A remedy with the packages and the interpreter of the log instead of placeholders."""
    given: dict[str, str] = {}
    if asked := _ASKED.search(root.message.partition(" (")[0].split("import name")[-1]):
        given |= {"NAME": installed_for(asked[1]), "IMPORTED": asked[1]}
    importer = _INSTALLED.search(root.frames[-1]) if root.frames else None
    other = importer is not None and importer[1] != given.get("IMPORTED")
    given["IMPORTER|"] = f"{importer[1]}|" if importer and other else ""
    if interpreter := _interpreter(log.text):
        given |= {"python -m pip": f"{interpreter} -m pip", "python -c": f"{interpreter} -c"}
    pattern = re.compile("|".join(rf"\b{re.escape(word)}" for word in given))
    return Text(*(pattern.sub(lambda match: given[match[0]], text) for text in (cure.en, cure.zh)))


def _interpreter(text: str) -> str | None:
    """The last interpreter in a log: the launcher prints the one of the workers."""
    named = _INTERPRETER.findall(text) or [f"{prefix}/bin/python" for prefix in _ENVIRONMENT.findall(text)]
    named = [each for each in named if "/.local/" not in each]  # a user's packages, without an interpreter
    return named[-1] if named else None


NOTEBOOK = re.compile(
    r"Cell In\s?\[|ipython-input-|ipykernel_|^-{1,5}> ?\d+ |localhost:8080/#|^/content/|/kaggle/(?:working|input)"
    r"|To view examples of installing some common dependencies",
    re.MULTILINE,
)
"""A notebook's cells, the arrow with which its tracebacks mark a line, and the folders and notes of hosted ones."""
_SPEC = re.compile(r"pip install (?:-U )?'(?P<package>[A-Za-z][\w.-]*)(?P<spec>[<>=!~][^']*)'")


def in_notebook(finding: Finding, log: Log) -> Finding:
    """A finding with the restart that an installation needs in a notebook, where old modules stay imported."""
    cure = finding.remedy
    if "pip install" not in cure.en or "restart" in cure.en or not NOTEBOOK.search(log.text):
        return finding
    match = _SPEC.search(cure.en)
    version = log.versions.get(match["package"]) if match else None
    if match and version and SpecifierSet(match["spec"]).contains(version, prereleases=True):
        first = words("restart-first", package=match["package"], version=version)
        return replace(finding, remedy=Text.lines([first, cure]))
    texts = [Text(cure.en.rstrip(), cure.zh.rstrip()), words("restart-notebook")]
    return replace(finding, remedy=Text.lines(texts))


def told_of(root: Traceback, log: Log) -> list[Text]:
    """The code that requested what is missing, and the versions in the log."""
    importer = [words("asked-by", frame=root.frames[-1])] if root.frames else []
    versions = ", ".join(f"{name} {version}" for name, version in log.versions.items())
    return [*importer, *([words("log-names", versions=versions)] if versions else [])]
