"""A package that was changed while a notebook had imported it: its new files import from its old modules."""

from __future__ import annotations

import re

from reshard.diagnosis.builds import installed_for
from reshard.diagnosis.finding import Finding
from reshard.diagnosis.kinds import NOTEBOOK
from reshard.diagnosis.log import Log, Traceback
from reshard.diagnosis.rules import told_at
from reshard.diagnosis.upstream import asker

_IMPORT = re.compile(
    r"cannot import name ['\"`‘’](?P<name>\w+)['\"`‘’] from ['\"`‘’](?P<module>\w{1,60})(?:\.[\w.]{1,200})?['\"`‘’]"
    r"|module ['\"`‘’](?P<owner>\w{1,60})(?:\.[\w.]{1,200})?['\"`‘’] has no attribute ['\"`‘’](?P<attribute>\w+)"
)
_SITE = re.compile(r"(?:site|dist)-packages[/\\](?P<root>\w+)[/\\]")


def of_stale(root: Traceback, log: Log) -> Finding | None:
    """The finding that a package in a notebook is half old and half new: it lacks a name that it imports itself."""
    match = _IMPORT.search(root.said)
    importer = _SITE.search(asker(root))
    if match is None or importer is None or "partially initialized" in root.said:
        return None
    package = match["module"] or match["owner"]
    if importer["root"] != package or not NOTEBOOK.search(log.text):
        return None
    if re.search(rf"-packages[/\\]{package}[/\\]__init__\.py", asker(root)):
        return None  # it runs when the package is imported first, so nothing of it was in memory
    values = {"package": package, "install": installed_for(package), "frame": asker(root)}
    values["name"] = match["name"] or match["attribute"]
    return told_at(("stale-in-memory", values), log.name, root.last, root.said)
