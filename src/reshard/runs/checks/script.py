"""A Python script as rules see it: calls in order, values of names and where they flow, rank guards. Never executed."""

from __future__ import annotations

import ast
import re
import tokenize
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from io import BytesIO
from typing import Any

from reshard.base.errors import ReshardError
from reshard.base.plain_json import MAX_CODE_BYTES
from reshard.runs.checks.location import Location
from reshard.stores import as_path
from reshard.transfer.source_files import Sources

_RANK = (
    r"(?:(?<!\w)(?:(?:get|local|global|dp|dist|process)_)*(?:rank|process_index)\b(?:\(\))?"
    r"|env(?:iron)?(?:\.get\(|\(|\[)'(?:LOCAL_)?RANK'[^)\]]*[)\]]+)"
)
_MAIN = re.compile(
    rf"{_RANK} (?:== 0|in [\[(]|<= 0|< 1)|\bis_(?:local_)?(?:main_process|world_process_zero|rank_?0|master)"
    r"|\bnot (?:\w+\.)*(?:local_|global_)?rank\b",
    re.IGNORECASE,
)
_OTHERS = re.compile(
    rf"{_RANK} (?:!= 0|> 0|>= 1)|\bnot (?:\w+\.)*is_(?:local_)?(?:main_process|world_process_zero|master)"
    r"|^(?:\w+\.)*(?:local_|global_)?rank$",
    re.IGNORECASE,
)
"""Conditions as `ast.unparse` writes them."""
_ONE_RANK = re.compile(r"on_(?:local_)?main_process|rank_?zero_only|master_only|main_process_only")


@dataclass(frozen=True)
class CallPlace:
    """The function around a piece of code, dotted ("" in the module), and the condition that selects ranks.

    `guard` is the line of that condition, `others` whether it includes all ranks except the first.
    """

    scope: str = ""
    guard: int | None = None
    others: bool = False


@dataclass(frozen=True)
class Call:
    """A call of `name` (dotted, as written), and where it is."""

    name: str
    node: ast.Call
    where: CallPlace

    @property
    def line(self) -> int:
        return self.node.lineno

    @property
    def last(self) -> str:
        """The last part of the name: the class or method."""
        return self.name.rsplit(".", 1)[-1]

    @property
    def owner(self) -> str:
        """The object of a method call, as written."""
        return self.name.rpartition(".")[0]

    def keyword(self, name: str) -> ast.keyword | None:
        """A keyword argument."""
        return next((each for each in self.node.keywords if each.arg == name), None)

    def constant(self, name: str) -> Any:
        """The value of a keyword argument if it is a constant, else None."""
        value = self.keyword(name)
        return value.value.value if value and isinstance(value.value, ast.Constant) else None

    def names(self) -> set[str]:
        """All variables and attributes among the arguments."""
        return names_in(*self.node.args, *(each.value for each in self.node.keywords))


@dataclass
class Script:
    """A parsed script. `calls` are in the order of the text.

    `installed` are the packages of the Python that runs it; None if that is this one.
    """

    path: str
    text: str
    tree: ast.Module
    calls: list[Call] = field(default_factory=list)
    installed: Mapping[str, str] | None = None

    @cached_property
    def lines(self) -> list[str]:
        return self.text.splitlines()

    def place(self, line: int) -> Location:
        """A line of the script."""
        return Location(self.path, line, self.lines[line - 1].strip())

    def find(self, *last: str) -> list[Call]:
        """Calls of any of these classes, functions or methods."""
        return [call for call in self.calls if call.last in last]

    @cached_property
    def values(self) -> dict[str, list[ast.expr]]:
        """All values of each name: from assignments, defaults of parameters, fields and argparse."""
        values: dict[str, list[ast.expr]] = {}
        for name, value in _bindings(self.tree):
            values.setdefault(name, []).append(value)
        return values

    @cached_property
    def _passed(self) -> list[tuple[str, ast.expr]]:
        """The values that names get, functions return, and parameters are given."""
        functions = {node.name: node for node in ast.walk(self.tree) if isinstance(node, ast.FunctionDef)}
        passed = [*_bindings(self.tree)]
        for name, function in functions.items():
            returned = (node.value for node in ast.walk(function) if isinstance(node, ast.Return))
            passed += [(name, value) for value in returned if value is not None]
        for call in self.calls:
            if call.last in functions:
                passed += _arguments(functions[call.last], call.node)
        return passed

    @cached_property
    def _steps(self) -> list[tuple[set[str], str]]:
        """The names in each of these values, and the name that gets it."""
        return [(names_in(value), name) for name, value in self._passed]

    def reached(self, node: ast.expr) -> set[str]:
        """All names that an expression may reach: by assignment, return, or as an argument."""
        reached = {name for name, value in self._passed if node in ast.walk(value)}
        while more := {name for names, name in self._steps if names & reached} - reached:
            reached |= more
        return reached


def _arguments(function: ast.FunctionDef, call: ast.Call) -> Iterator[tuple[str, ast.expr]]:
    """The parameters of a function, with the arguments of a call."""
    names = [each.arg for each in function.args.args if each.arg != "self"]
    yield from zip(names, call.args, strict=False)
    yield from ((each.arg, each.value) for each in call.keywords if each.arg is not None)


def names_in(*nodes: ast.AST) -> set[str]:
    """All variables in expressions, and attributes as written (`args.device_map`)."""
    every = [node for each in nodes for node in ast.walk(each)]
    names = {node.id for node in every if isinstance(node, ast.Name)}
    return names | {ast.unparse(node) for node in every if isinstance(node, ast.Attribute)}


def _bindings(tree: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """Each name that is bound, with its value. Fields and options are bound under their own name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for name in _targets(node.targets):
                yield name, node.value
        elif isinstance(node, ast.AnnAssign | ast.NamedExpr) and node.value is not None:
            for name in _targets([node.target]):
                yield name, _field_default(node.value)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _defaults(node.args)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("add_argument"):
            yield from _option(node)


def _defaults(parameters: ast.arguments) -> Iterator[tuple[str, ast.expr]]:
    """The parameters of a function that have a default, and that."""
    positional = [*parameters.posonlyargs, *parameters.args][::-1]
    pairs = [
        *zip(positional, parameters.defaults[::-1], strict=False),
        *zip(parameters.kwonlyargs, parameters.kw_defaults, strict=True),
    ]
    yield from ((each.arg, default) for each, default in pairs if default is not None)


def _field_default(value: ast.expr) -> ast.expr:
    """The default of a dataclass field."""
    if isinstance(value, ast.Call) and ast.unparse(value.func).endswith("field"):
        return next((each.value for each in value.keywords if each.arg == "default"), value)
    return value


def _option(call: ast.Call) -> Iterator[tuple[str, ast.expr]]:
    """The default of an argparse option."""
    default = next((each.value for each in call.keywords if each.arg == "default"), None)
    for flag in call.args:
        if default is not None and isinstance(flag, ast.Constant) and isinstance(flag.value, str):
            yield flag.value.lstrip("-").replace("-", "_"), default


NOT_PYTHON = (SyntaxError, ValueError, RecursionError, MemoryError)
"""Exceptions for text that is not Python, or nested too deep: which of the two depends on the limit reached first."""


def read_source(path: str) -> Script:
    """Parse a script. Raises ReshardError if it is not Python."""
    try:
        raw = Sources().read(as_path(path), MAX_CODE_BYTES)
        tree = ast.parse(raw)  # bytes: parsed in the encoding that the script declares, as in Python
        encoding, _ = tokenize.detect_encoding(BytesIO(raw).readline)
        return parsed(path, "\n".join(raw.decode(encoding).splitlines()), tree)
    except (*NOT_PYTHON, OSError) as error:
        raise _unreadable(path, error) from None


def _unreadable(path: str, error: Exception) -> ReshardError:
    line, reason = getattr(error, "lineno", None), getattr(error, "msg", None) or str(error)
    remedy = "fix its syntax first"
    if isinstance(error, RecursionError | MemoryError):
        reason, remedy = "it is nested too deeply", "split the long expression or chain"
    elif "codec" in reason or "encoding" in reason or "Non-UTF-8" in reason:
        remedy = "save it as UTF-8, or declare its encoding in the first line: # -*- coding: gbk -*-"
    return ReshardError(
        "script-not-python",
        "the script cannot be read as Python",
        file=f"{path}:{line}" if line else path,
        found=reason,
        remedy=f"{remedy}; if it is not a script, rename it: a log may have any other suffix",
    )


def parsed(path: str, text: str, tree: ast.Module) -> Script:
    """A parsed script, with its calls."""
    source = Script(path, text, tree)
    source.calls = sorted(
        _calls(source.tree, CallPlace()), key=lambda call: (call.line, call.node.col_offset)
    )
    return source


def _calls(node: ast.AST, where: CallPlace) -> Iterator[Call]:
    if isinstance(node, ast.Call):
        yield Call(ast.unparse(node.func), node, where)
    elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        alone = [each.lineno for each in node.decorator_list if _ONE_RANK.search(ast.unparse(each))]
        where = CallPlace(f"{where.scope}.{node.name}", alone[0] if alone else None)
    elif isinstance(node, ast.If) and (side := _side(node.test)) is not None:
        yield from _calls(node.test, where)
        yield from _block(node.body, CallPlace(where.scope, node.lineno, others=side == "others"))
        yield from _block(node.orelse, CallPlace(where.scope, node.lineno, others=side == "main"))
        return
    for _, value in ast.iter_fields(node):
        parts = value if isinstance(value, list) else [value]
        yield from _block([each for each in parts if isinstance(each, ast.AST)], where)


def _block(nodes: Sequence[ast.AST], where: CallPlace) -> Iterator[Call]:
    """The calls of a block. After `if rank != 0: return`, only the first rank remains."""
    for node in nodes:
        yield from _calls(node, where)
        if isinstance(node, ast.If) and _side(node.test) == "others" and _leaves(node.body):
            where = CallPlace(where.scope, node.lineno)


def _side(test: ast.expr) -> str | None:
    """Whether a condition includes only the "main" rank, or only the "others"."""
    condition = ast.unparse(test)
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.Or):
        return None  # includes others in another way
    if _OTHERS.search(condition):
        return "others"
    return "main" if _MAIN.search(condition) else None


def _leaves(body: list[ast.stmt]) -> bool:
    last = body[-1]
    ended = isinstance(last, ast.Expr) and bool(re.match(r"(?:sys\.|os\._)?exit\(", ast.unparse(last)))
    return ended or isinstance(last, ast.Return | ast.Continue)


def _targets(targets: list[ast.expr]) -> Iterator[str]:
    """Names and attributes that are assigned; for `d["key"] = …` the variable d."""
    for target in targets:
        if isinstance(target, ast.Tuple | ast.List):
            yield from _targets(target.elts)
        elif isinstance(target, ast.Subscript | ast.Starred):
            yield from _targets([target.value])
        else:
            yield ast.unparse(target)
