"""`reshard report`."""

from __future__ import annotations

from pathlib import Path

import click

from reshard.base.foreign_text import escape
from reshard.cli.console import common_options, handles_errors, print_json, stdout
from reshard.cli.options import LOCAL, quiet_option
from reshard.cli.usage import Command


@click.command("report", cls=Command)
@click.argument("runs", nargs=-1, required=True, metavar="RUN …", type=LOCAL)
@click.option(
    "-o",
    "--output",
    type=LOCAL,
    metavar="FILE",
    help="Page to write. [default: RUN/report.html, or runs.html for several runs]",
)
@quiet_option()
@common_options
@handles_errors
def command(runs: tuple[Path, ...], output: Path | None, quiet: bool, json_output: bool) -> None:
    """Draw one or several training runs on one HTML page.

    \b
      reshard report out                        out/report.html
      reshard report out-1e-5 out-2e-5          runs.html
      reshard report out-* --output lr.html

    RUN is an output folder of `reshard train`; the run may still be going on. The page needs no network.
    """
    from reshard.training.show.html_report import draw

    path, shown = draw(runs, output)
    if json_output:
        print_json({"report": str(path), "runs": {run.name: run.state for run in shown}})
    elif not quiet:
        stdout().print(f"report: {escape(str(path))}")
