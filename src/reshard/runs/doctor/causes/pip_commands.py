"""How a package is installed: what pip calls it."""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path

from reshard.base.data_files import read_data


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
