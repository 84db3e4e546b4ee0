"""How a package is installed: what pip calls it, by which interpreter, and what a notebook needs besides."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from packaging.specifiers import SpecifierSet

from reshard.base.data_files import read_data
from reshard.base.languages import Text
from reshard.runs.checks.finding import Finding
from reshard.runs.checks.phrases import phrase_text
from reshard.runs.doctor.text.log import Log


def installed_for(module: str) -> str:
    """What to give `pip install` for a module."""
    distributions = (what for pattern, what in _modules().items() if re.fullmatch(pattern, module))
    return next(distributions, module).replace("{name}", module)


def imported_from(package: str) -> str:
    """The module to import from a package, by the name that pip has for it."""
    named = (module for module, what in _modules().items() if what == package and module.isidentifier())
    return next(named, package.replace("-", "_"))


@lru_cache(maxsize=1)
def _modules() -> dict[str, str]:
    content: dict[str, str] = read_data(Path(__file__).with_name("modules.yaml"))
    return content


_INTERPRETER = re.compile(r"(?<![\w./~+-])(?:[\w./~+-]*/bin/python[\d.]*)(?![\w/])")
_ENVIRONMENT = re.compile(r"(?<![\w./~+-])([\w./~+-]*)/lib/python[\d.]+/(?:site|dist)-packages/")


def with_interpreter(cure: Text, log: Log) -> Text:
    """A remedy with the last interpreter in a log: a launcher prints the one of its workers."""
    named = _INTERPRETER.findall(log.text) or [
        f"{prefix}/bin/python" for prefix in _ENVIRONMENT.findall(log.text)
    ]
    of_environments = [each for each in named if "/.local/" not in each]  # there are a user's packages only
    if not of_environments:
        return cure
    return Text(
        *(re.sub(r"\bpython(?= -(?:m pip|c)\b)", of_environments[-1], text) for text in (cure.en, cure.zh))
    )


_NOTEBOOK = re.compile(
    r"Cell In\s?\[|ipython-input-|ipykernel_|^-{1,5}> ?\d+ |localhost:8080/#|^/content/|/kaggle/(?:working|input)"
    r"|To view examples of installing some common dependencies",
    re.MULTILINE,
)
"""A notebook's cells, the arrow with which its tracebacks mark a line, and the folders and notes of hosted ones."""
_SPEC = re.compile(r"pip install (?:-U )?'(?P<package>[A-Za-z][\w.-]*)(?P<spec>[<>=!~][^']*)'")


def in_notebook(finding: Finding, log: Log) -> Finding:
    """A finding with the restart that an installation needs in a notebook, where old modules stay imported."""
    cure = finding.remedy
    if "pip install" not in cure.en or "restart" in cure.en or not _NOTEBOOK.search(log.text):
        return finding
    match = _SPEC.search(cure.en)
    version = log.versions.get(match["package"]) if match else None
    if match and version and SpecifierSet(match["spec"]).contains(version, prereleases=True):
        first = phrase_text("restart-first", package=match["package"], version=version)
        return replace(finding, remedy=Text.lines([first, cure]))
    texts = [Text(cure.en.rstrip(), cure.zh.rstrip()), phrase_text("restart-notebook")]
    return replace(finding, remedy=Text.lines(texts))
