"""Pages that a browser opens without a network: the contents of a checkpoint, and the differences between two.

A page is one file: a jinja2 template, its data as JSON, and a build of Apache ECharts (`tools/charts`). The data
is aggregated here, so that even the page of the largest model stays small.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from reshard.base.foreign_text import printable_line
from reshard.pages.page_files import charts_script
from reshard.version import __version__

if TYPE_CHECKING:
    from jinja2 import Environment

    from reshard.commands.inspection import Inspection
    from reshard.commands.verification import Comparison


def inspection_page(inspection: Inspection) -> str:
    """The page that `inspect --html` writes."""
    from reshard.pages.rank_board import board_of
    from reshard.pages.weight_tree import tree_of

    checkpoint = inspection.checkpoint
    return _page(
        "inspect.html",
        title=str(checkpoint.path),
        rows=inspection.rows(),
        notes=[*inspection.notes, *inspection.hints],
        problems=[(each.severity, str(each)) for each in inspection.problems],
        next=inspection.next,
        board=board_of(inspection),
        data={"tree": tree_of(checkpoint)},
    )


def comparison_page(comparison: Comparison, source: str, target: str) -> str:
    """The page that `verify --html` writes for two checkpoints whose tensors were compared."""
    from reshard.pages.difference_map import heat_of, table_of

    return _page(
        "verify.html",
        title=f"{source} ↔ {target}",
        a=source,
        b=target,
        verdict=comparison.verdict,
        equal=comparison.equal,
        table=table_of(comparison),
        differing=len(comparison.rows) + len(comparison.rounded),
        notes=comparison.notes,
        data={"heat": heat_of(comparison.changes)},
    )


def served_page(
    address: str, repositories: Sequence[Any], described: Callable[[Any], Mapping[str, str]]
) -> str:
    """The page of `serve` at an address: the repositories of `serve/`, each step as it is `described`."""
    return _page("serve.html", title=address, repositories=repositories, described=described)


def _page(template: str, **content: Any) -> str:
    return (
        _environment().get_template(template).render(version=__version__, charts=charts_script(), **content)
    )


@cache
def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader(__name__, "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["shown"] = printable_line
    return environment
