"""How certain answers are, and how often they are right, over the project's own texts of failed runs."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import NamedTuple

import yaml

from reshard.runs.doctor.entries.catalogue_entry import catalogue
from reshard.runs.doctor.log_diagnosis import diagnose_text
from reshard.runs.doctor.text.ended_well import ended_well
from reshard.runs.doctor.text.log import read_log

FIELD = yaml.safe_load(Path(__file__).with_name("field_texts.yaml").read_text(encoding="utf-8"))
TEXTS = [(each["source"], each["text"], each["right"]) for each in FIELD]
TEXTS += [(entry.id, entry.excerpt, [entry.id]) for entry in catalogue().values() if entry.kind == "error"]
LEAST_RIGHT = 0.9
"""The share of right answers among those that are sure or likely."""


class Answer(NamedTuple):
    source: str
    certainty: str
    code: str
    is_right: bool


@cache
def answers() -> list[Answer]:
    """The first finding of each text, and whether it is a right one."""
    given = []
    for source, text, right in TEXTS:
        found = diagnose_text(source, text)
        if found:
            codes = {found[0].code, *found[0].also}
            given.append(Answer(source, found[0].certainty, found[0].code, bool(codes & set(right))))
    return given


def test_what_is_sure_is_right() -> None:
    assert [each for each in answers() if each.certainty == "sure" and not each.is_right] == []


def test_what_is_sure_or_likely_is_mostly_right() -> None:
    confident = [each for each in answers() if each.certainty in ("sure", "likely")]
    wrong = [each for each in confident if not each.is_right]
    assert len(confident) > 80 and len(wrong) <= (1 - LEAST_RIGHT) * len(confident), wrong


def test_no_failed_run_is_called_one_without_failure() -> None:
    silent = {source for source, _, _ in TEXTS} - {each.source for each in answers()}
    assert [
        source for source, text, _ in TEXTS if source in silent and ended_well(read_log("", text).lines)
    ] == []
