"""`reshard convert`."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import click

from reshard.api import conversion
from reshard.base.errors import listed
from reshard.base.foreign_text import escape
from reshard.base.quantities import count, size
from reshard.cli.console import (
    Watch,
    clean_end,
    common_options,
    handles_errors,
    print_json,
    print_problems,
    stderr,
    stdout,
    typed,
)
from reshard.cli.options import OUTPUT, SOURCE, quiet_option
from reshard.cli.record import record_options
from reshard.cli.usage import Command
from reshard.commands.conversion import Conversion
from reshard.commands.names import NAMES
from reshard.commands.options import ConvertOptions
from reshard.transfer.plan import Plan


@click.command("convert", cls=Command)
@click.argument("src", type=SOURCE)
@click.argument("dst", type=OUTPUT)
@record_options(ConvertOptions, NAMES)
@quiet_option()
@common_options
@handles_errors
def command(src: Path, dst: Path, quiet: bool, json_output: bool, options: ConvertOptions) -> None:
    """Convert the checkpoint at SRC to DST, to any format and parallel layout.

    The format of SRC is detected, and its config and tokenizer are copied. DST appears only when it is complete. If a
    run is interrupted, the same command continues it. SRC, DST and --base can be URLs of object stores, for example
    s3://bucket/run. SRC and --base can also be https://, hf:// or Org/Model on the Hub.

    \b
      reshard convert ckpt model                          Megatron to Hugging Face
      reshard convert model ckpt --to megatron --tp 4     Hugging Face to Megatron
      reshard convert ckpt ckpt2 --to megatron --pp 2     Megatron to another layout
      reshard convert ckpt ckpt2 --to fsdp-ranks --dp 4   verl to another number of GPUs
      reshard convert lora merged --merge --base model    a LoRA adapter into its base
      reshard convert ckpt model.gguf --quantize q8_0     any checkpoint to llama.cpp
    """
    run_conversion(
        lambda **hooks: conversion.converted(src, dst, replace(options, **hooks)),
        dst,
        quiet=quiet,
        json_output=json_output,
        print_plan=print_plan if options.dry_run else None,
    )


def run_conversion(
    convert: Callable[..., Conversion],
    dst: Path,
    *,
    quiet: bool,
    json_output: bool,
    print_plan: Callable[[Conversion], None] | None = None,
) -> None:
    """Run a conversion that takes `on_step`, `on_plan` and `on_bytes`, and show its notes, progress and result.

    `print_plan` shows the plan of a dry run, which has no result.
    """
    silent, total = quiet or json_output, 0
    begin = time.monotonic()
    with clean_end(dst):
        with Watch("convert", quiet=silent) as watch:

            def on_plan(plan: Plan) -> None:
                nonlocal total
                total = plan.nbytes
                watch.end()
                if not silent:
                    for note in plan.notes:
                        stderr().print(f"[bold]note:[/] {escape(note)}")
                print_problems(plan.warnings)
                if not print_plan:
                    watch.begin(plan.nbytes)

            def on_resume(note: str, done: int) -> None:
                watch.end()
                if not silent:
                    stderr().print(f"[bold]note:[/] {escape(note)}")
                if done:
                    watch.begin(total, done)

            def on_upload(address: str, nbytes: int) -> None:
                watch.end()
                if not silent:
                    stderr().print(f"[bold]note:[/] uploading {size(nbytes)} to {escape(address)}")
                watch.upload(f"uploading to {address}")

            result = convert(
                command=typed(),
                on_step=watch.step,
                on_plan=on_plan,
                on_bytes=lambda count: watch.advance(count),
                on_resume=on_resume,
                on_upload=on_upload,
            )
        if json_output:
            print_json(result.as_dict())
            return
        if not quiet and print_plan:
            print_plan(result)
        elif not quiet:
            _print_result(result, dst, time.monotonic() - begin)
        _print_warnings(result)


def _print_warnings(result: Conversion) -> None:
    print_problems(result.warnings)
    if result.report and result.report.nonfinite:
        names = escape(listed(result.report.nonfinite, 5))
        stderr().print(f"[bold yellow]warning:[/] NaN or Inf in {names} (--strict refuses it)")


def print_plan(result: Conversion) -> None:
    """Print what a dry run has planned."""
    plan, share, console = result.plan, result.share, stdout()
    console.print(
        f"{plan.source} → {plan.target}: {count(plan.parameters)} parameters in {plan.tensors} tensors"
    )
    files = result.files
    for path, nbytes in files[:40]:
        console.print(f"  {size(nbytes):>10}  {escape(path)}")
    if len(files) > 40:
        console.print(f"  … and {len(files) - 40} more files (--json lists all)")
    console.print(f"  {size(sum(nbytes for _, nbytes in files)):>10}  in {_file_count(len(files))}")
    console.print(f"buffers: at most {size(share.threads * share.each)} in {share.threads} threads")
    for rule, nbytes in plan.dropped.items():
        console.print(f"dropped: {escape(rule)}, {size(nbytes)}")
    console.print("unmatched: none")


def _file_count(files: int) -> str:
    return "1 file" if files == 1 else f"{files} files"


def _print_result(result: Conversion, dst: Path, seconds: float) -> None:
    plan, console = result.plan, stdout()
    if plan.load_with:
        flags = shlex.join(["--load", str(dst), *plan.load_with])
        stderr().print(f"[bold]load with:[/] {escape(flags)}")
    for rule, nbytes in plan.dropped.items():
        console.print(f"dropped: {escape(rule)}, {size(nbytes)}")
    if result.uploaded:
        console.print(f"uploaded: {escape(result.uploaded)}")
    console.print(
        f"{escape(str(dst))}: {plan.target}, {count(plan.parameters)} parameters in {plan.tensors} tensors, "
        f"{size(plan.nbytes)} in {seconds:.1f} s ({size(plan.nbytes / seconds)}/s)"
    )
    for command in plan.afterwards:
        stderr().print(f"[bold]{escape(command.purpose)}:[/] {escape(command.typed(dst, result.single))}")
