"""Whether a run went on: lines of metrics, full progress bars, and messages that something was saved or finished.

So an error that a program logged and recovered from, in the middle of a run that ended well, is not a failure.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from reshard.runs.doctor.text.error_lines import is_error
from reshard.runs.doctor.text.tracebacks import LogLine

DATA_LENGTH = 2000
"""Length in characters from which a line is considered data, which may contain any word."""
_MEASURED = r"""['"]?(?:train_|eval_)?(?:loss|runtime)['"]?\s*[:=]\s*['"]?\d | \biteration\s+\d+\s*/ | train_runtime
      | \bstep\s*(?:[:=]\s*)?\d.{0,500}\bloss\b
      | ^(?!.{0,200}\b(?:Loading|Map|Filter|Fetching|Download|Generating|[Tt]okeniz|Resolving|Capturing|Convert
        |Packing|Grouping)).*\b100%\|"""
_SAID_DONE = r"""\b(?i:successfully
            |(?:training|run|export|conversion|evaluation)\ (?:is\ )?(?:complete|finished|done)
            |(?:model|weights|checkpoint|tokenizer|adapter)s?\ saved|saved\ (?:model|weights|checkpoint|to)
            |saving\ (?:model|tokenizer|checkpoint)|nothing\ wrong\ found)\b
      | \(success\)"""
_WENT_ON = re.compile(f"{_MEASURED} | {_SAID_DONE}", re.VERBOSE)
_WORKED_ON = re.compile(_MEASURED, re.VERBOSE)
"""What only a working program prints, and not the shell script around it after it died."""


def went_on(line: LogLine, measured: bool = False) -> bool:
    """Whether a line shows progress; `measured`: by its metrics."""
    pattern = _WORKED_ON if measured else _WENT_ON
    return len(line.text) < DATA_LENGTH and bool(pattern.search(line.text)) and not is_error(line.text)


def progress(lines: Sequence[LogLine], measured: bool = False) -> dict[str, int]:
    """The number of the last line in each stream that shows that its process continued; `measured`: by metrics only."""
    last: dict[str, int] = {}
    for line in reversed(lines):
        if line.stream not in last and went_on(line, measured):
            last[line.stream] = line.number
    return last


def after_progress(lines: Sequence[LogLine]) -> Sequence[LogLine]:
    """The lines after the last sign that the run continued."""
    at = next((at for at in reversed(range(len(lines))) if went_on(lines[at])), -1)
    return lines[at + 1 :]
