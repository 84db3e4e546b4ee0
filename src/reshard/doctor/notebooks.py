"""Diagnose a notebook: its code cells as a script, and the errors that it keeps beneath them as a log."""

from __future__ import annotations

import ast
import codecs
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from reshard.doctor.finding import Finding, Place
from reshard.doctor.logs import diagnose_text
from reshard.doctor.scripts import diagnose_source
from reshard.doctor.source import parsed
from reshard.errors import ReshardError
from reshard.plain import json_of
from reshard.stores import as_path

_COMMAND = re.compile(r"^(\s*)(?=\S)(?:[%!?].*|.*\?\s*)$")
"""Lines that are for the notebook, not for Python."""


def diagnose_notebook(path: str) -> list[Finding]:
    """What is wrong with a notebook. Places name a cell by its number, from 1, and a line in it.

    Raises ReshardError if it is no notebook.
    """
    try:
        content = json_of(as_path(path).read_bytes().removeprefix(codecs.BOM_UTF8))
        cells = [cell for cell in content["cells"] if cell.get("cell_type") == "code"]
        numbers = [at for at, cell in enumerate(content["cells"], 1) if cell.get("cell_type") == "code"]
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise ReshardError(
            "notebook-unreadable",
            "the notebook cannot be read",
            file=path,
            found=f"{type(error).__name__}: {error}",
            expected="a notebook of Jupyter, format 4",
            remedy="save it again in Jupyter, or give its code as a .py (jupyter nbconvert --to script)",
        ) from None
    return [*_of_code(path, numbers, cells), *_of_outputs(path, numbers, cells)]


def _of_code(path: str, numbers: list[int], cells: list[dict[str, Any]]) -> Iterator[Finding]:
    """Findings in all cells together, that names may come from any earlier one; what is no Python is left out."""
    lines: list[str] = []
    origins: list[tuple[int, int]] = []
    for number, cell in zip(numbers, cells, strict=True):
        own = [_COMMAND.sub(r"\1pass", line) for line in _joined(cell.get("source")).splitlines()]
        if own and not own[0].startswith("%%") and _parses("\n".join(own)):
            lines += own
            origins += [(number, line) for line in range(1, len(own) + 1)]
    text = "\n".join(lines)
    for finding in diagnose_source(parsed(path, text, ast.parse(text))):
        yield replace(finding, places=tuple(_in_cell(place, origins) for place in finding.places))


def _in_cell(place: Place, origins: list[tuple[int, int]]) -> Place:
    if place.line is None:
        return place
    cell, line = origins[place.line - 1]
    return replace(place, target=f"{place.target}[{cell}]", line=line)


def _parses(text: str) -> bool:
    try:
        ast.parse(text)
    except (SyntaxError, ValueError):
        return False
    return True


def _of_outputs(path: str, numbers: list[int], cells: list[dict[str, Any]]) -> Iterator[Finding]:
    """Findings in what each cell has printed: its streams, and the traceback that it ended in."""
    for number, cell in zip(numbers, cells, strict=True):
        printed: list[str] = []
        for output in cell.get("outputs") or ():
            printed += [_joined(output.get("text"))] if output.get("output_type") == "stream" else []
            if output.get("output_type") == "error":
                said = f"{output.get('ename')}: {output.get('evalue')}"
                printed += output.get("traceback") or [said]
        if printed:
            yield from diagnose_text(f"{path}[{number}]", "\n".join(printed))


def _joined(text: Any) -> str:
    return "".join(text) if isinstance(text, list) else str(text or "")
