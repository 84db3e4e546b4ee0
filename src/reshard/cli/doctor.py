"""`reshard doctor`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import click
from rich.cells import set_cell_size

from reshard.base.foreign_text import escape, escape_lines
from reshard.base.languages import LANGUAGES, Text, locale_language
from reshard.base.options import About
from reshard.base.values import StrPath
from reshard.cli.console import common_options, handles_errors, print_json, progress, stdout
from reshard.cli.options import TARGET, quiet_option
from reshard.cli.record import record_options
from reshard.cli.usage import Command
from reshard.runs.checks.environment import ENVIRONMENT_PACKAGES, Environment, look_around
from reshard.runs.checks.finding import UNKNOWN
from reshard.runs.checks.machine_checks import check_machine
from reshard.runs.checks.rules import rules
from reshard.runs.doctor import Finding
from reshard.runs.doctor.diagnose_targets import bytes_of_logs, examine
from reshard.runs.doctor.entries.catalogue_entry import CatalogueEntry, catalogue, find
from reshard.runs.doctor.examination import Examination
from reshard.runs.doctor.python_api import DoctorOptions
from reshard.runs.doctor.remedy_spelling import RunTools, spelled

LABELS = {
    "en": {"why": "why", "cure": "fix", "where": "where", "because": "because"}
    | {"sources": "sources", "also": "explains", "clean": "nothing wrong found", "punctuation": ": | (|, |)"}
    | {"sure": "sure", "likely": "likely", "possible": "possible", "unknown": "unknown"}
    | {"seen": "seen", "next": "next", "warning": "warning", "error": "error"}
    | {
        "absent": "not installed",
        "none": "–",
        "total": "{errors}, {warnings}; fix the first one first",
        "count_errors": "{count} errors",
        "count_warnings": "{count} warnings",
        "count_error": "1 error",
        "count_warning": "1 warning",
    }
    | {
        "total1": "1 finding",
        "environment": "environment",
        "id": "id",
        "kind": "kind",
        "title": "what happens",
    }
    | {"hang": "hang", "silent": "silent", "symptom": "symptom"}
    | {"count": "{count} failures; `reshard doctor --explain ID` shows more"},
    "zh": {"why": "原因", "cure": "解法", "where": "位置", "because": "依据"}
    | {"sources": "来源", "also": "由此引起", "clean": "没有发现问题", "punctuation": "：|（|，|）"}
    | {"sure": "确定", "likely": "很可能", "possible": "有可能", "unknown": "未知"}
    | {"seen": "所见", "next": "下一步", "warning": "警告", "error": "错误"}
    | {"absent": "未安装", "none": "–", "total": "共 {errors}、{warnings}；请先解决第一个"}
    | {"count_error": "1 个错误", "count_errors": "{count} 个错误"}
    | {"count_warning": "1 个警告", "count_warnings": "{count} 个警告"}
    | {"total1": "共 1 个问题", "environment": "环境", "id": "id", "kind": "类别", "title": "现象"}
    | {"hang": "卡住", "silent": "无报错", "symptom": "表象"}
    | {"count": "共 {count} 种故障；用 `reshard doctor --explain ID` 查看详情"}
    | {"CUDA of torch": "torch 的 CUDA", "driver": "驱动", "GPUs": "GPU", "variables": "环境变量"}
    | {"none (CPU build)": "无（CPU 版）"},
}


@dataclass(frozen=True, kw_only=True)
class CatalogueOptions:
    """What is shown of the catalogue, and in which language."""

    lang: Annotated[
        str | None, About("Language of the report. [default: from the locale]", choices=LANGUAGES)
    ] = None
    list_all: Annotated[bool, About("List all failures in the catalogue.", flag="--list")] = False
    explain: Annotated[str | None, About("Explain a catalogue entry or a rule.", "ID")] = None


@dataclass(frozen=True, kw_only=True)
class Flags(DoctorOptions, CatalogueOptions):
    """All options of the command."""

    def check(self, targets: Sequence[StrPath]) -> None:
        """Raise an error for options that cannot be combined."""
        if targets and (self.list_all or self.explain):
            raise click.UsageError("--list and --explain take no target")
        if self.python and (self.list_all or self.explain):
            raise click.UsageError("--python examines an environment, and takes no target")
        super().check(targets)


@click.command("doctor", cls=Command)
@click.argument("targets", nargs=-1, metavar="[TARGET …]", type=TARGET)
@record_options(Flags)
@quiet_option("Print one line for each finding.")
@common_options
@handles_errors
def command(targets: tuple[str, ...], *, quiet: bool, json_output: bool, options: Flags) -> None:
    """Explain what is wrong, why, and how to fix it.

    A TARGET is a log (or - for standard input), a training script (.py), a launch script (.sh), a
    config of accelerate, DeepSpeed, TRL or LLaMA-Factory (.yaml, .json), or a checkpoint. The doctor never executes the
    files it reads. Pass several files of one run together: a mistake in the script explains an error in the
    log. Without a TARGET, the doctor examines the environment: versions, GPUs, driver and launcher variables.

    \b
      reshard doctor                              the environment
      reshard doctor --python venv/bin/python     another environment
      reshard doctor train.log train.py ckpt/     a run that failed
      reshard doctor ckpt/                        a checkpoint
      reshard doctor run/                         the folder of a run: its logs, configs and checkpoints
      torchrun … 2>&1 | reshard doctor -          a log from a pipe
      reshard doctor --explain ID                 one failure in the catalogue

    Each finding states how certain it is. Fix the first one first. --json also prints `facts`: what the files show,
    each with its line.

    A log without an error counts as a run without failure only if it says that the run ended well. Otherwise, and if
    nothing known explains an error, the answer is `unknown`: what was seen, and where to look next.

    Exit status: 0 no errors (there may be warnings), 1 errors or unknown, 2 a target cannot be read.
    """
    language = options.lang or locale_language()
    options.check(targets)
    if options.list_all:
        _list(language, json_output)
    elif options.explain is not None:
        _explain(options.explain, language, json_output)
    else:
        _diagnose(targets, options, quiet=quiet, json_output=json_output)


def _diagnose(targets: tuple[str, ...], options: Flags, *, quiet: bool, json_output: bool) -> None:
    """Examine the targets or the environment, print what was found, and exit."""
    language = options.lang or locale_language()
    python = None if options.python is None else str(options.python)
    environment = None if targets else look_around(python)
    read: list[Text] = []
    if environment is None:
        examination = _examined(targets, json_output or quiet, read.append)
    else:
        examination = Examination(spelled(check_machine(environment), RunTools()))
    findings = examination.findings
    if json_output:
        shown = {} if environment is None else {"environment": environment.as_dict()}
        facts = {} if environment is not None else {"facts": examination.facts}
        print_json({**shown, **examination.as_dict(options.lang), **facts})
    elif quiet:
        _print_lines(findings, language)
    else:
        if environment is not None:
            _print_environment(environment, language)
        _print(findings, read, language)
    sys.exit(1 if any(finding.severity == "error" for finding in findings) else 0)


LONG = 32 << 20
"""Bytes of logs above which progress is shown: about two seconds of reading."""


def _examined(targets: tuple[str, ...], silent: bool, on_read: Callable[[Text], None]) -> Examination:
    total = bytes_of_logs(*targets)
    with progress("read", total, quiet=silent or total < LONG) as advance:
        return examine(*targets, on_bytes=advance, on_read=on_read)


def _print_environment(environment: Environment, language: str) -> None:
    """Print the environment, one line per entry."""
    console, words = stdout(), LABELS[language]
    for name, told in environment.as_dict().items():
        value = " ".join(f"{key}={each}" for key, each in told.items()) if isinstance(told, dict) else told
        for each in value if isinstance(value, list) and value else [value]:
            shown = str(each or (words["absent"] if name in ENVIRONMENT_PACKAGES else words["none"]))
            label = set_cell_size(words.get(name, name), 19)
            console.print(f"[bold]{label}[/] {escape(words.get(shown, shown))}")
    console.print()


def _print_lines(findings: list[Finding], language: str) -> None:
    """Print one line for each finding, in the style of compilers."""
    words = LABELS[language]
    for finding in findings:
        where = f"{finding.places[0]}: " if finding.places else ""
        said = f"{finding.message.of(language)} ({', '.join(_code_and_certainty(finding, words))})"
        stdout().print(escape(f"{where}{words[_heading(finding)]}: {said}"))


def _heading(finding: Finding) -> str:
    return UNKNOWN if finding.certainty == UNKNOWN else finding.severity


def _code_and_certainty(finding: Finding, words: dict[str, str]) -> list[str]:
    """Of an answer that is unknown, its heading says so."""
    return [finding.code] if finding.certainty == UNKNOWN else [finding.code, words[finding.certainty]]


def _print(findings: list[Finding], read: list[Text], language: str) -> None:
    """Print the findings, or what was read without any."""
    console, words = stdout(), LABELS[language]
    for each in read:
        console.print(escape(each.of(language)))
    if not findings and not read:
        console.print(f"[bold green]{words['clean']}[/]")
    for finding in findings:
        _print_finding(finding, language)
        console.print()
    known = [finding for finding in findings if finding.certainty != UNKNOWN]
    if len(known) == 1:
        console.print(f"[bold]{words['total1']}[/]")
    elif known:
        errors = sum(finding.severity == "error" for finding in known)
        counts = {"errors": errors, "warnings": len(known) - errors}
        shown = {
            kind: words[f"count_{kind if count != 1 else kind[:-1]}"].format(count=count)
            for kind, count in counts.items()
        }
        console.print(f"[bold]{words['total'].format(**shown)}[/]")


def _aside(words: dict[str, str], *parts: str) -> str:
    """What follows a title, in the brackets of the language."""
    _, opens, comma, closes = words["punctuation"].split("|")
    return escape(f"{opens}{comma.join(parts)}{closes}")


PLACES = 8
"""Places of a finding that are printed; a failure may be in the log of every rank."""


def _print_finding(finding: Finding, language: str) -> None:
    console, words = stdout(), LABELS[language]
    style = "bold red" if finding.severity == "error" else "bold yellow"
    why, cure = ("seen", "next") if finding.certainty == UNKNOWN else ("why", "cure")
    colon = words["punctuation"].split("|")[0]
    console.print(
        f"[{style}]{words[_heading(finding)]}{colon}[/][bold]{escape(finding.message.of(language))}[/]"
        f"{_aside(words, *_code_and_certainty(finding, words))}"
    )
    for place in finding.places[:PLACES]:
        console.print(
            f"[bold]{words['where']}[/] {escape(words.get(str(place), str(place)))}  {escape(place.text)}"
        )
    if len(finding.places) > PLACES:
        console.print(f"[bold]{words['where']}[/] … +{len(finding.places) - PLACES:,} (--json)")
    console.print(f"[bold]{words[why]}[/] {escape_lines(finding.rule.of(language))}")
    console.print(f"[bold]{words[cure]}[/]")
    _print_cure(finding.remedy.of(language))
    for evidence in finding.evidence:
        console.print(f"[bold]{words['because']}[/] {escape(evidence.of(language))}")
    if finding.also:
        console.print(f"[bold]{words['also']}[/] {escape(', '.join(finding.also))}")
    if finding.sources:
        console.print(f"[bold]{words['sources']}[/] {escape(', '.join(map(link, finding.sources)))}")


def _print_cure(cure: str) -> None:
    """Print a fix unchanged, so that it can be pasted; on a terminal, code is coloured and its lines stay whole."""
    console, is_code = stdout(), False
    if not console.is_terminal:
        console.print(escape_lines(cure.rstrip()))
        return
    for line in cure.rstrip().splitlines():
        if line.strip().startswith("```"):
            is_code = not is_code
        else:
            console.print(
                f"[cyan]{escape_lines(line)}[/]" if is_code else escape_lines(line), no_wrap=is_code
            )


def link(source: str) -> str:
    """The URL of a thread written as owner/repo#number."""
    if source.startswith("http") or "#" not in source:
        return source
    repository, number = source.split("#", 1)
    return f"https://github.com/{repository}/issues/{number}"


def _list(language: str, json_output: bool) -> None:
    from reshard.cli.tables import print_table

    entries = catalogue().values()
    if json_output:
        print_json(
            [{"id": entry.id, "kind": entry.kind, "title": entry.title.of(language)} for entry in entries]
        )
        return
    words = LABELS[language]
    rows = [(entry.id, words[entry.kind], entry.title.of(language)) for entry in entries]
    print_table(stdout(), (words["id"], words["kind"], words["title"]), rows)
    stdout().print(words["count"].format(count=len(entries)))


class _Names(dict[str, str]):
    """Replaces each brace of a text by its name in angle brackets, and `told`, which a log would supply, by nothing."""

    def __missing__(self, key: str) -> str:
        return "" if key == "told" else f"<{key}>"


def _explain(identifier: str, language: str, json_output: bool) -> None:
    """Explain a rule or an entry of the catalogue. Raises ReshardError if there is neither."""
    content = _rule(identifier, language) if identifier in rules() else _entry(find(identifier), language)
    if json_output:
        print_json(content)
        return
    console, words = stdout(), LABELS[language]
    aside = _aside(words, identifier, words[content["kind"]])
    console.print(f"[bold]{escape(content['title'])}[/]{aside}")
    for name, specifier in content.get("versions", {}).items():
        console.print(f"  {name} {escape(specifier)}")
    console.print(f"[bold]{words['why']}[/] {escape_lines(content['cause'])}")
    console.print(f"[bold]{words['cure']}[/]")
    _print_cure(content["cure"])
    if content["sources"]:
        console.print(f"[bold]{words['sources']}[/] {escape(', '.join(content['sources']))}")
    if "excerpt" in content:
        excerpt = escape_lines(content["excerpt"].rstrip())
        console.print(f"\n{excerpt}\n  — {escape(content['excerpt_from'])}")


def _rule(identifier: str, language: str) -> dict[str, Any]:
    """A rule, with names instead of values from a target."""
    rule = rules()[identifier]
    texts = {
        key: RunTools().spelled(rule[key][language].strip().format_map(_Names()))
        for key in ("title", "cause", "cure")
    }
    return {"id": identifier, "kind": rule["severity"], **texts, "sources": [*map(link, rule["sources"])]}


def _entry(entry: CatalogueEntry, language: str) -> dict[str, Any]:
    """An entry of the catalogue."""
    return {
        "id": entry.id,
        "kind": entry.kind,
        "engines": list(entry.engines),
        "title": entry.title.of(language),
        "cause": RunTools().spelled(entry.cause.of(language)),
        "cure": RunTools().spelled(entry.cure.of(language)),
        "versions": entry.versions,
        "patterns": [pattern.pattern for pattern in entry.patterns],
        "sources": [*map(link, entry.sources)],
        "excerpt": entry.excerpt,
        "excerpt_from": entry.excerpt_from,
    }
