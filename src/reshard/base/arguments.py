"""Arguments of the public functions, checked as the command line is (`base/values.py`).

A function whose options a record declares takes the record as its last argument, `options`. `with_options` gives it the
options as arguments instead: a signature, documentation, and checks that tell all wrong arguments together.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from inspect import BoundArguments, Parameter, Signature
from typing import Any, Concatenate, ParamSpec, TypeVar

from reshard.base.errors import ArgumentsError, Problem, ReshardError, raise_all
from reshard.base.options import options_of
from reshard.base.suggest import did_you_mean, meant
from reshard.base.values import PATH, Kind

A = TypeVar("A")
Options = TypeVar("Options")
P = ParamSpec("P")
R = TypeVar("R")

_ALL_ARGUMENTS = "see help() of this function for all its arguments"


class Arguments:
    """The arguments of one call. Each check records a problem; `settle` raises all of them together."""

    def __init__(self, function: str) -> None:
        self._function = function
        self.problems: list[Problem] = []

    def check(self, name: str, value: Any, kind: Kind) -> Any:
        """The value of an argument, or None if it is wrong."""
        try:
            return kind.check(value)
        except ReshardError as error:
            self.problems += error.problems
        except ValueError:
            near = meant(value, kind.choices) if isinstance(value, str) else None
            self.reject(name, value, kind.expected, f"did you mean {name}={near!r}?" if near else None)
        return None

    def check_optional(self, name: str, value: Any, kind: Kind) -> Any:
        """The value of an argument that may also be None."""
        return None if value is None else self.check(name, value, kind)

    def reject(self, name: str, value: Any, expected: str, remedy: str | None = None) -> None:
        """Record that a value is not what is `expected`."""
        self.problems.append(
            Problem(
                "argument-wrong",
                f"{self._function}: wrong value for {name}",
                expected=expected,
                found=f"{name}={value!r}",
                remedy=remedy,
            )
        )

    def settle(self) -> None:
        """Raise ReshardError with all recorded problems, if there are any."""
        raise_all(self.problems)


def takes(
    record: Callable[P, Options], kinds: Mapping[str, Kind] | None = None, called: str | None = None
) -> Callable[[Callable[[A, Options], R]], Callable[Concatenate[A, P], R]]:
    """`with_options` for a function of one argument besides them, as type checkers see it."""
    return with_options(record, kinds, called=called)


def with_options(
    record: Any,
    kinds: Mapping[str, Kind] | None = None,
    *,
    positional: int = 0,
    called: str | None = None,
) -> Callable[[Callable[..., Any]], Any]:
    """Give a function the options of a record as arguments, in place of its last one, `options`.

    Its other arguments are paths, unless `kinds` has others, which it also has for options about which the record
    knows too little. The first `positional` options need no names. In the documentation, ``{options}`` becomes a list
    of them. Errors name the function as it is `called`, by default by its name.
    """
    options = options_of(record)
    more = [
        Parameter(
            each.name,
            Parameter.POSITIONAL_OR_KEYWORD if number < positional else Parameter.KEYWORD_ONLY,
            default=each.default,
            annotation=each.type,
        )
        for number, each in enumerate(options)
    ]
    kinds = {**{each.name: each.kind for each in options}, **(kinds or {})}
    optional = {each.name for each in options if each.is_optional}

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        declared = inspect.signature(function)
        own = {name: each for name, each in declared.parameters.items() if name != "options"}
        may_be_none = optional | {name for name, each in own.items() if each.default is None}
        signature = declared.replace(parameters=[*own.values(), *more])
        name = called or function.__name__

        @wraps(function)
        def wrapper(*positional_values: Any, **named: Any) -> Any:
            bound, arguments = _bound_arguments(name, signature, positional_values, named), Arguments(name)
            values = {
                each: arguments.check(each, value, kinds.get(each, PATH))
                for each, value in bound.arguments.items()
                if value is not None or each not in may_be_none
            }
            arguments.settle()
            options_given = record(**{each: value for each, value in values.items() if each not in own})
            bound.arguments = {each: value for each, value in values.items() if each in own}
            return function(*bound.args, options=options_given)

        entries = "\n".join(each.entry for each in options)
        wrapper.__doc__ = inspect.cleandoc(function.__doc__ or "").replace("{options}", entries)
        wrapper.__signature__ = signature  # type: ignore[attr-defined]
        return wrapper

    return decorate


def _bound_arguments(
    name: str, signature: Signature, values: Sequence[Any], named: Mapping[str, Any]
) -> BoundArguments:
    """The arguments of a call by their names. Raises ArgumentsError unless the signature has them."""
    known = list(signature.parameters)
    problems = [
        Problem(
            "argument-unknown",
            f"{name}() got an unexpected keyword argument {each!r}",
            remedy=did_you_mean(each, known, _ALL_ARGUMENTS),
        )
        for each in named
        if each not in known
    ]
    if problems:
        raise ArgumentsError(problems)
    try:
        return signature.bind(*values, **named)
    except TypeError as error:
        raise ArgumentsError(
            "arguments-do-not-fit", f"{name}() got wrong arguments: {error}", remedy=_ALL_ARGUMENTS
        ) from None
