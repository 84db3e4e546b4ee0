"""The table of one package: everything in some of its releases, and which releases have it.

Things are grouped by their span: `"0-"` is all releases, `"3-7,9-"` those at these indices in `versions`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from reshard.runs.checks.history.api_table import PACKAGE_ROOTS
from tools.api_history.collect import Collected
from tools.api_history.release import Release

Spans = dict[str, set[int]]
_KEYS = {
    "transformers": r"CONFIG_MAPPING_NAMES",
    "vllm": r"[A-Z_]*_MODELS",
}
"""Registries whose keys appear in messages."""
_DEEP = re.compile(r"^(?:transformers\.models\.|vllm\.model_executor\.models\.)")
"""Modules that exist once per model: the parameters of a model's own functions are left out."""


def table(package: str, every: list[Collected]) -> dict[str, Any]:
    """The table of a package, as JSON values."""
    root = PACKAGE_ROOTS[package]
    modules: Spans = defaultdict(set)
    names: dict[str, Spans] = defaultdict(lambda: defaultdict(set))
    external: dict[str, set[str]] = defaultdict(set)
    own: dict[str, set[str]] = defaultdict(set)
    opened: Spans = defaultdict(set)
    functions: dict[tuple[str, str], Spans] = defaultdict(lambda: defaultdict(set))
    attributes: dict[str, Spans] = defaultdict(lambda: defaultdict(set))
    bases: dict[str, Spans] = defaultdict(lambda: defaultdict(set))
    keys: Spans = defaultdict(set)
    words: Spans = defaultdict(set)
    uses: Spans = defaultdict(set)
    renames: set[tuple[str, str]] = set()
    inits: set[str] = set()
    fields: set[tuple[str, str]] = set()
    for at, content in enumerate(every):
        release = Release(content, root)
        inits |= content.packages
        for module in release.modules:
            modules[module].add(at)
            if release.is_open(module):
                opened[module].add(at)
            for name, is_own in release.names(module).items():
                names[module][name].add(at)
                (own if is_own else external)[module].add(name)
            surface = release.surface(module)
            renames |= {(old, new) for old, new in surface.get("renames", ())}
            for variable, values in surface.get("keys", {}).items():
                if package in _KEYS and re.fullmatch(_KEYS[package], variable):
                    for each in values:
                        keys[each].add(at)
            for word in surface.get("constants", ()):
                words[word].add(at)
            if surface.get("aliases"):
                opened["*"].add(at)
            for name, kind in surface.get("classes", {}).items():
                attributes[name]["()"].add(at)
                for each in kind.get("attributes", ()):
                    attributes[name][each].add(at)
                for base in release.bases((module, name)):
                    if not isinstance(base, str):
                        bases[name][base[1]].add(at)
        for key, parameters in release.functions():
            if key[1] not in release.surface(key[0]).get("functions", {}):
                fields.add(key)  # a dataclass
            spans = functions[key]
            spans["()"].add(at)
            for each in parameters:
                if each.startswith("**"):
                    spans["**"].add(at)
                elif each[0] == "*":
                    continue
                else:
                    spans[each.rstrip("=")].add(at)
                    if each[-1] != "=" and each[0] != "@":
                        spans[f"{each}!"].add(at)
        for target in release.uses():
            uses[target].add(at)
    last = len(every) - 1
    return {
        "package": package,
        "root": root,
        "versions": [each.version for each in every],
        "dates": [each.date for each in every],
        "modules": _grouped(modules, last),
        "names": _names(names, own, modules, inits, last),
        "open": _grouped(opened, last),
        "functions": _functions(functions, fields, names.get(root, {}).keys(), last),
        "attributes": _attributes(attributes, last),
        "bases": {name: _grouped(spans, last) for name, spans in sorted(bases.items())},
        "keys": _grouped(keys, last),
        "words": _grouped(words, last),
        "uses": _grouped({name: spans for name, spans in uses.items() if last not in spans}, last),
        "renames": _renames(renames, functions, last),
    }


def _names(
    names: Mapping[str, Spans], own: Mapping[str, set[str]], modules: Spans, inits: set[str], last: int
) -> dict[str, Any]:
    """Names by module: all for packages; for others, public names, or those added or removed while it existed."""
    found = {}
    for module, spans in sorted(names.items()):
        kept = {
            name: span
            for name, span in spans.items()
            if name in own.get(module, ())
            and not (name.startswith("__") and name != "__version__")
            and (module in inits or span != modules[module])
        }
        if kept:
            found[module] = _grouped(kept, last)
    return found


def _functions(
    functions: Mapping[tuple[str, str], Spans],
    fields: set[tuple[str, str]],
    public: Iterable[str],
    last: int,
) -> dict[str, Any]:
    """Parameters by qualified name: all of dataclasses and of the exports of the package's root; of the rest, those
    that were added or removed.
    """
    exported = set(public)
    found: dict[str, dict[str, Any]] = defaultdict(dict)
    for (module, name), spans in sorted(functions.items()):
        whole = spans["()"]
        is_public = name.split(".")[0] in exported and (name.endswith("__init__") or "." not in name)
        has_fields = (module, name) in fields and not _DEEP.match(module)
        kept = {
            each: span
            for each, span in spans.items()
            if (span != whole and span) or ((is_public or has_fields) and each[-1] != "!")
        }
        if not kept or (_DEEP.match(module) and not (is_public or name.endswith("__init__"))):
            continue
        found[name][module] = _grouped({**kept, "()": whole}, last)
    return dict(found)


def _attributes(attributes: Mapping[str, Spans], last: int) -> dict[str, Any]:
    found = {}
    for name, spans in sorted(attributes.items()):
        kept = {each: span for each, span in spans.items() if span != spans["()"]}
        if kept:
            found[name] = _grouped({**kept, "()": spans["()"]}, last)
    return found


def _renames(
    renames: set[tuple[str, str]], functions: Mapping[tuple[str, str], Spans], last: int
) -> dict[str, str]:
    """Old parameters and their replacements: where a function has lost the old one, and has the new one afterwards."""
    true: dict[str, set[str]] = defaultdict(set)
    for old, new in renames:
        if not {*old.split("_")} & {*new.split("_")}:
            continue  # a replacement is not always a new name
        for spans in functions.values():
            if spans.get(old) and spans.get(new) and max(spans[old]) < max(spans[new]):
                true[old].add(new)
    return {old: min(new) for old, new in sorted(true.items()) if len(new) == 1}


def _grouped(spans: Spans, last: int) -> dict[str, str]:
    """Things grouped by the text of their span."""
    found: dict[str, list[str]] = defaultdict(list)
    for name, span in spans.items():
        found[text_of(span, last)].append(name)
    return {span: " ".join(sorted(found[span])) for span in sorted(found)}


def text_of(span: set[int], last: int) -> str:
    """A set of indices as ranges; a range that includes the last index has no end."""
    runs: list[list[int]] = []
    for at in sorted(span):
        if runs and runs[-1][1] == at - 1:
            runs[-1][1] = at
        else:
            runs.append([at, at])
    return ",".join(
        f"{one}-" if two == last else f"{one}-{two}" if one != two else f"{one}" for one, two in runs
    )
