"""`report.html`: one run, or several in the same charts, in one file that opens offline.

The page of a run that is not finished reloads itself. Its template, style and script are in `page/`.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reshard.base.errors import GIB, Problem, ReshardError, memory_size
from reshard.guard.end.completeness import RUN_RECORD
from reshard.pages.page_files import GENERATOR, charts_script, in_the_way, replace_page, write_page
from reshard.stores import realpath
from reshard.training.methods import LOSS_MEASURE, TrainingMeasure, headline, words_for
from reshard.training.show.chart_series import ChartSeries, Point, chart
from reshard.training.show.metrics import METRICS_FILE, History, SampleRow, history_of
from reshard.version import __version__

if TYPE_CHECKING:
    from jinja2 import Template
    from markupsafe import Markup

REPORT, SEVERAL = "report.html", "runs.html"
"""The page of a run in its output, and that of several runs in the working folder."""
RELOAD_SECONDS = 5
"""Seconds after which the page of an unfinished run reloads itself."""
UNFINISHED_STATES = ("running", "trained")
"""States of a run that is not finished: of a trained one, the final folder is made."""
SMALL_CHARTS = ("learning_rate", "grad_norm", "speed", "memory")
"""Small charts, side by side."""
SMOOTH_MEASURES = ("learning_rate", "memory")
"""Values that hardly vary from step to step; they get no means."""
UNDRAWN_MEASURES = ("tokens", "seconds")
LAST_ANSWERS = 3
"""Of how many of the last steps answers are shown."""


@dataclass(frozen=True)
class ShownRun:
    """A run as the page shows it: its name, record (`run.json`), history and folder."""

    name: str
    record: Mapping[str, Any]
    history: History
    folder: Path = Path()

    @property
    def method(self) -> str | None:
        """The training method."""
        return self.history.method or self.record.get("method")

    @property
    def title(self) -> str:
        """The title, such as sft · Qwen3-8B."""
        return f"{self.method or 'train'} · {Path(str(self.record.get('model', ''))).name}"

    @property
    def state(self) -> str:
        """The state of the run in one word."""
        return self.history.outcome or "running"

    @property
    def when(self) -> str:
        """The time of the last row as a date."""
        return time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(self.history.last))

    @property
    def samples(self) -> list[tuple[int, list[SampleRow]]]:
        """Answers of the model: in the last steps, the last one first, and in the first step."""
        steps = sorted(self.history.samples, reverse=True)
        shown = dict.fromkeys([*steps[:LAST_ANSWERS], *steps[-1:]])
        return [(step, self.history.samples[step]) for step in shown]

    @property
    def facts(self) -> dict[str, str]:
        """The most important numbers."""
        history = self.history
        speed, memory, left = history.speed, history.latest("memory"), history.left
        measured = [(each.words, history.latest(each.name)) for each in headline(self.method)]
        return {
            "step": f"{history.done} of {history.total}" if history.total else "–",
            **{words: f"{value:.4f}" for words, value in measured if value is not None},
            "tokens per second": short(speed) if speed is not None else "–",
            "memory": memory_size(memory) if memory is not None else "–",
            "time": clock((history.last or 0) - (history.began or 0)),
            **({"left": clock(left)} if left is not None and history.outcome is None else {}),
        }

    def series(self, name: str) -> ChartSeries:
        """The values of a name for its chart."""
        if name == "speed":
            return ChartSeries(self.history.speeds())
        points: Sequence[Point] = self.history.series(name)
        if name == "memory":
            points = [(step, value / GIB) for step, value in points]
        return ChartSeries(points, self.history.series(f"eval_{name}"))

    @property
    def configuration(self) -> list[tuple[str, str]]:
        """The settings in run.json, by their names there."""
        return list(_flat(self.record))


_OWN = ("output", "eval_data_digest", "resume", "files", "command", "memory.available")
"""Left out of the comparison: differs between any two runs, or is shown elsewhere."""


def write(output: Path, history: History | None = None) -> Path:
    """Write the report of the run in `output` atomically. Returns its path."""
    return replace_page(output / REPORT, page([shown_of(output, history)]))


def shown_of(output: Path, history: History | None = None, name: str = "") -> ShownRun:
    """The run in `output`, from its record and metrics; `name` is another one than that of the folder."""
    record: dict[str, Any] = {}
    with suppress(OSError, ValueError):
        record = json.loads((output / RUN_RECORD).read_text(encoding="utf-8"))
    return ShownRun(name or output.name or str(output), record, history or history_of(output), output)


def draw(outputs: Sequence[Path], path: Path | None = None) -> tuple[Path, list[ShownRun]]:
    """Draw the runs with these outputs on one page. Returns its path, and the runs.

    Raises ReshardError if an output is not that of a run, or if the path is taken by something else.
    """
    outputs = list(dict.fromkeys(outputs))
    where = path or (outputs[0] / REPORT if len(outputs) == 1 else Path(SEVERAL))
    problems = [*_no_runs(outputs)]
    if path or not problems:  # the default path lies in the folder of a run
        problems += in_the_way(where, "--output")
    if problems:
        raise ReshardError(problems)
    names = [realpath(output).name for output in outputs]
    shown = [
        shown_of(output, name=name if names.count(name) == 1 else str(output))
        for output, name in zip(outputs, names, strict=True)
    ]
    return write_page(where, page(shown), "--output"), shown


def _no_runs(outputs: Sequence[Path]) -> Iterator[Problem]:
    """Problems of folders without metrics, except of a run that has only written its record yet."""
    for output in outputs:
        record = shown_of(output, History()).record
        run = Path(record.get("output", output))
        if (output / METRICS_FILE).is_file() or (record and realpath(run) == realpath(output)):
            continue
        yield Problem(
            "report-no-run",
            "not the output of a training run",
            file=str(output),
            expected=f"a folder with {METRICS_FILE}, written by `reshard train … -o`",
            found=f"a part of the run in {run}" if record else "no such file in it",
            remedy=f"pass {run if record else 'the folder of the -o of the run'}",
        )


def page(runs: Sequence[ShownRun]) -> str:
    """The complete page."""
    large, small, other = _charts(runs)
    goes_on = any(run.state in UNFINISHED_STATES for run in runs)
    return _template().render(
        title=_title(runs),
        generator=f"{GENERATOR} {__version__}",
        reload=RELOAD_SECONDS if goes_on and len(runs) == 1 else None,
        runs=runs,
        several=len(runs) > 1,
        columns=list(dict.fromkeys(name for run in runs for name in run.facts)),
        differing=list(_differing(runs)),
        large=large,
        small=small,
        other=other,
        charts=charts_script(),
    )


def _title(runs: Sequence[ShownRun]) -> str:
    """The title, such as sft · Qwen3-8B, or the number of runs with it."""
    titles = list(dict.fromkeys(run.title for run in runs))
    if len(runs) == 1:
        return titles[0]
    return f"{len(runs)} runs" + (f" · {titles[0]}" if len(titles) == 1 else "")


@lru_cache(1)
def _template() -> Template:
    from jinja2 import Environment, PackageLoader

    environment = Environment(
        loader=PackageLoader("reshard.training.show", "page"), autoescape=True, trim_blocks=False
    )
    environment.filters["number"] = _number
    environment.filters["code"] = _code
    return environment.get_template("report.html")


def _number(value: Any) -> str:
    """A number with four digits: 0.25, 1e-05, 12.3k."""
    if not isinstance(value, (int, float)):
        return str(value)
    return short(value) if abs(value) >= 10_000 else f"{value:.4g}"


def _code(text: str) -> Markup:
    """Escaped text in which words between backticks become `code` elements."""
    from markupsafe import Markup, escape

    return Markup(re.sub(r"`([^`\n]+)`", r"<code>\1</code>", str(escape(text))))


def _charts(runs: Sequence[ShownRun]) -> tuple[list[Any], list[Any], list[Any]]:
    """Large charts for the headline, small ones for speed and stability, and all others."""
    heads = list(dict.fromkeys(each for run in runs for each in headline(run.method)))
    large = [*_drawn(heads, runs)]
    names = [name for name in (*SMALL_CHARTS, LOSS_MEASURE.name) if name not in {each.name for each in heads}]
    small = [*_drawn([TrainingMeasure(name, _words(name)) for name in names], runs)]
    rest = dict.fromkeys(name for run in runs for name in run.history.measured())
    known = {*(each.name for each in heads), *names, *UNDRAWN_MEASURES}
    return large, small, [*_drawn([TrainingMeasure(n, _words(n)) for n in rest if n not in known], runs)]


def _words(name: str) -> str:
    return "memory (GiB)" if name == "memory" else words_for(name)


def _drawn(measures: Sequence[TrainingMeasure], runs: Sequence[ShownRun]) -> Iterator[dict[str, Any]]:
    """The charts of values that any run measured."""
    for measure in measures:
        series = [run.series(measure.name) for run in runs]
        beside = "on evaluation data" if any(each.beside for each in series) else ""
        if beside or any(each.points for each in series):
            yield chart(measure.words, series, noisy=measure.name not in SMOOTH_MEASURES, beside=beside)


def _differing(runs: Sequence[ShownRun]) -> Iterator[tuple[str, list[str]]]:
    """Settings that differ between runs, by their names in run.json."""
    flat = [dict(run.configuration) for run in runs]
    for name in dict.fromkeys(name for each in flat for name in each if not name.startswith(_OWN)):
        values = [each.get(name, "–") for each in flat]
        if len({*values}) > 1:
            yield name, values


def _flat(record: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in record.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        elif isinstance(value, str) or value is None:
            yield f"{prefix}{name}", value or "–"
        else:
            yield f"{prefix}{name}", json.dumps(value, ensure_ascii=False, default=str)


def short(value: float) -> str:
    """A count with three or four digits: 512, 12.3k, 4.1M, 8.33e+29."""
    for unit in ("", "k", "M"):
        if value < 1000:
            return f"{value:.0f}" if not unit else f"{value:.1f}{unit}"
        value /= 1000
    return f"{value:.1f}G" if value < 1000 else f"{value * 1e9:.3g}"


def clock(seconds: float) -> str:
    """A duration as h:mm:ss, preceded by days if there are any."""
    days, rest = divmod(round(seconds), 86400)
    text = f"{rest // 3600}:{rest // 60 % 60:02}:{rest % 60:02}"
    return f"{days}d {text}" if days else text
