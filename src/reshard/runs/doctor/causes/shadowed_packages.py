"""A folder or file of one's own that Python imports in place of a package of the same name."""

from __future__ import annotations

import re

from reshard.base.languages import Text
from reshard.runs.checks import rules
from reshard.runs.checks.finding import Finding
from reshard.runs.checks.history.api_table import table_of
from reshard.runs.checks.phrases import phrase_text
from reshard.runs.doctor.causes.missing_names import QUOTE, imported_in, is_shadowed
from reshard.runs.doctor.text.log import Log, Traceback

_MODULE = re.compile(rf"(?:from|module) {QUOTE}(?P<module>\w+){QUOTE}")


def of_shadow(root: Traceback, log: Log) -> Finding | None:
    """The finding that a folder or file of the same name is imported instead of a package."""
    match = _MODULE.search(root.error_text)
    folder = _shadow(match["module"], root) if match else None
    if match is None or folder is None:
        return None
    values = {"module": match["module"], "folder": folder}
    return rules.finding("folder-for-package", values=values)


def _shadow(module: str, root: Traceback) -> Text | None:
    """What is imported in place of a package: Python tells its path, or the frames show it."""
    own, missing = table_of(module), imported_in(root.error_text)
    if "unknown location" in root.error_text:
        return phrase_text("folder-without-init", module=module) if own else None
    if "partially initialized" in root.error_text:
        paths = re.findall(r"\(([^()]+)\)", root.error_text)
        paths += [frame.rpartition(" ")[0].rpartition(":")[0] for frame in root.frames]
        file = re.compile(rf"(?:.*[/\\])?{module}\.py")
        path = next((each for each in paths if file.fullmatch(each) and is_shadowed(each)), None)
        return phrase_text("file-of-same-name", module=module, path=path) if path else None
    if own is None or missing is None or not is_shadowed(missing.path):
        return None
    is_of_all = own.name(module, missing.name).is_everywhere
    return phrase_text("folder-of-path", path=missing.path) if is_of_all else None
