"""The report is one file that opens offline, and draws all measurements: one point, none, NaN, a hundred thousand."""

from __future__ import annotations

import html
import json
import math
import random
import re
import subprocess
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path
from shutil import which
from typing import Any
from xml.etree import ElementTree

import pytest

from reshard.pages.page_files import charts_script
from reshard.training.run import Run
from reshard.training.show import html_report
from reshard.training.show.chart_series import CHART_COLUMNS, ChartSeries, chart, means, thinned
from reshard.training.show.metrics import History, MetricsWriter, append
from tests.commandline import reshard

RECORD = {
    "method": "sft",
    "model": "/models/Qwen3-8B",
    "layout": {"kind": "fsdp2", "tp": 1},
    "options": {"learning_rate": "1e-5", "note": "<script>alert(1)</script>"},
    "versions": {"torch": "2.13.0"},
    "plan": {"world size": 8},
}


DRAW = """
require('./charts.js');
const names = [], style = () => '#888';
let scale = '';
const chosen = name => name === scale;
%(functions)s
const drawn = ['', 'logarithmic'].map(each => {
  scale = each;
  const chart = echarts.init(null, null, { renderer: 'svg', ssr: true, width: 600, height: 260 });
  chart.setOption(options(%(chart)s));
  const drawing = chart.renderToSVGString();
  chart.dispose();
  return drawing;
});
console.log(JSON.stringify(drawn));
"""
"""The page's own functions, called by node."""


def history(
    count: int,
    outcome: str | None = None,
    *,
    method: str | None = None,
    samples: list[dict[str, Any]] | None = None,
    failure: dict[str, Any] | None = None,
    resume: str | None = None,
    **metrics: Any,
) -> History:
    found = History()
    found.add({"event": "begin", "steps": 10, "done": 0, "time": 1e9, "method": method})
    for step in range(1, count + 1):
        row = {"loss": 4.0 / step, "learning_rate": 1e-5, **metrics}
        found.add({"event": "step", "step": step, "time": 1e9 + step, **row})
    if samples:
        found.add({"event": "samples", "step": 1, "samples": samples, "time": 1e9 + count})
    if outcome:
        end = {"failure": failure, "resume": resume}
        found.add({"event": "end", "outcome": outcome, "time": 2e9, **{k: v for k, v in end.items() if v}})
    return found


class Parser(HTMLParser):
    """Checks that tags are closed in order, and collects their references."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []
        self.names: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href")]
        if tag not in ("meta", "input"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def parsed(page: str) -> Parser:
    parser = Parser()
    parser.feed(page)
    assert parser.open == []
    return parser


def plots(page: str) -> list[dict[str, Any]]:
    """The data of each chart."""
    return [json.loads(html.unescape(text)) for text in re.findall(r"data-chart='(.*?)'", page)]


def titles(page: str) -> list[str]:
    """The charts of a page, in their order."""
    return re.findall(r'<section class="chart[^>]*>\s*<h2>(.*?)(?: <span|</h2>)', page)


def shown(found: History, record: dict[str, Any] | None = None, name: str = "out") -> html_report.ShownRun:
    return html_report.ShownRun(name, RECORD if record is None else record, found)


def page_of(found: History, record: dict[str, Any] | None = None) -> str:
    return html_report.page([shown(found, record)])


@pytest.mark.parametrize("count", [0, 1, 2, 150])
def test_the_page_is_whole_and_refers_to_nothing_outside(count: int) -> None:
    page = page_of(history(count))
    parser = parsed(page)
    own = page.replace(charts_script(), "")
    assert parser.links == [] and "@import" not in own and "url(" not in own and "fetch(" not in own
    assert titles(page) == (["loss", "learning rate"] if count else [])
    assert len(plots(page)) == len(titles(page))
    assert ("Nothing has been measured" in page) == (count == 0)
    for plot in plots(page):
        assert [step for step, _ in plot["runs"][0]["points"]] == list(range(1, count + 1))


def test_what_the_record_says_is_text_and_not_code() -> None:
    hostile = history(1, samples=[{"prompt": "<img src=x onerror=alert(1)>", "completion": "</script>"}])
    page = page_of(hostile)
    assert "<script>alert" not in page and "&lt;script&gt;alert(1)" in page
    assert "<img" not in page and page.count("</script>") == 2
    for text in ("sft · Qwen3-8B", "layout.kind", "2.13.0", "plan.world size", "last update"):
        assert text in page
    names = html_report.page([shown(history(1), name="</script><b>"), shown(history(1))])
    assert names.count("</script>") == 2 and "<b>" not in names.split("<main")[1].split("Configuration")[0]


@pytest.mark.parametrize(
    ("outcome", "reloads"), [(None, True), ("trained", True), ("done", False), ("failed", False)]
)
def test_the_page_reloads_itself_while_the_run_goes_on(outcome: str | None, reloads: bool) -> None:
    assert ('<meta http-equiv="refresh"' in page_of(history(3, outcome))) == reloads


def test_the_headline_of_the_method_comes_first_and_the_rest_is_folded() -> None:
    measured = {"reward": 0.5, "kl": 0.1, "grad_norm": 1.0, "memory": 2e9, "tokens": 64, "entropy": 1.0}
    page = page_of(history(3, method="grpo", **measured))
    assert titles(page) == [
        *("reward", "KL divergence"),
        *("learning rate", "gradient norm", "tokens per second", "memory (GiB)", "loss"),
        "entropy",
    ]
    folded = page[page.index("<details>") :]
    assert titles(folded) == ["entropy"]
    facts = page[page.index('class="facts"') : page.index('class="controls"')]
    assert "<b>0.5000</b><span>reward</span>" in facts and "loss" not in facts
    assert "<b>64</b><span>tokens per second</span>" in facts and "<b>1.9 GiB</b>" in facts


def test_speed_is_told_for_each_step_without_evaluations_and_pauses() -> None:
    found = History()
    rows: list[dict[str, Any]] = [
        {"event": "begin", "steps": 9, "done": 0, "time": 100.0},
        {"event": "step", "step": 1, "tokens": 100, "time": 110.0},
        {"event": "step", "step": 2, "tokens": 100, "time": 112.0},
        {"event": "eval", "step": 2, "seconds": 50.0, "time": 162.0},
        {"event": "step", "step": 3, "tokens": 100, "time": 164.0},
        {"event": "begin", "steps": 9, "done": 2, "time": 1000.0},
        {"event": "step", "step": 3, "tokens": 100, "time": 1004.0},
        {"event": "step", "step": 5, "tokens": 300, "time": 1007.0},
    ]
    for row in rows:
        found.add(row)
    assert found.speeds() == [(1, 10.0), (2, 50.0), (3, 25.0), (5, 100.0)]


def test_why_a_run_failed_comes_first_with_what_to_do() -> None:
    problem = {
        "code": "vocab-index",
        "certainty": "sure",
        "title": "An id",
        "cause": "`x` < 3",
        "cure": "a cure",
    }
    failure = {"who": "rank 1 failed first", "shown": ["IndexError: <no>"], "problems": [problem]}
    page = page_of(history(3, "failed", failure=failure, resume="reshard train --resume"))
    told = page[page.index('<section class="failure') : page.index('class="facts"')]
    for text in ("rank 1 failed first", "An id", "<code>x</code> &lt; 3", "a cure", "vocab-index, sure"):
        assert text in told
    assert "IndexError: &lt;no&gt;" in told and "reshard train --resume" in told
    assert "failure" not in page_of(history(3, "done")).split("<main")[1]


def test_an_attempt_that_goes_on_forgets_how_the_one_before_ended() -> None:
    found = history(3, "failed", failure={"who": "rank 0", "shown": [], "problems": []})
    found.add({"event": "begin", "steps": 10, "done": 2, "time": 3e9})
    assert found.outcome is None and "rank 0" not in page_of(found)


def test_answers_of_the_last_step_are_shown_and_earlier_ones_folded(tmp_path: Path) -> None:
    metrics = MetricsWriter(Run("grpo", tmp_path, tmp_path, tmp_path), 0)
    metrics.begin(9)
    for step in range(1, 10):
        metrics.step(step, reward=1.0)
        metrics.samples(step, [{"prompt": "p", "completion": f"answer {step} " + "x" * 5000, "r": 0.5}] * 9)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    kept = [row["samples"] for row in rows if row["event"] == "samples"]
    assert len(kept) == 9 and all(len(each) == 4 and len(each[0]["completion"]) < 2100 for each in kept)
    page = html_report.write(tmp_path).read_text()
    steps = re.findall(r"<h3>Step (\d+)</h3>", page)
    assert steps[0] == "9" and "1" in steps and len(steps) == 4
    assert page.index("answer 9") < page.index("Earlier steps") < page.index("answer 1 ")
    assert "<span>r <b>0.5</b></span>" in page


def test_what_is_no_number_breaks_the_line_and_is_marked() -> None:
    points = [(1, 3.0), (2, 2.0), (3, math.nan), (4, math.inf), (50, 1.0), (51, 1.5)]
    found = chart("loss", [ChartSeries(points)])["content"]
    assert found["runs"][0]["points"] == [(1, 3.0), (2, 2.0), (3, None), (4, None), (50, 1.0), (51, 1.5)]
    assert found["broken"] == [3, 4] and found["positive"]
    everywhere = chart("loss", [ChartSeries([(step, math.nan) for step in range(5000)])])["content"]
    assert 200 < len(everywhere["broken"]) <= 400 and not everywhere["positive"]
    assert plots(page_of(history(1, loss="nan")))[0]["broken"] == [1]


@pytest.mark.skipif(which("node") is None, reason="node draws the charts")
def test_charts_are_drawn_on_both_scales_without_a_browser(tmp_path: Path) -> None:
    measured = [(1, 1e-6), (2, 1e-3), (3, 0.0), (4, math.nan), (5, 1.0), (6, 10.0)]
    found = chart("loss", [ChartSeries(measured, [(6, 2.0)])])["content"]
    script = (files("reshard.training.show") / "page" / "page.js").read_text()
    functions = script[script.index("function lines") : script.index("function draw")]
    (tmp_path / "charts.js").write_text(charts_script())
    (tmp_path / "draw.js").write_text(DRAW % {"functions": functions, "chart": json.dumps(found)})
    drawn = subprocess.run(
        ["node", tmp_path / "draw.js"], capture_output=True, text=True, check=True, timeout=300
    ).stdout
    linear, log = (ElementTree.fromstring(text) for text in json.loads(drawn))
    texts = [{each.text for each in plot.iter("{http://www.w3.org/2000/svg}text")} for plot in (linear, log)]
    assert {"2", "4", "6", "8", "10"} <= texts[0] and {"0.001", "1", "10"} & texts[1]


def test_means_are_drawn_over_what_jumps() -> None:
    points = [(step, float(step % 2)) for step in range(40)]
    jumping, steady = (
        chart("x", [ChartSeries(points)], noisy=noisy)["content"]["runs"][0] for noisy in (True, False)
    )
    assert jumping["means"][-1] == (39, pytest.approx(0.6)) and steady["means"] == []


def test_many_points_become_few_and_no_extreme_is_lost() -> None:
    random.seed(0)
    points = [(step, random.gauss(1, 0.1)) for step in range(100_000)]
    points[54_321], points[77_777], points[10] = (54_321, 40.0), (77_777, -3.0), (10, math.nan)
    kept = list(thinned(points))
    assert len(kept) <= 4 * CHART_COLUMNS + 1
    assert {points[0], points[-1], points[54_321], points[77_777]} <= set(kept)
    assert any(math.isnan(value) for _, value in kept)
    assert [step for step, _ in kept] == sorted(step for step, _ in kept)


def test_the_mean_follows_the_points() -> None:
    assert means([(step, 2.0) for step in range(200)]) == [(step, 2.0) for step in range(200)]
    assert means([(1, 1.0), (2, math.nan), (3, 3.0)]) == [(1, 1.0), (3, 2.0)]
    after = means([(step, 1e30 if step == 3 else 1.0) for step in range(40)])
    assert after[-1] == (39, 1.0)


def test_checks_are_told_and_stay(tmp_path: Path) -> None:
    append(tmp_path, {"event": "begin", "steps": 1})
    checks = [("bits", "equal", True), ("template", "lost", False)]
    append(tmp_path, {"event": "end", "outcome": "failed", "checks": checks})
    page = html_report.write(tmp_path).read_text()
    assert page.count('class="right"') == 1 and page.count('class="wrong"') == 1


def test_the_report_of_an_output_is_written_whole(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps(RECORD))
    append(tmp_path, {"event": "begin", "steps": 1})
    append(tmp_path, {"event": "step", "step": 1, "loss": 2.0})
    path = html_report.write(tmp_path)
    assert path == tmp_path / "report.html" and titles(path.read_text()) == ["loss"]
    assert {file.name for file in tmp_path.iterdir()} == {"run.json", "metrics.jsonl", "report.html"}


# --------------------------------------------------------------------------------------------- several runs


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    outputs = [tmp_path / name for name in ("slow", "fast")]
    for output, rate in zip(outputs, ("1e-5", "5e-5"), strict=True):
        output.mkdir()
        record = {**RECORD, "options": {"learning_rate": rate, "seed": 1}}
        (output / "run.json").write_text(json.dumps(record))
        append(output, {"event": "begin", "steps": 2, "method": "sft"})
        append(output, {"event": "step", "step": 1, "loss": float(rate)})
        append(output, {"event": "step", "step": 2, "loss": 0.5})
    append(outputs[0], {"event": "end", "outcome": "done"})
    return outputs


def test_several_runs_are_drawn_over_each_other(runs: list[Path], tmp_path: Path) -> None:
    page_at = tmp_path / "both.html"
    result = reshard("report", *runs, "--output", page_at)
    assert (result.code, result.err) == (0, "") and str(page_at) in result.out.replace("\n", "")
    page = page_at.read_text()
    parsed(page)
    assert titles(page) == ["loss"] and [each["points"][0] for each in plots(page)[0]["runs"]] == [
        [1, 1e-5],
        [1, 5e-5],
    ]
    differing = page[page.index("What differs") : page.index('class="controls"')]
    assert "options.learning_rate" in differing and "1e-5" in differing and "5e-5" in differing
    assert "seed" not in differing and "<meta http-equiv" not in page
    assert reshard("report", *runs, "-o", page_at, "--json").json == {
        "report": str(page_at),
        "runs": {"slow": "done", "fast": "running"},
    }


def test_the_report_of_one_run_is_drawn_again_at_its_place(runs: list[Path]) -> None:
    assert reshard("report", runs[0]).code == 0
    assert titles((runs[0] / "report.html").read_text()) == ["loss"]


def test_what_is_no_run_is_named_and_nothing_else_is_replaced(runs: list[Path], tmp_path: Path) -> None:
    own = tmp_path / "own.html"
    own.write_text("<p>mine</p>")
    (tmp_path / "folder").mkdir()
    result = reshard("report", runs[0], tmp_path / "nowhere", tmp_path / "folder", "-o", own)
    assert result.code == 2 and own.read_text() == "<p>mine</p>"
    for text in ("nowhere", "folder", "a file that reshard did not write", "-o"):
        assert text in result.err
    missing = reshard("report", tmp_path / "nowhere")
    assert missing.code == 2 and missing.err.count("error: ") == 1, missing.err
    unwritable = reshard("report", runs[0], "-o", tmp_path / "no" / "where.html")
    assert unwritable.code == 2 and "cannot be written" in unwritable.err


def test_a_run_that_has_only_begun_is_drawn(runs: list[Path]) -> None:
    (runs[0] / "metrics.jsonl").unlink()
    record = json.loads((runs[0] / "run.json").read_text())
    (runs[0] / "run.json").write_text(json.dumps({**record, "output": str(runs[0])}))
    assert reshard("report", runs[0]).code == 0


def test_a_checkpoint_is_not_its_run(runs: list[Path]) -> None:
    final = runs[0] / "final"
    final.mkdir()
    record = json.loads((runs[0] / "run.json").read_text())
    (final / "run.json").write_text(json.dumps({**record, "output": str(runs[0])}))
    result = reshard("report", final)
    assert (
        result.code == 2 and f"remedy: pass {runs[0]}" in result.err and not (final / "report.html").exists()
    )


def test_what_differs_between_machines_is_no_setting(runs: list[Path], tmp_path: Path) -> None:
    for number, run in enumerate(runs):
        record = json.loads((run / "run.json").read_text())
        more = {"command": ["torchrun", str(run)], "files": [str(number)], "memory": {"available": number}}
        (run / "run.json").write_text(json.dumps({**record, **more}))
    assert reshard("report", *runs, "-o", tmp_path / "both.html").code == 0
    page = (tmp_path / "both.html").read_text()
    differing = page[page.index("What differs") : page.index('class="controls"')]
    assert "options.learning_rate" in differing and "torchrun" not in differing and "memory" not in differing


def test_numbers_of_any_size_are_short() -> None:
    assert [html_report._number(value) for value in (0.25, 12_300, 4.1e9, 8.33e29)] == [
        "0.25",
        "12.3k",
        "4.1G",
        "8.33e+29",
    ]
