"""The report is one file that opens offline, and draws what was measured: one point, none, NaN, a hundred thousand."""

from __future__ import annotations

import json
import math
import random
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from reshard.train.show import report
from reshard.train.show.chart import decimated, means, svg, ticks
from reshard.train.show.monitor import History, append

RECORD = {
    "method": "sft",
    "model": "/models/Qwen3-8B",
    "layout": {"kind": "fsdp2", "tp": 1},
    "options": {"learning_rate": "1e-5", "note": "<script>alert(1)</script>"},
    "versions": {"torch": "2.13.0"},
    "plan": {"world size": 8},
}


def history(count: int, outcome: str | None = None, **metrics: Any) -> History:
    found = History()
    found.add({"event": "begin", "steps": 10, "done": 0, "time": 1e9})
    for step in range(1, count + 1):
        row = {"loss": 4.0 / step, "learning_rate": 1e-5, **metrics}
        found.add({"event": "step", "step": step, "time": 1e9 + step, **row})
    if outcome:
        found.add({"event": "end", "outcome": outcome, "time": 2e9})
    return found


class Parser(HTMLParser):
    """Checks that tags are closed in their order, and gathers what they refer to."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []
        self.names: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href")]
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def parsed(page: str) -> Parser:
    parser = Parser()
    parser.feed(page)
    assert parser.open == []
    return parser


def charts(page: str) -> list[ElementTree.Element]:
    return [ElementTree.fromstring(text) for text in re.findall(r"<svg.*?</svg>", page)]


def numbers(chart: ElementTree.Element) -> list[float]:
    """All coordinates of lines and dots."""
    texts = [element.get("points", "") for element in chart.iter("polyline")]
    texts += [f"{dot.get('cx')},{dot.get('cy')}" for dot in chart.iter("circle")]
    return [float(number) for text in texts for number in re.split("[ ,]", text)]


@pytest.mark.parametrize("count", [0, 1, 2, 150])
def test_the_page_is_whole_and_refers_to_nothing_outside(count: int) -> None:
    page = report.page(RECORD, history(count))
    parser = parsed(page)
    assert parser.links == [] and "@import" not in page and "url(" not in page and "fetch(" not in page
    assert len(charts(page)) == (2 if count else 0)
    for chart in charts(page):
        assert all(0 <= number <= 900 for number in numbers(chart))


def test_what_the_record_says_is_text_and_not_code() -> None:
    page = report.page(RECORD, history(1))
    assert "<script>alert" not in page and "&lt;script&gt;alert(1)" in page
    for text in ("sft · Qwen3-8B", "kind fsdp2 · tp 1", "2.13.0", "world size", "last update"):
        assert text in page


@pytest.mark.parametrize(
    ("outcome", "reloads"), [(None, True), ("trained", True), ("done", False), ("failed", False)]
)
def test_the_page_reloads_itself_while_the_run_goes_on(outcome: str | None, reloads: bool) -> None:
    assert ('<meta http-equiv="refresh"' in report.page(RECORD, history(3, outcome))) == reloads


def test_only_what_was_measured_is_drawn() -> None:
    assert "reward" not in report.page({}, history(3))
    assert len(charts(report.page({}, history(3, reward=0.5, grad_norm=1.0)))) == 4


def test_one_point_is_a_dot_and_a_constant_is_drawn() -> None:
    (dot,) = ElementTree.fromstring(svg("loss", [(7, 0.0)])).iter("circle")
    assert 0 < float(dot.get("cx") or 0) < 900
    line = ElementTree.fromstring(svg("loss", [(1, 2.0), (2, 2.0)]))
    assert len(list(line.iter("polyline"))) == 1


def test_what_is_no_number_breaks_the_line_and_is_marked() -> None:
    points = [(1, 3.0), (2, 2.0), (3, math.nan), (4, math.inf), (50, 1.0), (51, 1.5)]
    chart = ElementTree.fromstring(svg("loss", points))
    assert len(list(chart.iter("polyline"))) == 2
    assert [mark.findtext("title") for mark in chart.iter("path")] == [
        "step 3 is no number",
        "step 4 is no number",
    ]
    everywhere = ElementTree.fromstring(svg("loss", [(step, math.nan) for step in range(5000)]))
    assert 200 < len(list(everywhere.iter("path"))) < 300
    assert ElementTree.fromstring(svg("loss", [(1, math.nan)])).find("path") is not None


def test_many_points_become_few_and_no_extreme_is_lost() -> None:
    random.seed(0)
    points = [(step, random.gauss(1, 0.1)) for step in range(100_000)]
    points[54_321], points[77_777], points[10] = (54_321, 40.0), (77_777, -3.0), (10, math.nan)
    kept = list(decimated(points))
    assert len(kept) <= 4 * 900 + 1
    assert {points[0], points[-1], points[54_321], points[77_777]} <= set(kept)
    assert any(math.isnan(value) for _, value in kept)
    assert [step for step, _ in kept] == sorted(step for step, _ in kept)
    assert len(svg("loss", points)) < 300_000


def test_the_mean_follows_the_points() -> None:
    assert means([(step, 2.0) for step in range(200)]) == [(step, 2.0) for step in range(200)]
    assert means([(1, 1.0), (2, math.nan), (3, 3.0)]) == [(1, 1.0), (3, 3.0)]


def test_ticks_are_round() -> None:
    assert ticks(0.13, 4.2, 5) == [1, 2, 3, 4]
    assert ticks(-2e-6, 1.1e-5, 5) == pytest.approx([0.0, 5e-6, 1e-5])


def test_checks_are_told(tmp_path: Path) -> None:
    page = report.page(RECORD, history(2, "done"), [("bits", "equal", True), ("template", "lost", False)])
    assert page.count('class="right"') == 1 and page.count('class="wrong"') == 1


def test_the_report_of_an_output_is_written_whole(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps(RECORD))
    append(tmp_path, {"event": "begin", "steps": 1})
    append(tmp_path, {"event": "step", "step": 1, "loss": 2.0})
    path = report.write(tmp_path)
    assert path == tmp_path / "report.html" and len(charts(path.read_text())) == 1
    assert {file.name for file in tmp_path.iterdir()} == {"run.json", "metrics.jsonl", "report.html"}
