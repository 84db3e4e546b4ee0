"""Python files beside weights: the code of a model, which transformers loads if an `auto_map` names it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from reshard.base.plain_json import MAX_CODE_BYTES
from reshard.folders.allowed_paths import belongs, files_matching
from reshard.folders.companion_names import CONFIG, TOKENIZER_CONFIG
from reshard.folders.json_objects import read_object
from reshard.transfer.source_files import Sources

_CLASS = re.compile(r"([^\W\d]\w*)\.\w+")
"""A class that `auto_map` names, in a file next to the config: one of another repository begins with its name."""
_IMPORT = re.compile(r"^[ \t]*(?:import[ \t]+\.(\w+)[ \t]*$|from[ \t]+\.(\w+)[ \t]+import\b)", re.MULTILINE)
"""The imports that `get_relative_imports` in dynamic_module_utils.py of transformers 5.23 matches."""


def code_files(folder: Path, sources: Sources) -> Iterator[Path]:
    """The Python files that transformers loads for the files in `folder`: those of `auto_map`, and their imports."""
    maps = [read_object(file, sources).get("auto_map") for file in _configs(folder, sources)]
    waiting = [module for auto_map in maps for module in _modules(auto_map)]
    seen: set[str] = set()
    while waiting:
        module = waiting.pop(0)
        path = folder / f"{module}.py"
        if module not in seen and path.is_file():
            yield path
            if belongs(path, folder, sources):
                text = sources.read(path, MAX_CODE_BYTES).decode(errors="replace")
                waiting += [first or second for first, second in _IMPORT.findall(text)]
        seen.add(module)


def _configs(folder: Path, sources: Sources) -> list[Path]:
    candidates = [
        folder / CONFIG,
        folder / TOKENIZER_CONFIG,
        *files_matching(folder / "*processor_config.json"),
    ]
    return [path for path in candidates if path.is_file() and belongs(path, folder, sources)]


def _modules(auto_map: Any) -> Iterator[str]:
    """The modules that an `auto_map` names: one class per task, or for tokenizers a slow and a fast one."""
    for classes in auto_map.values() if isinstance(auto_map, Mapping) else ():
        for each in classes if isinstance(classes, list) else [classes]:
            if isinstance(each, str) and (match := _CLASS.fullmatch(each)):
                yield match[1]
