"""What to install for an imported name (`modules.yaml`, where the two differ)."""

from __future__ import annotations

import re
from functools import lru_cache

from reshard.diagnosis.data import data
from reshard.diagnosis.finding import Text
from reshard.diagnosis.rules import Told


def installed_for(module: str) -> str:
    """What to give `pip install` for a module."""
    found = (what for pattern, what in _modules().items() if re.fullmatch(pattern, module))
    return next(found, module).replace("{name}", module)


def at_fault(module: str, what: Text) -> Told:
    """The rule for a package, by its module, whose own code is wrong."""
    package = installed_for(module).split()[-1].strip("'")
    return "package-at-fault", {"what": what, "module": module, "package": package}


@lru_cache(maxsize=1)
def _modules() -> dict[str, str]:
    content: dict[str, str] = data("modules.yaml")
    return content
