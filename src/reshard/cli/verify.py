"""`reshard verify`."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from reshard.api.verification import VerifyOptions, verified
from reshard.base.foreign_text import escape
from reshard.base.quantities import size
from reshard.cli.console import (
    Watch,
    common_options,
    handles_errors,
    print_json,
    print_omitted,
    stderr,
    stdout,
)
from reshard.cli.options import SOURCE, quiet_option
from reshard.cli.record import record_options
from reshard.cli.tables import print_table
from reshard.cli.usage import Command
from reshard.commands.coverage import Proof
from reshard.commands.verification import COLUMNS, ROUNDED, ROUNDED_SUM, SHOWN, Comparison, Row
from reshard.records.reshard_json import Integrity


@click.command("verify", cls=Command)
@click.argument("a", type=SOURCE)
@click.argument("b", type=SOURCE, required=False)
@record_options(VerifyOptions)
@quiet_option("Print problems only; the exit status tells the result.")
@common_options
@handles_errors
def command(a: Path, b: Path | None, *, quiet: bool, json_output: bool, options: VerifyOptions) -> None:
    """Compare the weights of checkpoints A and B bit for bit, in any format and layout.

    Without B, check all files of A, an output of `convert`, against the digests recorded in its reshard.json.

    For a training run, compare the step that its tracker names; for another step, name its folder, for example
    RUN/iter_0000200.

    Where dtypes differ, the values are compared, after rounding to the narrower dtype if necessary, and a line tells
    whether they are equal. The tensors still differ, bit for bit.

    Exit status: 0 equal (or balanced, with --proof), 1 not equal, 2 a checkpoint cannot be read.
    """
    with Watch("verify", quiet=quiet or json_output) as watch:
        hooks: dict[str, Any] = {
            "on_step": watch.step,
            "on_total": watch.begin,
            "on_bytes": lambda count: watch.advance(count),
        }
        outcome = verified(a, b, replace(options, **hooks))
    if json_output:
        print_json(outcome.as_dict())
    elif not quiet and isinstance(outcome, Integrity):
        _print_integrity(outcome)
    elif not quiet and isinstance(outcome, Comparison):
        _print_comparison(outcome)
    elif not quiet and isinstance(outcome, Proof):
        _print_proof(outcome, a, b)
    sys.exit(0 if outcome else 1)


def _print_integrity(integrity: Integrity) -> None:
    """Print whether the files of a folder are those that its record describes."""
    verdict = (
        "[bold green]unchanged:[/]"
        if integrity.equal
        else f"[bold red]changed:[/] {_count_of(len(integrity.faults), 'problem')};"
    )
    stdout().print(
        f"{verdict} {integrity.files} files, {size(integrity.nbytes)}, read and compared with reshard.json"
    )
    for fault in integrity.faults[:SHOWN]:
        stdout().print(f"{escape(fault.file)} {escape(fault.message)}")
    print_omitted(len(integrity.faults) - SHOWN, stdout())


def _print_proof(proof: Proof, a: Path, b: Path | None) -> None:
    console, source, target = stdout(), proof.source, proof.target
    rows: list[tuple[int, str]] = [(source.used, "used once" if not source.shared else "used")]
    if source.shared:
        rows.append((source.shared, "of these, used for more than one tensor of B"))
    if source.filled:
        rows.append((source.filled, "of these, filled from another model, which A does not have"))
    rows += [(elements, f"dropped: {rule}") for rule, elements in sorted(source.unused.items())]
    if source.copies:
        rows.append(
            (source.copies, "stored again: compared with a copy that is used, before anything was written")
        )
    _print_counts(f"A  {escape(str(a))}: {source.elements:,} elements in {source.tensors:,} tensors", rows)
    for rule, nbytes in sorted(source.dropped.items()):
        if rule not in source.unused:
            console.print(f"   no tensors of the model, dropped: {escape(rule)}, {nbytes:,} bytes")
    if source.elsewhere:
        console.print(f"   used from files outside A: {source.elsewhere:,} bytes")
    rows = [(target.elements - target.computed - target.zeros, "from A")]
    rows += [(target.computed, "computed from A")] if target.computed else []
    rows += [(target.zeros, "zeros, as padding")] if target.zeros else []
    rows += [(target.copies, "more, in copies for ranks that share a tensor")] if target.copies else []
    _print_counts(f"B  {escape(str(b))}: {target.elements:,} elements in {target.tensors:,} tensors", rows)
    rows = [
        (target.bytes_of_tensors, "of tensors"),
        (target.bytes_of_headers, "of headers, indexes and configs"),
        (target.bytes_copied, "of files copied as they are"),
        (target.bytes_between, "of zeros between them"),
    ]
    _print_counts(f"   {target.bytes:,} bytes in {target.files:,} files", [row for row in rows if row[0]])
    for fault in proof.faults[:SHOWN]:
        console.print(f"{escape(fault.tensor)}: {escape(fault.message)}")
    print_omitted(len(proof.faults) - SHOWN, console)
    if proof.balanced:
        verdict = "the recorded plan" if proof.recorded else "a plan with the recorded options"
        console.print(f"[bold green]balanced:[/] {verdict}, {target.blocks:,} blocks compiled and counted")
    else:
        verdict = _count_of(len(proof.faults), "problem")
        console.print(f"[bold red]unbalanced:[/] {verdict}; please report this with the lines above")


def _print_counts(title: str, rows: list[tuple[int, str]]) -> None:
    stdout().print(title)
    width = max(len(f"{number:,}") for number, _ in rows)
    for number, what in rows:
        stdout().print(f"   {number:>{width},} {escape(what)}")


def _count_of(number: int, what: str) -> str:
    """A number with its noun."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _print_different(comparison: Comparison) -> None:
    """Print the verdict, then the tensors that differ."""
    console = stdout()
    if comparison.models:
        verdict, what = comparison.verdict.split(": ", 1)
        console.print(f"[bold red]{verdict}:[/] {escape(what)} (--json lists all tensors that differ)")
        return
    more = f"; {len(comparison.rounded)} more differ by rounding only" if comparison.rounded else ""
    different = comparison.different
    console.print(
        f"[bold red]different:[/] {_count_of(len(different), 'tensor')}; {comparison.tensors} were compared{more}"
    )
    print_table(console, COLUMNS, [(row.tensor, row.kind, row.how) for row in different[:SHOWN]])
    print_omitted(len(different) - SHOWN, console)


def _print_recast(comparison: Comparison) -> None:
    """Print which tensors have equal values and other dtypes, and what is equal besides them."""
    for line in comparison.by_dtypes():
        heading, _, which = line.partition(":")
        stdout().print(f"[bold yellow]{escape(heading)}:[/]{escape(which)}")
    if not comparison.different and (rest := comparison.tensors - len(comparison.rows)):
        rounded = (
            f", {len(comparison.rounded)} of them but for rounding" if comparison.rounded else ", bit for bit"
        )
        stdout().print(f"[bold green]equal:[/] {_count_of(rest, 'tensor')}{rounded}")


def _print_rounded(comparison: Comparison) -> None:
    """Print what is equal but for rounding: quantized weights as one count, zero-centred norms by name."""
    console = stdout()
    sums = [row for row in comparison.rounded if row.kind == ROUNDED_SUM]
    for row in sums[:SHOWN]:
        console.print(f"{escape(row.tensor)} is rounded: {row.how}")
    print_omitted(len(sums) - SHOWN, console)
    quantized = [row for row in comparison.rounded if row.kind == ROUNDED]
    parts = [f"{comparison.tensors - len(comparison.rounded)} tensors bit for bit"]
    if quantized:
        what = "match the other side once that is quantized, bit for bit"
        parts.append(f"{len(quantized)} {what} {_largest(quantized)}")
    if sums:
        parts.append(f"tensors that one side stores changed, rounded: {len(sums)} {_largest(sums)}")
    console.print(f"[bold green]equal but for rounding:[/] {'; '.join(parts)}")


def _largest(rows: list[Row]) -> str:
    return f"(largest difference {max(row.largest or 0 for row in rows):.3g})"


def _print_comparison(comparison: Comparison) -> None:
    """Print whether two checkpoints are equal, and where they differ."""
    console = stdout()
    for note in comparison.notes:
        stderr().print(f"[bold]note:[/] {escape(note)}")
    if comparison.different:
        _print_different(comparison)
    if comparison.rows:
        _print_recast(comparison)
    elif comparison.rounded:
        _print_rounded(comparison)
    else:
        console.print(
            f"[bold green]equal:[/] {comparison.tensors} tensors, {size(comparison.nbytes)}, bit for bit"
        )
    if logits := comparison.logits:
        verdict = "[bold green]agree[/]" if logits["equal"] else "[bold red]differ[/]"
        console.print(
            f"logits {verdict}: largest difference {logits['difference']:.2e} of {logits['scale']:.3g}, "
            f"relative {logits['relative']:.2e}, threshold {logits['threshold']:.0e} "
            f"({logits['tokens']} tokens; {logits['a']} and {logits['b']})"
        )
