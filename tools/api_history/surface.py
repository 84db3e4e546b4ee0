"""The names, classes and parameters that one Python file offers, from its syntax tree. Nothing is run.

If the effects of a file at import time cannot be determined, its surface is `open`: it may have more names than listed.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterator
from typing import Any

Surface = dict[str, Any]
"""The surface of a file; all lists are sorted or in order, and empty keys are absent:

names: names defined here; imports: {name: "module:name" or "module"}; stars: modules; all: `__all__`; open: true;
functions: {qualified name: parameters}; classes: {qualified name: {bases, fields, attributes, open}};
renames: [[old, new]]; keys: {variable: keys of a dictionary literal}; constants: words of a config's own keys;
aliases: true if modules may have further names.

A parameter is `name` if it is required, `name=` if not, with `*` and `**` in front as in Python.
"""

_TRANSPARENT = re.compile(
    r"(?:abc\.)?abstractmethod|staticmethod|classmethod|property|cached_property|.*\.setter|.*\.getter|overload"
    r"|(?:functools\.)?(?:lru_cache|cache|wraps|cached_property).*|(?:torch\.)?(?:no_grad|inference_mode).*"
    r"|(?:typing\.)?(?:final|override|overload)|add_.*doc.*|replace_return_docstrings.*|auto_docstring.*"
    r"|(?:dataclasses\.)?dataclass.*|is_flaky.*|requires.*|export.*|set_module.*|experimental.*|compatibility.*"
)
"""Decorators that do not change the parameters."""
_LAZY = (
    "import_structure",
    "_LazyModule",
    "_SUBMOD_ATTRS",
    "\ndef __getattr__(",
    "\n    def __getattr__(name",
)
"""Signs of a module that imports names lazily: its names are those under TYPE_CHECKING."""
_RENAMED = re.compile(
    r"[`'\"](?P<old>[a-z_]\w+)[`'\"][^.]{0,60}(?:deprecated|renamed|removed|replaced)"
    r"(?:.{0,140}?\b(?:use|to|by|favou?r of|with)\b (?:the )?(?:parameter |argument )?"
    r"[`'\"](?:\w+\.)?(?P<new>[a-z_]\w+)[`'\"])",
    re.DOTALL | re.IGNORECASE,
)
_KEYED = re.compile(r"[A-Z_]*(?:MAPPING_NAMES|_MODELS|_REGISTRY)$")
"""Variables whose keys are a registry: model types in transformers, architectures in vLLM."""
_CONFIGURING = re.compile(
    r"constants$|accelerate\.commands\.(?:config\.|launch)|deepspeed\.(?:.*\.)?config\w*$"
)
"""Modules with the keys of a config as string constants."""


def surface_of(content: bytes, module: str, is_package: bool) -> Surface | None:
    """The surface of one file; None if it is not valid Python for this version."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(content)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    reader = _Reader(module, is_package, any(word.encode() in content for word in _LAZY))
    reader.is_deprecating = b"deprecat" in content
    reader.block(tree.body)
    if _CONFIGURING.search(module):
        reader.constants = {each for each in _strings(tree) if re.fullmatch(r"[a-z]\w+", each)}
    return reader.surface()


class _Reader:
    """Walks the statements that run when a module is imported, both branches of each condition."""

    def __init__(self, module: str, is_package: bool, is_lazy: bool) -> None:
        self.module = module
        self.package = module if is_package else module.rpartition(".")[0]
        self.is_lazy = is_lazy
        self.is_deprecating = True
        self.names: set[str] = set()
        self.imports: dict[str, str] = {}
        self.stars: list[str] = []
        self.all: list[str] | None = None
        self.open = False
        self.functions: dict[str, list[str]] = {}
        self.classes: dict[str, dict[str, Any]] = {}
        self.renames: set[tuple[str, str]] = set()
        self.keys: dict[str, list[str]] = {}
        self.constants: set[str] = set()
        self.aliases = False

    def surface(self) -> Surface:
        found = {
            "names": sorted(self.names),
            "imports": dict(sorted(self.imports.items())),
            "stars": list(dict.fromkeys(self.stars)),
            "open": self.open,
            "aliases": self.aliases,
            "functions": self.functions,
            "classes": self.classes,
            "renames": sorted(map(list, self.renames)),
            "keys": self.keys,
            "constants": sorted(self.constants),
        }
        kept: Surface = {key: value for key, value in found.items() if value}
        return kept if self.all is None else {**kept, "all": sorted(set(self.all))}

    # ------------------------------------------------------------------------------------------ modules

    def block(self, body: list[ast.stmt]) -> None:
        for node in body:
            self.statement(node)

    def statement(self, node: ast.stmt) -> None:
        if isinstance(node, ast.Import | ast.ImportFrom):
            self._import(node)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            self._function(node)
        elif isinstance(node, ast.ClassDef):
            self.names.add(node.name)
            self._class(node, node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
            self._assign(node)
        elif isinstance(node, ast.Expr):
            self._call(node.value)
        elif isinstance(node, ast.If):
            checks_types = "TYPE_CHECKING" in ast.unparse(node.test)
            if not checks_types or self.is_lazy:
                self.block(node.body)
            self.block(node.orelse)
        elif isinstance(node, ast.Try):
            for body in (node.body, *(each.body for each in node.handlers), node.orelse, node.finalbody):
                self.block(body)
        elif isinstance(node, ast.For):
            self._loop(node)
        elif isinstance(node, ast.With | ast.While):
            self.block(node.body)
        elif isinstance(node, ast.Delete):
            self._forget(node)

    def _forget(self, node: ast.Delete) -> None:
        for each in node.targets:
            if isinstance(each, ast.Name):
                self.names.discard(each.id)
                self.imports.pop(each.id, None)

    def _absolute(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        parts = self.package.split(".")
        base = parts[: len(parts) - node.level + 1]
        return ".".join([*base, *([node.module] if node.module else [])])

    def _import(self, node: ast.Import | ast.ImportFrom) -> None:
        if isinstance(node, ast.Import):
            for each in node.names:
                self.imports[each.asname or each.name.split(".")[0]] = (
                    each.name if each.asname else each.name.split(".")[0]
                )
            return
        origin = self._absolute(node)
        for each in node.names:
            if each.name == "*":
                self.stars.append(origin)
            else:
                self.imports[each.asname or each.name] = f"{origin}:{each.name}"

    def _assign(self, node: ast.Assign | ast.AnnAssign | ast.AugAssign) -> None:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        for target in targets:
            text = ast.unparse(target)
            if text == "__all__":
                self.all = [*(self.all or []), *_strings(node.value)]
            elif text.startswith(("globals()[", "vars()[")) or "sys.modules[__name__]" in text:
                self.open |= "_LazyModule" not in ast.unparse(node.value or node)
            elif text.startswith("sys.modules["):
                self.aliases = True
            elif text.startswith("_import_structure"):
                self._lazy(text, node.value)
            for name in _bound(target):
                self.names.add(name)
                self._value(name, node.value)

    def _value(self, name: str, value: ast.expr | None) -> None:
        if _KEYED.match(name) and isinstance(value, ast.Dict | ast.List | ast.Call):
            self.keys[name] = sorted({*self.keys.get(name, ()), *_keys(value)})

    def _lazy(self, text: str, value: ast.expr | None) -> None:
        """Read `_import_structure`: names by the submodule that has them."""
        if isinstance(value, ast.Dict):
            for key, each in zip(value.keys, value.values, strict=True):
                if isinstance(key, ast.Constant):
                    self._lazily(str(key.value), each)
        elif match := re.match(r"_import_structure\['([\w.]+)'\]", text):
            self._lazily(match[1], value)

    def _lazily(self, submodule: str, value: ast.expr | None) -> None:
        self.imports.setdefault(submodule.split(".")[0], f"{self.package}.{submodule.split('.')[0]}")
        for name in _strings(value):
            self.imports[name] = f"{self.package}.{submodule}:{name}"

    def _call(self, node: ast.expr) -> None:
        if not isinstance(node, ast.Call):
            return
        text = ast.unparse(node.func)
        if match := re.fullmatch(r"_import_structure\['([\w.]+)'\]\.(?:extend|append)", text):
            for each in node.args:
                self._lazily(match[1], each)
        elif text in ("__all__.extend", "__all__.append"):
            self.all = [*(self.all or []), *(name for each in node.args for name in _strings(each))]
        elif text in ("globals().update", "vars().update", "exec", "setattr"):
            self.open = True
        elif text.startswith("sys.meta_path."):
            self.aliases = True
        elif text.endswith(".update") and node.args:
            self._value(text.removesuffix(".update"), node.args[0])

    def _loop(self, node: ast.For) -> None:
        """Read loops at import time: those over `dir(X)` that set globals are star imports of X."""
        text = ast.unparse(node)
        if "globals()" in text or "setattr(" in text or "exec(" in text:
            self.open = True
        if match := re.match(r"for \w+ in dir\(([\w.]+)\)", text):
            first, _, rest = match[1].partition(".")
            origin = self.imports.get(first, first).replace(":", ".")
            self.stars.append(f"{origin}.{rest}" if rest else origin)
        self.block(node.body)

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self.names.add(node.name)
        self._takes(node.name, node)
        self._renames(node)
        if node.name == "__getattr__":
            self.open = True
            self.names |= {each for each in _strings(node) if each.isidentifier()}

    def _takes(self, qualified: str, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        """Record a function's parameters; for several definitions, their union, required if all require it."""
        found, before = _parameters(node), self.functions.get(qualified)
        if before is not None:
            names = list(dict.fromkeys(each.rstrip("=") for each in (*before, *found)))
            both = set(before) & set(found)
            found = [each if each in both or each[0] == "*" else f"{each}=" for each in names]
        self.functions[qualified] = found

    # ------------------------------------------------------------------------------------------ classes

    def _class(self, node: ast.ClassDef, qualified: str) -> None:
        decorators = [ast.unparse(each) for each in node.decorator_list]
        kind: dict[str, Any] = {"bases": [ast.unparse(each) for each in node.bases]}
        if any(
            re.match(r"(?:dataclasses\.)?dataclass\b|strict_dataclass|strict\b", each) for each in decorators
        ):
            kind["dataclass"] = True
        odd = [each for each in decorators if not _TRANSPARENT.fullmatch(each.split("(")[0])]
        if node.keywords or odd:
            kind["open"] = True
        fields: list[str] = []
        attributes: set[str] = set()
        self._members(node.body, qualified, fields, attributes)
        self._renames(node)
        if before := self.classes.get(qualified):
            kind = {**before, **kind, "bases": [*before.get("bases", ()), *kind["bases"]]}
            fields = [*before.get("fields", ()), *fields]
            attributes |= set(before.get("attributes", ()))
        kind |= {"fields": list(dict.fromkeys(fields)), "attributes": sorted(attributes)}
        self.classes[qualified] = {key: value for key, value in kind.items() if value}

    def _members(self, body: list[ast.stmt], qualified: str, fields: list[str], attributes: set[str]) -> None:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                attributes.add(node.name)
                self._takes(f"{qualified}.{node.name}", node)
                attributes |= set(_set_on_self(node))
            elif isinstance(node, ast.ClassDef):
                attributes.add(node.name)
                self._class(node, f"{qualified}.{node.name}")
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                attributes.add(node.target.id)
                if not ast.unparse(node.annotation).startswith(("ClassVar", "typing.ClassVar")):
                    fields += _fields(node)
            elif isinstance(node, ast.Assign):
                attributes |= {name for target in node.targets for name in _bound(target)}
            elif isinstance(node, ast.If):
                if "TYPE_CHECKING" not in ast.unparse(node.test):
                    self._members(node.body, qualified, fields, attributes)
                self._members(node.orelse, qualified, fields, attributes)
            elif isinstance(node, ast.Try | ast.With):
                self._members(node.body, qualified, fields, attributes)

    def _renames(self, node: ast.AST) -> None:
        """Record renamed parameters, from messages in the code and from decorators."""
        for each in ast.walk(node) if self.is_deprecating else ():
            if (
                isinstance(each, ast.Call)
                and ast.unparse(each.func).endswith("deprecate_kwarg")
                and each.args
            ):
                new = next((k.value for k in each.keywords if k.arg == "new_name"), None)
                old = each.args[0]
                if isinstance(old, ast.Constant) and isinstance(new, ast.Constant) and new.value:
                    self.renames.add((str(old.value), str(new.value)))
            elif isinstance(each, ast.Constant) and isinstance(each.value, str) and "`" in each.value:
                for match in _RENAMED.finditer(" ".join(each.value.split())):
                    if match["old"] != match["new"] and match["new"].islower():
                        self.renames.add((match["old"], match["new"]))


def _parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    given = node.args
    ordered = [*given.posonlyargs, *given.args]
    optional = len(ordered) - len(given.defaults)
    found = [f"{each.arg}=" if at >= optional else each.arg for at, each in enumerate(ordered)]
    if given.vararg:
        found.append(f"*{given.vararg.arg}")
    for each, default in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        found.append(each.arg if default is None else f"{each.arg}=")
    if given.kwarg:
        found.append(f"**{given.kwarg.arg}")
    elif any(not _TRANSPARENT.fullmatch(ast.unparse(each).split("(")[0]) for each in node.decorator_list):
        found.append("**")  # a decorator may accept more
    return found


def _fields(node: ast.AnnAssign) -> Iterator[str]:
    """The field that an annotation declares, and its pydantic alias."""
    optional = "" if node.value is None else "="
    yield ast.unparse(node.target) + optional
    for each in node.value.keywords if isinstance(node.value, ast.Call) else ():
        if each.arg in ("alias", "validation_alias") and isinstance(each.value, ast.Constant):
            yield f"{each.value.value}{optional}"


def _set_on_self(node: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    for each in ast.walk(node):
        if (
            isinstance(each, ast.Attribute)
            and isinstance(each.ctx, ast.Store)
            and isinstance(each.value, ast.Name)
            and each.value.id in ("self", "cls")
        ):
            yield each.attr


def _bound(target: ast.expr) -> Iterator[str]:
    if isinstance(target, ast.Name):
        yield target.id
    elif isinstance(target, ast.Tuple | ast.List):
        for each in target.elts:
            yield from _bound(each)
    elif isinstance(target, ast.Starred):
        yield from _bound(target.value)


def _strings(node: ast.AST | None) -> Iterator[str]:
    for each in ast.walk(node) if node is not None else ():
        if isinstance(each, ast.Constant) and isinstance(each.value, str):
            yield each.value


def _keys(value: ast.expr) -> Iterator[str]:
    """Keys of a dictionary literal, or of pairs in a list, also as an argument; included dictionaries are left out."""
    if isinstance(value, ast.Call):
        for each in (*value.args, *(keyword.value for keyword in value.keywords)):
            yield from _keys(each)
    pairs: list[ast.expr | None] = value.keys if isinstance(value, ast.Dict) else []
    if isinstance(value, ast.List):
        pairs = [each.elts[0] for each in value.elts if isinstance(each, ast.Tuple) and each.elts]
    for key in pairs:
        if isinstance(key, ast.Constant) and isinstance(key.value, str):
            yield key.value
