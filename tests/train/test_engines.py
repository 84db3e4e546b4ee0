"""The contract of engines: their differences are in their `ENGINE`, and no other code names an engine."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from reshard.training import engine_registry
from reshard.training.engine_registry import ENGINE_MODULES, engine_named
from reshard.training.methods import TRAINING_METHODS
from reshard.training.run import Run

SOURCE = Path(engine_registry.__file__).parent
FOLDERS = [SOURCE / module.rsplit(".", 1)[1] for module in ENGINE_MODULES.values()]
OUTSIDE = [
    path for path in sorted(SOURCE.rglob("*.py")) if not any(path.is_relative_to(each) for each in FOLDERS)
]
NAMES = {*ENGINE_MODULES, *(name.capitalize() for name in ENGINE_MODULES)}


def names_of_engines(tree: ast.AST) -> Iterator[str]:
    """Code that names an engine: as a string by itself, as a module, in a comparison with `….engine`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and node.value in NAMES:
            yield f"{node.lineno}: {node.value!r}"
        if isinstance(node, ast.ImportFrom):
            modules = [f"{node.module}.{alias.name}" for alias in node.names]
            if any(
                f"{each}.".startswith(f"{module}.") for each in modules for module in ENGINE_MODULES.values()
            ):
                yield f"{node.lineno}: import of {node.module}"
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            fields = [side for side in sides if isinstance(side, ast.Attribute) and side.attr == "engine"]
            if fields and not all(isinstance(side, ast.Attribute) for side in sides):
                yield f"{node.lineno}: comparison with the name of an engine"


def test_only_the_list_of_engines_and_the_default_name_one() -> None:
    found = {
        path.relative_to(SOURCE).as_posix(): list(
            names_of_engines(ast.parse(path.read_text(encoding="utf-8")))
        )
        for path in OUTSIDE
    }
    named = {path: lines for path, lines in found.items() if lines}
    assert named.keys() == {"options.py"}, named
    assert len(named["options.py"]) == len(ENGINE_MODULES) + 1


def test_the_look_would_see_a_name() -> None:
    lines = (
        'run.engine == "a"',
        "from reshard.training.trl import x",
        "from reshard.training import trl",
        'f("trl")',
    )
    for line in lines:
        assert list(names_of_engines(ast.parse(line))), line
    assert not list(names_of_engines(ast.parse("before.engine == run.engine")))


@pytest.mark.parametrize("name", ENGINE_MODULES)
def test_an_engine_tells_all_about_itself(name: str, tmp_path: Path) -> None:
    engine = engine_named(name)
    assert engine.name == name
    assert set(engine.methods) <= set(TRAINING_METHODS)
    run = Run(engine.methods[0], tmp_path, tmp_path, tmp_path, engine=name)
    assert set(engine.requires(run)) <= set(engine.packages)
    assert list(engine.looks.asked(run)) == []
    assert engine.checkpoints.last(tmp_path) is None
    assert Path(engine.checkpoints.name(3)).match(engine.checkpoints.pattern)
    assert engine.known_options(engine.methods[0])


def test_every_method_has_an_engine() -> None:
    assert {method for name in ENGINE_MODULES for method in engine_named(name).methods} == set(
        TRAINING_METHODS
    )


def test_asking_an_engine_imports_no_framework() -> None:
    """So that a rank can claim its device first, and `--help` is fast; nor the doctor, which no rank needs."""
    needless = ("torch", "transformers", "trl", "megatron.core", "reshard.diagnosis.diagnose_targets")
    code = (
        "import sys; from reshard.training.engine_registry import ENGINE_MODULES, engine_named\n"
        "[engine_named(n) for n in ENGINE_MODULES]; "
        f"import reshard.training.worker; print([m for m in {needless} if m in sys.modules])"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == "[]"
