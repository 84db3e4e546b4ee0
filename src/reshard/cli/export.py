"""`reshard export`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from reshard.cli.console import common_options, handles_errors
from reshard.cli.convert import shown
from reshard.cli.options import quiet_option
from reshard.cli.usage import Command


@click.command("export", cls=Command)
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.argument("dst", type=click.Path(path_type=Path))
@click.option("--merge", is_flag=True, help="Merge the adapter of a LoRA run into its base.")
@click.option("--dtype", metavar="DTYPE", help="Convert weights to float32, bfloat16 or float16.")
@click.option("--overwrite", is_flag=True, help="Replace the one checkpoint at DST.")
@click.option("--no-resume", is_flag=True, help="Start anew, and keep nothing of a run that is interrupted.")
@quiet_option()
@common_options
@handles_errors
def command(
    checkpoint: Path, dst: Path, no_resume: bool, quiet: bool, json_output: bool, **options: Any
) -> None:
    """Make a Hugging Face folder of a CHECKPOINT that `reshard train` left.

    The same as `reshard convert`, told everything by the record of the run that lies in the checkpoint.

    \b
      reshard export OUT/checkpoint-200 model
      reshard export OUT/iter_0000200 model          of the Megatron engine
      reshard export OUT/checkpoint-200 model --merge     a LoRA run, merged into its base
    """
    from reshard.train.final.finish import export

    shown(
        lambda **hooks: export(checkpoint, dst, resume=not no_resume, **options, **hooks),
        dst,
        quiet=quiet,
        json_output=json_output,
    )
