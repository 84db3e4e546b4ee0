"""`report.html`: a run in pictures and tables, in one file that opens offline and reloads itself while it goes on."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from html import escape
from pathlib import Path
from typing import Any

from reshard.train.run import RECORD
from reshard.train.show.chart import Point, svg
from reshard.train.show.display import clock, short
from reshard.train.show.monitor import History, history_of

REPORT = "report.html"
RELOAD = 5
"""Seconds after which the page of a run that goes on loads itself again."""
STATES = {
    None: "running",
    "trained": "trained; the final folder is made",
    "done": "done",
    "failed": "failed",
    "refused": "refused",
    "interrupted": "interrupted",
}
GOING_ON = (None, "trained")
CHARTS = {
    "loss": "loss",
    "reward": "reward",
    "learning_rate": "learning rate",
    "grad_norm": "gradient norm",
    "kl": "KL divergence from the reference",
    "rewards/accuracies": "how often the chosen answer is preferred",
}
"""What is drawn where it was measured; loss and learning rate always are."""
EVALUATED = ("loss", "reward", "rewards/accuracies")
"""Beside these is drawn what evaluations measured."""
ALWAYS = ("loss", "learning_rate")

Check = tuple[str, str, bool]
"""What was checked, what was found, and whether that is right."""


def write(output: Path, history: History | None = None, checks: Sequence[Check] = ()) -> Path:
    """Write the report of the run in `output`, whole or not at all; where it lies."""
    record: dict[str, Any] = {}
    with suppress(OSError, ValueError):
        record = json.loads((output / RECORD).read_text(encoding="utf-8"))
    path = output / REPORT
    partial = output / f".{REPORT}.{os.getpid()}"
    partial.write_text(page(record, history or history_of(output), checks), encoding="utf-8")
    partial.replace(path)
    return path


def page(record: Mapping[str, Any], history: History, checks: Sequence[Check] = ()) -> str:
    """The whole page."""
    title = f"{record.get('method', 'train')} · {Path(str(record.get('model', ''))).name}"
    reload = f'<meta http-equiv="refresh" content="{RELOAD}">' if history.outcome in GOING_ON else ""
    body = "".join(_body(title, record, history, checks))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"{reload}<title>{escape(title)}</title><style>{_STYLE}</style></head>"
        f"<body><main>{body}</main><script>{_SCRIPT}</script></body></html>\n"
    )


def _body(title: str, record: Mapping[str, Any], history: History, checks: Sequence[Check]) -> Iterator[str]:
    state = STATES.get(history.outcome, str(history.outcome))
    yield f'<h1>{escape(title)}</h1><p class="state {history.outcome or "running"}">{escape(state)}'
    if history.last:
        when = time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(history.last))
        yield f'<span class="when" data-time="{history.last:.0f}">last update {when}</span>'
    yield "</p>"
    if isinstance(record.get("plan"), str):
        yield f"<p>{escape(record['plan'])}</p>"
    yield _facts(history)
    for name, words in CHARTS.items():
        points = history.series(name)
        beside = history.series(f"eval_{name}") if name in EVALUATED else []
        if points or beside or name in ALWAYS:
            drawn = (
                svg(words, points, beside, noisy=name != "learning_rate")
                if points or beside
                else '<p class="none">nothing measured yet</p>'
            )
            yield f"<section><h2>{escape(words)}{_legend(beside)}</h2>{drawn}</section>"
    if checks:
        yield _table("The result, checked", [(what, found, right) for what, found, right in checks])
    if history.saved:
        yield _table("Checkpoints", [(path.name, str(path), None) for path in history.saved])
    if history.notes:
        yield _table("Notes", [(str(number), note, None) for number, note in enumerate(history.notes, 1)])
    yield from _record(record)


def _legend(beside: Sequence[Point]) -> str:
    if not beside:
        return ""
    step, value = beside[-1]
    return f'<span class="beside">● on evaluation data: {value:.4f} after step {step}</span>'


def _facts(history: History) -> str:
    """The numbers that one looks for first."""
    loss, speed, memory = history.latest("loss"), history.speed, history.latest("memory")
    left, spent = history.left, (history.last or 0) - (history.began or 0)
    facts = {
        "step": f"{history.done} of {history.total}" if history.total else "–",
        "loss": f"{loss:.4f}" if loss is not None else "–",
        "tokens per second": short(speed) if speed is not None else "–",
        "memory": f"{memory / 1e9:.1f} GB" if memory is not None else "–",
        "time": clock(spent),
        "left": clock(left) if left is not None and history.outcome is None else "–",
    }
    cells = "".join(f"<div><b>{escape(value)}</b><span>{name}</span></div>" for name, value in facts.items())
    return f'<div class="facts">{cells}</div>'


def _record(record: Mapping[str, Any]) -> Iterator[str]:
    """What was asked for, as run.json has it: each nested part as a table."""
    tables = {name for name, value in record.items() if isinstance(value, Mapping) and name not in _INLINE}
    flat = {name: value for name, value in record.items() if name not in tables}
    if flat:
        yield _table("What was run", [(name, _shown(value), None) for name, value in flat.items()])
    for name in (name for name in record if name in tables):
        rows = [(str(key), _shown(value), None) for key, value in record[name].items()]
        yield _table(_TITLES.get(name, name), rows)


_INLINE = ("layout", "ranks")
_TITLES = {
    "options": "Options of the engine",
    "lengths": "The data, in records and tokens",
    "evaluation": "What it is evaluated on",
    "batches": "One step",
    "memory": "Memory of a rank, estimated in bytes",
    "versions": "Versions",
    "plan": "The plan",
}


def _shown(value: Any) -> str:
    if isinstance(value, (list, tuple)) and all(isinstance(each, str) for each in value):
        return " ".join(value) or "–"
    if isinstance(value, Mapping):
        return " · ".join(f"{key} {_shown(each)}" for key, each in value.items())
    if isinstance(value, (list, tuple)):
        return json.dumps(value, ensure_ascii=False, default=str)
    return "–" if value is None else str(value)


def _table(title: str, rows: Sequence[tuple[str, str, bool | None]]) -> str:
    def row(name: str, value: str, right: bool | None) -> str:
        mark = (
            ""
            if right is None
            else f'<td class="{"right" if right else "wrong"}">{"✓" if right else "✗"}</td>'
        )
        return f"<tr><th>{escape(name)}</th><td>{escape(value)}</td>{mark}</tr>"

    body = "".join(row(*each) for each in rows)
    return f"<section><h2>{escape(title)}</h2><table>{body}</table></section>"


_STYLE = """
:root{color-scheme:light dark;--bg:#fff;--fg:#1c2330;--dim:#667085;--line:#e4e7ec;--box:#f7f8fa;--ink:#2563eb;
--bad:#d92d20;--good:#067647;--other:#c2410c}
@media(prefers-color-scheme:dark){:root{--bg:#12161d;--fg:#e6e9ef;--dim:#98a2b3;--line:#2a313c;--box:#1a202a;
--ink:#6ea8fe;--bad:#f97066;--good:#47cd89;--other:#fdba74}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--fg);font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
main{max-width:980px;margin:0 auto;padding:28px 20px 60px}
h1{font-size:24px;margin:0 0 4px;overflow-wrap:anywhere}
h2{font-size:14px;font-weight:600;margin:0 0 8px}
.state{margin:0 0 18px;font-weight:600;color:var(--ink)}
.state.done{color:var(--good)}.state.failed,.state.refused,.state.interrupted{color:var(--bad)}
.when{margin-left:12px;font-weight:400;color:var(--dim)}
.facts{display:grid;grid-template-columns:repeat(auto-fit,minmax(145px,1fr));gap:10px;margin-bottom:22px}
.facts div{background:var(--box);border:1px solid var(--line);border-radius:8px;padding:10px 12px}
.facts b{display:block;font-size:17px;font-variant-numeric:tabular-nums;white-space:nowrap}
.facts span{color:var(--dim);font-size:13px}
section{margin:0 0 24px}
svg{width:100%;height:auto;display:block;background:var(--box);border:1px solid var(--line);border-radius:8px}
svg text{fill:var(--dim);font-size:12px;font-variant-numeric:tabular-nums}
svg .grid{stroke:var(--line)}
svg polyline{fill:none;stroke:var(--ink);stroke-width:1.6;stroke-linejoin:round}
svg circle{fill:var(--ink)}
svg .faint{opacity:.35;stroke-width:1}
svg .mean{stroke-width:2}
svg polyline.beside{stroke:var(--other)}svg circle.beside{fill:var(--other)}
h2 .beside{margin-left:12px;font-weight:400;color:var(--other)}
svg .broken{fill:var(--bad)}
svg .cross{stroke:var(--dim);stroke-dasharray:3 3}
svg .told{fill:var(--fg);font-weight:600}
.none{color:var(--dim);background:var(--box);border:1px solid var(--line);border-radius:8px;padding:14px;margin:0}
table{width:100%;border-collapse:collapse;font-size:14px}
th,td{text-align:left;vertical-align:top;padding:5px 10px 5px 0;border-top:1px solid var(--line);
overflow-wrap:anywhere}
th{font-weight:400;color:var(--dim);width:34%}
.right{color:var(--good);width:1.5em}.wrong{color:var(--bad);width:1.5em}
"""

_SCRIPT = """
for (const svg of document.querySelectorAll('svg[data-points]')) {
  const points = JSON.parse(svg.dataset.points), cross = svg.querySelector('.cross'), told = svg.querySelector('.told');
  const hide = () => { cross.setAttribute('y2', 0); told.textContent = ''; };
  svg.addEventListener('pointerleave', hide);
  svg.addEventListener('pointermove', event => {
    if (!points.length) return;
    const box = svg.getBoundingClientRect(), x = (event.clientX - box.left) / box.width * svg.viewBox.baseVal.width;
    const [step, at, value] = points.reduce((a, b) => Math.abs(b[1] - x) < Math.abs(a[1] - x) ? b : a);
    const right = at > svg.viewBox.baseVal.width / 2;
    cross.setAttribute('x1', at); cross.setAttribute('x2', at);
    cross.setAttribute('y1', 14); cross.setAttribute('y2', svg.viewBox.baseVal.height - 30);
    told.setAttribute('x', at + (right ? -8 : 8)); told.setAttribute('y', 28);
    told.setAttribute('text-anchor', right ? 'end' : 'start');
    told.textContent = 'step ' + step + ': ' + Number(value.toPrecision(5));
  });
}
const when = document.querySelector('.when');
if (when && document.querySelector('meta[http-equiv]')) {
  const tell = () => {
    const age = Math.round(Date.now() / 1000 - when.dataset.time);
    if (age > 60) when.textContent = 'last update ' + Math.round(age / 60) + ' min ago';
  };
  tell(); setInterval(tell, 1000);
}
"""
