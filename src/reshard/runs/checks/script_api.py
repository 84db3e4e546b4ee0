"""Names and keywords in a script that its package versions do not have, looked up without running it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from reshard.base.suggest import closest
from reshard.runs.checks import rules
from reshard.runs.checks.finding import Finding
from reshard.runs.checks.history.api_table import PACKAGE_OF_ROOT, REPLACED_NAMES, ApiTable, table_of, tables
from reshard.runs.checks.history.bloom_filters import packages_with
from reshard.runs.checks.history.call_parameters import parameters, refused
from reshard.runs.checks.history.versions_in_use import Versions
from reshard.runs.checks.location import Launch
from reshard.runs.checks.other_releases import added_later, of_other_release
from reshard.runs.checks.phrases import phrase_text
from reshard.runs.checks.script import Call, Script

ImportedName = tuple[ast.stmt | ast.expr, str, str]
"""Where a script names something, the module, and the name in it; "" for the module itself."""


def names_of_other_releases(source: Script, _: Launch | None) -> Iterator[Finding]:
    """Imports, attributes of modules, and keywords that the packages in use do not have."""
    names = imported_names(source.tree)
    if not names and not source.calls:
        return
    versions = Versions(source.installed)
    places: dict[tuple[str, str], ast.stmt | ast.expr] = {}
    for node, module, name in (*_imported(source.tree), *_read(source.tree, names)):
        places.setdefault((module, name), node)
    for (module, name), node in places.items():
        if own := table_of(module):
            yield from _of_name(source, node, module, name, own, versions)
    defined = _defined(source.tree)
    for call in source.calls:
        for own, function in _functions(call, names, defined):
            yield from _of_call(source, call, own, function, versions)


# ----------------------------------------------------------------------------------------------------- names


def _imported(tree: ast.Module) -> Iterator[ImportedName]:
    """What is imported unconditionally."""
    for node in _unconditional(tree):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from ((node, node.module, each.name) for each in node.names if each.name != "*")
        elif isinstance(node, ast.Import):
            yield from ((node, each.name, "") for each in node.names)


def _unconditional(node: ast.AST) -> Iterator[ast.stmt]:
    """Statements outside of `if` and `try`: code that checks a version first supports several."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If | ast.Try):
            continue
        if isinstance(child, ast.stmt):
            yield child
        yield from _unconditional(child)


def _read(tree: ast.Module, names: dict[str, str]) -> Iterator[ImportedName]:
    """Attributes of imported modules that are read: `transformers.AdamW`."""
    for node in ast.walk(tree):
        is_read = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
        first, *rest = _dotted(node).split(".") if is_read else [""]
        module = names.get(first, "")
        own = table_of(module) if ":" not in module else None
        if own and isinstance(node, ast.expr):
            inside = [".".join([module, *rest[:count]]) for count in range(len(rest) + 1)]
            depth = next((at for at, each in enumerate(inside) if each not in own.modules), 0)
            yield from [(node, inside[depth - 1], rest[depth - 1])] if depth else []


def _dotted(node: ast.AST) -> str:
    """A name with attributes as it is written; "" for other expressions."""
    if isinstance(node, ast.Attribute):
        return f"{inner}.{node.attr}" if (inner := _dotted(node.value)) else ""
    return node.id if isinstance(node, ast.Name) else ""


def imported_names(tree: ast.Module) -> dict[str, str]:
    """The meaning of each imported name: a module, or `module:name`, for packages in the history."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {each.asname or each.name: f"{node.module}:{each.name}" for each in node.names}
        elif isinstance(node, ast.Import):
            roots = {(root := each.name.partition(".")[0]): root for each in node.names if not each.asname}
            names |= roots | {each.asname: each.name for each in node.names if each.asname}
    return {name: target for name, target in names.items() if re.split("[.:]", target)[0] in PACKAGE_OF_ROOT}


def _defined(tree: ast.Module) -> set[str]:
    """Names that the script defines or imports itself."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {each.asname or each.name.partition(".")[0] for each in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


def _of_name(
    source: Script, node: ast.stmt | ast.expr, module: str, name: str, own: ApiTable, versions: Versions
) -> Iterator[Finding]:
    """A name or module that only releases other than the script's have."""
    version = versions.assumed(own)
    presence, spelling = own.module(module), module
    if name and presence.at(version) is not False:
        presence, spelling = own.name(module, name), f"{module}.{name}"
    bounds = presence.bounds(version) if presence.at(version) is False else None
    replaced = REPLACED_NAMES.get(spelling, "")
    if bounds is None or (own.is_open(module, version) and not replaced):
        return
    if bounds.since:
        yield added_later(spelling, own, bounds, source.place(node.lineno), versions)
        return
    new = own.elsewhere(name, module, max(0, own.place(version)[0])) if name else None
    instead = replaced or (f"from {new} import {name}" if new else "")
    values = {"name": spelling, "package": own.package, "release": bounds.last}
    values["pin"] = f"{own.package}{bounds.specifier}"
    values["instead"] = phrase_text("write-instead", new=instead) if instead else phrase_text("go-back")
    yield rules.finding(
        "script-name-gone", [source.place(node.lineno)], values, **versions.proof(own, bounds.until)
    )


# -------------------------------------------------------------------------------------------------- keywords

COMMON_PACKAGES = ("trl", "transformers", "peft", "accelerate")
"""Packages of classes that a script uses without importing them, as a notebook cell does."""
LEAST_SIMILARITY = 0.85
"""Minimum similarity of a keyword that was probably meant."""


def _functions(call: Call, names: dict[str, str], defined: set[str]) -> Iterator[tuple[ApiTable, str]]:
    """The tables and qualified names that a call may mean: by its import, or by the name of a common class."""
    first, _, rest = call.name.partition(".")
    module, _, name = names.get(first, "").partition(":")
    if own := table_of(module):
        last = rest.rpartition(".")[2] or name
        yield from _known(own, f"{name}.{last}" if rest and name else last)
    elif "." not in call.name and first not in defined:
        exporting = (
            own for own in tables(packages_with(COMMON_PACKAGES, first)) if first in own.exports(own.root)
        )
        yield from [each for own in exporting for each in _known(own, first)][:1]


def _known(own: ApiTable, name: str) -> Iterator[tuple[ApiTable, str]]:
    """The constructor of a class, a function, or a method of a class."""
    yield from ((own, each) for each in (f"{name}.__init__", name) if own.functions(each))


def _of_call(
    source: Script, call: Call, own: ApiTable, function: str, versions: Versions
) -> Iterator[Finding]:
    """The keywords of a call that its function does not accept in the script's release."""
    owner = function.removesuffix(".__init__")
    for keyword in call.node.keywords:
        why = refused(own, function, keyword.arg, versions) if keyword.arg else None
        if why and why.bounds:
            yield of_other_release(owner, str(keyword.arg), why, source.place(keyword.lineno), versions)
        elif why:
            known = parameters(own, function, versions) or set()
            for near in closest(str(keyword.arg), known, cutoff=LEAST_SIMILARITY):
                values = {"name": owner, "key": keyword.arg, "near": near}
                proof = versions.proof(own, own.versions[-1])
                place = source.place(keyword.lineno)
                yield rules.finding("script-unknown-keyword", [place], values, **proof)
