"""Options that several commands have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click


def _iteration(ctx: click.Context, param: click.Parameter, value: str | None) -> int | str | None:
    if value is None or value == "release":
        return value
    if not value.isdecimal() or len(value) > 18:
        raise click.BadParameter(f"{value} is neither the number of a step nor release")
    return int(value)


def memory_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """`--memory`, a number of bytes with a unit."""
    return click.option(
        "--memory",
        default="1GiB",
        show_default=True,
        metavar="SIZE",
        help="Bound on the memory that it takes beside Python itself, about 60 MiB.",
    )(function)


def iteration_option(help: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """`--iteration`, the number of a step or `release`."""
    return click.option("--iteration", callback=_iteration, metavar="N|release", help=help)
