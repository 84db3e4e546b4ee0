"""What all drop-ins share: how they are run, their arguments of reshard's own, and what an output must be like."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from reshard.base.errors import ReshardError
from reshard.cli import main
from reshard.cli.convert import run_conversion
from reshard.commands.conversion import Conversion, convert
from reshard.commands.options import RunOptions
from reshard.formats.options import ConversionOptions
from reshard.transfer.plan import Plan

SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 110}
Check = Callable[[Plan], None]
"""Raises ReshardError if the plan is not what the script would do. Nothing is written before."""


def run(command: click.Command) -> Any:
    """Run a drop-in with the arguments of this process."""
    return main(command=command, program=f"python -m reshard.dropins.{command.name}")


overwrite_option = click.option(
    "--overwrite", is_flag=True, help="Replace the checkpoint in the output folder. (Only in reshard.)"
)
debug_option = click.option("--debug", is_flag=True, help="Show the traceback of errors. (Only in reshard.)")


def convert_as_asked(
    source: Path, target: Path, options: ConversionOptions, check: Check = lambda plan: None, **how: Any
) -> None:
    """Convert with progress on the screen, after `check` has accepted the plan. Raises ReshardError."""

    def converted(on_plan: Check, **hooks: Any) -> Conversion:
        def planned(plan: Plan) -> None:
            check(plan)
            on_plan(plan)

        return convert(source, target, options, RunOptions(on_plan=planned, **how, **hooks))

    run_conversion(converted, target, quiet=False, json_output=False)


def refuse(option: str, why: str, remedy: str) -> ReshardError:
    """The error for an argument of a script that would change the output, and that reshard does not have."""
    return ReshardError("drop-in-option-unsupported", f"{option} is not supported: {why}", remedy=remedy)
