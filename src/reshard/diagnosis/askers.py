"""Whose fault a failure is, by the caller: another package, the user's own code, the interpreter."""

from __future__ import annotations

import re
import sys

from reshard.diagnosis.finding import Finding
from reshard.diagnosis.history.table import PACKAGES
from reshard.diagnosis.log import Log, Traceback
from reshard.diagnosis.packages import installed_for
from reshard.diagnosis.rules import told_at
from reshard.diagnosis.upstream import package_of

_INSTALLED = re.compile(r"(?:site|dist)-packages/(?P<name>[A-Za-z_]\w*)")


_SUBMODULE = re.compile(r"No module named ['\"](?P<module>(?P<package>[A-Za-z_]\w*)(?:\.\w+)+)['\"]")
_NAMESPACES = frozenset(
    ("google", "megatron", "nvidia", "azure", "ruamel", "mpl_toolkits", "transformers_modules")
)
"""Packages that several distributions fill."""


def of_submodule(root: Traceback, log: Log) -> Finding | None:
    """The finding that a package was imported that has no such part; None if the package itself is missing."""
    match = _SUBMODULE.search(root.said)
    if match is None or match["package"] in _NAMESPACES | sys.stdlib_module_names:
        return None
    values = {**match.groupdict(), "distribution": PACKAGES.get(match["package"], match["package"])}
    own = imports_itself(root, log) or (root.frames and owner(root.frames[-1]) == match["package"])
    identifier = "package-without-part" if own else "submodule-missing"
    return told_at((identifier, values), log.name, root.last, root.said)


_RELATIVE = re.compile(r"^\s*from \.[\w.]* import\b")


def imports_itself(root: Traceback, log: Log) -> bool:
    """Whether the import that failed is relative, so that a package lacks a part of its own."""
    before = (line.text for line in log.lines if line.stream == root.stream and line.number == root.last - 1)
    return bool(_RELATIVE.match(root.source or next(before, "")))


_PAIR = re.compile(
    r"cannot import name ['\"`‘’](?P<name>\w+)['\"`‘’]? from "
    r"['\"`‘’](?P<module>(?P<package>[A-Za-z]\w*)(?:\.\w+)*)['\"`‘’]"
    r"(?! \(unknown location)(?: \((?P<path>[^)\n]{0,300}))?"
)


_PARTNERS = {"unsloth_zoo": "unsloth"}
"""Packages that only one other package imports."""


def of_pair(root: Traceback, log: Log) -> Finding | None:
    """The finding that a package imports a name which the installed release of another one does not have.

    For packages whose history is not known.
    """
    match = _PAIR.search(root.said)
    asking = owner(root.frames[-1]) if root.frames else match and _PARTNERS.get(match["package"])
    if match is None or not asking or "partially initialized" in root.said:
        return None
    called = match["package"]
    own = match["path"] and not _INSTALLED.search(match["path"])
    if own or called in (asking, *_NAMESPACES) or called in sys.stdlib_module_names or called in PACKAGES:
        return None
    values: dict[str, object] = {
        **match.groupdict(),
        "package": called,
        "distribution": installed_for(called),
        "importer": PACKAGES.get(asking, asking.replace("_", "-")),
    }
    return told_at(("import-of-other-release", values), log.name, root.last, root.said)


def owner(frame: str) -> str | None:
    """The package of a frame's file; None for a script."""
    match = _INSTALLED.search(frame)
    found = match["name"] if match else package_of(frame)
    return found.partition("/")[0] if found else None
