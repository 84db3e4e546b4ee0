"""`reshard.convert`: a checkpoint in another format or layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from reshard.base.argument_checks import Arguments, StrPath
from reshard.base.exceptions_to_problems import for_users
from reshard.base.notebook_progress import NotebookBar
from reshard.base.options import part_of, with_options
from reshard.commands import conversion
from reshard.commands.conversion import Conversion
from reshard.commands.names import NAMES
from reshard.commands.options import ConvertOptions, RunOptions
from reshard.formats.options import AverageOf, ConversionOptions
from reshard.stores import source_path, typed_path

A_contra = TypeVar("A_contra", contravariant=True)
P = ParamSpec("P")


class Converting(Protocol[A_contra, P]):
    """A function that makes a conversion of what it is given, as type checkers see it."""

    def __call__(self, src: A_contra, dst: StrPath, *args: P.args, **options: P.kwargs) -> Conversion: ...


def converts(
    record: Callable[P, object],
) -> Callable[[Callable[Concatenate[A_contra, ...], Conversion]], Converting[A_contra, P]]:
    """`with_options` of a record, for a function of `src` and `dst`."""
    return with_options(record)


@for_users()
@converts(ConvertOptions)
def convert(src: StrPath | AverageOf, dst: StrPath, **given: Any) -> Conversion:
    """Convert the checkpoint at `src` to `dst`, to any format and parallel layout.

    Sources are only read. `dst` appears when it is complete; until then it stays as it was. If a run is interrupted,
    the same call continues it.

    Parameters
    ----------
    src : str or path-like
        Checkpoint to read: a folder, a file, a URL, or ``Org/Model`` on the Hub. (`average` passes several.)
    dst : str or path-like
        Output: a folder, or the URL of an object store, for example ``s3://bucket/model``.

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
    arguments = Arguments("convert", NAMES)
    source, average = (src.paths[-1], src) if isinstance(src, AverageOf) else (src, None)
    arguments.path("src", source)
    arguments.path("dst", dst)
    asked = ConvertOptions(**arguments.options(ConvertOptions, _with_bar(given)), average=average)
    return conversion.convert(
        source_path(source), typed_path(dst), part_of(ConversionOptions, asked), part_of(RunOptions, asked)
    )


def _with_bar(given: dict[str, Any]) -> dict[str, Any]:
    """Arguments in which the progress bar of a notebook takes the place of callbacks that are not there."""
    bar = NotebookBar()
    drawn: dict[str, Any] = {
        "on_plan": lambda plan: None if given.get("dry_run") else bar.begin(plan.nbytes),
        "on_bytes": bar.advance,
        "on_resume": lambda note, nbytes: bar.begin_at(nbytes),
    }
    return given | {name: draw for name, draw in drawn.items() if given.get(name) is None}
