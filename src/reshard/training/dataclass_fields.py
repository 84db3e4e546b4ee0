"""Options of an engine as fields of its framework's dataclasses: read from the source, typed, and found by name.

The source has what a live dataclass lacks: descriptions of fields. Nothing is imported, so all options of a framework
are listed quickly, even on a machine where it cannot be imported.
"""

from __future__ import annotations

import ast
import types
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, ForwardRef, List, Literal, Optional, Tuple, Union, get_args, get_origin  # noqa: UP035

from reshard.base.argument_checks import truth
from reshard.base.plain_json import json_of


class Untypeable:
    """The type of a field that cannot be set as text: a function, a module, or a type of the framework."""


@dataclass(frozen=True)
class Field:
    """A field of a dataclass. `hint` is its type, of values that can be typed; `default` as in the source.

    `value` is the default itself, if the source has a literal.
    """

    name: str
    hint: Any
    default: str
    help: str
    value: Any = None


def fields_of(source: Path, name: str, names: Mapping[str, Any], bases: Mapping[str, Path] = {}) -> Fields:
    """The fields of the dataclass `name` in a file, by name. Raises OSError, SyntaxError.

    `names` are types and defaults that fields may name besides Python's own types, `bases` the files of base classes
    whose fields are included.
    """
    known, declared = _Names(names), _classes(source)[name]
    body = declared.body
    found: Fields = {}
    for base in map(ast.unparse, declared.bases):
        found |= fields_of(bases[base], base, names, bases) if base in bases else {}
    for node, behind in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            hint = eval(compile(ast.Expression(node.annotation), str(source), "eval"), {}, known)
            found[node.target.id] = _field(node.target.id, hint, node.value, behind, known)
    return found


Fields = dict[str, Field]


def _field(
    name: str, hint: Any, value: ast.expr | None, behind: ast.stmt | None, names: Mapping[str, Any]
) -> Field:
    """A field whose description and choices are in its metadata, or whose description follows it."""
    given = (
        {each.arg: each.value for each in value.keywords}
        if isinstance(value, ast.Call)
        else {"default": value}
    )
    default = given.get("default") or getattr(given.get("default_factory"), "body", None)  # that of a lambda
    told = _entries(given.get("metadata"))
    if told.get("choices"):
        hint = Literal[tuple(told["choices"])] | None
    text = " ".join(str(told.get("help") or _text(behind)).split()).replace("%%", "%")
    shown = "" if default is None else ast.unparse(default).strip("'")
    found = names[default.id] if isinstance(default, ast.Name) else _literal(default)
    return Field(name, hint, "" if shown == "None" else shown, text, found)


def _entries(value: ast.expr | None) -> dict[Any, Any]:
    """A dict in the source, with None for values that are not literals."""
    if not isinstance(value, ast.Dict):
        return {}
    return {_literal(key): _literal(each) for key, each in zip(value.keys, value.values, strict=True)}


def enumeration(source: Path, name: str) -> Any:
    """The values of an enumeration in a file, as a Literal."""
    body = _classes(source)[name].body
    return Literal[tuple(_literal(node.value) for node in body if isinstance(node, ast.Assign))]


@lru_cache(4)
def _classes(source: Path) -> dict[str, ast.ClassDef]:
    """The classes in a file. Raises OSError, SyntaxError."""
    tree = ast.parse(source.read_text(encoding="utf-8"))
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


class _Names(dict[str, Any]):
    """The names in annotations. Types that are not Python's own become `Untypeable`."""

    def __init__(self, more: Mapping[str, Any]) -> None:
        known = {each.__name__: each for each in (int, float, bool, str, list, tuple, dict)}
        typing = {"Optional": Optional, "Union": Union, "Literal": Literal, "List": List, "Tuple": Tuple}  # noqa: UP006
        super().__init__({**known, **typing, "Callable": Callable, **more})

    def __missing__(self, name: str) -> Any:
        return Untypeable


def _literal(value: ast.expr | None) -> Any:
    """The value of a literal; None for anything else."""
    with suppress(ValueError):
        return ast.literal_eval(value) if value else None


def _text(node: ast.stmt | None) -> str:
    """The string that follows a field."""
    return str(_literal(node.value) or "") if isinstance(node, ast.Expr) else ""


def _members(hint: Any) -> list[Any]:
    """The types that a value may have, without None, and without those that cannot be typed.

    Beside fixed words, `str` means an enumeration's value in another form, and not any word.
    """
    either = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    fixed = any(get_origin(each) is Literal and isinstance(get_args(each)[0], str) for each in either)
    beside = (type(None), str) if fixed else (type(None),)
    return [each for each in either if each not in beside and _typeable(each)]


def _typeable(hint: Any) -> bool:
    if isinstance(hint, (str, ForwardRef)) or hint in (Untypeable, Callable, dict):
        return False
    if get_origin(hint) is Literal:
        return True
    return all(_typeable(each) for each in get_args(hint) if each is not ...)


def can_be_typed(hint: Any) -> bool:
    """Whether some value of the type can be typed."""
    return bool(_members(hint))


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


def literals(hint: Any) -> list[str]:
    """The words that a type allows, if it is one of fixed values."""
    return [str(value) for each in _members(hint) if get_origin(each) is Literal for value in get_args(each)]


def typed(value: Any, hint: Any) -> Any:
    """A value from the command line or a config file, converted to a type. Raises ValueError."""
    if value is None or (isinstance(value, str) and value.lower() == "none"):
        if type(None) in get_args(hint):
            return None
        raise ValueError(value)
    several = not isinstance(value, str) or any(mark in value for mark in ", [")
    # Any word is a string, and a list of one.
    for member in sorted(_members(hint), key=lambda each: (_is_list(each) != several, each is str)):
        with suppress(KeyError, TypeError, ValueError):
            return _as(value, member)
    raise ValueError(value)


def _is_list(member: Any) -> bool:
    return (get_origin(member) or member) in (list, tuple)


def _as(value: Any, member: Any) -> Any:
    if get_origin(member) is Literal:
        return {str(each): each for each in get_args(member)}[str(value)]
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
