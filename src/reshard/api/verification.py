"""`reshard.verify`: two checkpoints compared, one checked, or a conversion proved."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, overload

from reshard.base.argument_checks import Arguments, OnBytes, StrPath
from reshard.base.errors import ReshardError
from reshard.base.exceptions_to_problems import for_users
from reshard.base.notebook_progress import NotebookBar
from reshard.commands.coverage import Proof, prove_output
from reshard.commands.verification import Comparison, compare_weights, need_of, open_sides
from reshard.pages import comparison_page
from reshard.pages.page_files import check_page, write_page
from reshard.records.reshard_json import Integrity, check_record
from reshard.stores import source_path
from reshard.transfer.memory_budget import MemoryMeter, MemoryNeed, shared
from reshard.transfer.source_files import OnStep


@overload
def verify(
    a: StrPath,
    b: None = None,
    *,
    memory: int | str = ...,
    on_total: OnBytes | None = ...,
    on_bytes: OnBytes | None = ...,
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
    html: StrPath | None = ...,
    on_step: OnStep = ...,
    on_total: OnBytes | None = ...,
    on_bytes: OnBytes | None = ...,
) -> Comparison: ...


@overload
def verify(
    a: StrPath, b: StrPath, *, base: StrPath | None = None, proof: Literal[True], on_step: OnStep = ...
) -> Proof: ...


@for_users()
def verify(
    a: StrPath,
    b: StrPath | None = None,
    *,
    base: StrPath | None = None,
    logits: bool = False,
    memory: int | str = "1GiB",
    proof: bool = False,
    html: StrPath | None = None,
    on_step: OnStep = lambda step: None,
    on_total: OnBytes | None = None,
    on_bytes: OnBytes | None = None,
) -> Comparison | Integrity | Proof:
    """Compare the weights of two checkpoints bit for bit, in any format and layout.

    Without `b`, check all files of `a`, an output of `convert`, against the digests recorded in its `reshard.json`.

    With `proof`, count elements instead of comparing values: the plan by which `convert` made `b` from `a` is rebuilt,
    and must use every element of `a` once or drop it by a named rule, and write every element of `b` once.

    Parameters
    ----------
    a, b : str or path-like
        Folders, files, URLs, or ``Org/Model`` on the Hub.
    base : str or path-like, optional
        Hugging Face folder with the config, if `a` or `b` has none. With `proof`, it replaces the recorded one.
    logits : bool
        Also compare the logits that transformers or megatron-core compute for the same tokens.
    memory : int or str
        Memory limit, in bytes or with a unit ("1GiB"). Python itself (about 60 MiB) is not counted.
    proof : bool
        Count elements instead of comparing values.
    html : str or path-like, optional
        Also write a page to this file: a heat map of the relative change by layer and module, and a table of
        differences. The result then has the `changes` of every tensor.
    on_step : callable
        Called with a line of text when a new step of the work begins.
    on_total : callable, optional
        Called once with the number of bytes to compare. In a notebook, a progress bar by default.
    on_bytes : callable, optional
        Called with the number of bytes of each tensor that was compared.

    Returns
    -------
    Comparison, Integrity or Proof
        `Comparison` is true if the weights are equal. Without `b`, `Integrity` is true if the files are unchanged.
        With `proof`, `Proof` is true if the counts balance.

    Raises
    ------
    ReshardError
        If a checkpoint cannot be read.

    Examples
    --------
    >>> bool(reshard.verify("run", "model"))
    True
    >>> for row in reshard.verify("model", "tuned").rows[:1]:
    ...     print(row.tensor, row.kind)
    model.layers.1.mlp.up_proj.weight values
    """
    given = Arguments("verify")
    given.path("a", a)
    for name, path in (("b", b), ("base", base), ("html", html)):
        if path is not None:
            given.path(name, path)
    given.switches(logits=logits, proof=proof)
    given.callbacks(on_step=on_step, on_total=on_total, on_bytes=on_bytes)
    meter = MemoryMeter(given.size("--memory", memory))
    given.settle()
    if html is not None and (b is None or proof):
        raise ReshardError(
            "page-needs-two-checkpoints",
            "a page shows where the values of two checkpoints differ",
            remedy="pass both, without --proof: reshard verify A B --html FILE",
        )
    bar = NotebookBar()
    on_total, on_bytes = on_total or bar.begin, on_bytes or bar.advance
    config = source_path(base) if base is not None else None
    if proof:
        if b is None or logits:
            raise ReshardError(
                "proof-arguments-wrong",
                "a proof needs the source and the output, and only counts elements",
                remedy="pass both: reshard verify SRC DST --proof",
            )
        return prove_output(source_path(a), source_path(b), config, on_step)
    if b is None:
        if base is not None or logits:
            raise ReshardError(
                "second-checkpoint-missing",
                "base and logits are for two checkpoints, but only one is given",
                remedy="pass the other one too: verify(a, b)",
            )
        return check_record(
            source_path(a), shared(None, meter.left(MemoryNeed())).threads, on_total, on_bytes
        )
    if html is not None:
        check_page(Path(html), "--html")
    first, second = open_sides(source_path(a), source_path(b), config, on_step, meter)
    need = need_of(first, second)
    share = shared(None, meter.left(need), need, first.checkpoint.sources.paths)
    result = compare_weights(
        first, second, share, measured=html is not None, on_total=on_total, on_bytes=on_bytes
    )
    if logits:
        from reshard.oracle.agreement import compare_logits

        result.logits = compare_logits(first, second)
    if html is not None:
        write_page(Path(html), comparison_page(result, str(a), str(b)), "--html")
    return result
