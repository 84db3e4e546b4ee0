"""`reshard.verify`: two checkpoints compared, one checked, or a conversion proved."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, ParamSpec, Protocol, overload

from reshard.base.arguments import with_options
from reshard.base.errors import ReshardError
from reshard.base.exceptions_to_problems import for_users
from reshard.base.notebook_progress import NotebookBar
from reshard.base.options import About
from reshard.base.shared_options import MemoryOption, OnStepOption, PageOption
from reshard.base.values import OnBytes, StrPath
from reshard.commands.coverage import Proof, prove_output
from reshard.commands.verification import Comparison, compare_weights, need_of, open_sides
from reshard.formats.options import BaseOption
from reshard.pages import comparison_page
from reshard.pages.page_files import check_page, write_page
from reshard.records.reshard_json import Integrity, check_record
from reshard.stores import source_path
from reshard.transfer.memory_budget import MemoryMeter, MemoryNeed, shared

C = ParamSpec("C")
W = ParamSpec("W")


@dataclass(frozen=True, kw_only=True)
class CheckOptions(OnStepOption, MemoryOption):
    """Options of `verify` for one checkpoint or two."""

    on_total: Annotated[
        OnBytes | None,
        About(
            "Called once with the number of bytes to compare. In a notebook, on_total and on_bytes draw a progress bar "
            "by default."
        ),
    ] = None
    on_bytes: Annotated[
        OnBytes | None, About("Called with the number of bytes of each tensor that was compared.")
    ] = None


@dataclass(frozen=True, kw_only=True)
class CompareOptions(CheckOptions, PageOption, BaseOption):
    """Options of `verify` that compare values."""

    HELP: ClassVar[dict[str, str]] = {
        "base": "Hugging Face folder with the config, if A or B has none. With --proof, it replaces the recorded one.",
        "html": "Write a page to this file: how much each module of each layer changed, and a table of differences.",
    }

    logits: Annotated[
        bool,
        About("Also compare the logits that transformers or megatron-core compute for the same tokens."),
    ] = False


@dataclass(frozen=True, kw_only=True)
class VerifyOptions(CompareOptions):
    """All options of `verify`."""

    proof: Annotated[
        bool,
        About(
            "Count elements instead of comparing values, if `convert` made B from A: every element of A is used once "
            "or dropped by a named rule, and every element of B is written once."
        ),
    ] = False

    def check(self, b: StrPath | None) -> None:
        """Raise ReshardError for options that cannot be combined, or that need the second checkpoint."""
        is_alone = b is None
        if self.html is not None and (is_alone or self.proof):
            raise ReshardError(
                "page-needs-two-checkpoints",
                "--html shows where the values of two checkpoints differ",
                remedy="compare both: reshard verify A B --html FILE",
            )
        if self.proof and (is_alone or self.logits):
            raise ReshardError(
                "proof-arguments-wrong",
                "--proof needs SRC and DST, and only counts elements",
                remedy="pass both: reshard verify SRC DST --proof",
            )
        if is_alone and (self.base is not None or self.fill_from is not None or self.logits):
            raise ReshardError(
                "second-checkpoint-missing",
                "--base, --fill-from and --logits compare two checkpoints, but only one is given",
                remedy="pass the other one too: reshard verify A B",
            )


class Verify(Protocol[C, W]):
    """`verify`, as type checkers see it."""

    @overload
    def __call__(self, a: StrPath, b: None = None, *args: C.args, **options: C.kwargs) -> Integrity: ...

    @overload
    def __call__(self, a: StrPath, b: StrPath, *args: W.args, **options: W.kwargs) -> Comparison: ...

    @overload
    def __call__(self, a: StrPath, b: StrPath, *, proof: Literal[True], **options: Any) -> Proof: ...


def _takes(
    one: Callable[C, object], two: Callable[W, object], every: type
) -> Callable[[Callable[..., Any]], Verify[C, W]]:
    """`with_options` of every option. Type checkers see those for one checkpoint and for two."""
    return with_options(every)


@for_users()
@_takes(CheckOptions, CompareOptions, VerifyOptions)
def verify(a: StrPath, b: StrPath | None = None, *, options: VerifyOptions) -> Comparison | Integrity | Proof:
    """Compare the weights of two checkpoints bit for bit, in any format and layout.

    Without `b`, check all files of `a`, an output of `convert`, against the digests recorded in its `reshard.json`.

    With `proof`, count elements instead of comparing values: the plan by which `convert` made `b` from `a` is rebuilt,
    and must use every element of `a` once or drop it by a named rule, and write every element of `b` once.

    Options are described as in `reshard verify --help`: --proof is `proof`, A and B are `a` and `b`.

    Parameters
    ----------
    a, b : str or path-like
        Folders, files, URLs, or ``Org/Model`` on the Hub.
    {options}

    Returns
    -------
    Comparison, Integrity or Proof
        `Comparison` is true if the weights are equal. With `html`, it has the `changes` of every tensor. Without `b`,
        `Integrity` is true if the files are unchanged. With `proof`, `Proof` is true if the counts balance.

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
    return verified(a, b, options)


def verified(a: StrPath, b: StrPath | None, options: VerifyOptions) -> Comparison | Integrity | Proof:
    """What there is to say about one checkpoint, or about two. Raises ReshardError."""
    options.check(b)
    bar = NotebookBar()
    hooks = {"on_total": options.on_total or bar.begin, "on_bytes": options.on_bytes or bar.advance}
    if b is None:
        threads = shared(None, MemoryMeter(options.limit).left(MemoryNeed())).threads
        return check_record(source_path(a), threads, **hooks)
    if options.proof:
        return prove_output(source_path(a), source_path(b), options, options.on_step)
    return _comparison_of(a, b, options, hooks)


def _comparison_of(
    a: StrPath, b: StrPath, options: CompareOptions, hooks: Mapping[str, Callable[[int], None]]
) -> Comparison:
    """The comparison of two checkpoints, with the logits and the page that are asked for."""
    if options.page is not None:
        check_page(options.page)
    meter = MemoryMeter(options.limit)
    first, second = open_sides(
        source_path(a), source_path(b), options.base_path, options.fill_path, options.on_step, meter
    )
    need = need_of(first, second)
    share = shared(None, meter.left(need), need, first.checkpoint.sources.paths)
    result = compare_weights(first, second, share, measured=options.page is not None, **hooks)
    if options.logits:
        from reshard.oracle.agreement import compare_logits

        result.logits = compare_logits(first, second)
    if options.page is not None:
        write_page(options.page, comparison_page(result, str(a), str(b)))
    return result
