"""Which of several causes is right depends on what they explain and how specific they are, never on their order."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from reshard.base.languages import Text
from reshard.runs.checks.finding import Finding
from reshard.runs.doctor.entries import catalogue_entry
from reshard.runs.doctor.ranking import Candidate, Explains, Specificity, candidates_of, causes_in, ranked
from reshard.runs.doctor.text.log import read_log

FOLDERS = (Path(__file__).parent, Path(__file__).parents[1] / "data/guard")
LOGS = sorted(path for folder in FOLDERS for path in folder.rglob("*.log"))


def candidate(
    code: str,
    explains: Explains = Explains.FIRST,
    specificity: Specificity = Specificity.MESSAGE,
    *,
    covers: tuple[str, ...] = (),
    certainty: str = "likely",
) -> Candidate:
    texts = (Text.same(f"{code} {part}") for part in ("title", "cause", "cure"))
    message, rule, remedy = texts
    finding = Finding(code=code, message=message, rule=rule, remedy=remedy, certainty=certainty)
    return Candidate(finding, explains, specificity, 1, frozenset(covers))


def codes(*given: Candidate) -> list[str]:
    return [each.finding.code for each in ranked(given)]


@pytest.mark.parametrize("path", LOGS, ids=lambda path: path.name)
def test_the_order_in_which_candidates_are_found_changes_nothing(path: Path) -> None:
    found = candidates_of(read_log("log", path.read_text(errors="replace")))
    expected = [each.finding for each in ranked(found)]
    for seed in range(10):
        random.Random(seed).shuffle(found)
        assert [each.finding for each in ranked(found)] == expected


def test_the_names_of_files_change_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    logs = [read_log("log", path.read_text(errors="replace")) for path in LOGS]
    before = [[each.code for each in causes_in(log)] for log in logs]
    turned = dict(reversed(catalogue_entry.catalogue().items()))
    monkeypatch.setattr("reshard.runs.doctor.entries.matching.catalogue", lambda: turned)
    assert [[each.code for each in causes_in(log)] for log in logs] == before


def test_what_explains_the_first_failure_comes_before_what_is_only_more_specific() -> None:
    other = candidate("other", Explains.OTHER, Specificity.NUMBERS, certainty="sure")
    assert codes(other, candidate("first", specificity=Specificity.KIND)) == ["first", "other"]


def test_an_unknown_failure_of_its_own_outranks_what_explains_another_line() -> None:
    unknown = candidate("unknown-failure", specificity=Specificity.UNKNOWN, certainty="possible")
    assert codes(candidate("other", Explains.OTHER), unknown) == ["unknown-failure", "other"]


def test_computed_values_complete_an_entry() -> None:
    computed = candidate("computed", specificity=Specificity.NUMBERS, certainty="possible")
    (entry,) = ranked([candidate("entry"), computed])
    assert entry.finding.code == "entry" and entry.finding.also == ("computed",)
    assert entry.finding.remedy == "computed cure\nentry cure" and "computed cause" in entry.finding.evidence
    assert entry.finding.certainty == "likely"


def test_a_kind_of_exception_is_completed_by_nothing() -> None:
    kind = candidate("kind", specificity=Specificity.KIND)
    assert codes(kind, candidate("computed", specificity=Specificity.HISTORY)) == ["computed"]


def test_files_given_for_others_are_the_cause_whatever_entries_say() -> None:
    assert codes(candidate("entry"), candidate("content", specificity=Specificity.CONTENT)) == ["content"]


def test_what_a_cause_covers_is_not_told() -> None:
    closed = candidate("closed", specificity=Specificity.NUMBERS, covers=("killed",))
    (told,) = ranked([candidate("killed"), closed, candidate("symptom", Explains.SYMPTOM)])
    assert (told.finding.code, told.finding.also) == ("closed", ("killed", "symptom"))
