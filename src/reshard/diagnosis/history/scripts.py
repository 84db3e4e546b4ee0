"""Names and keywords in a script that its package versions do not have, looked up without running it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from reshard.base.suggest import closest
from reshard.checks.source import Call, Source
from reshard.diagnosis.finding import Finding, Place
from reshard.diagnosis.history.calls import parameters, refused
from reshard.diagnosis.history.findings import read_from
from reshard.diagnosis.history.having import having
from reshard.diagnosis.history.releases import Presence
from reshard.diagnosis.history.table import PACKAGES, Table, tables
from reshard.diagnosis.history.versions import Versions
from reshard.diagnosis.rules import told
from reshard.diagnosis.words import words

COMMON = ("trl", "transformers", "peft", "accelerate")
"""Packages of classes that a script uses without importing them, as a notebook cell does."""


def history_findings(source: Source) -> Iterator[Finding]:
    """Findings of the history about a script: imports, attributes of modules, keywords."""
    names = _imports(source.tree)
    if not names and not source.calls:
        return
    versions = Versions.beside(source.path, source.text, source.installed)
    told_of: set[str] = set()
    asked: list[tuple[ast.stmt | ast.expr, str, str | None]] = [*_asked(source.tree)]
    for node, module, name in (*asked, *_attributes(source.tree, names)):
        if f"{module}:{name}" not in told_of:
            told_of.add(f"{module}:{name}")
            yield from _missing(source, node, module, name, versions)
    defined = _defined(source.tree)
    for call in source.calls:
        for found, function in _function(call, names, defined):
            yield from _keywords(source, call, found, function, versions)


def _asked(tree: ast.Module) -> Iterator[tuple[ast.stmt, str, str | None]]:
    """Each unconditional import: the statement, the module, and the name."""
    for node in _unconditional(tree):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for each in node.names:
                if each.name != "*":
                    yield node, node.module, each.name
        elif isinstance(node, ast.Import):
            for each in node.names:
                yield node, each.name, None


def _unconditional(node: ast.AST) -> Iterator[ast.stmt]:
    """Statements outside of `if` and `try`: code that checks a version first supports several."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If | ast.Try):
            continue
        if isinstance(child, ast.stmt):
            yield child
        yield from _unconditional(child)


def _imports(tree: ast.Module) -> dict[str, str]:
    """The meaning of each imported name: a module, or `module:name`, for packages in the history."""
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for each in node.names:
                found[each.asname or each.name] = f"{node.module}:{each.name}"
        elif isinstance(node, ast.Import):
            for each in node.names:
                plain = each.name if each.asname else each.name.partition(".")[0]
                found[each.asname or plain] = plain
    return {name: target for name, target in found.items() if _root(target) in PACKAGES}


def _root(target: str) -> str:
    return target.partition(":")[0].partition(".")[0]


def _defined(tree: ast.Module) -> set[str]:
    """Names that the script defines itself."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    own = {node.name for node in ast.walk(tree) if isinstance(node, kinds)}
    stored = {
        node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    aliases = {
        each.asname or each.name.partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for each in node.names
    }
    return own | stored | aliases


def _attributes(tree: ast.Module, names: dict[str, str]) -> Iterator[tuple[ast.expr, str, str]]:
    """Attributes of imported modules that are read: `transformers.AdamW`."""
    seen: set[int] = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or id(node) in seen or not isinstance(node.ctx, ast.Load):
            continue
        chain: list[ast.Attribute] = []
        inner: ast.expr = node
        while isinstance(inner, ast.Attribute):
            seen.add(id(inner))
            chain.insert(0, inner)
            inner = inner.value
        target = names.get(inner.id) if isinstance(inner, ast.Name) else None
        if target is None or ":" in target:
            continue
        for each in chain:
            found = next(tables([PACKAGES[_root(target)]]), None)
            if found is None:
                break
            if f"{target}.{each.attr}" in found.modules:
                target = f"{target}.{each.attr}"
                continue
            yield each, target, each.attr
            break


def _missing(
    source: Source, node: ast.stmt | ast.expr, module: str, name: str | None, versions: Versions
) -> Iterator[Finding]:
    """A name or module that only releases other than the script's have."""
    for found in tables([PACKAGES[_root(module)]] if _root(module) in PACKAGES else []):
        version = versions.assumed(found)
        lost = found.module(module)
        if lost.there and lost.at(version) is False:
            if not found.is_open("*", version):
                yield from _lacks(source, node, found, module, lost, versions, None)
        elif name is not None and not found.is_open(module, version):
            presence = found.name(module, name)
            if presence.there and presence.at(version) is False:
                new = found.elsewhere(name, module, max(0, found.place(version)[0]))
                instead = f"from {new} import {name}" if new else None
                yield from _lacks(source, node, found, f"{module}.{name}", presence, versions, instead)


def _lacks(
    source: Source,
    node: ast.stmt | ast.expr,
    found: Table,
    shown: str,
    presence: Presence,
    versions: Versions,
    instead: str | None,
) -> Iterator[Finding]:
    bounds = presence.bounds(versions.assumed(found))
    if bounds is None:
        return
    sure, evidence = versions.certainty(found, bounds.until)
    gone = bounds.since is None
    values = {
        "name": shown,
        "package": found.package,
        "release": bounds.last if gone else bounds.shown,
        "pin": f"{found.package}{bounds.specifier}",
        "instead": words("write-instead", new=instead) if instead and gone else words("go-back"),
    }
    line = source.lines[node.lineno - 1]
    alone = isinstance(node, ast.ImportFrom) and len(node.names) == 1 and node.end_lineno == node.lineno
    fixed = re.sub(r"from \S+ import .*", instead, line) if instead and gone and alone else ""
    kind = "script-name-gone" if gone else "script-name-later"
    place = source.place(node.lineno, fixed)
    yield told(kind, [place], values, certainty=sure, evidence=[evidence, read_from(found)])


# -------------------------------------------------------------------------------------------------- keywords


def _function(call: Call, names: dict[str, str], defined: set[str]) -> Iterator[tuple[Table, str]]:
    """The tables and qualified names that a call may mean: by its import, or by the name of a common class."""
    first, _, rest = call.name.partition(".")
    if first in names:
        module, _, name = names[first].partition(":")
        whole = ".".join(part for part in (name, rest) if part).rpartition(".")[2] if rest else name
        owner = name if rest and name else ""
        for found in tables([PACKAGES[_root(module)]]):
            yield from _known(found, whole, owner)
    elif "." not in call.name and first not in defined:
        public = (found for found in tables(having(COMMON, first)) if first in _public(found))
        every = [each for found in public for each in _known(found, first, "")]
        yield from every[:1]


def _known(found: Table, name: str, owner: str) -> Iterator[tuple[Table, str]]:
    """The constructor of a class, a function, or a method of a class."""
    candidates = (f"{owner}.{name}",) if owner else (f"{name}.__init__", name)
    yield from ((found, each) for each in candidates if each in found.raw["functions"])


def _public(found: Table) -> set[str]:
    groups = found.raw["names"].get(found.root, {})
    return {name for names in groups.values() for name in names.split(" ")}


def _keywords(
    source: Source, call: Call, found: Table, function: str, versions: Versions
) -> Iterator[Finding]:
    shown = function.removesuffix(".__init__")
    for keyword in call.node.keywords:
        if keyword.arg is None or (why := refused(found, function, keyword.arg, versions)) is None:
            continue
        name = keyword.arg
        if why.bounds is None:
            known = parameters(found, function, versions) or set()
            near = closest(name, known, cutoff=0.85)
            if near:
                sure, evidence = versions.certainty(found, found.versions[-1])
                slip = {"name": shown, "key": name, "near": near[0]}
                place = renamed(source, keyword, near[0])
                proof = [evidence, read_from(found)]
                yield told("script-unknown-keyword", [place], slip, certainty=sure, evidence=proof)
            continue
        sure, evidence = versions.certainty(why.table, why.bounds.until)
        proof = [evidence, read_from(why.table)]
        if why.bounds.since is None:
            place = renamed(source, keyword, why.renamed) if why.renamed else dropped(source, keyword)
            gone = wording(shown, name, why.renamed, why.table.package, why.bounds.specifier)
            yield told("script-removed-keyword", [place], gone, certainty=sure, evidence=proof)
        else:
            values: dict[str, object] = {
                "name": f"{shown}({name}=…)",
                "package": why.table.package,
                "release": why.bounds.shown,
                "pin": f"{why.table.package}{why.bounds.specifier}",
            }
            place = source.place(keyword.lineno)
            yield told("script-name-later", [place], values, certainty=sure, evidence=proof)


def wording(name: str, old: str, new: str | None, package: str, specifier: str) -> dict[str, object]:
    """What the rule says about an old keyword or key: renamed, or removed."""
    return {
        "name": name,
        "old": old,
        "became": words("name-became" if new else "name-gone", old=old, new=new),
        "cure": words("write-new" if new else "delete-old", old=old, new=new),
        "pin": f"{package}{specifier}",
    }


def renamed(source: Source, keyword: ast.keyword, new: str) -> Place:
    """The line of a keyword with another name."""
    line = source.lines[keyword.lineno - 1]
    return source.place(keyword.lineno, re.sub(rf"\b{keyword.arg}(\s*=)", rf"{new}\1", line, count=1))


def dropped(source: Source, keyword: ast.keyword) -> Place:
    """The line without a keyword: as a comment if it stands alone, else with the rest of the call."""
    if keyword.end_lineno != keyword.lineno:
        return source.place(keyword.lineno)
    line = source.lines[keyword.lineno - 1]
    before, after = line[: keyword.col_offset], line[keyword.end_col_offset :]
    if not before.strip() and after.strip() in ("", ","):
        return source.place(keyword.lineno, f"# {line.strip()}")
    if match := re.match(r"\s*,\s*", after):
        return source.place(keyword.lineno, before + after[match.end() :])
    return source.place(keyword.lineno, re.sub(r",\s*$", "", before) + after)
