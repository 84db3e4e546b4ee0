"""A new option is a field of a record, in one file of `src`: all else follows, as a copy of the sources shows."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import reshard

SOURCE = Path(reshard.__file__).parent
ROOT = Path(__file__).parents[1]
FUTURE = "from __future__ import annotations\n"
IMPORTS = "from typing import Annotated\nfrom reshard.base.options import About\n"
FIELD = """
    spare: Annotated[int, About("Spare parts of SRC.", "N", least=2)] = 7

    def __post_init__(self) -> None:
        print(f"<spare {self.spare}>")

"""
"""An option, and a method that shows its value when the record is made."""
TRIED = """
import inspect, json, sys
import reshard
from reshard.base.errors import ReshardError
from tests.commandline import reshard as typed
from tools.man_pages import pages

name, *words = sys.argv[1:]
tried = {str(value): typed(name, *words, "--spare", value)._asdict() for value in (1, 5)}
function = getattr(reshard, name)
try:
    function("x", "y", spare=1) if name in ("convert", "verify") else function("x", spare=1)
except ReshardError as error:
    tried["refused"] = str(error)
found = inspect.signature(function).parameters["spare"]
tried["signature"] = [found.kind.name, found.default]
tried |= {"doc": inspect.getdoc(function), "help": typed(name, "--help").out, "page": pages()[f"reshard-{name}.1"]}
print(json.dumps(tried))
"""
"""What is seen of the option in a process that has never imported the record without it."""


def with_field(source: str, record: str) -> str:
    """The text of a module in which a record has one more field, before its others."""
    classes = [each for each in ast.parse(source).body if isinstance(each, ast.ClassDef)]
    (found,) = (each for each in classes if each.name == record)
    lines = source.splitlines(keepends=True)
    lines.insert(found.body[0].end_lineno or 0, FIELD)
    return "".join(lines).replace(FUTURE, FUTURE + IMPORTS)


def tried(folder: Path, file: str, record: str, *words: object) -> dict[str, Any]:
    """What is seen of the option in a copy of the sources, of which one file is changed."""
    copy = folder / "src" / "reshard"
    shutil.copytree(SOURCE, copy)
    path = copy / file
    path.write_text(with_field(path.read_text(encoding="utf-8"), record), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-c", TRIED, *map(str, words)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(copy.parent), str(ROOT)]), "COLUMNS": "110"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def is_everywhere(found: dict[str, Any]) -> bool:
    """Whether the option is in the help, the function, the man page, and the checks of both."""
    assert "--spare N" in found["help"] and "[default: 7]" in found["help"]
    assert found["signature"] == ["KEYWORD_ONLY", 7]
    assert "\nspare : int, default 7\n    Spare parts of SRC." in found["doc"]
    assert "\\fB\\-\\-spare N\\fR\nSpare parts of SRC." in found["page"]
    assert found["1"]["code"] == 2 and "an integer of at least 2" in found["1"]["err"]
    assert "an integer of at least 2" in found["refused"] and "spare=1" in found["refused"]
    assert found["5"]["code"] == 0, found["5"]["err"]
    return "<spare 5>" in found["5"]["out"]


@pytest.mark.thorough
def test_an_option_of_convert(hf_model: Callable[..., Path], tmp_path: Path) -> None:
    model, out = hf_model("qwen3"), tmp_path / "out"
    words = ("convert", model, out, "--to", "megatron")
    assert is_everywhere(tried(tmp_path / "how", "commands/options.py", "RunOptions", *words, "--dry-run"))
    assert is_everywhere(tried(tmp_path / "what", "formats/options.py", "Output", *words))
    recorded = json.loads((out / "reshard.json").read_text(encoding="utf-8"))
    assert recorded["options"]["spare"] == 5


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "file", "record"),
    [
        ("inspect", "api/inspection.py", "InspectOptions"),
        ("verify", "api/verification.py", "CheckOptions"),
        ("doctor", "runs/doctor/python_api.py", "DoctorOptions"),
    ],
)
def test_an_option_of_another_command(
    name: str, file: str, record: str, hf_model: Callable[..., Path], tmp_path: Path
) -> None:
    model = hf_model("qwen3")
    words = [name, model, model] if name == "verify" else [name, model]
    assert is_everywhere(tried(tmp_path, file, record, *words))
