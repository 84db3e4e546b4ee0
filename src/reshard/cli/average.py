"""`reshard average`."""

from __future__ import annotations

from copy import copy
from pathlib import Path
from typing import Any

import click

from reshard.api import averaging
from reshard.cli import convert
from reshard.cli.console import handles_errors
from reshard.cli.options import OUTPUT, SOURCE
from reshard.cli.record import only_typed
from reshard.cli.usage import Command


def _weights(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[float, ...] | None:
    try:
        return tuple(float(part) for part in value.split(",")) if value is not None else None
    except ValueError:
        raise click.BadParameter(f"{value!r} is not a number for each CKPT, such as 3,1") from None


@click.command("average", cls=Command)
@click.argument("ckpts", type=SOURCE, nargs=-1, required=True, metavar="CKPT CKPT...")
@click.argument("dst", type=OUTPUT)
@click.option(
    "--weights",
    callback=_weights,
    metavar="W,W,…",
    help="Weight of each CKPT, divided by the sum of all. [default: all equal]",
)
@handles_errors
@only_typed
def command(ckpts: tuple[Path, ...], dst: Path, quiet: bool, json_output: bool, **options: Any) -> None:
    """Average the weights of two or more checkpoints of one model into DST, in any format and parallel layout.

    The CKPTs may have different formats and layouts. They must have the same tensors, shapes and settings; all
    differences are listed. Sums are float32, in the order given, and rounded once. Config and tokenizer are those of
    the last CKPT, or of --base. Adapters are refused: merge them first. Optimizer states are dropped.

    \b
      reshard average run/iter_0000100 run/iter_0000200 model       equal weights
      reshard average a b c soup --weights 2,1,1                    a counts twice
      reshard average hf ckpt mean --to megatron --tp 2             mixed formats
    """
    convert.shown(
        lambda **hooks: averaging.average(ckpts, dst, **options, **hooks),
        dst,
        quiet=quiet,
        json_output=json_output,
        print_plan=convert.print_plan if options.get("dry_run") else None,
    )


HELP = {
    "to": "Format of the output, or an alias such as hf or mcore. [default: huggingface]",
    "base": "Hugging Face folder with config and tokenizer. [default: the last CKPT]",
    "engine": "Library that will load the Megatron checkpoint. [default: mcore]",
    "family": "Model family of all CKPTs, overriding their configs.",
    "dtype": "Dtype of the output: float32, bfloat16 or float16. [default: that of all CKPTs]",
}
"""Help for options of `convert` that mean something else with several sources."""


def _shared(option: click.Parameter) -> click.Parameter:
    """An option of `convert`, with help for several sources."""
    found: Any = copy(option)
    found.help = HELP.get(str(option.name), found.help.replace("SRC", "the last CKPT"))
    return found  # type: ignore[no-any-return]


command.params += [
    _shared(each)
    for each in convert.command.params
    if isinstance(each, click.Option) and each.name not in averaging.NOT_AVERAGED
]
