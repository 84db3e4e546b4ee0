"""The functions behind the commands, under the same names and with the same arguments."""

from __future__ import annotations

import re
from collections.abc import Callable
from os import PathLike
from typing import TYPE_CHECKING, Literal, overload

from reshard import conversion, planning
from reshard.algebra.layout import Layout
from reshard.conversion import Conversion
from reshard.errors import ReshardError
from reshard.formats import open_checkpoint, writable
from reshard.formats.checkpoint import Checkpoint, Iteration
from reshard.formats.record import Integrity, check_record
from reshard.stores import source_path, typed_path
from reshard.transfer.memory import Meter, Need, plainly, shared
from reshard.transfer.plan import Plan
from reshard.transfer.sources import OnStep
from reshard.transfer.staging import OnResume

if TYPE_CHECKING:
    from reshard.coverage import Proof
    from reshard.hub.push import OnUpload
    from reshard.inspection import Inspection
    from reshard.verification import Comparison

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
    match = re.fullmatch(r"\s*(\d{1,18}(?:\.\d{1,18})?)\s*([kmgt]i?)?b?\s*", size.lower())
    if not match:
        raise ReshardError(
            "size-malformed",
            f"{flag} is no size",
            expected="a number with a unit, as 5GB or 512MiB",
            found=size,
            remedy=f"correct {flag}",
        )
    return int(float(match[1]) * _UNITS[match[2] or ""])


def open(path: StrPath, iteration: Iteration | None = None) -> Checkpoint:
    """Open a checkpoint of any format, reading headers and metadata only. Raises ReshardError."""
    return open_checkpoint(source_path(path), iteration)


def inspect(
    path: StrPath, iteration: Iteration | None = None, *, on_step: OnStep = lambda step: None
) -> Inspection:
    """What a checkpoint is, whether it is whole, and what to type next; `on_step` hears what is done next.

    Raises ReshardError.
    """
    from reshard.inspection import inspect_checkpoint

    return inspect_checkpoint(source_path(path), iteration, on_step)


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
    on: str | None = None,
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
    no_sync: bool = False,
    push_to_hub: str | None = None,
    private: bool = False,
    command: str = "",
    on_step: OnStep = lambda step: None,
    on_plan: Callable[[Plan], None] = lambda plan: None,
    on_bytes: Callable[[int], None] = lambda count: None,
    on_resume: OnResume = lambda note, nbytes: None,
    on_upload: OnUpload = lambda address, nbytes: None,
) -> Conversion:
    """Carry the checkpoint at `src` to `dst`, in the format and layout that are asked for.

    `on` names other machines that do the work, as `--on` of the command line: "dask://scheduler:8786".
    `on_step` hears what is done until there is a plan; `on_plan` sees the plan before a byte is read, `on_bytes` the
    count of each window that was written. The same call continues a run that was interrupted: `on_resume` hears so, and
    how many bytes are written already. `command` is what `inspect` names to continue this one. `on_upload` hears where
    `push_to_hub` uploads to, and how much.
    Raises ReshardError, with `dst` as it was before.
    """
    if private and not push_to_hub:
        raise ReshardError(
            "private-without-push",
            "--private is for --push-to-hub",
            remedy="add --push-to-hub Org/Name, or leave out --private",
        )
    push = None
    if push_to_hub:
        from reshard.hub.push import Push

        push = Push(push_to_hub, private, overwrite)
    layout = Layout(tp, pp, vpp, ep, tp if etp is None else etp, stages)
    options = planning.Options(
        to=writable(to).name if to else None,
        base=source_path(base) if base else None,
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
    how = conversion.How(
        dry_run=dry_run,
        overwrite=overwrite,
        memory=parse_size(memory, "--memory"),
        workers=workers,
        on=on,
        strict=strict,
        checksum=not no_checksum,
        verify=verify,
        resume=not no_resume,
        sync=not no_sync,
        command=command,
        push=push,
        on_step=on_step,
        on_plan=on_plan,
        on_bytes=on_bytes,
        on_resume=on_resume,
        on_upload=on_upload,
    )
    return conversion.convert(source_path(src), typed_path(dst), options, how)


@overload
def verify(
    a: StrPath,
    b: None = None,
    *,
    memory: int | str = ...,
    on_total: OnBytes = ...,
    on_bytes: OnBytes = ...,
    on_step: OnStep = ...,
) -> Integrity: ...


@overload
def verify(
    a: StrPath,
    b: StrPath,
    *,
    base: StrPath | None = None,
    logits: bool = False,
    memory: int | str = ...,
    proof: Literal[False] = False,
    on_step: OnStep = ...,
    on_total: OnBytes = ...,
    on_bytes: OnBytes = ...,
) -> Comparison: ...


@overload
def verify(
    a: StrPath, b: StrPath, *, base: StrPath | None = None, proof: Literal[True], on_step: OnStep = ...
) -> Proof: ...


@plainly()
def verify(
    a: StrPath,
    b: StrPath | None = None,
    *,
    base: StrPath | None = None,
    logits: bool = False,
    memory: int | str = "1GiB",
    proof: bool = False,
    on_step: OnStep = lambda step: None,
    on_total: OnBytes = lambda total: None,
    on_bytes: OnBytes = lambda count: None,
) -> Comparison | Integrity | Proof:
    """Whether two checkpoints of any formats and layouts hold the same weights, bit for bit.

    With `logits`, the same tokens also run through both, by transformers and by megatron-core. Without `b`, whether all
    files of `a`, which `convert` wrote, are still those that its `reshard.json` names. With `proof`, the plan by which
    `convert` made `b` of `a` is made again, and instead of values elements are counted: each of `a` is used once or
    dropped by a rule, each of `b` written once. `base` then replaces the base folder of that plan. `on_step` hears what
    is done next, `on_total` how many bytes will be compared, `on_bytes` the count of each tensor that was. Raises
    ReshardError if either cannot be read.
    """
    meter = Meter(parse_size(memory, "--memory"))
    if proof:
        from reshard.coverage import prove_output

        if b is None or logits:
            raise ReshardError(
                "proof-arguments-wrong",
                "a proof needs the source and the output, and counts elements alone",
                remedy="name both: reshard verify SRC DST --proof",
            )
        return prove_output(source_path(a), source_path(b), source_path(base) if base else None, on_step)
    if b is None:
        return check_record(source_path(a), shared(None, meter.left(Need())).threads, on_total, on_bytes)
    from reshard.verification import compare_weights, need_of, open_sides

    with meter.bounding():
        first, second = open_sides(
            source_path(a), source_path(b), source_path(base) if base else None, on_step
        )
    need = need_of(first, second)
    share = shared(None, meter.left(need), need, (first.sources | second.sources).paths)
    result = compare_weights(first, second, share, on_total=on_total, on_bytes=on_bytes)
    if logits:
        from reshard.oracle.agreement import compare_logits

        result.logits = compare_logits(first, second)
    return result
