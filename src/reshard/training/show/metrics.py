"""The progress of a run: rank 0 reports it as lines of `metrics.jsonl`, from which the history is read.

A row has an `event` and its `time` (seconds since 1970):

- `begin`: steps, done, method, and the names of the headline's measures
- `step`: step, loss, learning_rate, grad_norm, tokens, memory and whatever else was measured
- `first`: step, if the first step of an attempt is not logged
- `eval`: step, eval_loss, other eval_…, and the seconds that it took
- `samples`: step, and prompt, completion and rewards of some answers
- `saved`: checkpoint; `note`: text; `stop`: signal, step, why
- `end`: outcome; `failure`, if it failed or was interrupted; `checks` of the final folder; `resume`, the command that
  continues it

Each step has one row of a kind, that of the attempt from which the run went on.
JSON has no NaN: such a number is a string, "nan" or "inf".
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from reshard.base.plain_json import json_of
from reshard.training.methods import headline
from reshard.training.run import Run
from reshard.training.signals import StoppedRun

METRICS_FILE = "metrics.jsonl"
SPEED_STEPS = 20
"""Steps over which speed is measured."""

STEP_KINDS = ("step", "first", "eval", "samples")
"""Events that belong to a step."""
SAMPLES, LONGEST = 4, 2000
"""How many answers of a step are kept, and how many characters of each text."""

MetricsRow = dict[str, Any]
SampleRow = Mapping[str, Any]
"""A `prompt`, its `completion`, and numbers such as rewards by their names."""


class MetricsWriter:
    """Writes the rows of rank 0; other ranks write nothing. `listeners` receive each row as well."""

    def __init__(self, run: Run, rank: int, listeners: Iterable[Callable[[MetricsRow], None]] = ()) -> None:
        self._output = run.output if rank == 0 else None
        self._method = run.method
        self._listeners = list(listeners)

    def begin(self, steps: int, done: int = 0) -> None:
        """Record that training starts after step `done` and ends with step `steps`.

        What an earlier attempt recorded of later steps is dropped: they are trained again.
        """
        if self._output is not None:
            drop_repeated(self._output, done)
        names = [measure.name for measure in headline(self._method)]
        self._write(
            {"event": "begin", "steps": steps, "done": done, "method": self._method, "headline": names}
        )

    def step(self, step: int, **metrics: float) -> None:
        """Record what a step measured: loss, learning_rate, grad_norm, tokens (of all ranks), memory (bytes)."""
        self._write({"event": "step", "step": step, **metrics})

    def unlogged(self, step: int) -> None:
        """Record that the first step of an attempt is done, of which nothing is logged."""
        self._write({"event": "first", "step": step})

    def evaluated(self, step: int, **metrics: float) -> None:
        """Record what an evaluation after a step measured: eval_loss, other eval_…, and its duration in `seconds`."""
        self._write({"event": "eval", "step": step, **metrics})

    def samples(self, step: int, samples: Sequence[SampleRow]) -> None:
        """Record answers of the model in a step: the first few, with long texts cut. Numbers have names."""
        shown = [{name: _cut(value) for name, value in each.items()} for each in samples[:SAMPLES]]
        self._write({"event": "samples", "step": step, "samples": shown})

    def saved(self, checkpoint: Path) -> None:
        """Record that a checkpoint is complete on disk."""
        self._write({"event": "saved", "checkpoint": str(checkpoint)})

    def stopped(self, stop: StoppedRun) -> None:
        """Record that a signal ended the run after a step."""
        self._write({"event": "stop", "signal": stop.number, "step": stop.step, "why": str(stop)})

    def note(self, text: str) -> None:
        """Record a note for the user."""
        self._write({"event": "note", "text": text})

    def _write(self, row: MetricsRow) -> None:
        if self._output is not None:
            written = append(self._output, row)
            for listener in self._listeners:
                listener(written)


def monitor_of(run: Run, listeners: Iterable[Callable[[MetricsRow], None]] = ()) -> MetricsWriter:
    """The monitor of this rank."""
    return MetricsWriter(run, int(os.environ.get("RANK", "0")), listeners)


def append(output: Path, row: MetricsRow) -> MetricsRow:
    """Add a row, with the time, to the metrics of the run in `output`. Returns the row.

    Raises OSError if the disk is full; the file then ends with the row before.
    """
    written = {name: _plain(value) for name, value in {**row, "time": round(time.time(), 3)}.items()}
    line = (json.dumps(written, ensure_ascii=False, allow_nan=False) + "\n").encode()
    path = output / METRICS_FILE
    with path.open("ab", buffering=0) as file:
        end = file.seek(0, os.SEEK_END)
        try:
            while line:  # a disk that fills up takes only a part
                line = line[file.write(line) :]
        except OSError as error:
            with suppress(OSError):
                file.truncate(end)
            raise OSError(error.errno, error.strerror, str(path)) from None
    return written


def drop_repeated(output: Path, done: int) -> None:
    """Remove rows of steps after `done` from the metrics, and all but the last row of the others."""
    path = output / METRICS_FILE
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    kept: dict[Any, bytes] = {}
    for number, line in enumerate(lines):
        row = _row_of(line)
        step = int(row["step"]) if row and row["event"] in STEP_KINDS else 0
        key = (row["event"], step) if row and step else number
        kept.pop(key, None)
        if row and step <= done:
            kept[key] = line
    if len(kept) < len(lines):
        partial = path.with_name(f".{METRICS_FILE}.{os.getpid()}")
        partial.write_bytes(b"".join(kept.values()))
        partial.replace(path)


def _row_of(line: bytes) -> MetricsRow | None:
    """The row in a line; None if a killed process left it incomplete."""
    try:
        row = json_of(line) if line.endswith(b"\n") else None
    except ValueError:
        return None
    return row if isinstance(row, dict) and "event" in row else None


def _cut(value: Any) -> Any:
    text = isinstance(value, str) and len(value) > LONGEST
    return f"{value[:LONGEST]} …" if text else value


def _plain(value: Any) -> Any:
    """A value in strict JSON. Numbers of numpy and torch become plain numbers."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    number = float(value)
    return number if math.isfinite(number) else str(number)


class MetricsTail:
    """Rows added to a file since the last call. An incomplete last line is left for the next call."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = self._offset = 0
        self._seen: set[int] = set()

    def rows(self) -> Iterator[MetricsRow]:
        """The new rows, also if a resumed run has replaced the file. Incomplete lines are skipped."""
        try:
            with self._path.open("rb") as file:
                if (number := os.fstat(file.fileno()).st_ino) != self._file:
                    self._file, self._offset = number, 0
                file.seek(self._offset)
                content = file.read()
        except FileNotFoundError:
            return
        whole = content[: content.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.splitlines(keepends=True):
            is_new = hash(line) not in self._seen
            self._seen.add(hash(line))
            if is_new and (row := _row_of(line)):
                yield row


@dataclass
class History:
    """The history of a run, from its rows. A step that was repeated after a resume counts once, with its last row."""

    method: str | None = None
    total: int = 0
    done: int = 0
    """The last completed step."""
    steps: dict[int, MetricsRow] = field(default_factory=dict)
    evaluations: dict[int, MetricsRow] = field(default_factory=dict)
    """Keyed by the step after which they ran."""
    saved: list[str] = field(default_factory=list)
    """The names of the checkpoints in the run's folder, which may have been moved."""
    notes: list[str] = field(default_factory=list)
    samples: dict[int, list[SampleRow]] = field(default_factory=dict)
    """Keyed by the step in which the model gave these answers."""
    end: MetricsRow = field(default_factory=dict)
    """The row about the end of the run; empty while it runs."""
    began: float | None = None
    last: float | None = None
    took: dict[int, tuple[float, int]] = field(default_factory=dict)
    """By step: seconds and steps since the row before, without evaluations."""
    _since: float = 0.0
    _attempt: int = 0
    """The last step completed before this attempt."""

    def add(self, row: MetricsRow) -> None:
        """Add a row."""
        event, when = row["event"], float(row.get("time", 0))
        self.last = when
        self.began = when if self.began is None else self.began
        if event == "begin":
            self._begin(row, when)
        elif event == "step":
            self._step(row, when)
        elif event == "eval":
            self._evaluated(row)
        elif event == "saved":
            name = Path(row["checkpoint"]).name
            self.saved = [*(each for each in self.saved if each != name), name]
        elif event == "note":
            self.notes.append(str(row["text"]))
        elif event == "samples":
            self.samples[int(row["step"])] = list(row["samples"])
        elif event == "end":
            self.end = row

    @property
    def outcome(self) -> str | None:
        """How the run ended; None while it runs."""
        return str(self.end["outcome"]) if self.end else None

    def _begin(self, row: MetricsRow, when: float) -> None:
        self.total, self.done = int(row["steps"]), int(row.get("done", 0))
        self.method, self.end = row.get("method"), {}
        behind: tuple[dict[int, Any], ...] = (self.steps, self.evaluations, self.samples, self.took)
        for rows in behind:
            for step in [step for step in rows if step > self.done]:
                del rows[step]
        self._since, self._attempt = when, self.done

    def _step(self, row: MetricsRow, when: float) -> None:
        step = int(row["step"])
        self.took[step] = (when - self._since, step - self.done)
        self.steps[step] = row
        self.done, self._since = step, when

    def _evaluated(self, row: MetricsRow) -> None:
        """Record an evaluation, in which nothing is trained."""
        self.evaluations[int(row["step"])] = row
        self._since += number(row, "seconds") or 0.0

    def latest(self, name: str) -> float | None:
        """The value in the last completed step; None if it has none."""
        return number(self.steps[self.done], name) if self.done in self.steps else None

    def series(self, name: str) -> list[tuple[int, float]]:
        """All values of this name, sorted by step; names that begin with eval_ are those of evaluations."""
        rows = self.evaluations if name.startswith("eval_") else self.steps
        found = ((step, number(row, name)) for step, row in sorted(rows.items()))
        return [(step, value) for step, value in found if value is not None]

    def measured(self) -> list[str]:
        """The names of all values of steps and evaluations, in order of appearance."""
        names = dict.fromkeys(name for row in self.steps.values() for name in row)
        names |= dict.fromkeys(
            name.removeprefix("eval_") for row in self.evaluations.values() for name in row if "eval_" in name
        )
        return [name for name in names if name not in ("event", "step", "time")]

    def speeds(self) -> list[tuple[int, float]]:
        """Tokens per second of each step, over all ranks: since the previous row, without the time of evaluations."""
        tokens = {step: number(row, "tokens") for step, row in sorted(self.steps.items())}
        spent = {step: seconds for step, (seconds, _) in self.took.items() if seconds > 0}
        return [(step, count / spent[step]) for step, count in tokens.items() if count and step in spent]

    @property
    def speed(self) -> float | None:
        """Tokens per second of all ranks over the last steps."""
        seconds, steps = self._recent()
        tokens = [count for step in steps if (count := number(self.steps[step], "tokens")) is not None]
        return sum(tokens) / seconds if seconds and tokens and len(tokens) == len(steps) else None

    @property
    def left(self) -> float | None:
        """Estimated seconds until the last step, at the speed of the last steps."""
        seconds, steps = self._recent()
        done = sum(self.took[step][1] for step in steps)
        return (self.total - self.done) * seconds / max(done, 1) if seconds else None

    def _recent(self) -> tuple[float, list[int]]:
        """The last steps of this attempt, and how many seconds they took."""
        steps = [step for step in islice(reversed(self.took), SPEED_STEPS) if step > self._attempt]
        return sum(self.took[step][0] for step in steps), steps


def number(row: Mapping[str, Any], name: str) -> float | None:
    """A measured value, NaN and infinities included; None if it is absent or not a number."""
    value = row.get(name)
    try:
        return None if value is None else float(value)
    except (TypeError, ValueError):
        return None


def history_of(output: Path) -> History:
    """The history of the run in `output`; empty if nothing was reported yet."""
    history = History()
    for row in MetricsTail(output / METRICS_FILE).rows():
        history.add(row)
    return history


def begun(output: Path) -> bool:
    """Whether the last attempt at the run in `output` completed a step."""
    events = [row["event"] for row in MetricsTail(output / METRICS_FILE).rows()]
    since = max((at for at, event in enumerate(events) if event in ("begin", "end")), default=0)
    return not {"step", "first"}.isdisjoint(events[since:])
