"""Check entries of the catalogue: `python -m tools.check_entries [FILE …]`.

Every file is checked against `catalogue.schema.json`; in addition, an entry must be named like its file, be recognised
by its own excerpt, and refer to existing entries. Needs the jsonschema package, which nothing else in reshard does.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from reshard.runs.doctor.entries.catalogue_entry import CATALOGUE_FOLDER

SCHEMA = CATALOGUE_FOLDER.with_name("catalogue.schema.json")


def problems(path: Path) -> list[str]:
    """The problems of one entry, each as a line with its place; empty if there are none."""
    try:
        entry = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        return [f"cannot be read: {error}"]
    return list(_against_schema(entry)) or list(_beyond_schema(path, entry))


def _against_schema(entry: Any) -> Iterator[str]:
    from jsonschema import Draft202012Validator

    schema = json.loads(SCHEMA.read_text(encoding="utf-8"))
    checker = Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER)
    for error in sorted(checker.iter_errors(entry), key=lambda error: error.json_path):
        meant = error.schema.get("description", "") if isinstance(error.schema, dict) else ""
        yield f"{error.json_path.removeprefix('$.')}: {error.message}" + (f" ({meant})" if meant else "")


def _beyond_schema(path: Path, entry: dict[str, Any]) -> Iterator[str]:
    if entry["id"] != path.stem:
        yield f"id: {entry['id']!r}, but the file is called {path.stem!r}"
    known = {each.stem for each in CATALOGUE_FOLDER.glob("*.yaml")} - {entry["id"]}
    for other in entry["symptom_of"]:
        if other not in known:
            yield f"symptom_of: there is no entry {other!r}"
    for language, text in entry["cure"].items():
        if text.count("```") % 2:
            yield f"cure.{language}: a block of code that begins with ``` does not end"
    if entry["patterns"]:
        yield from _unrecognised(entry)


def _unrecognised(entry: dict[str, Any]) -> Iterator[str]:
    """Why an entry's own excerpt does not match it: it needs any of `patterns`, all `needs` and no `unless`."""

    def shows(regex: str) -> bool:
        return re.search(regex, entry["excerpt"], re.MULTILINE) is not None

    if not any(map(shows, entry["patterns"])):
        yield "patterns: none of them is in the excerpt"
    for regex in entry["needs"]:
        if not shows(regex):
            yield f"needs: {regex!r} is not in the excerpt"
    for regex in entry["unless"]:
        if shows(regex):
            yield f"unless: {regex!r} is in the excerpt"


def main(names: Sequence[str]) -> int:
    """Print the problems of the given files, or of all entries. Returns the exit status."""
    if find_spec("jsonschema") is None:
        print("this check needs the jsonschema package: pip install jsonschema", file=sys.stderr)
        return 2
    paths = [Path(name) for name in names] or sorted(CATALOGUE_FOLDER.glob("*.yaml"))
    found = [f"{path.name}: {problem}" for path in paths for problem in problems(path)]
    print("\n".join(found) or f"{len(paths)} entries are sound")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
