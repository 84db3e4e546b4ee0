"""Diagnose a checkpoint: the findings of `inspect`, and whether it would load and train."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from reshard.base.errors import Problem, ReshardError
from reshard.base.foreign_text import shown
from reshard.base.languages import Text
from reshard.base.translations import translated
from reshard.commands.inspection import NO_CONFIG, NO_TOKENIZER, Inspection, inspect_checkpoint
from reshard.folders import iterations
from reshard.formats import foreign
from reshard.formats.megatron import fsdp_dtensor, legacy, torch_dist, zarr
from reshard.formats.not_found import NOTHING_FOUND
from reshard.formats.options import ConversionOptions
from reshard.planning import IS_ADAPTER, plan_conversion
from reshard.runs.checks.finding import Finding
from reshard.runs.checks.location import Location
from reshard.runs.checks.phrases import words
from reshard.runs.checks.rules import told
from reshard.runs.doctor.targets.trainability import trainability

CHECKPOINT_MARKS = (
    *("config.json", "adapter_config.json", "latest", iterations.TRACKER),
    *("iter_*", "release", "mp_rank_*", "global_step*", "*.distcp"),
)
"""Names that show that a checkpoint was intended, even if it has no weights that can be read."""
TORCH_FILES = ("*.bin", "*.pt", "*.pth")
"""Names of weights that other programs use, too: such a file has to begin as one with weights does."""
WEIGHT_BEGINNINGS = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05", b"version https")
"""Of a zip archive, a pickle, and a Git LFS pointer."""


def diagnose_checkpoint(
    path: Path, on_inspected: Callable[[Inspection], None] = lambda inspection: None
) -> tuple[list[Finding], str]:
    """The findings about the checkpoint at `path`, and the command to run next ("" if there is none).

    `on_inspected` receives what `inspect` found, if it can be opened. Raises ReshardError if there is no checkpoint: a
    damaged or incomplete one is a finding.
    """
    try:
        inspection = inspect_checkpoint(_tracked(path))
    except ReshardError as error:
        is_foreign = any(problem.code in foreign.CODES for problem in error.problems)
        if is_foreign or not _is_meant(path, error):
            raise
        return [_damage(problem, path) for problem in error.problems], ""
    on_inspected(inspection)
    checkpoint = inspection.checkpoint
    findings = [_of_problem(problem, inspection) for problem in inspection.problems if not _lacks(problem)]
    findings += _missing(inspection, _tracked(path))
    try:
        findings += trainability(checkpoint)
    except ReshardError as error:  # a config or a tokenizer that is not JSON
        findings += [
            _damage(problem, path) for problem in error.problems if problem not in inspection.problems
        ]
    return findings, inspection.next


def of_pair(first: Path, second: Path) -> list[Finding]:
    """Whether a checkpoint and a Hugging Face folder belong together, as with `convert --base`.

    The base is the second, unless only the first has a config.json. An adapter belongs to the base that it can be
    merged into. Raises nothing: misfits are findings.
    """
    checkpoint, base = (second, first) if _has_config(first) and not _has_config(second) else (first, second)
    problems = _refused(checkpoint, base, merge=False)
    if any(problem.code == IS_ADAPTER for problem in problems):
        problems = _refused(checkpoint, base, merge=True)
    return [
        _told("base-does-not-fit", problem, base, "problem-name-base", path=checkpoint, base=base)
        for problem in problems
    ]


def _refused(checkpoint: Path, base: Path, *, merge: bool) -> list[Problem]:
    """Why a conversion with this base would be refused."""
    try:
        plan_conversion(checkpoint, ConversionOptions(to="huggingface", base=base, merge=merge))
    except ReshardError as error:
        return error.problems
    return []


def _has_config(path: Path) -> bool:
    return (path / "config.json").is_file()


def _tracked(path: Path) -> Path:
    """The path; for a Megatron run without a tracker file, its last iteration."""
    steps = iterations.found_in(path)
    return path if not steps or (path / iterations.TRACKER).exists() else list(steps.values())[-1]


def _is_meant(path: Path, error: ReshardError) -> bool:
    """Whether a path was intended as a checkpoint, although it cannot be opened: it has at least a part of one."""
    if any(problem.code != NOTHING_FOUND for problem in error.problems):
        return True
    folders = [each for each in (path, *path.glob("*")) if each.is_dir()]
    if any(_matching(folder, CHECKPOINT_MARKS) for folder in folders):
        return True
    files = chain([path], *(_matching(folder, TORCH_FILES) for folder in folders))
    return any(file.is_file() and _begins_as_weights(file) for file in files)


def _matching(folder: Path, patterns: Iterable[str]) -> list[Path]:
    return [file for pattern in patterns for file in folder.glob(pattern)]


def _begins_as_weights(path: Path) -> bool:
    """Whether a file begins as one with weights, or has only zeros, as after an interrupted copy."""
    with path.open("rb") as file:
        begin = file.read(64)
    return begin.startswith(WEIGHT_BEGINNINGS) or not begin.strip(b"\0")


def _damage(problem: Problem, path: Path) -> Finding:
    """The finding why a checkpoint cannot be opened."""
    return _told("checkpoint-damaged", problem, path, "problem-copy-again", path=path)


def _told(code: str, problem: Problem, place: Path, remedy: str, **paths: Path) -> Finding:
    """The finding of a rule that quotes a problem; `remedy` is the phrase for one that has none."""
    values = {
        "message": translated(problem, "message"),
        "shows": Text.lines(_said(problem, "tensor", "rule", "expected", "found")),
        "remedy": translated(problem, "remedy") if problem.remedy else words(remedy),
    }
    return told(code, [_place(problem, place)], {**values, **paths})


def _place(problem: Problem, path: Path) -> Location:
    return Location(problem.file or str(path), None, problem.tensor or "")


def _said(problem: Problem, *fields: str) -> Iterator[Text]:
    """The fields of a problem that are set, one line each."""
    for field in fields:
        if value := getattr(problem, field):
            yield words(f"problem-{field}", value=value if field == "tensor" else translated(problem, field))


def _lacks(problem: Problem) -> bool:
    """Whether a problem is among those that `_missing` combines into one."""
    return problem.code in (NO_CONFIG, NO_TOKENIZER)


class MissingPart(NamedTuple):
    """A file that should be next to the weights, and the flags that replace it."""

    name: Text
    is_missing: bool
    flags: str

    @property
    def shows(self) -> Text:
        return words("part-missing" if self.is_missing else "part-there", name=self.name, flags=self.flags)


def _missing(inspection: Inspection, path: Path) -> Iterator[Finding]:
    """Which of weights, config, tokenizer and tracker are there, and how to supply the others."""
    checkpoint = inspection.checkpoint
    parts = list(_parts(inspection))
    lost = [part.name for part in parts if part.is_missing]
    if lost:
        what = ", ".join(filter(None, (checkpoint.format, str(checkpoint.layout))))
        weights = words("part-weights", count=len(checkpoint.tensors), what=what)
        values = {
            "missing": Text(", ".join(part.en for part in lost), "、".join(part.zh for part in lost)),
            "command": inspection.next or f"reshard inspect {path}",
            "shows": Text.lines([weights, *(part.shows for part in parts)]),
        }
        yield told("checkpoint-lacks", [Location(str(path))], values)


def _parts(inspection: Inspection) -> Iterator[MissingPart]:
    lacking = {problem.code for problem in inspection.problems}
    checkpoint = inspection.checkpoint
    is_there = (checkpoint.root / "config.json").is_file()
    if is_there or NO_CONFIG in lacking:  # otherwise the checkpoint itself tells what it would contain
        yield MissingPart(Text.same("config.json"), not is_there, "--base DIR")
    yield MissingPart(words("part-tokenizer"), NO_TOKENIZER in lacking, "--base DIR (--no-tokenizer)")
    if checkpoint.format in (torch_dist.NAME, zarr.NAME, legacy.NAME, fsdp_dtensor.NAME):
        tracker = iterations.root_of(checkpoint.path) / iterations.TRACKER
        flags = f"--iteration {checkpoint.iteration}"
        yield MissingPart(Text.same(iterations.TRACKER), not tracker.is_file(), flags)


def _of_problem(problem: Problem, inspection: Inspection) -> Finding:
    """A problem that `inspect` found, with the command to run next."""
    cure = [translated(problem, "remedy") if problem.remedy else words("problem-copy-again")]
    if inspection.next:
        cure.append(Text.same(f"```\n{shown(inspection.next)}\n```"))
    return replace(of_recorded(problem, inspection.checkpoint.path), remedy=Text.lines(cure))


def of_recorded(problem: Problem, folder: Path) -> Finding:
    """A problem for which the training run in `folder` ended, as the run recorded it."""
    return Finding(
        code=problem.code,
        message=translated(problem, "message"),
        rule=Text.lines(_said(problem, "rule", "expected", "found")),
        remedy=translated(problem, "remedy") if problem.remedy else Text.same(""),
        severity=problem.severity,
        places=(_place(problem, folder),),
    )
