"""Text of a `sitecustomize` that runs code once a module is imported, in every process that has it on PYTHONPATH."""

from __future__ import annotations

from textwrap import indent

FINDER = """
import importlib.util, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name != {name!r}:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
{code}

        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Finder())
"""


def after_import(name: str, code: str) -> str:
    """The text; `code` sees the module as `module`."""
    return FINDER.format(name=name, code=indent(code.strip("\n"), " " * 12))
