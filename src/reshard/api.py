"""The functions behind the commands, under the same names and with the same arguments."""

from __future__ import annotations

import re
from collections.abc import Callable
from os import PathLike
from pathlib import Path
from typing import overload

from reshard import conversion, planning
from reshard.algebra.layout import Layout
from reshard.conversion import Conversion
from reshard.errors import ReshardError
from reshard.formats import open_checkpoint
from reshard.formats.checkpoint import Checkpoint, Iteration
from reshard.formats.record import Integrity, check_record
from reshard.inspection import Inspection, inspect_checkpoint
from reshard.transfer.execute import worker_count
from reshard.transfer.plan import Plan
from reshard.transfer.sources import OnStep
from reshard.transfer.staging import OnResume
from reshard.verification import Comparison, compare_weights, open_sides

StrPath = str | PathLike[str]
OnBytes = Callable[[int], None]
_UNITS = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "ki": 2**10,
    "mi": 2**20,
    "gi": 2**30,
    "ti": 2**40,
}


def parse_size(size: int | str, flag: str = "size") -> int:
    """Bytes of "5GB", "1GiB", "500M" or a plain number. Raises ReshardError naming `flag`."""
    if isinstance(size, int):
        return size
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?\s*", size.lower())
    if not match:
        raise ReshardError(
            f"{flag} is no size",
            expected="a number with a unit, as 5GB or 512MiB",
            found=size,
            remedy=f"correct {flag}",
        )
    return int(float(match[1]) * _UNITS[match[2] or ""])


def open(path: StrPath, iteration: Iteration | None = None) -> Checkpoint:
    """Open a checkpoint of any format, reading headers and metadata only. Raises ReshardError."""
    return open_checkpoint(Path(path), iteration)


def inspect(
    path: StrPath, iteration: Iteration | None = None, *, on_step: OnStep = lambda step: None
) -> Inspection:
    """What a checkpoint is, whether it is whole, and what to type next; `on_step` hears what is done next.

    Raises ReshardError.
    """
    return inspect_checkpoint(Path(path), iteration, on_step)


def convert(
    src: StrPath,
    dst: StrPath,
    *,
    to: str | None = None,
    base: StrPath | None = None,
    tp: int = 1,
    pp: int = 1,
    vpp: int = 1,
    ep: int = 1,
    etp: int | None = None,
    stages: tuple[int, ...] = (),
    iteration: Iteration | None = None,
    family: str | None = None,
    engine: str | None = None,
    trust: str = "checkpoint",
    dtype: str | None = None,
    quantize: str | None = None,
    max_shard_size: int | str = "5GB",
    vocab_divisible_by: int | None = None,
    transformer_impl: str | None = None,
    memory: int | str = "1GiB",
    workers: int | None = None,
    dry_run: bool = False,
    overwrite: bool = False,
    no_tokenizer: bool = False,
    strip: tuple[str, ...] = (),
    merge: bool = False,
    adapter: str | None = None,
    lora_alpha: float | None = None,
    with_optimizer: bool = False,
    strict: bool = False,
    no_checksum: bool = False,
    verify: bool = False,
    no_resume: bool = False,
    command: str = "",
    on_step: OnStep = lambda step: None,
    on_plan: Callable[[Plan], None] = lambda plan: None,
    on_bytes: Callable[[int], None] = lambda count: None,
    on_resume: OnResume = lambda note, nbytes: None,
) -> Conversion:
    """Carry the checkpoint at `src` to `dst`, in the format and layout that are asked for.

    `on_step` hears what is done until there is a plan; `on_plan` sees the plan before a byte is read, `on_bytes` the
    count of each window that was written. The same call continues a run that was interrupted: `on_resume` hears so, and
    how many bytes are written already. `command` is what `inspect` names to continue this one.
    Raises ReshardError, with `dst` as it was before.
    """
    layout = Layout(tp, pp, vpp, ep, tp if etp is None else etp, stages)
    options = planning.Options(
        to=to,
        base=Path(base) if base else None,
        layout=layout,
        iteration=iteration,
        family=family,
        engine=engine,
        trust=trust,
        dtype=dtype,
        quantize=quantize,
        max_shard_size=parse_size(max_shard_size, "--max-shard-size"),
        vocab_divisible_by=vocab_divisible_by,
        transformer_impl=transformer_impl,
        tokenizer=not no_tokenizer,
        strip=strip,
        merge=merge,
        adapter=adapter,
        lora_alpha=lora_alpha,
        with_optimizer=with_optimizer,
    )
    return conversion.convert(
        Path(src),
        Path(dst),
        options,
        dry_run=dry_run,
        overwrite=overwrite,
        memory=parse_size(memory, "--memory"),
        workers=workers,
        strict=strict,
        checksum=not no_checksum,
        verify=verify,
        resume=not no_resume,
        command=command,
        on_step=on_step,
        on_plan=on_plan,
        on_bytes=on_bytes,
        on_resume=on_resume,
    )


@overload
def verify(
    a: StrPath, b: None = None, *, on_total: OnBytes = ..., on_bytes: OnBytes = ..., on_step: OnStep = ...
) -> Integrity: ...


@overload
def verify(
    a: StrPath,
    b: StrPath,
    *,
    base: StrPath | None = None,
    logits: bool = False,
    on_step: OnStep = ...,
    on_total: OnBytes = ...,
    on_bytes: OnBytes = ...,
) -> Comparison: ...


def verify(
    a: StrPath,
    b: StrPath | None = None,
    *,
    base: StrPath | None = None,
    logits: bool = False,
    on_step: OnStep = lambda step: None,
    on_total: OnBytes = lambda total: None,
    on_bytes: OnBytes = lambda count: None,
) -> Comparison | Integrity:
    """Whether two checkpoints of any formats and layouts hold the same weights, bit for bit.

    With `logits`, the same tokens also run through both, by transformers and by megatron-core. Without `b`, whether all
    files of `a`, which `convert` wrote, are still those that its `reshard.json` names. `on_step` hears what is
    done next, `on_total` how many bytes will be compared, `on_bytes` the count of each tensor that was. Raises
    ReshardError if either cannot be read.
    """
    if b is None:
        return check_record(Path(a), worker_count(None, 1 << 30), on_total, on_bytes)
    first, second = open_sides(Path(a), Path(b), Path(base) if base else None, on_step)
    workers = worker_count(None, 1 << 30)
    result = compare_weights(first, second, workers=workers, on_total=on_total, on_bytes=on_bytes)
    if logits:
        from reshard.oracle.agreement import compare_logits

        result.logits = compare_logits(first, second)
    return result
