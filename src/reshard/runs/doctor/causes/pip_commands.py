"""How a package is installed: what pip calls it, and by which interpreter."""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path

from reshard.base.data_files import read_data
from reshard.base.languages import Text
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
