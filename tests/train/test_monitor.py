"""Reports are recorded, and records are shown again: the line, the speed, the time left."""

from __future__ import annotations

import json
import math
import resource
import shutil
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from reshard.base.errors import ReshardError
from reshard.training.run import Run
from reshard.training.show import html_report, progress_display, trackers
from reshard.training.show.html_report import clock, short
from reshard.training.show.metrics import (
    METRICS_FILE,
    History,
    MetricsTail,
    MetricsWriter,
    append,
    history_of,
)
from reshard.training.show.progress_display import ProgressDisplay, evaluated, words


def run_in(folder: Path, **fields: Any) -> Run:
    return Run("sft", folder, folder, folder, **fields)


def told(*rows: dict[str, Any]) -> History:
    history = History()
    for row in rows:
        history.add(row)
    return history


def steps(*numbers: int, begin: float = 0.0, each: float = 2.0, **metrics: Any) -> list[dict[str, Any]]:
    return [
        {"event": "step", "step": number, "time": begin + each * count, **metrics}
        for count, number in enumerate(numbers, 1)
    ]


def test_only_rank_0_writes(tmp_path: Path) -> None:
    for rank in (0, 1):
        MetricsWriter(run_in(tmp_path), rank).begin(3)
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 1


def test_rows_are_strict_json_whatever_was_measured(tmp_path: Path) -> None:
    monitor = MetricsWriter(run_in(tmp_path), 0)
    monitor.step(1, loss=math.nan, grad_norm=math.inf, learning_rate=np.float32(0.5), tokens=7)

    def refuse(constant: str) -> None:
        raise ValueError(constant)

    row = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)
    assert row.pop("time") > 1e9
    assert row == {
        "event": "step",
        "step": 1,
        "loss": "nan",
        "grad_norm": "inf",
        "learning_rate": 0.5,
        "tokens": 7,
    }
    history = history_of(tmp_path)
    assert math.isnan(history.latest("loss") or 0) and history.latest("grad_norm") == math.inf


def test_a_line_that_is_not_finished_waits(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"event": "note", "text": "a"}\n{"event": "no')
    tail = MetricsTail(file)
    assert [row["text"] for row in tail.rows()] == ["a"]
    assert list(tail.rows()) == []
    with file.open("a") as more:
        more.write('te", "text": "b"}\nbroken by a kill\n[1]\n')
    assert [row["text"] for row in tail.rows()] == ["b"]


def test_steps_that_are_trained_again_have_one_row_and_a_reader_misses_none(tmp_path: Path) -> None:
    metrics, tail = MetricsWriter(run_in(tmp_path), 0), MetricsTail(tmp_path / METRICS_FILE)
    metrics.begin(4)
    for step in (1, 2, 3):
        metrics.step(step, loss=1.0)
        metrics.evaluated(step, eval_loss=1.0)
    metrics.samples(3, [])
    metrics.saved(tmp_path / "checkpoint-2")
    seen = [*tail.rows()]
    with (tmp_path / METRICS_FILE).open("a") as file:
        file.write('{"event": "step", "st')  # killed
    MetricsWriter(run_in(tmp_path), 0).begin(4, 2)
    metrics.step(3, loss=2.0)
    assert [(row["event"], row.get("step")) for row in tail.rows()] == [("begin", None), ("step", 3)]
    metrics.evaluated(3, eval_loss=2.0)
    rows = [json.loads(line) for line in (tmp_path / METRICS_FILE).read_text().splitlines()]
    assert [row["loss"] for row in rows if row["event"] == "step"] == [1.0, 1.0, 2.0]
    assert [row["eval_loss"] for row in rows if row["event"] == "eval"] == [1.0, 1.0, 2.0]
    assert [row["event"] for row in rows].count("begin") == 2 and "samples" not in {
        row["event"] for row in rows
    }
    assert [row["event"] for row in seen].count("step") == 3
    assert history_of(tmp_path).saved == ["checkpoint-2"]


def test_rows_that_an_older_version_left_twice_are_dropped(tmp_path: Path) -> None:
    for loss in (1.0, 2.0):
        append(tmp_path, {"event": "begin", "steps": 3, "done": 0})
        append(tmp_path, {"event": "step", "step": 1, "loss": loss})
    MetricsWriter(run_in(tmp_path), 0).begin(3, 1)
    rows = [json.loads(line) for line in (tmp_path / METRICS_FILE).read_text().splitlines()]
    assert [row["loss"] for row in rows if row["event"] == "step"] == [2.0]


def test_a_row_that_does_not_fit_on_the_disk_is_not_torn(tmp_path: Path) -> None:
    append(tmp_path, {"event": "begin", "steps": 9})
    before = (tmp_path / "metrics.jsonl").read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 10, limits[1]))
    try:
        with pytest.raises(OSError):
            append(tmp_path, {"event": "note", "text": "too long"})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_listeners_hear_what_is_written(tmp_path: Path) -> None:
    heard: list[dict[str, Any]] = []
    MetricsWriter(run_in(tmp_path), 0, [heard.append]).note("a")
    assert [row["text"] for row in heard] == ["a"] and "time" in heard[0]


def test_steps_that_are_run_again_replace_the_older() -> None:
    history = told(
        {"event": "begin", "steps": 6, "done": 0, "time": 0.0},
        *steps(1, 2, 3, 4, loss=9.0),
        {"event": "end", "outcome": "interrupted", "time": 9.0},
        {"event": "begin", "steps": 6, "done": 2, "time": 100.0},
        *steps(3, begin=100.0, loss=1.0),
    )
    assert history.series("loss") == [(1, 9.0), (2, 9.0), (3, 1.0)]
    assert (history.done, history.outcome) == (3, None)


def test_speed_and_time_left_are_those_of_the_last_steps() -> None:
    slow = steps(1, 2, each=100.0, tokens=10)
    fast = steps(*range(3, 43), begin=200.0, each=2.0, tokens=10)
    history = told({"event": "begin", "steps": 142, "done": 0, "time": 0.0}, *slow, *fast)
    assert history.speed == 5.0
    assert history.left == 200.0


def test_what_was_not_measured_is_not_told() -> None:
    assert words(told({"event": "begin", "steps": 4, "done": 0, "time": 0.0})) == "step 0/4"
    row = steps(1, loss=1.25, learning_rate=1e-5, tokens=3000, memory=4.2e9)
    history = told({"event": "begin", "steps": 4, "done": 0, "time": 0.0}, *row)
    assert words(history) == "step 1/4  loss 1.2500  lr 1.0e-05  1.5k tok/s  3.9 GiB  0:00:06 left"
    assert History().speed is None and History().left is None


@pytest.mark.parametrize(
    ("method", "measured", "line"),
    [
        ("sft", {"loss": 1.25, "mean_token_accuracy": 0.5}, "loss 1.2500  token accuracy 0.5000"),
        (
            "dpo",
            {"loss": 0.69, "rewards/accuracies": 0.75, "rewards/margins": 0.01},
            "accuracy 0.7500  margin 0.0100  loss 0.6900",
        ),
        ("grpo", {"loss": 1e-9, "reward": 0.25, "kl": 0.5}, "reward 0.2500  KL divergence 0.5000"),
        ("unheard-of", {"loss": 2.0, "reward": 1.0}, "loss 2.0000"),
    ],
)
def test_each_method_shows_what_tells_how_it_goes(
    method: str, measured: dict[str, float], line: str, tmp_path: Path
) -> None:
    run = Run(method, tmp_path, tmp_path, tmp_path)
    metrics = MetricsWriter(run, 0)
    metrics.begin(4)
    metrics.step(1, **measured)
    history = history_of(tmp_path)
    assert words(history).removesuffix("  0:00:00 left") == f"step 1/4  {line}"
    row = {"event": "eval", "step": 1, **{f"eval_{name}": value for name, value in measured.items()}}
    assert evaluated(row, history.method) == f"after step 1  {line}"
    begin = json.loads((tmp_path / METRICS_FILE).read_text().splitlines()[0])
    assert begin["headline"][0] in measured


def test_the_checkpoints_of_a_copied_run_are_in_the_copy(tmp_path: Path) -> None:
    run, copy = tmp_path / "run", tmp_path / "copy"
    (run / "checkpoint-2").mkdir(parents=True)
    append(run, {"event": "saved", "checkpoint": str(run / "checkpoint-2")})
    shutil.copytree(run, copy)
    assert f"<li>{copy / 'checkpoint-2'}</li>" in html_report.write(copy).read_text()


def shown(folder: Path, terminal: bool, quiet: bool = False) -> str:
    console = Console(file=StringIO(), force_terminal=terminal, width=120)
    with ProgressDisplay(run_in(folder), console, quiet=quiet) as display:
        for row in ({"event": "begin", "steps": 3, "time": 0.0}, *steps(1, 2, 3, loss=1.5)):
            display.add(row)
        display.add({"event": "saved", "checkpoint": "checkpoint-3"})
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def test_a_log_gets_lines_now_and_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(tmp_path, terminal=False).splitlines() == [
        "step 0/3",
        "step 3/3  loss 1.5000",
        "saved checkpoint-3",
    ]
    monkeypatch.setattr(progress_display, "PLAIN_SECONDS", 0.0)
    assert len(shown(tmp_path, terminal=False).splitlines()) == 5


def test_a_terminal_has_one_line_that_is_redrawn(tmp_path: Path) -> None:
    text = shown(tmp_path, terminal=True)
    assert "step 3/3" in text and "━" in text and "\x1b[2K" in text


@pytest.mark.parametrize("width", [30, 60, 80, 120])
def test_the_line_is_no_wider_than_the_terminal(width: int, tmp_path: Path) -> None:
    row = steps(1, loss=1.25, learning_rate=1e-5, tokens=3000, memory=61e9)
    console = Console(file=StringIO(), force_terminal=True, color_system=None, width=width)
    display = ProgressDisplay(run_in(tmp_path), console)
    display.history = told({"event": "begin", "steps": 100000, "done": 0, "time": 0.0}, *row)
    (line,) = console.render_lines(display._line(), pad=False)
    text = "".join(segment.text for segment in line)
    assert len(text) <= width
    assert text.endswith("left") == (width >= 80) and ("╌" in text) == (width == 120)


def test_colours_are_left_out_where_nobody_wants_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    text = shown(tmp_path, terminal=True)
    assert "\x1b[36m" not in text and "step 3/3" in text


def test_nothing_is_shown_where_it_is_quiet(tmp_path: Path) -> None:
    assert shown(tmp_path, terminal=False, quiet=True) == shown(tmp_path, terminal=True, quiet=True) == ""


def test_a_report_that_cannot_be_written_ends_nothing(tmp_path: Path) -> None:
    console = Console(file=StringIO())
    with ProgressDisplay(run_in(tmp_path / "gone"), console) as display:
        display.add({"event": "begin", "steps": 2, "done": 0, "time": 1.0})
    assert console.file.getvalue() == "step 0/2\n"  # type: ignore[attr-defined]


def test_numbers_and_times_are_short() -> None:
    assert [short(value) for value in (0, 999, 12345, 4.1e6, 3e9)] == ["0", "999", "12.3k", "4.1M", "3.0G"]
    assert [clock(value) for value in (0, 61, 3600, 90061)] == ["0:00:00", "0:01:01", "1:00:00", "1d 1:01:01"]


def test_a_tracker_that_is_not_there_is_refused_before_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers, "TRACKER_MODULES", {"tensorboard": ("no_such_module",), "wandb": ("json",)})
    with pytest.raises(ReshardError, match="tensorboard is not installed") as caught:
        trackers.check(run_in(tmp_path, options={"report_to": "tensorboard,wandb"}))
    assert len(caught.value.problems) == 1
    trackers.check(run_in(tmp_path, options={"report_to": "none"}))
    trackers.check(run_in(tmp_path, options={"report_to": ["wandb", "mlflow"]}))
    with pytest.raises(ReshardError, match="does not write to this tracker"):
        trackers.check(run_in(tmp_path, engine="megatron", options={"report_to": "mlflow"}))


def test_trl_writes_to_trackers_itself(tmp_path: Path) -> None:
    assert trackers.listeners(run_in(tmp_path, options={"report_to": "tensorboard"})) == []


def test_tensorboard_gets_every_number_of_a_step(tmp_path: Path) -> None:
    events = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="pip install tensorboard"
    )
    run = run_in(tmp_path, engine="megatron", options={"report_to": "tensorboard"})
    monitor = MetricsWriter(run, 0, trackers.listeners(run))
    monitor.begin(2)
    monitor.step(1, loss=2.0, learning_rate=0.5)
    monitor.step(2, loss=1.0)
    monitor.evaluated(2, eval_loss=1.5, seconds=3.0)
    found = events.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in found.Scalars("train/loss")] == [(1, 2.0), (2, 1.0)]
    assert len(found.Scalars("train/learning_rate")) == 1
    assert [(event.step, event.value) for event in found.Scalars("eval/loss")] == [(2, 1.5)]
