"""What the doctor answers first to each text of `texts.yaml`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from reshard.runs.checks.finding import Finding
from reshard.runs.doctor.log_diagnosis import diagnose_text

TOPICS = yaml.safe_load(Path(__file__).with_name("texts.yaml").read_text(encoding="utf-8"))
CASES = [
    pytest.param(case, id=f"{topic} {number}")
    for topic, cases in TOPICS.items()
    for number, case in enumerate(cases, 1)
]


@pytest.mark.parametrize("case", CASES)
def test_the_first_finding_of_a_text(case: dict[str, Any]) -> None:
    found = diagnose_text("log", case["text"])
    if case.get("code") == "none":
        assert found == []
        return
    first = found[0]
    assert first.code == case.get("code", first.code)
    assert first.code != case.get("not")
    assert first.severity == case.get("severity", first.severity)
    assert first.certainty == case["certainty"] if "certainty" in case else first.certainty != "sure"
    assert "line" not in case or first.places[0].line == case["line"]
    assert "only" not in case or len(found) == 1
    assert_texts(first, case)


def assert_texts(finding: Finding, case: dict[str, Any]) -> None:
    """Its phrases are in the finding, and no placeholder is."""
    for key, text in (("title", finding.message), ("cause", finding.rule), ("fix", finding.remedy)):
        both = text.en + text.zh
        assert not re.search(r"\{[a-z]+\}", both)
        assert [
            phrase for phrase in phrases(case, key) if phrase not in text.en or phrase not in text.zh
        ] == []
        assert [phrase for phrase in phrases(case, f"{key}-en") if phrase not in text.en] == []
        assert [phrase for phrase in phrases(case, f"{key}-zh") if phrase not in text.zh] == []
        assert [phrase for phrase in phrases(case, f"{key}-not") if phrase in both] == []
    assert re.search(r"[\u4e00-\u9fff]", finding.message.zh + finding.rule.zh + finding.remedy.zh) or (
        finding.code == "reshard-refused"
    )
    evidence = "\n".join(each.en for each in finding.evidence)
    assert [phrase for phrase in phrases(case, "evidence") if phrase not in evidence] == []
    assert [phrase for phrase in phrases(case, "evidence-not") if phrase in evidence] == []


def test_each_text_is_there_once_and_says_what_is_expected() -> None:
    cases = [case for cases in TOPICS.values() for case in cases]
    assert len({case["text"] for case in cases}) == len(cases)
    phrases_of = {
        key + end for key in ("title", "cause", "fix", "evidence") for end in ("", "-en", "-zh", "-not")
    }
    checks = {"code", "not", "only", "certainty", "severity", "line", *phrases_of}
    assert [case for case in cases if not case.keys() - {"text"} or case.keys() - {"text"} - checks] == []


def phrases(case: dict[str, Any], key: str) -> list[str]:
    given = case.get(key, [])
    return [given] if isinstance(given, str) else given
