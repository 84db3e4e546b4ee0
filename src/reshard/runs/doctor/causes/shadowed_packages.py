"""A folder of one's own that Python imports in place of a package of the same name, by its path."""

from __future__ import annotations

from reshard.runs.checks import rules
from reshard.runs.checks.finding import Finding
from reshard.runs.checks.history.api_table import table_of
from reshard.runs.checks.phrases import phrase_text
from reshard.runs.doctor.causes.missing_names import imported_in, is_shadowed
from reshard.runs.doctor.text.log import Log, Traceback


def of_shadow(root: Traceback, log: Log) -> Finding | None:
    """The finding for a module outside of the folders for packages without a name that all releases have."""
    missing = imported_in(root.error_text)
    own = table_of(missing.owner) if missing else None
    if missing is None or own is None or "." in missing.owner or not is_shadowed(missing.path):
        return None
    if not own.name(missing.owner, missing.name).is_everywhere:
        return None
    values = {"module": missing.owner, "folder": phrase_text("folder-of-path", path=missing.path)}
    return rules.finding("folder-for-package", values=values)
