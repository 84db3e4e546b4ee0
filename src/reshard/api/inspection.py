"""`reshard.inspect`: what a checkpoint is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from reshard.base.exceptions_to_problems import for_users
from reshard.base.shared_options import OnStepOption, PageOption, StepOption, takes_step
from reshard.base.values import StrPath
from reshard.commands.inspection import Inspection, inspect_checkpoint
from reshard.pages import inspection_page
from reshard.pages.page_files import check_page, write_page
from reshard.stores import source_path


@dataclass(frozen=True, kw_only=True)
class InspectOptions(OnStepOption, PageOption, StepOption):
    """Options of `inspect`."""

    HELP: ClassVar[dict[str, str]] = {
        "html": "Write a page to this file: the weights by module, and the contents of each rank or file.",
    }


@for_users()
@takes_step(InspectOptions)
def inspect(path: StrPath, options: InspectOptions) -> Inspection:
    """Show what a checkpoint is, whether it is complete, and what to type next.

    Options are described as in `reshard inspect --help`.

    Parameters
    ----------
    path : str or path-like
        Folder, file, URL (``s3://``, ``hf://``, ``https://`` …) or ``Org/Model`` on the Hub.
    {options}

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
    if options.page is not None:
        check_page(options.page)
    inspection = inspect_checkpoint(source_path(path), options.iteration, options.on_step)
    if options.page is not None:
        write_page(options.page, inspection_page(inspection))
    return inspection
