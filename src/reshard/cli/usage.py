"""Parsing of a command line: all mistakes at once, with suggestions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import click

from reshard.base.errors import Problem, ReshardError
from reshard.base.foreign_text import printable_line
from reshard.base.options import COMMON, GROUPS
from reshard.base.suggest import did_you_mean, meant
from reshard.cli.options import WrongValue

OPTIONS = {
    "--tensor-parallel-size": "--tp",
    "--tensor-model-parallel-size": "--tp",
    "--target-tensor-parallel-size": "--tp",
    "--pipeline-parallel-size": "--pp",
    "--pipeline-model-parallel-size": "--pp",
    "--target-pipeline-parallel-size": "--pp",
    "--virtual-pipeline-model-parallel-size": "--vpp",
    "--expert-parallel-size": "--ep",
    "--expert-model-parallel-size": "--ep",
    "--target-expert-parallel-size": "--ep",
    "--expert-tensor-parallel-size": "--etp",
    "--pipeline-layers": "--stages",
    "--make-vocab-size-divisible-by": "--vocab-divisible-by",
    "--format": "--to",
    "--saver": "--to",
    "--target-format": "--to",
    "--hf-model": "--base",
    "--hf-path": "--base",
    "--tokenizer": "--base",
    "--tokenizer-model": "--base",
    "--step": "--iteration",
    "--ckpt-step": "--iteration",
    "--torch-dtype": "--dtype",
    "--params-dtype": "--dtype",
    "--bf16": "--dtype bfloat16",
    "--fp16": "--dtype float16",
    "--fp32": "--dtype float32",
    "--bits": "--quantize",
    "--q-bits": "--quantize",
    "--outtype": "--quantize",
    "--force": "--overwrite",
    "--threads": "--workers",
    "--jobs": "--workers",
    "--silent": "--quiet",
    "--timeout": "--time-limit",
    "--language": "--lang",
}
"""Options of other programs (Megatron-LM's `tools/checkpoint`, vLLM, torch, transformers) and their equivalents."""

COMMANDS = {
    "info": "inspect",
    "show": "inspect",
    "ls": "inspect",
    "diff": "verify",
    "compare": "verify",
    "check": "verify",
    "diagnose": "doctor",
    "merge": "convert",
    "shard": "convert",
    "formats": "support",
    "finetune": "train",
}
"""Other names that people use for the commands."""


class WrongUsageError(ReshardError):
    """The command line cannot be understood; `context` belongs to the command that it was for."""

    def __init__(self, problems: list[Problem], context: click.Context | None) -> None:
        super().__init__(problems)
        self.context = context


class Command(click.Command):
    """A command that reports all errors in its arguments at once."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, [*args])
        except (click.UsageError, ReshardError) as error:
            if ctx.resilient_parsing or isinstance(error, click.exceptions.NoArgsIsHelpError):
                raise
            raise WrongUsageError([*_all_wrong(self, ctx, args)] or problems_of_usage(error), ctx) from None

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options under the headings of their groups, those without one first."""
        for heading, rows in sections(self.get_params(ctx), ctx).items():
            with formatter.section(heading):
                formatter.write_dl(rows)


FEW = 12
"""Options that are read at a glance."""


def sections(params: Iterable[click.Parameter], ctx: click.Context) -> dict[str, list[tuple[str, str]]]:
    """The help of options, by the headings of their groups. A few options are under one heading."""
    options = [each for each in params if isinstance(each, click.Option)]
    records: dict[str, list[tuple[str, str]]] = {heading: [] for heading in GROUPS}
    for each in options:
        group = getattr(each, "group", COMMON) if len(options) > FEW else COMMON
        if record := each.get_help_record(ctx):
            records[group].append(record)
    return {heading: rows for heading, rows in records.items() if rows}


class Group(click.Group):
    """A group that suggests its commands."""

    command_class = Command

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, [*args])
        except click.NoSuchOption as error:
            raise WrongUsageError(_no_option(self, ctx, error.option_name), ctx) from None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if ctx.resilient_parsing or self.get_command(ctx, name):
            return super().resolve_command(ctx, args)
        known = self.list_commands(ctx)
        problem = Problem(
            "command-unknown",
            f"{ctx.command_path} has no command {name!r}",
            expected=", ".join(known),
            remedy=did_you_mean(name, known, f"see `{ctx.command_path} --help`", COMMANDS),
        )
        raise WrongUsageError([problem], ctx)


def problems_of_usage(error: click.ClickException | ReshardError) -> list[Problem]:
    """Click's errors as problems with codes. They quote what was typed, which may be any text."""
    if isinstance(error, ReshardError):
        return error.problems
    if isinstance(error, click.MissingParameter):
        kind = "option" if isinstance(error.param, click.Option) else "argument"
        return [Problem("argument-missing", f"missing {kind}: {_hint(error)}")]
    if isinstance(error, WrongValue):
        near = meant(error.text, error.kind.choices)
        return [
            Problem(
                "value-invalid",
                f"invalid value for {_hint(error)}",
                expected=error.kind.expected,
                found=repr(error.text),
                remedy=f"did you mean {near}?" if near else error.remedy,
            )
        ]
    if isinstance(error, click.BadParameter):
        return [
            Problem("value-invalid", f"invalid value for {_hint(error)}", found=error.message.rstrip("."))
        ]
    if isinstance(error, click.BadOptionUsage) and "requires an argument" in error.message:
        return [Problem("option-without-value", f"{printable_line(error.option_name)} needs a value")]
    return [Problem("usage-wrong", printable_line(error.format_message()))]


def _hint(error: click.BadParameter) -> str:
    """The option or argument that an error is about, as it is typed."""
    hint = error.param.get_error_hint(error.ctx) if error.param and error.ctx else error.param_hint or ""
    return (hint if isinstance(hint, str) else " / ".join(hint)).replace("'", "")


def _all_wrong(command: click.Command, ctx: click.Context, args: list[str]) -> Iterator[Problem]:
    """Unknown options, then invalid values, then missing or unexpected arguments."""
    unknown, args = False, [*args]
    while True:
        parser = command.make_parser(ctx)
        try:
            options, rest, _ = parser.parse_args([*args])
            break
        except click.NoSuchOption as error:
            yield from _no_option(command, ctx, error.option_name)
            unknown, shorter = True, _without(command, args, error.option_name)
            if len(shorter) == len(args):  # one of several short flags in one word
                return
            args = shorter
        except click.UsageError as error:
            yield from problems_of_usage(error)
            return
    for param in command.get_params(ctx):
        if unknown and isinstance(param, click.Argument):
            continue  # it may be a value of the unknown option
        try:
            _, rest = param.handle_parse_result(ctx, options, rest)
        except (click.UsageError, ReshardError) as error:
            yield from problems_of_usage(error)
    if rest and not unknown and not ctx.allow_extra_args:
        yield Problem(
            "argument-unexpected", f"unexpected argument: {printable_line(' '.join(map(str, rest)))}"
        )


def _without(command: click.Command, args: list[str], name: str) -> list[str]:
    """The words without an unknown option, and without its value if the most similar option takes one."""
    at = next((i for i, word in enumerate(args) if word == name or word.startswith(f"{name}=")), None)
    if at is None:
        return args
    options = {flag: each for each in command.params for flag in each.opts}
    like = options.get(str(meant(name, options, OPTIONS)).split()[0])
    takes = args[at] == name and isinstance(like, click.Option) and not like.is_flag
    return args[:at] + args[at + (2 if takes else 1) :]


def _no_option(command: click.Command, ctx: click.Context, name: str) -> list[Problem]:
    flags = [flag for each in command.get_params(ctx) for flag in each.opts if flag.startswith("-")]
    return [
        Problem(
            "option-not-known",
            f"{ctx.command_path} has no option {printable_line(name)}",
            remedy=did_you_mean(name, flags, f"see `{ctx.command_path} --help`", OPTIONS),
        )
    ]
