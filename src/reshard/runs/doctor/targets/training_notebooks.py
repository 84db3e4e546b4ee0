"""Diagnose a notebook: its code cells as a script, and the errors in its outputs as a log."""

from __future__ import annotations

import ast
import codecs
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from reshard.base.errors import ReshardError
from reshard.base.plain_json import JSON_MOST, json_of
from reshard.runs.checks.finding import Finding
from reshard.runs.checks.location import Location
from reshard.runs.checks.script import NOT_PYTHON, parsed
from reshard.runs.doctor.log_diagnosis import diagnose_text
from reshard.runs.doctor.targets.training_scripts import diagnose_source
from reshard.stores import as_path
from reshard.transfer.source_files import Sources

_COMMAND = re.compile(r"^(\s*)(?=\S)(?:[%!?].*|.*\?\s*)$")
"""Lines for the notebook, not for Python."""


class _Cell(NamedTuple):
    """A cell: its number in the notebook, from 1, its code, and what that printed."""

    number: int
    source: str
    printed: str


def diagnose_notebook(path: str) -> list[Finding]:
    """The findings about a notebook. Places name a cell by its number, from 1, and a line in it.

    Raises ReshardError if the file is not a notebook.
    """
    try:
        cells = _cells(json_of(Sources().read(as_path(path), JSON_MOST).removeprefix(codecs.BOM_UTF8)))
    except (ValueError, OSError) as error:
        raise ReshardError(
            "notebook-unreadable",
            "the notebook cannot be read",
            file=path,
            found=str(error),
            expected="a Jupyter notebook, format 4",
            remedy="save it again in Jupyter, or pass its code as a .py file (jupyter nbconvert --to script)",
        ) from None
    printed = [cell for cell in cells if cell.printed]
    return [
        *_of_code(path, cells),
        *(found for cell in printed for found in diagnose_text(f"{path}[{cell.number}]", cell.printed)),
    ]


def _cells(content: Any) -> list[_Cell]:
    """The cells. Raises ValueError if the content does not follow Jupyter's format 4 (nbformat.v4.schema.json)."""
    cells = content.get("cells") if isinstance(content, dict) else None
    if not isinstance(cells, list):
        raise ValueError("there is no list of cells")
    return [_cell(number, cell) for number, cell in enumerate(cells, 1)]


def _cell(number: int, cell: dict[str, Any]) -> _Cell:
    """A cell: an empty one, if it has no code."""
    try:
        if cell.get("cell_type") != "code":
            return _Cell(number, "", "")
        printed = filter(None, map(_printed, cell.get("outputs") or []))
        return _Cell(number, _joined(cell.get("source")), "\n".join(printed))
    except (AttributeError, TypeError):
        raise ValueError(f"cell {number} is not as Jupyter writes it") from None


def _printed(output: dict[str, Any]) -> str:
    """The text of a stream, or of a cell's traceback."""
    kind = output.get("output_type")
    if kind == "error":
        return "\n".join(output.get("traceback") or [f"{output.get('ename')}: {output.get('evalue')}"])
    return _joined(output.get("text")) if kind == "stream" else ""


def _joined(text: str | list[str] | None) -> str:
    """What the schema calls a multiline string: one string, or a list."""
    return "".join(text or "")


def _of_code(path: str, cells: list[_Cell]) -> Iterator[Finding]:
    """Findings in all cells together, as names may come from any earlier one; cells that are not Python are skipped."""
    lines: list[str] = []
    origins: list[tuple[int, int]] = []
    for cell in cells:
        own = [_COMMAND.sub(r"\1pass", line) for line in cell.source.splitlines()]
        if own and not own[0].startswith("%%") and _parses("\n".join(own)):
            lines += own
            origins += [(cell.number, line) for line in range(1, len(own) + 1)]
    text = "\n".join(lines)
    for finding in diagnose_source(parsed(path, text, ast.parse(text))):
        yield replace(finding, places=tuple(_in_cell(place, origins) for place in finding.places))


def _in_cell(place: Location, origins: list[tuple[int, int]]) -> Location:
    if place.line is None:
        return place
    cell, line = origins[place.line - 1]
    return replace(place, target=f"{place.target}[{cell}]", line=line)


def _parses(text: str) -> bool:
    """Whether a cell is Python, and not nested too deep to be analysed."""
    try:
        parsed("", text, ast.parse(text))
    except NOT_PYTHON:
        return False
    return True
