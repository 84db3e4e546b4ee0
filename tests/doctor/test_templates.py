"""What chat templates refuse is told by what they say."""

from __future__ import annotations

import pytest

from reshard.runs.doctor.log_diagnosis import diagnose_text

REFUSED = {
    "TemplateError: Conversation roles must alternate user/assistant/user/assistant/...": "groupby",
    "TemplateError: System role not supported": "system text",
    "UndefinedError: 'dict object' has no attribute 'content'": "Messages are",
    "TemplateSyntaxError: Encountered unknown tag 'generation'.": "jinja2",
}


@pytest.mark.parametrize("said", REFUSED)
def test_the_cure_fits_the_refusal(said: str) -> None:
    (found,) = diagnose_text("log", f"jinja2.exceptions.{said}")
    assert found.code == "chat-refused" and REFUSED[said] in found.remedy.en and found.remedy.zh
