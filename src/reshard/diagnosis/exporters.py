"""Failures of export scripts: a model that silently becomes tensor parallel, and ranks that are not merged."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from reshard.checks.device_maps import SPREAD
from reshard.diagnosis.finding import Finding
from reshard.diagnosis.rules import told
from reshard.diagnosis.source import Source
from reshard.diagnosis.spread import device_map_findings

_SETS_WORLD_SIZE = re.compile(r"""environ(?:\.setdefault\(|\[)["']WORLD_SIZE["']\]?\s*[,=][^=]""")
_RANK_0 = re.compile(r"\bmodel_tp0_pp|\bmp_rank_00\b")
_OTHER_RANKS = re.compile(r"model_tp(?:\{|\*|%|\\d|[1-9])|mp_rank_(?:\{|\*|%|\\d|0[1-9])")


def export_device_map(source: Source) -> Iterator[Finding]:
    """device_map='auto' in a script that sets WORLD_SIZE itself, and passes the model to no trainer."""
    if not _SETS_WORLD_SIZE.search(source.text) or any(device_map_findings(source)):
        return
    maps = [keyword.value for call in source.calls if (keyword := call.keyword("device_map"))]
    spread = [value for value in maps if isinstance(value, ast.Constant) and value.value in SPREAD]
    if spread:
        yield told("script-export-device-map", [source.replaced(value, "None") for value in spread])


def first_rank_only(source: Source) -> Iterator[Finding]:
    """Only the files of tensor-parallel rank 0 are read: InternLM's `model_tp0_pp*`, Megatron's `mp_rank_00`."""
    if not source.find("load_state_dict") or _OTHER_RANKS.search(source.text):
        return
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
            continue
        if _RANK_0.search(node.value) and "\n" not in node.value:  # a docstring may mention it
            yield told("script-first-rank-only", [source.place(node.lineno)])
            return
