"""`reshard guard`."""

from __future__ import annotations

import sys

import click

from reshard.base.interrupts import ignore_from_now_on
from reshard.cli.console import common_options, handles_errors, print_json
from reshard.cli.options import quiet_option
from reshard.cli.record import record_options
from reshard.cli.usage import Command
from reshard.runs.guard.options import GuardOptions


@click.command("guard", cls=Command, context_settings={"allow_interspersed_args": False})
@record_options(GuardOptions)
@quiet_option("Print warnings, errors and the output of the command only.")
@click.argument("words", nargs=-1, type=click.UNPROCESSED, required=True, metavar="-- COMMAND …")
@common_options
@handles_errors
def command(words: tuple[str, ...], *, quiet: bool, json_output: bool, options: GuardOptions) -> None:
    """Run a training command and monitor it.

    \b
      reshard guard -- torchrun --nproc-per-node 8 train.py --output_dir out
      reshard guard --final model -- accelerate launch --config_file fsdp2.yaml sft.py
      reshard guard --no-check --stall 30m -- bash run.sh

    Before the start, the command, its script and config, and the machine are checked. A stalled run is
    reported, with the rank that the others wait for; a loss that is NaN ends it. At the end: the rank that failed
    first, why, the last complete checkpoint, and the command that continues from it.

    The output, the exit status and the terminal of the command stay as they are without a guard; its output is also
    kept in a log. With --json, it goes to stderr, and a report to stdout.

    Exit status: that of the command; 2 refused before the start; 1 ended by the guard, or the folder of --final did not
    pass its checks; 128 + N ended by signal N.
    """
    from reshard.base.languages import locale_language
    from reshard.runs.guard.guarded_run import guarded

    stdout, language = 2 if json_output else 1, locale_language()
    report = guarded(words, options, quiet=quiet, stdout=stdout, language=language)
    ignore_from_now_on()
    if json_output:
        print_json(report.as_dict(language))
    sys.exit(report.status)
