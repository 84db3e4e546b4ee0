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
- `history`: what `history.between.changes` says of the names in findings, and of those in frames that a release surely
  added or removed
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

from packaging.version import Version

from reshard.base.errors import ReshardError
from reshard.runs.checks.finding import Finding
from reshard.runs.checks.history.api_table import PACKAGE_OF_ROOT, PACKAGE_ROOTS, table
from reshard.runs.checks.history.release_diff import changes
from reshard.runs.doctor.facts.process_output import failure_of, frames_of, ranks_of, root_of
from reshard.runs.doctor.facts.run_settings import Fact, at, commands_in, settings_in, versions_in
from reshard.runs.doctor.text.log import Log

if TYPE_CHECKING:
    from reshard.commands.inspection import Inspection

MAX_FACTS = 300
"""Facts of each list."""
MAX_LOOKUPS = 8
"""Names of which the history is told."""


def facts_of(
    findings: Sequence[Finding],
    logs: Sequence[Log],
    texts: Mapping[str, str],
    checkpoints: Mapping[str, Inspection | None],
) -> dict[str, Any]:
    """All facts in what was examined. `findings` are those of each target, the first cause first."""
    root = root_of(findings, logs)
    frames = list(frames_of(*root)) if root else []
    versions, commands = list(versions_in(logs, texts)), list(commands_in(logs, texts))
    processes, known = ranks_of(logs)
    lists = {
        **processes,
        "versions": versions,
        "commands": commands,
        "settings": list(settings_in(texts)),
        "numbers": list(_numbers(findings)),
        "checkpoints": [_summary(path, inspection) for path, inspection in checkpoints.items()],
        "history": list(_history(findings, frames, versions)),
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


_IMPORTED = re.compile(r"\bfrom (?P<module>\w[\w.]*) import (?P<names>\w+(?:, \w+)*)")
_WRITTEN = re.compile(rf"(?<![\w./])(?P<root>{'|'.join(PACKAGE_OF_ROOT)})(?:\.\w+)+(?!\w)")


def _history(findings: Sequence[Finding], frames: Sequence[Fact], versions: Sequence[Fact]) -> Iterator[Fact]:
    """What releases have of the names in the findings and in the frames' code; since the one in use, if it is known."""
    stated = [str(each["package"]) for each in versions]
    used = {
        str(each["package"]): str(each["version"])
        for each in versions
        if stated.count(str(each["package"])) == 1
    }
    places: dict[tuple[str, str], Fact] = {}
    for each in findings:
        if (package := str(each.values.get("package"))) in PACKAGE_ROOTS and each.places:
            name = str(each.values.get("name")).removeprefix("model_type ")
            places[package, name] = at(each.places[0].target, each.places[0].line)
    of_findings = len(places)
    for frame in frames:
        for named in _names_in(str(frame["code"])):
            places.setdefault(named, {key: frame[key] for key in ("file", "line")})
    facts = (
        _changed(*named, used, is_asked=number < of_findings) | place
        for number, (named, place) in enumerate(places.items())
    )
    yield from islice((each for each in facts if "package" in each), MAX_LOOKUPS)


def _changed(package: str, name: str, used: Mapping[str, str], is_asked: bool) -> Fact:
    """What the history has of a name; {} without anything. Of names in code, only what surely was added or removed."""
    try:
        change = changes(package, name, used.get(package))
    except ReshardError:  # neither the package nor the name has a history
        return {}
    known = change.pop("known")["releases"]
    around = [known[known.index(change["added"]) - 1]] if change["added"] else []
    around += [each for each in (change["removed"], change["renamed"]) if each]
    own, module = table(package), name.rpartition(".")[0]
    is_seen = own is not None and not any(own.is_open(module, Version(each)) for each in around)
    if not is_asked and not (around and is_seen):
        return {}
    of_use = ("before", "after", "there", "parameters") if package not in used else ()
    return {
        **{key: value for key, value in change.items() if key not in of_use},
        "known": [known[0], known[-1]],
    }


def _names_in(code: str) -> Iterator[tuple[str, str]]:
    """The names that a line of code imports from known packages, or writes with their modules."""
    for match in _IMPORTED.finditer(code):
        root = match["module"].partition(".")[0]
        for name in match["names"].split(", ") if root in PACKAGE_OF_ROOT else ():
            yield PACKAGE_OF_ROOT[root], f"{match['module']}.{name}"
    for match in _WRITTEN.finditer(code):
        yield PACKAGE_OF_ROOT[match["root"]], match[0]
