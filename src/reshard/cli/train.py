"""`reshard train`."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import click

from reshard.base.foreign_text import escape
from reshard.base.options import About
from reshard.cli.console import (
    common_options,
    handles_errors,
    print_json,
    print_problems,
    stderr,
    stdout,
)
from reshard.cli.options import quiet_option
from reshard.cli.record import record_options
from reshard.cli.tables import print_table
from reshard.cli.usage import Group, WrongUsageError
from reshard.training.engine_registry import engine_named
from reshard.training.methods import TRAINING_METHODS, elsewhere
from reshard.training.options import StartOptions
from reshard.training.run import Run

if TYPE_CHECKING:
    from reshard.guard.end.final_folder import FinishedRun
    from reshard.training.launching.slurm_job import SubmittedJob
    from reshard.training.planning.plans import FittingPlans
    from reshard.training.preflight_report import Preflight

SETTINGS = {"ignore_unknown_options": True, "token_normalize_func": lambda token: token.replace("_", "-")}
"""Flags may contain underscores, like those of the engines."""


@dataclass(frozen=True, kw_only=True)
class Flags(StartOptions):
    """Options of the command."""

    list_options: Annotated[bool, About("List the options of the engine.", flag="--options")] = False


class Methods(Group):
    """The methods. For one of TRL's that is not offered, it says what to run instead."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Click's, after that check."""
        if not ctx.resilient_parsing and (problem := elsewhere(args[0])):
            raise WrongUsageError([problem], ctx)
        return super().resolve_command(ctx, args)


@click.group("train", cls=Methods)
def command() -> None:
    """Fine-tune a model on many processes, and write a Hugging Face folder at the end.

    \b
      reshard train sft  --model DIR --data FILE -o OUT
      reshard train sft  --model DIR --data FILE -o OUT --lora --parallel fsdp2 --nproc 8
      reshard train sft  --model DIR --data FILE -o OUT --engine megatron --tp 2 --pp 2
      reshard train dpo  --model DIR --data PAIRS -o OUT                               (or kto, reward)
      reshard train grpo --model DIR --data PROMPTS -o OUT --reward rewards:score      (or rloo)

    Package versions, data, tokenizer, batches and memory are checked before anything starts. --dry-run stops after the
    checks; with --gpus H100:8, it plans for GPUs of another machine.
    """


def _note(text: str) -> None:
    stderr().print(escape(text))


def _silent(text: str) -> None:
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()


def _method(name: str, help_text: str) -> None:
    @command.command(name, help=help_text + _REST, context_settings=SETTINGS)
    @record_options(Flags)
    @quiet_option()
    @click.argument("rest", nargs=-1, type=click.UNPROCESSED, metavar="[ENGINE OPTIONS]")
    @common_options
    @handles_errors
    def subcommand(
        rest: tuple[str, ...], *, quiet: bool, json_output: bool, list_options: bool = False, **given: Any
    ) -> None:
        if list_options:
            _print_options(name, given.get("engine", StartOptions.engine))
            return
        from reshard.base.languages import locale_language
        from reshard.training.start import trained

        silent = quiet or json_output

        def on_preflight(found: Preflight) -> None:
            if not json_output:
                _print_preflight(found, quiet=quiet, starts=not given.get("dry_run"))

        run, outcome = trained(
            name,
            given,
            rest,
            note=_silent if silent else _note,
            quiet=silent,
            language=locale_language(),
            on_preflight=on_preflight,
        )
        if json_output:
            print_json(outcome.as_dict())
        elif outcome.finished and not quiet:
            _print_finished(run, outcome.finished)
        elif outcome.submitted:
            _print_submitted(run, outcome.submitted)
        sys.exit(outcome.status)


_REST = """

Options of the engine keep their own names, with dashes or underscores, for example --learning_rate 1e-5; --options
lists them.

Exit status: 0 done, 1 the run or a check of its output failed, 2 refused before the start, 128 + N ended by signal N.
"""
for _name, _one in TRAINING_METHODS.items():
    _method(_name, _one.help)


OF_ALL_PLANS = ("note", "model", "data", "evaluate", "lengths")
"""Rows of a dry run that are the same for every plan."""


def _print_plans(plans: FittingPlans) -> None:
    """Print the plans that fit, the best first, and the command for each."""
    if not plans.fitting:
        return
    rows = [
        (
            str(number),
            plan.words,
            f"{plan.memory.total / (1 << 30):.1f} GiB",
            f"{plan.batches.samples:,}",
            f"{plan.tokens:,.0f}",
        )
        for number, plan in enumerate(plans.fitting, 1)
    ]
    console = stdout()
    console.print(f"[bold]plans that fit on {escape(str(plans.machine))}[/], the fastest first")
    print_table(console, ("", "plan", "memory per GPU", "samples per step", "tokens per second"), rows)
    console.print(f"Speed is an estimate, to compare plans: {plans.made_of}.")
    for number, plan in enumerate(plans.fitting, 1):
        console.print(f"[bold]{number}[/] {escape(shlex.join(plan.command))}")
    if plans.machine.nodes > 1:
        console.print(
            "Run the command on each node, with its own --node-rank and the first node's address as --rendezvous."
        )


def _print_preflight(found: Preflight, *, quiet: bool, starts: bool) -> None:
    """The plan and its warnings. Errors are raised afterwards."""
    print_problems(found.warnings)
    if not quiet:
        console = stderr()
        for row, value in found.rows():
            if row == "command" and starts:
                continue  # printed when it starts
            if not found.plans or row in OF_ALL_PLANS:
                console.print(f"[bold]{row:<8}[/] {escape(value)}")
    if found.plans:
        _print_plans(found.plans)


def _print_finished(run: Run, finished: FinishedRun) -> None:
    """Print the checks of the final folder, and what to type next."""
    console = stdout()
    for check in finished.checks:
        style = "green" if check.right else "bold red"
        mark = f"[{style if check.checked else 'yellow'}]{check.mark}[/]"
        console.print(f"{mark} {escape(check.name)}: {escape(check.found)}")
    print_problems(finished.problems)
    if finished.whole:
        console.print(f"[bold]{escape(str(finished.merged or finished.final))}[/] is ready")
        console.print(f"report: {escape(str(run.output / 'report.html'))}")


def _print_submitted(run: Run, submitted: SubmittedJob) -> None:
    """The job, and where its log and report are."""
    console = stdout()
    console.print(f"submitted job [bold]{escape(submitted.number)}[/]")
    console.print(f"log: {escape(str(submitted.log))}")
    console.print(f"report: {escape(str(run.output / 'report.html'))}")


def _print_options(method: str, engine: str) -> None:
    """List the options of an engine, which are passed through under these names."""
    rows = [
        (f"--{each.name}", each.kind, each.default, each.help)
        for each in engine_named(engine).known_options(method)
    ]
    print_table(stdout(), ("option", "type", "default", "what it does"), rows)
