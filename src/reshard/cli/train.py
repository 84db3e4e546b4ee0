"""`reshard train`."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from reshard.base.shown import escape
from reshard.cli.console import (
    common_options,
    handles_errors,
    print_json,
    print_problems,
    stderr,
    stdout,
)
from reshard.cli.options import COUNT, LOCAL, POSITIVE, quiet_option
from reshard.cli.tables import print_table
from reshard.cli.usage import Group, WrongUsageError
from reshard.training.data.records import DATA_SHAPES
from reshard.training.engines import MODULES, engine_named
from reshard.training.methods import METHODS, elsewhere
from reshard.training.request import run_of
from reshard.training.run import PARALLEL, Run
from reshard.training.start import start, submit

if TYPE_CHECKING:
    from reshard.guard.final import Finished
    from reshard.training.launching.slurm import Submitted
    from reshard.training.outlook import Preflight
    from reshard.training.planning.plans import Plans

SETTINGS = {"ignore_unknown_options": True, "token_normalize_func": lambda token: token.replace("_", "-")}
"""Flags may contain underscores, like those of the engines."""


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


def _number(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    if value is None or value == "auto" or (value.isdecimal() and int(value) > 0):
        return value
    raise click.BadParameter(f"{value!r} is neither a number of processes nor auto")


def _options(function: Callable[..., Any]) -> Callable[..., Any]:
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


_OPTIONS = [
    click.option("--model", help="Hugging Face folder or Hub model (Org/Model) to start from."),
    click.option("--model-revision", metavar="NAME", help="Branch, tag or commit of a Hub model."),
    click.option(
        "--data",
        multiple=True,
        metavar="PATH[:WEIGHT]",
        help="JSONL or Parquet file, a folder of them, or a Hub dataset (Org/Set). Repeat the option to mix several by "
        "weight, for example a.jsonl:0.7.",
    ),
    click.option(
        "--eval-data",
        multiple=True,
        metavar="PATH[:WEIGHT]",
        help="Data to evaluate the model on during training.",
    ),
    click.option("--dataset-config", metavar="NAME", help="Configuration of a Hub dataset."),
    click.option(
        "--dataset-train-split", metavar="NAME", help="Split of a Hub dataset for --data. [default: train]"
    ),
    click.option(
        "--dataset-test-split", metavar="NAME", help="Split of a Hub dataset for --eval-data. [default: test]"
    ),
    click.option(
        "--data-shape",
        type=click.Choice(DATA_SHAPES),
        help="How to read records that fit several shapes.",
    ),
    click.option("--system", metavar="TEXT", help="System message for chats that have none."),
    click.option(
        "--token-cache/--no-token-cache",
        default=None,
        help="Cache the tokenized data in ~/.cache/reshard for the next run (default).",
    ),
    click.option("-o", "--output", type=LOCAL, help="Output folder. The trained model is in OUT/final."),
    click.option(
        "--engine",
        type=click.Choice(tuple(MODULES)),
        help="trl, or megatron (experimental) for TP, PP and EP. [default: trl]",
    ),
    click.option("--lora/--full", default=None, help="Train LoRA adapters or all weights (default)."),
    click.option("--parallel", type=click.Choice(PARALLEL), help="How TRL shards the model. [default: ddp]"),
    click.option("--tp", type=POSITIVE, metavar="N", help="Tensor-parallel size."),
    click.option("--pp", type=POSITIVE, metavar="N", help="Pipeline-parallel size (megatron)."),
    click.option("--vpp", type=POSITIVE, metavar="N", help="Virtual pipeline chunks per stage (megatron)."),
    click.option("--ep", type=POSITIVE, metavar="N", help="Expert-parallel size."),
    click.option("--cp", type=POSITIVE, metavar="N", help="Context-parallel size (megatron)."),
    click.option(
        "--nproc", callback=_number, metavar="N|auto", help="Processes on this node. [default: one per GPU]"
    ),
    click.option(
        "--nnodes",
        "--nodes",
        type=POSITIVE,
        metavar="N",
        help="Number of nodes. Run the same command on each.",
    ),
    click.option("--node-rank", type=COUNT, metavar="R", help="Rank of this node, from 0."),
    click.option("--rendezvous", metavar="HOST:PORT", help="Address of the first node."),
    click.option(
        "--reward",
        multiple=True,
        metavar="FILE.py:NAME[:WEIGHT]",
        help="Reward function for GRPO and RLOO, also as MODULE:NAME. Repeat the option to add several.",
    ),
    click.option(
        "--merge/--no-merge", default=None, help="With --lora, also write the merged model (default)."
    ),
    click.option(
        "--nan-steps",
        type=POSITIVE,
        metavar="N",
        help="Stop after N consecutive steps with a NaN or Inf loss. [default: 1]",
    ),
    click.option(
        "--save-on-signal",
        type=COUNT,
        metavar="SECONDS",
        help="Time to finish and save the current step after SIGTERM, SIGUSR1 or Ctrl-C. With 0, nothing is saved. "
        "[default: 600]",
    ),
    click.option(
        "--slurm",
        metavar="NAME=VALUE,…",
        help="Submit the run to Slurm, for example partition=gpu,nodes=2,gpus_per_node=8,time=720 (minutes).",
    ),
    click.option(
        "--max-restarts", type=COUNT, metavar="N", help="Restart failed ranks up to N times. [default: 0]"
    ),
    click.option("--resume", is_flag=True, default=None, help="Continue from the last checkpoint in OUT."),
    click.option(
        "--config",
        type=LOCAL,
        help="YAML file with options of this command or of the engine. The command line takes precedence.",
    ),
    click.option("--dry-run", is_flag=True, help="Check everything, print the plan, and stop."),
    click.option(
        "--gpus",
        metavar="N|NAME:N",
        help="With --dry-run, plan for N GPUs per node of another machine, for example H100:8.",
    ),
    click.option("--gpu-memory", metavar="SIZE", help="With --gpus N, memory of each GPU, for example 80GB."),
    click.option("--overwrite", is_flag=True, help="Replace the files of an earlier run in OUT."),
    click.option("--options", "list_options", is_flag=True, help="List the options of the engine."),
    quiet_option(),
]


def _note(text: str) -> None:
    stderr().print(escape(text))


def _silent(text: str) -> None:
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()


def _method(name: str, help_text: str) -> None:
    @command.command(name, help=help_text + _REST, context_settings=SETTINGS)
    @_options
    @click.argument("rest", nargs=-1, type=click.UNPROCESSED, metavar="[ENGINE OPTIONS]")
    @common_options
    @handles_errors
    def subcommand(
        rest: tuple[str, ...],
        config: Path | None,
        dry_run: bool,
        overwrite: bool,
        list_options: bool,
        slurm: str | None,
        quiet: bool,
        json_output: bool,
        gpus: str | None,
        gpu_memory: str | None,
        **flags: Any,
    ) -> None:
        if list_options:
            _print_options(name, flags["engine"] or Run.engine)
            return
        from reshard.diagnosis.words import locale_language
        from reshard.training.planning.gpus import machine_asked

        silent = quiet or json_output
        run = run_of(name, flags, rest, config, _silent if silent else _note)
        machine = machine_asked(gpus, gpu_memory, run.ranks.nnodes, dry_run=dry_run and slurm is None)

        def on_preflight(found: Preflight) -> None:
            if not json_output:
                _print_preflight(found, quiet=quiet, starts=not dry_run)

        told: dict[str, Any] = {"dry_run": dry_run, "overwrite": overwrite, "on_preflight": on_preflight}
        if slurm is not None:
            outcome = submit(run, slurm, config, **told)
        else:
            language = locale_language()
            outcome = start(run, config, machine=machine, quiet=silent, language=language, **told)
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
for _name, _one in METHODS.items():
    _method(_name, _one.help)


OF_ALL_PLANS = ("note", "model", "data", "evaluate", "lengths")
"""Rows of a dry run that are the same for every plan."""


def _print_plans(plans: Plans) -> None:
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


def _print_finished(run: Run, finished: Finished) -> None:
    """Print the checks of the final folder, and what to type next."""
    console = stdout()
    for check in finished.checks:
        mark = "[green]✓[/]" if check.right else "[bold red]✗[/]"
        console.print(f"{mark} {escape(check.name)}: {escape(check.found)}")
    print_problems(finished.problems)
    if finished.whole:
        console.print(f"[bold]{escape(str(finished.merged or finished.final))}[/] is ready")
        console.print(f"report: {escape(str(run.output / 'report.html'))}")


def _print_submitted(run: Run, submitted: Submitted) -> None:
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
