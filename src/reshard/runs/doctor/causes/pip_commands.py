"""How a package is installed: what pip calls it."""

import re

from reshard.base.data_files import data_beside


def installed_for(module: str) -> str:
    """What to give `pip install` for a module."""
    distributions = (what for pattern, what in _modules().items() if re.fullmatch(pattern, module))
    return next(distributions, module).replace("{name}", module)


def imported_from(package: str) -> str:
    """The module to import from a package, by the name that pip has for it."""
    named = (module for module, what in _modules().items() if what == package and module.isidentifier())
    return next(named, package.replace("-", "_"))


_modules = data_beside(__file__, "modules.yaml")
