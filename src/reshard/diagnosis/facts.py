"""The facts in the targets of a diagnosis, for programs: what stands where, not what it means.

Each fact names the `file` and `line` where it was seen; a line of a log counts from 1. What is not certain is left out.
What would be too long is left out as well, and counted in `left_out`.

`facts_of` gives, as plain values for JSON:

- `root`: the first failure: `rank`, `exception`, `message`, and the lines `first` to `last` (`line` has the exception);
  its `frames`, outermost first, each with `source` and `source_line` (its file and line of code), `function`, `code`
  and the `line` of the log; null if there is none
- `ranks`: `last` (the last line of each rank: `rank`, `text`), `first_failed` (`rank`, `known_by`), `world`
  (`size`), `missing` (`ranks`)
- `versions`: `package`, `version`
- `commands`: `text`, and its `flags` (`name`, `value`)
- `settings`: `name`, `value`
- `numbers`: values that were compared: `what`, and `values` by name
- `checkpoints`: a summary of each
- `history`: `package`, `name`, and in which releases it was added, removed or moved
- `unseen`: `what` the files cannot show, and the `command` that would
- `left_out`: how many facts of each kind were too many
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from reshard.diagnosis.finding import Finding
from reshard.diagnosis.log import Log

if TYPE_CHECKING:
    from reshard.commands.inspection import Inspection


def facts_of(
    findings: Sequence[Finding],
    logs: Sequence[Log],
    texts: Mapping[str, str],
    checkpoints: Mapping[str, Inspection | None],
) -> dict[str, object]:
    """All facts in what was examined."""
    lists = ("versions", "commands", "settings", "numbers", "checkpoints", "history", "unseen")
    return {"root": None, "ranks": {}, **{name: [] for name in lists}, "left_out": {}}
