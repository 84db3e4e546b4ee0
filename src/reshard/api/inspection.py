"""`reshard.inspect`: what a checkpoint is."""

from __future__ import annotations

from pathlib import Path

from reshard.base.argument_checks import Arguments, StrPath
from reshard.base.exceptions_to_problems import for_users
from reshard.commands.inspection import Inspection, inspect_checkpoint
from reshard.folders.iterations import Iteration
from reshard.pages import inspection_page
from reshard.pages.page_files import check_page, write_page
from reshard.stores import source_path
from reshard.transfer.source_files import OnStep


@for_users()
def inspect(
    path: StrPath,
    iteration: Iteration | None = None,
    *,
    html: StrPath | None = None,
    on_step: OnStep = lambda step: None,
) -> Inspection:
    """Show what a checkpoint is, whether it is complete, and what to type next.

    Parameters
    ----------
    path : str or path-like
        Folder, file, URL (``s3://``, ``hf://``, ``https://`` …) or ``Org/Model`` on the Hub.
    iteration : int or "release", optional
        Step of a training run. By default, the one that its tracker names.
    html : str or path-like, optional
        Also write a page to this file: a treemap of the weights by module, and the contents of each rank or file.
    on_step : callable
        Called with a line of text when a new step of the work begins.

    Returns
    -------
    Inspection
        Family, layout, sizes and problems. Printed, it looks like the output of `reshard inspect`.

    Raises
    ------
    ReshardError
        If `path` cannot be opened. Problems of a checkpoint that opens are in `problems`.

    Examples
    --------
    >>> found = reshard.inspect("run")
    >>> found.family, found.whole
    ('qwen3', True)
    """
    given = Arguments("inspect")
    given.path("path", path)
    given.step("iteration", iteration)
    if html is not None:
        given.path("html", html)
    given.callbacks(on_step=on_step)
    given.settle()
    if html is not None:
        check_page(Path(html), "--html")
    found = inspect_checkpoint(source_path(path), iteration, on_step)
    if html is not None:
        write_page(Path(html), inspection_page(found), "--html")
    return found
