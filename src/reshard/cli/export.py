"""`reshard export`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from reshard.base.argument_checks import Arguments
from reshard.cli.console import common_options, handles_errors
from reshard.cli.convert import shown
from reshard.cli.options import LOCAL, quiet_option
from reshard.cli.record import record_options
from reshard.cli.usage import Command
from reshard.commands.names import NAMES
from reshard.training.options import ExportOptions


@click.command("export", cls=Command)
@click.argument("checkpoint", type=LOCAL)
@click.argument("dst", type=LOCAL)
@record_options(ExportOptions, NAMES)
@quiet_option()
@common_options
@handles_errors
def command(checkpoint: Path, dst: Path, quiet: bool, json_output: bool, **options: Any) -> None:
    """Make a Hugging Face folder from a CHECKPOINT that `reshard train` saved.

    Like `reshard convert`, with all options taken from the record of the run.

    \b
      reshard export OUT/checkpoint-200 model             trained with TRL
      reshard export OUT/iter_0000200 model               trained with Megatron-Core
      reshard export OUT/checkpoint-200 model --merge     a LoRA run, merged into its base
    """
    from reshard.training.finish import export

    asked = Arguments("export", NAMES).options(ExportOptions, options)
    shown(
        lambda **hooks: export(checkpoint, dst, **asked, **hooks),
        dst,
        quiet=quiet,
        json_output=json_output,
    )
