"""Diagnose a notebook: its code cells as a script, and the errors in its outputs as a log."""

from __future__ import annotations

import ast
import codecs
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

from reshard.base.errors import ReshardError
from reshard.base.plain import JSON_MOST, json_of
from reshard.diagnosis.finding import Finding, Place
from reshard.diagnosis.logs import diagnose_text
from reshard.diagnosis.scripts import diagnose_source
from reshard.diagnosis.source import NOT_PYTHON, parsed
from reshard.stores import as_path
from reshard.transfer.sources import Sources

T = TypeVar("T")

_COMMAND = re.compile(r"^(\s*)(?=\S)(?:[%!?].*|.*\?\s*)$")
"""Lines for the notebook, not for Python."""


class _Cell(NamedTuple):
    """A code cell: its number in the notebook, from 1, its code, and the lines that it printed."""

    number: int
    source: str
    printed: list[str]


def diagnose_notebook(path: str) -> list[Finding]:
    """The findings about a notebook. Places name a cell by its number, from 1, and a line in it.

    Raises ReshardError if the file is not a notebook.
    """
    try:
        cells = list(_cells(json_of(Sources().read(as_path(path), JSON_MOST).removeprefix(codecs.BOM_UTF8))))
    except (ValueError, OSError) as error:
        raise ReshardError(
            "notebook-unreadable",
            "the notebook cannot be read",
            file=path,
            found=str(error),
            expected="a Jupyter notebook, format 4",
            remedy="save it again in Jupyter, or pass its code as a .py file (jupyter nbconvert --to script)",
        ) from None
    return [*_of_code(path, cells), *_of_outputs(path, cells)]


def _cells(content: Any) -> Iterator[_Cell]:
    """The code cells. Raises ValueError if the content does not follow Jupyter's format 4.

    Source: nbformat.v4.schema.json, whose `multiline_string` is a string or a list of strings.
    """
    cells = _of_kind(dict, content, "the notebook").get("cells")
    if cells is None and "worksheets" in content:
        raise ValueError("worksheets: this is format 3 or older")
    for number, cell in enumerate(_of_kind(list, cells, "cells"), 1):
        where = f"cell {number}"
        if _of_kind(dict, cell, where).get("cell_type") == "code":
            outputs = _of_kind(list, cell.get("outputs") or [], f"outputs of {where}")
            printed = [line for output in outputs for line in _printed(output, where)]
            yield _Cell(number, _joined(cell.get("source"), f"source of {where}"), printed)


def _printed(output: Any, where: str) -> list[str]:
    """The lines of a stream, or of a cell's traceback."""
    kind = _of_kind(dict, output, f"an output of {where}").get("output_type")
    if kind == "stream":
        return [_joined(output.get("text"), f"the text that {where} printed")]
    if kind != "error":
        return []
    lines = _of_kind(list, output.get("traceback") or [], f"the traceback of {where}")
    said = f"{output.get('ename')}: {output.get('evalue')}"
    return [_of_kind(str, line, f"a line of the traceback of {where}") for line in lines] or [said]


def _joined(text: Any, where: str) -> str:
    lines = text if isinstance(text, list) else [text or ""]
    return "".join(_of_kind(str, line, where) for line in lines)


def _of_kind(kind: type[T], value: Any, where: str) -> T:
    if not isinstance(value, kind):
        raise ValueError(f"{where}: {_WORDS[kind]} is expected, not {_WORDS.get(type(value), 'a number')}")
    return value


_WORDS = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "nothing"}


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


def _in_cell(place: Place, origins: list[tuple[int, int]]) -> Place:
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


def _of_outputs(path: str, cells: list[_Cell]) -> Iterator[Finding]:
    """Findings in what each cell printed."""
    for cell in cells:
        if cell.printed:
            yield from diagnose_text(f"{path}[{cell.number}]", "\n".join(cell.printed))
