"""`reshard average`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import click

from reshard.api.averaging import AverageOptions, averaged
from reshard.cli import convert
from reshard.cli.console import common_options, handles_errors
from reshard.cli.options import OUTPUT, SOURCE, quiet_option
from reshard.cli.record import record_options
from reshard.cli.usage import Command
from reshard.commands.names import NAMES


@click.command("average", cls=Command)
@click.argument("ckpts", type=SOURCE, nargs=-1, required=True, metavar="CKPT CKPT...")
@click.argument("dst", type=OUTPUT)
@record_options(AverageOptions, NAMES)
@quiet_option()
@common_options
@handles_errors
def command(
    ckpts: tuple[Path, ...], dst: Path, quiet: bool, json_output: bool, options: AverageOptions
) -> None:
    """Average the weights of two or more checkpoints of one model into DST, in any format and parallel layout.

    The CKPTs may have different formats and layouts. They must have the same tensors, shapes and settings; all
    differences are listed. Sums are float32, in the order given, and rounded once. Config and tokenizer are those of
    the last CKPT, or of --base. Adapters are refused: merge them first. Optimizer states are dropped.

    \b
      reshard average run/iter_0000100 run/iter_0000200 model       equal weights
      reshard average a b c soup --weights 2,1,1                    a counts twice
      reshard average hf ckpt mean --to megatron --tp 2             mixed formats
    """
    convert.run_conversion(
        lambda **hooks: averaged(ckpts, dst, replace(options, **hooks)),
        dst,
        quiet=quiet,
        json_output=json_output,
        print_plan=convert.print_plan if options.dry_run else None,
    )
