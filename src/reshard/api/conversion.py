"""`reshard.convert`: a checkpoint in another format or layout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ParamSpec, Protocol, TypeVar

from reshard.base.arguments import with_options
from reshard.base.exceptions_to_problems import for_users
from reshard.base.notebook_progress import NotebookBar
from reshard.base.options import part_of
from reshard.base.values import StrPath
from reshard.commands import conversion
from reshard.commands.conversion import Conversion
from reshard.commands.names import NAMES
from reshard.commands.options import ConvertOptions, RunOptions
from reshard.formats.options import ConversionOptions
from reshard.stores import source_path, typed_path

Options = TypeVar("Options")
P = ParamSpec("P")


class Convert(Protocol[P]):
    """`convert`, as type checkers see it."""

    def __call__(self, src: StrPath, dst: StrPath, *args: P.args, **options: P.kwargs) -> Conversion: ...


def _takes(
    record: Callable[P, Options],
) -> Callable[[Callable[[StrPath, StrPath, Options], Conversion]], Convert[P]]:
    """`with_options` of a record."""
    return with_options(record, NAMES)


@for_users()
@_takes(ConvertOptions)
def convert(src: StrPath, dst: StrPath, options: ConvertOptions) -> Conversion:
    """Convert the checkpoint at `src` to `dst`, to any format and parallel layout.

    Sources are only read. `dst` appears when it is complete; until then it stays as it was. If a run is interrupted,
    the same call continues it. Options are described as in `reshard convert --help`: --dry-run is `dry_run`, SRC and
    DST are `src` and `dst`.

    Parameters
    ----------
    src : str or path-like
        Checkpoint to read: a folder, a file, a URL, or ``Org/Model`` on the Hub.
    dst : str or path-like
        Output: a folder, or the URL of an object store, for example ``s3://bucket/model``.
    {options}

    Returns
    -------
    Conversion
        The plan with its notes and warnings, and a report of what was written (None after a dry run).

    Raises
    ------
    ReshardError
        With every reason that was found. `dst` is as it was before.

    Examples
    --------
    >>> result = reshard.convert("model", "megatron", to="megatron", tp=2, pp=2)
    >>> result.plan.target, result.report.nonfinite
    ('megatron', [])
    """
    return converted(src, dst, options)


def converted(src: StrPath, dst: StrPath, options: ConvertOptions) -> Conversion:
    """The conversion of a checkpoint. In a notebook, it draws a progress bar in place of callbacks that are not set."""
    bar = NotebookBar()
    drawn: dict[str, Any] = {
        "on_plan": lambda plan: None if options.dry_run else bar.begin(plan.nbytes),
        "on_bytes": bar.advance,
        "on_resume": lambda note, nbytes: bar.begin_at(nbytes),
    }
    unset = {
        name: draw for name, draw in drawn.items() if getattr(options, name) is getattr(RunOptions, name)
    }
    return conversion.convert(
        source_path(src),
        typed_path(dst),
        part_of(ConversionOptions, options),
        replace(part_of(RunOptions, options), **unset),
    )
