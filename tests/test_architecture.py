"""The order of imports: each part of the program imports only parts below it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import reshard

SOURCE = Path(reshard.__file__).parent
DOCS = SOURCE.parents[1] / "docs"

ORDER = (
    ("base", "version"),
    ("stores",),
    ("algebra",),
    ("families", "transfer"),
    ("containers",),
    ("codecs",),
    ("folders",),
    ("formats",),
    ("model", "records"),
    ("adapters",),
    ("hub", "planning"),
    ("cluster", "exchange"),
    ("commands",),
    ("pages",),
    ("oracle",),
    ("final",),
    ("api",),
    ("live", "serve"),
    ("runs",),
    ("guard",),
    ("cli",),
)
"""From the bottom to the top. Parts on one line do not import each other."""
FREE = ("__init__", "__main__")
"""The entry points of the package: `import reshard` and `python -m reshard`."""

LEVEL = {part: level for level, parts in enumerate(ORDER) for part in parts}
MODULES = sorted(SOURCE.rglob("*.py"))


def part_of(module: str) -> str:
    """The part that a module belongs to, by its dotted name."""
    return [*module.split("."), "__init__"][1]


def name_of(path: Path) -> str:
    """The dotted name of a module."""
    return ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts).removesuffix(".__init__")


@cache
def imports_of(path: Path) -> tuple[ast.Import | ast.ImportFrom, ...]:
    """The import statements of a module, wherever they stand."""
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return tuple(node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom))


def imported(path: Path) -> Iterator[str]:
    """The modules of the project that one imports anywhere, including imports for types."""
    for node in imports_of(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "reshard")
        elif (node.module or "").split(".")[0] == "reshard":
            names = [f"reshard.{alias.name}" for alias in node.names]
            yield from names if node.module == "reshard" else [str(node.module)]


def test_every_part_has_its_place() -> None:
    assert {part_of(name_of(path)) for path in MODULES} == {*LEVEL, *FREE}


@pytest.mark.parametrize("part", LEVEL)
def test_imports_run_downwards(part: str) -> None:
    upwards = [
        f"{name_of(path)} imports {module}"
        for path in MODULES
        if part_of(name_of(path)) == part
        for module in imported(path)
        if part_of(module) not in (part, *FREE) and LEVEL[part_of(module)] >= LEVEL[part]
    ]
    assert upwards == []


def test_only_the_top_imports_the_public_package() -> None:
    found = {part_of(name_of(path)) for path in MODULES if "reshard" in imported(path)}
    assert found <= {"runs", "cli", *FREE}  # the package imports the others, on first use


def test_the_architecture_page_tells_the_same_order() -> None:
    text = " ".join((DOCS / "architecture.md").read_text(encoding="utf-8").split())
    order = " → ".join(", ".join(parts) for parts in reversed(ORDER))
    assert order in text


def test_one_module_suggests_names() -> None:
    """Every module finds similar names with `reshard.base.suggest`."""
    users = {name_of(path) for path in MODULES if "difflib" in path.read_text(encoding="utf-8")}
    assert users == {"reshard.base.suggest"}


def _imported_later(path: Path) -> Iterator[tuple[str, str, str]]:
    """What a module imports when it is first used: module, name there, name here."""
    for block in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(block, ast.With) and "imported_later" in ast.unparse(block.items[0]):
            for node in block.body:
                assert isinstance(node, ast.ImportFrom) and node.module, ast.unparse(node)
                yield from ((node.module, each.name, each.asname or each.name) for each in node.names)


def _needed_at_once(tree: ast.AST) -> Iterator[ast.AST | None]:
    """Expressions of which Python needs the values themselves."""
    for node in ast.walk(tree):
        match node:
            case ast.ClassDef():
                yield from (*node.bases, *node.decorator_list)
            case ast.FunctionDef():
                yield from node.decorator_list
            case ast.ExceptHandler():
                yield node.type
            case ast.Compare():
                yield from (node.left, *node.comparators)
            case ast.BinOp(op=ast.Add() | ast.Div()):
                yield from (node.left, node.right)


LATER = [path for path in MODULES if "with imported_later(__name__)" in path.read_text(encoding="utf-8")]


@pytest.mark.parametrize("path", LATER, ids=name_of)
def test_what_is_imported_later_is_called_or_asked(path: Path) -> None:
    """A stand-in is no constant, no base, no decorator, and nothing that `except` or `==` can take."""
    later = {here: (module, name) for module, name, here in _imported_later(path)}
    values = {
        here: getattr(__import__(module, fromlist=[name]), name) for here, (module, name) in later.items()
    }
    assert [name for name, value in values.items() if isinstance(value, str | int | tuple | frozenset)] == []
    needed = {ast.unparse(each) for each in _needed_at_once(ast.parse(path.read_text("utf-8"))) if each}
    assert needed & later.keys() == set()


def _targets(path: Path) -> set[str]:
    """The modules that one imports anywhere, where a name that is imported from a package may be a module itself."""
    found = set()
    for node in imports_of(path):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif node.module:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner in BY_NAME else node.module)
    return (found & BY_NAME.keys()) - {name_of(path)}


BY_NAME = {name_of(path): path for path in MODULES}


def test_no_modules_import_each_other() -> None:
    """Neither directly nor through others, wherever the import stands."""
    left = {name: _targets(path) for name, path in BY_NAME.items()}
    while ends := {name for name, targets in left.items() if not targets & left.keys()}:
        left = {name: targets for name, targets in left.items() if name not in ends}
    while tops := left.keys() - {target for targets in left.values() for target in targets}:
        left = {name: targets for name, targets in left.items() if name not in tops}
    assert {name: sorted(targets & left.keys()) for name, targets in left.items()} == {}


RUNS = (("checks",), ("doctor",), ("guard",), ("train", "mcp", "follow"))
"""The packages of `runs`, from the bottom to the top."""
DOCTOR = ("text", "causes", "entries", "facts")
"""The packages of the doctor. None imports a later one."""


def test_the_packages_of_runs_run_downwards() -> None:
    level = {package: at for at, packages in enumerate(RUNS) for package in packages}
    assert {path.name for path in (SOURCE / "runs").iterdir() if (path / "__init__.py").exists()} == {*level}
    upwards = [
        f"{name_of(path)} imports {module}"
        for package in level
        for path in (SOURCE / "runs" / package).rglob("*.py")
        for module in imported(path)
        for other in level.keys() - {package}
        if module.startswith(f"reshard.runs.{other}") and level[other] >= level[package]
    ]
    assert upwards == []


def test_the_packages_of_the_doctor_run_downwards() -> None:
    upwards = [
        f"{name_of(path)} imports {module}"
        for level, package in enumerate(DOCTOR)
        for path in (SOURCE / "runs" / "doctor" / package).rglob("*.py")
        for module in imported(path)
        for other in DOCTOR[level + 1 :]
        if module.startswith(f"reshard.runs.doctor.{other}.")
    ]
    assert upwards == []


OF_THE_CORE = """
    api commands.inspection containers.torchfiles.pickles final.final_folder final.saved_checkpoints
    folders folders.companion_names folders.companions folders.find_weights folders.json_objects
    formats formats.checkpoint formats.not_found reshard stores transfer.source_files
    commands.conversion commands.options hub model.find_config records.checkpoint_files
    serve.options serve.repositories serve.server transfer.leftovers transfer.run_files
"""
"""The modules of the core that `runs` may import, besides those of `base`."""


def test_runs_imports_these_modules_of_the_core() -> None:
    modules = {module for path in (SOURCE / "runs").rglob("*.py") for module in imported(path)}
    of_the_core = {module for module in modules if part_of(module) not in ("base", "runs")}
    assert sorted(module.removeprefix("reshard.") for module in of_the_core) == sorted(OF_THE_CORE.split())


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_no_error_of_ours_is_the_cause_of_another(path: Path) -> None:
    """Users would see both in one traceback, with the same problems: see `cause_of`."""
    handlers = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ExceptHandler))
    ours = [each for each in handlers if each.type and "ReshardError" in ast.unparse(each.type)]
    raised = [node for each in ours for node in ast.walk(each) if isinstance(node, ast.Raise)]
    assert [ast.unparse(node) for node in raised if isinstance(node.cause, ast.Name)] == []


def test_tests_import_no_private_names() -> None:
    root = SOURCE.parent.parent
    paths = [path for folder in ("tests", "bench", "demo", "tools") for path in (root / folder).rglob("*.py")]
    nodes = ((path, node) for path in paths for node in ast.walk(ast.parse(path.read_text("utf-8"))))
    private = [
        f"{path.relative_to(root)}: {each.name}"
        for path, node in nodes
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("reshard")
        for each in node.names
        if each.name.startswith("_") and not each.name.startswith("__")
    ]
    assert private == []


def test_class_variables_have_a_type() -> None:
    """Python 3.10 resolves no annotations of a class that has a plain ClassVar."""
    sources = {path: path.read_text(encoding="utf-8") for path in SOURCE.rglob("*.py")}
    assert [path for path, text in sources.items() if re.search(r": ClassVar\s*(=|$)", text, re.M)] == []
