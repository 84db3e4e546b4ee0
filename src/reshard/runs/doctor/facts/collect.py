"""The facts in the targets of a diagnosis, for programs: what stands where, not what it means.

Each fact names the `file` and the `line` where it was seen; lines count from 1. What is not certain is left out. Of
each list, `MAX_FACTS` are given, and `left_out` counts the others. All texts are in English, or the program's own.

- `root`: the first failure: `process`, `exception`, `message` (its first line and indented ones), the `first` and
  `last` line (`line` has the exception), whether it only `follows` from another process's failure, the later exceptions
  of its chain (`then`), and its `frames`, outermost first: `source` and `source_line` (file and line of code),
  `function`, `code`
- `ranks`: `last` (the last line of each process), `failed` (its exception), `first_failed` (and how it is `known_by`),
  `world` (its `size`), `absent` (`ranks` that did not reach a barrier, or how many `came`, `of` how many). A process
  has the name in the prefix of its lines
- `versions`: `package`, `version`
- `commands`: `text`, and `flags`: `name`, and the `value` that stands behind
- `settings`: `name`, `value`
- `numbers`: `what` and `value`, as compared
- `checkpoints`: a summary of each; `opened` is false where nothing can be opened
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from reshard.runs.checks.finding import Finding
from reshard.runs.doctor.facts.process_output import failure_of, frames_of, ranks_of, root_of
from reshard.runs.doctor.facts.run_settings import Fact, at, commands_in, settings_in, versions_in
from reshard.runs.doctor.text.log import Log

if TYPE_CHECKING:
    from reshard.commands.inspection import Inspection

MAX_FACTS = 300
"""Facts of each list."""


def facts_of(
    findings: Sequence[Finding],
    logs: Sequence[Log],
    texts: Mapping[str, str],
    checkpoints: Mapping[str, Inspection | None],
) -> dict[str, Any]:
    """All facts in what was examined. `findings` are those of each target, the first cause first."""
    root = root_of(findings, logs)
    frames = list(frames_of(*root)) if root else []
    processes, known = ranks_of(logs)
    lists = {
        **processes,
        "versions": list(versions_in(logs)),
        "commands": list(commands_in(logs, texts)),
        "settings": list(settings_in(texts)),
        "numbers": list(_numbers(findings)),
        "checkpoints": [_summary(path, inspection) for path, inspection in checkpoints.items()],
    }
    given = {name: each[:MAX_FACTS] for name, each in lists.items()}
    left = {
        name: len(each) - MAX_FACTS
        for name, each in {**lists, "frames": frames}.items()
        if len(each) > MAX_FACTS
    }
    return {
        "root": {**failure_of(*root), "frames": frames[-MAX_FACTS:]} if root else None,
        "ranks": {**{name: given.pop(name) for name in processes}, **known},
        **given,
        "left_out": left,
    }


SIZE_MEANINGS = {"asked": "requested", "there": "available", "own": "in use by the process"}


def _numbers(findings: Sequence[Finding]) -> Iterator[Fact]:
    """What causes have computed with, as far as the message itself has it."""
    for finding in findings:
        compared = finding.values.get("compared")
        for name, value in compared.items() if isinstance(compared, Mapping) and finding.places else ():
            place = finding.places[0]
            yield {"what": SIZE_MEANINGS.get(name, name), "value": value, **at(place.target, place.line)}


CHECKPOINT_KEYS = "format variant family layout iteration tensors parameters bytes dtypes dropped"
"""What `inspect --json` says of a checkpoint that is no text."""


def _summary(path: str, inspection: Inspection | None) -> Fact:
    """What `inspect` says of a checkpoint."""
    if inspection is None:
        return {"opened": False, **at(path, None)}
    report = inspection.as_dict()
    problems = [
        {name: each.get(name) for name in ("code", "message", "file", "tensor")}
        for each in report["problems"]
    ]
    values = {name: report[name] for name in CHECKPOINT_KEYS.split()}
    return {
        "opened": True,
        "complete": inspection.whole,
        **values,
        "problems": problems[:MAX_FACTS],
        **at(path, None),
    }
