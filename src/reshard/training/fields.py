"""Options of an engine as fields of its framework's dataclasses: read from the source, typed, and found by name.

The source has what a live dataclass lacks: descriptions of fields. Nothing is imported, so all options of a framework
are listed quickly, even on a machine where it cannot be imported.
"""

from __future__ import annotations

import ast
import types
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ForwardRef, List, Literal, Optional, Tuple, Union, get_args, get_origin  # noqa: UP035

from reshard.base.arguments import truth
from reshard.base.plain import json_of


class Untypeable:
    """The type of a field that cannot be set as text: a function, a module, or a type of the framework."""


@dataclass(frozen=True)
class Field:
    """A field of a dataclass. `hint` is its type, of values that can be typed; `default` as in the source."""

    name: str
    hint: Any
    default: str
    help: str


def fields_of(source: Path, name: str, dtypes: Any = Untypeable) -> dict[str, Field]:
    """The fields of the dataclass `name` in a file, by name, without those of bases. Raises OSError, SyntaxError."""
    tree = ast.parse(source.read_text(encoding="utf-8"))
    body = next(node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    names = _Names(dtypes)
    found = {}
    for node, behind in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            hint = eval(compile(ast.Expression(node.annotation), str(source), "eval"), {}, names)
            found[node.target.id] = Field(node.target.id, hint, _default(node.value), _text(behind))
    return found


class _Names(dict[str, Any]):
    """The names in annotations. Types that are not Python's own become `Untypeable`."""

    def __init__(self, dtypes: Any) -> None:
        known = {each.__name__: each for each in (int, float, bool, str, list, tuple, dict)}
        typing = {"Optional": Optional, "Union": Union, "Literal": Literal, "List": List, "Tuple": Tuple}  # noqa: UP006
        super().__init__(
            {**known, **typing, "Callable": Callable, "torch": types.SimpleNamespace(dtype=dtypes)}
        )

    def __missing__(self, name: str) -> Any:
        return Untypeable


def _default(value: ast.expr | None) -> str:
    if isinstance(value, ast.Call):  # field(default=…, metadata=…)
        value = next((each.value for each in value.keywords if each.arg == "default"), None)
    return "" if value is None or ast.unparse(value) == "None" else ast.unparse(value).strip("'")


def _text(node: ast.stmt | None) -> str:
    """The string that follows a field."""
    if (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    ):
        return " ".join(node.value.value.split())
    return ""


def _members(hint: Any) -> list[Any]:
    """The types that a value may have, without None, and without those that cannot be typed."""
    either = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    return [each for each in either if each is not type(None) and _typeable(each)]


def _typeable(hint: Any) -> bool:
    if isinstance(hint, (str, ForwardRef)) or hint in (Untypeable, Callable, dict):
        return False
    if get_origin(hint) is Literal:
        return True
    return all(_typeable(each) for each in get_args(hint) if each is not ...)


def can_be_typed(hint: Any) -> bool:
    """Whether some value of the type can be typed."""
    return bool(_members(hint))


def is_optional(hint: Any) -> bool:
    """Whether None is a valid value."""
    return type(None) in get_args(hint)


def kind(hint: Any) -> str:
    """A type in words: `int`, `full | selective`, `float or list of float`."""
    words = []
    for each in _members(hint):
        arguments = [part for part in get_args(each) if part is not ...]
        if get_origin(each) is Literal:
            words.append(" | ".join(map(str, arguments)))
        elif _is_list(each):
            words.append(f"list of {kind(arguments[0])}" if arguments else "list")
        else:
            words.append(each.__name__)
    return " or ".join(dict.fromkeys(words))


def typed(value: Any, hint: Any) -> Any:
    """A value from the command line or a config file, converted to a type. Raises ValueError."""
    if value is None or (isinstance(value, str) and value.lower() == "none"):
        if is_optional(hint):
            return None
        raise ValueError(value)
    several = not isinstance(value, str) or any(mark in value for mark in ", [")
    # Any word is a string, and a list of one.
    for member in sorted(_members(hint), key=lambda each: (_is_list(each) != several, each is str)):
        with suppress(TypeError, ValueError):
            return _as(value, member)
    raise ValueError(value)


def _is_list(member: Any) -> bool:
    return (get_origin(member) or member) in (list, tuple)


def _as(value: Any, member: Any) -> Any:
    if get_origin(member) is Literal:
        return next(each for each in _or_error(get_args(member), value) if str(each) == str(value))
    if _is_list(member):
        (inner, *_) = get_args(member) or (str,)
        several = [typed(each, inner) for each in _several(value)]
        return several if (get_origin(member) or member) is list else tuple(several)
    if member is bool:
        return switch(value)
    if isinstance(value, (bool, list, Mapping)):
        raise TypeError(value)
    if member is int and float(value) != int(float(value)):
        raise ValueError(value)
    return int(float(value)) if member is int else member(value)


def _or_error(choices: Collection[Any], value: Any) -> Collection[Any]:
    if str(value) not in map(str, choices):
        raise ValueError(value)
    return choices


def _several(value: Any) -> list[Any]:
    """The items of a list: words of a command line, words separated by commas, a list in JSON or YAML."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        return list(json_of(value.encode()))
    if isinstance(value, str):
        return value.replace(",", " ").split()
    if isinstance(value, (list, tuple)):
        return list(value)
    raise TypeError(value)


def switch(value: Any) -> bool:
    """Whether a switch is on. Raises ValueError if the value is neither on nor off."""
    if (found := truth(value)) is None:
        raise ValueError(value)
    return found
