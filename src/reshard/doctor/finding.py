"""What the doctor says: one finding for each thing that is wrong."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

LANGUAGES = ("en", "zh")
CERTAINTIES = ("sure", "likely", "possible")


@dataclass(frozen=True)
class Text:
    """The same sentence in both languages."""

    en: str
    zh: str

    def of(self, language: str) -> str:
        """The words in one of `LANGUAGES`."""
        return self.zh if language == "zh" else self.en

    def __str__(self) -> str:
        return self.en

    @staticmethod
    def same(text: str) -> Text:
        """What reads alike in both: code, names, numbers."""
        return Text(text, text)


@dataclass(frozen=True)
class Place:
    """Where it shows. `line` counts from 1, `text` is that line, `mended` what it should become."""

    target: str
    line: int | None = None
    text: str = ""
    mended: str = ""

    def __str__(self) -> str:
        return self.target if self.line is None else f"{self.target}:{self.line}"


@dataclass(frozen=True)
class Finding:
    """What happened (`title`), why (`cause`), and what to do (`cure`).

    `id` is that of a catalogue entry or a rule, `certainty` one of `CERTAINTIES`, `severity` "error" or "warning".
    `evidence` says what the certainty rests on; `sources` are upstream threads.
    """

    id: str
    title: Text
    cause: Text
    cure: Text
    certainty: str = "sure"
    severity: str = "error"
    places: tuple[Place, ...] = ()
    evidence: tuple[Text, ...] = ()
    sources: tuple[str, ...] = ()
    also: tuple[str, ...] = field(default=())
    """Ids of what is only a consequence of this."""

    def as_dict(self, language: str | None = None) -> dict[str, Any]:
        """For `--json`: both languages, or the words of one. Evidence is always lines of one: English by default."""
        content = asdict(self)
        for key in ("title", "cause", "cure"):
            text: Text = getattr(self, key)
            content[key] = text.of(language) if language else {"en": text.en, "zh": text.zh}
        content["evidence"] = [each.of(language or "en") for each in self.evidence]
        return content
