"""What a Python interpreter has installed. Imports nothing of that, and nothing outside the standard library.

Other interpreters, from Python 3.8 on, run this file as text: `python -c TEXT REQUEST`, a JSON object with the
arguments of `installed`. They print its result as JSON.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    sys.path[:] = filter(None, sys.path)  # not the current folder: the user's json.py would be executed

from collections.abc import Iterable
from typing import Any


def installed(names: Iterable[str], modules: Iterable[str] = (), paths: Iterable[str] = ()) -> dict[str, Any]:
    """Versions and requirements of packages, where torch is, and which modules can be found.

    `paths` are folders in which modules are found besides the interpreter's own.
    """
    import os
    import platform
    from importlib.metadata import PackageNotFoundError, distribution

    seen: dict[str, Any] = {
        "versions": {},
        "requires": {},
        "executable": sys.executable,
        "prefix": sys.prefix,
    }
    seen["variables"] = dict(os.environ)
    seen["markers"] = {
        "python_version": ".".join(platform.python_version_tuple()[:2]),
        "python_full_version": platform.python_version(),
        "implementation_name": sys.implementation.name,
        "platform_python_implementation": platform.python_implementation(),
    }
    for name in names:
        try:
            package = distribution(name)
        except PackageNotFoundError:
            continue
        seen["versions"][name] = package.version
        seen["requires"][name] = package.requires or []
    torch = _spec("torch", None)
    seen["torch"] = torch.origin if torch else None
    seen["modules"] = {name: _is_there(name, list(paths)) for name in modules}
    return seen


def _spec(name: str, path: list[str] | None) -> Any:
    """Where a module is, without the import of its parents."""
    for finder in sys.meta_path:
        spec = finder.find_spec(name, path) if hasattr(finder, "find_spec") else None
        if spec is not None:
            return spec
    return None


def _is_there(name: str, paths: list[str]) -> bool:
    """Whether a dotted name is a module, as far as can be seen without an import."""
    from importlib.machinery import PathFinder

    whole, *below = name.split(".")
    spec = _spec(whole, None) or PathFinder.find_spec(whole, paths)
    for part in below:
        if spec is None or spec.submodule_search_locations is None:
            return False
        whole = whole + "." + part
        spec = _spec(whole, list(spec.submodule_search_locations))
    return spec is not None


if __name__ == "__main__":
    import json

    print(json.dumps(installed(**json.loads(sys.argv[1]))))
