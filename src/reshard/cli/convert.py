"""`reshard convert`."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import click

from reshard.adapters.engines import ENGINES as ADAPTERS_FOR
from reshard.api import conversion
from reshard.base.errors import count, listed, size
from reshard.base.shown import escape
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
from reshard.cli.options import OUTPUT, POSITIVE, SOURCE, iteration_option, memory_option, quiet_option
from reshard.cli.usage import Command
from reshard.commands.conversion import Conversion
from reshard.families.family import ENGINES
from reshard.formats import quantizations, quantized_as, writable, written
from reshard.transfer.plan import Plan


class Known(click.Choice):  # type: ignore[type-arg]  # click 8.1 takes no arguments
    """A word that `known` turns into one of the choices. It raises ReshardError for others."""

    def __init__(self, choices: Iterable[str], known: Callable[[str], str]) -> None:
        super().__init__(list(choices))
        self._known = known

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        return self._known(value)


def _stages(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in value.split(",")) if value else ()
    except ValueError:
        raise click.BadParameter(f"{value!r} is not the layers of each stage, such as 10,12,12,10") from None


@click.command("convert", cls=Command)
@click.argument("src", type=SOURCE)
@click.argument("dst", type=OUTPUT)
@click.option(
    "--to",
    type=Known(written(), lambda name: writable(name).name),
    help="Format of the output, or an alias such as hf or mcore. [default: huggingface, unless SRC is that]",
)
@click.option("--base", type=SOURCE, metavar="PATH", help="Hugging Face folder with config and tokenizer.")
@click.option(
    "--tp",
    type=POSITIVE,
    default=1,
    metavar="N",
    help="Tensor-parallel size of the output. [default: 1]",
)
@click.option(
    "--pp", type=POSITIVE, default=1, metavar="N", help="Pipeline-parallel size of the output. [default: 1]"
)
@click.option(
    "--vpp", type=POSITIVE, default=1, metavar="N", help="Virtual pipeline chunks per stage. [default: 1]"
)
@click.option(
    "--ep", type=POSITIVE, default=1, metavar="N", help="Expert-parallel size of the output. [default: 1]"
)
@click.option("--etp", type=POSITIVE, metavar="N", help="Expert-tensor-parallel size. [default: --tp]")
@click.option(
    "--dp",
    type=POSITIVE,
    metavar="N",
    help="Data-parallel size: how many ranks will load the output. For fsdp-ranks, which needs it.",
)
@click.option(
    "--stages",
    callback=_stages,
    metavar="N,N,…",
    help="Layers of each pipeline stage, for example 10,12,12,10.",
)
@iteration_option("Step to read, if SRC is a training run. [default: the one that its tracker names]")
@click.option("--family", metavar="NAME", help="Model family of SRC, overriding its config.")
@click.option(
    "--engine",
    type=click.Choice(list(ENGINES)),
    help="Library that will load the Megatron checkpoint. [default: the one that saved SRC]",
)
@click.option(
    "--trust",
    type=click.Choice(["checkpoint", "config"]),
    default="checkpoint",
    show_default=True,
    help="Which to believe where config.json and the arguments in a Megatron checkpoint disagree.",
)
@click.option("--dtype", metavar="DTYPE", help="Convert weights to float32, bfloat16 or float16.")
@click.option(
    "--quantize",
    type=Known(quantizations(), quantized_as),
    metavar="KIND",
    help="Quantize the linear layers of a Hugging Face output (fp8, fp8-ue8m0, nvfp4; mxfp4 is for gpt-oss only), "
    "or choose the type of a GGUF output (f32, f16, bf16, q8_0, q5_1, q5_0, q4_1, q4_0, tq1_0, tq2_0, mxfp4), or the "
    "bits and the group of an MLX output (affine-2, -3, -4, -5, -6 or -8, in groups of 64, or affine-4-32 …).",
)
@click.option(
    "--max-shard-size",
    metavar="SIZE",
    help="Maximum size of a weights file. [default: 5GB; GGUF: one file]",
)
@click.option(
    "--vocab-divisible-by",
    type=POSITIVE,
    metavar="N",
    help="Pad the vocabulary to a multiple of N × TP. [default: that of SRC, else 128]",
)
@click.option(
    "--transformer-impl",
    type=click.Choice(["transformer_engine", "local"]),
    help="Layer spec whose tensor names to write. [default: that of SRC, else transformer_engine]",
)
@memory_option
@click.option(
    "--workers",
    type=POSITIVE,
    metavar="N",
    help="Threads, or with --on threads per part. [default: two per core]",
)
@click.option(
    "--on",
    metavar="WHERE",
    help="Run on other machines: dask://HOST:PORT, ray, slurm:partition=P,nodes=N,time=MIN, or mpi.",
)
@click.option(
    "--dry-run", is_flag=True, help="Print the plan, or why the conversion is refused, and write nothing."
)
@click.option("--overwrite", is_flag=True, help="Replace the checkpoint at DST.")
@click.option("--no-tokenizer", is_flag=True, help="Continue without a tokenizer.")
@click.option(
    "--strip", multiple=True, metavar="MARK", help="Remove MARK from tensor names, for example `_orig_mod.`."
)
@click.option(
    "--with-optimizer", is_flag=True, help="Convert optimizer states too, if both formats can store them."
)
@click.option("--merge", is_flag=True, help="Merge SRC, a LoRA adapter, into the model at --base.")
@click.option("--adapter", metavar="NAME", help="Adapter to read, if SRC contains several.")
@click.option("--lora-alpha", type=float, metavar="N", help="Alpha of the adapter, if no file records it.")
@click.option(
    "--for",
    "adapter_for",
    type=click.Choice(list(ADAPTERS_FOR)),
    help="Write the adapter as this library applies it completely. [default: with the layout of SRC]",
)
@click.option(
    "--verify",
    is_flag=True,
    help="Read the output back from disk before it is published, and compare checksums.",
)
@click.option("--no-resume", is_flag=True, help="Start over, and keep nothing if the run is interrupted.")
@click.option(
    "--no-sync",
    is_flag=True,
    help="Do not wait for the disk. If the machine crashes within a minute, DST may be lost or damaged.",
)
@click.option("--strict", is_flag=True, help="Fail if weights contain NaN or Inf.")
@click.option("--no-checksum", is_flag=True, help="Do not check or record CRC32s of the source.")
@click.option(
    "--push-to-hub",
    metavar="ORG/NAME",
    help="Upload DST to this Hugging Face repository afterwards, with a model card, in one commit.",
)
@click.option("--private", is_flag=True, help="Create the repository as private.")
@quiet_option()
@common_options
@handles_errors
def command(src: Path, dst: Path, quiet: bool, json_output: bool, **options: Any) -> None:
    """Convert the checkpoint at SRC to DST, to any format and parallel layout.

    The format of SRC is detected, and its config and tokenizer are copied. DST appears only when it is complete. If a
    run is interrupted, the same command continues it. SRC, DST and --base can be URLs (s3://, gs://, oss://, az://).
    SRC and --base can also be https://, hf:// or Org/Model on the Hub.

    \b
      reshard convert ckpt model                          Megatron to Hugging Face
      reshard convert model ckpt --to megatron --tp 4     Hugging Face to Megatron
      reshard convert ckpt ckpt2 --to megatron --pp 2     Megatron to another layout
      reshard convert ckpt ckpt2 --to fsdp-ranks --dp 4   verl to another number of GPUs
      reshard convert lora merged --merge --base model    a LoRA adapter into its base
      reshard convert ckpt model.gguf --quantize q8_0     any checkpoint to llama.cpp
    """
    shown(
        lambda **hooks: conversion.convert(src, dst, **options, **hooks),
        dst,
        quiet=quiet,
        json_output=json_output,
        print_plan=print_plan if options["dry_run"] else None,
    )


def shown(
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
                    _print_notes(plan)
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


def _print_notes(plan: Plan) -> None:
    for note in plan.notes:
        stderr().print(f"[bold]note:[/] {escape(note)}")


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
    console.print(f"  {size(sum(nbytes for _, nbytes in files)):>10}  in {_counted(len(files))}")
    console.print(f"buffers: at most {size(share.threads * share.each)} in {share.threads} threads")
    for rule, nbytes in plan.dropped.items():
        console.print(f"dropped: {escape(rule)}, {size(nbytes)}")
    console.print("unmatched: none")


def _counted(files: int) -> str:
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
