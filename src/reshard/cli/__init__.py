"""The command line: one thin file for each command, which is imported when the command is called."""

from __future__ import annotations

import atexit
import gc
import io
import json
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from importlib import import_module
from typing import Any

import click
from click.shell_completion import CompletionItem

from reshard.base.address_space import can_reserve, is_no_memory
from reshard.base.errors import Problem, ReshardError
from reshard.base.exceptions_to_problems import no_memory
from reshard.base.garbage import uncollected
from reshard.base.interrupts import INTERRUPTED_STATUS, raise_again
from reshard.base.start_environment import set_for_this_process
from reshard.cli.usage import Group, WrongUsageError, problems_of_usage
from reshard.version import __version__

set_for_this_process("OPENBLAS_NUM_THREADS", "1")
"""numpy reads this on import. reshard has its own threads, and OpenBLAS's would spin against them: merging an adapter
took four times the processor time."""

atexit.register(gc.freeze)
"""Python collects garbage once more at exit, which took a tenth of the time of a large plan."""

NUMPY = 96 << 20
"""Address space that numpy needs, in bytes. With less, its OpenBLAS aborts the process."""

COMMANDS = {
    "inspect": "Show what a checkpoint is, whether it is complete, and what to type next.",
    "convert": "Convert a checkpoint to another format or parallel layout.",
    "verify": "Compare the weights of two checkpoints bit for bit.",
    "serve": "Show checkpoints as models of a Hub, without converting them.",
    "guard": "Run a training command, and watch over it.",
    "train": "Write a training recipe, and run it under guard.",
    "doctor": "Explain why a log, script, checkpoint or machine fails, and how to fix it.",
    "watch": "Follow a run, and convert, upload or evaluate each step.",
    "mcp": "Let coding agents inspect checkpoints and failed runs.",
    "support": "List the formats and model families that are read and written.",
    "help": "Show the help of a command.",
}


READER_GONE = 128 + signal.SIGPIPE
"""Exit status if the reader of a pipe has exited (`| head`), as for programs that SIGPIPE ends."""


@contextmanager
def _past_click() -> Iterator[None]:
    """Keep broken pipes from click, which would exit with status 1, like a failed check."""
    try:
        yield
    except BrokenPipeError:
        sys.exit(READER_GONE)


class LazyGroup(Group):
    """A group that imports a command when it is called, so that `--help` stays fast."""

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        with _past_click():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> Any:
        with _past_click():
            return super().invoke(ctx)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        if "numpy" not in sys.modules and not can_reserve(NUMPY):
            raise MemoryError(f"{NUMPY:,} bytes for numpy")
        with uncollected():
            command: click.Command = import_module(f"reshard.cli.{cmd_name.replace('-', '_')}").command
        return command

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem[str]]:
        """Complete command names without importing the commands."""
        names = [
            CompletionItem(name, help=text) for name, text in COMMANDS.items() if name.startswith(incomplete)
        ]
        return names or super().shell_complete(ctx, incomplete)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(
    cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110}
)
@click.version_option(__version__, "-V", "--version", prog_name="reshard", help="Show the version.")
def cli() -> None:
    """Convert LLM checkpoints between Hugging Face, Megatron-Core, FSDP, DeepSpeed, InternEvo and PEFT.

    It also verifies, fine-tunes and diagnoses them.

    \b
      reshard inspect  CKPT                              what it is, and what to type next
      reshard convert  CKPT  MODEL                       to a Hugging Face folder
      reshard convert  MODEL CKPT --to megatron --tp 2   to Megatron-Core
      reshard verify   CKPT  MODEL                       compare bit for bit
      reshard train    sft --model MODEL --data F -o OUT fine-tune, on many processes
      reshard doctor   train.log train.py                why it failed, and how to fix it

    Exit status: 0 done, 1 the check failed, 2 the request is refused.
    """
    raise_again()  # the command is imported


def main(argv: list[str] | None = None) -> Any:
    """Run the command line; the entry point of the `reshard` script."""
    _open_streams()
    try:
        with warnings.catch_warnings():
            warnings.showwarning = partial(_show, warnings.showwarning)
            return _run(sys.argv[1:] if argv is None else argv)
    except (BrokenPipeError, SystemExit) as ended:  # rich turns the first into the second
        if not isinstance(ended, BrokenPipeError) and not isinstance(ended.__context__, BrokenPipeError):
            raise
        _silence(sys.stdout)
        _silence(sys.stderr)
        sys.exit(READER_GONE)


def _run(arguments: list[str]) -> Any:
    try:
        return cli.main(args=arguments, prog_name="reshard", standalone_mode=False, obj=tuple(arguments))
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        sys.exit(2)
    except (click.ClickException, ReshardError) as error:  # before a command started
        _refuse(error, as_json="--json" in arguments)
        sys.exit(2)
    except click.Abort:  # Ctrl-C before a command started
        sys.exit(INTERRUPTED_STATUS)
    except BrokenPipeError:
        raise
    except Exception as error:
        problem = _last_words(error)
        if "--json" in arguments:
            click.echo(json.dumps({"problems": [problem.as_dict()]}))
    with suppress(OSError):
        click.echo(f"error: {problem}", err=True)
    sys.exit(2)


def _refuse(error: click.ClickException | ReshardError, *, as_json: bool) -> None:
    """Print what is wrong with the command line, and the usage."""
    from reshard.cli.console import print_json, print_problems, stderr

    problems = problems_of_usage(error)
    if as_json:
        print_json({"problems": [problem.as_dict() for problem in problems]})
    print_problems(problems, stderr())
    context = error.context if isinstance(error, WrongUsageError) else getattr(error, "ctx", None)
    if context is not None:
        click.echo(f"{context.get_usage()}\nTry '{context.command_path} --help'.", err=True)


def _last_words(error: Exception) -> Problem:
    """The problem to print for an error that the command could not report itself. Needs little memory."""
    if is_no_memory(error):
        return no_memory(error)
    if not isinstance(error, OSError):
        raise error
    _silence(sys.stdout)
    return Problem(
        "stdout-not-writable",
        "printing failed",
        found=error.strerror,
        remedy="check the disk, or the program, that the output goes to",
    )


def _show(otherwise: Callable[..., None], message: Warning | str, *where: Any) -> None:
    """Print a PluginWarning like other problems."""
    if problem := getattr(message, "problem", None):
        from reshard.cli.console import print_problems

        print_problems([problem])
    else:
        otherwise(message, *where)


def _open_streams() -> None:
    """Make printing always work: also if a stream was closed (`>&-`), or its encoding lacks a character.

    A closed standard input is opened too, and first: a file opened in its place would be that of other programs.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115  # for the life of the process
        elif name != "stdin" and isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _silence(stream: Any) -> None:
    """Discard what is left in the buffer of `stream`; otherwise Python complains about it at exit."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
