"""`reshard train`."""

from __future__ import annotations

import shlex
import sys

import click

from reshard.base.foreign_text import escape
from reshard.base.values import choice
from reshard.cli.console import common_options, handles_errors, print_json, stdout
from reshard.cli.options import ValueType
from reshard.cli.record import record_options
from reshard.cli.usage import Command
from reshard.runs.train.methods import TRAINING_METHODS
from reshard.runs.train.options import TrainOptions

METHOD = ValueType(choice([*TRAINING_METHODS]))
SETTINGS = {"ignore_unknown_options": True}


@click.command("train", cls=Command, context_settings=SETTINGS)
@click.argument("method", type=METHOD, metavar="{" + "|".join(TRAINING_METHODS) + "}")
@record_options(TrainOptions)
@click.argument("rest", nargs=-1, type=click.UNPROCESSED, metavar="[ENGINE OPTIONS]")
@common_options
@handles_errors
def command(method: str, rest: tuple[str, ...], *, json_output: bool, options: TrainOptions) -> None:
    """Write a recipe that fine-tunes a model, and run it under guard.

    \b
      reshard train sft  --model DIR --data FILE -o OUT
      reshard train sft  --model DIR --data FILE -o OUT --lora --parallel fsdp2 --learning_rate 1e-4
      reshard train grpo --model DIR --data PROMPTS -o OUT --reward rewards.py:score
      reshard train sft  --model DIR --data FILE -o OUT --engine ms-swift --tp 4 --pp 2
      reshard train sft  -o OUT --resume
      reshard train sft  --model DIR --data FILE -o OUT --write-only

    OUT gets train.py, a readable script for TRL, accelerate.yaml if there are several processes, and run.sh, which
    starts them under `reshard guard`. Change what you like, and start it again: bash OUT/run.sh. Every record of the
    data is checked first. At the end, OUT/final has the trained model, converted and checked.

    With --engine ms-swift, OUT has run.sh alone, which starts ms-swift's `megatron sft`.

    Options of the engine keep their names: the fields of TRL's config and of its ModelConfig, for example
    --learning_rate 1e-5 or --lora_r 32; or those of `megatron sft`, for example --lr 1e-5 or --lora_rank 32.

    Exit status: 2 refused before the start, otherwise that of `reshard guard`.
    """
    from reshard.runs.train.start import prepared, start, started

    run = prepared(method, options, rest)
    if json_output:
        run = run if options.write_only else started(run, stdout=2)
        print_json(run.as_dict())
        sys.exit(run.status or 0)
    if not options.write_only:
        start(run)
    stdout().print(
        escape(f"{'found' if options.resume else 'wrote'} {run.folder}; start it: {shlex.join(run.command)}"),
        soft_wrap=True,
    )
