"""Texts in English and Chinese, and which of them a person reads."""

from __future__ import annotations

import locale
import os
from collections.abc import Iterable

LANGUAGES = ("en", "zh")


class Text(str):
    """A sentence, with its Chinese version (`zh`)."""

    zh: str

    def __new__(cls, en: str, zh: str) -> Text:
        text = super().__new__(cls, en)
        text.zh = zh
        return text

    def __reduce__(self) -> tuple[type[Text], tuple[str, str]]:
        """For pickling and copying."""
        return Text, (self.en, self.zh)

    @property
    def en(self) -> str:
        """The English sentence."""
        return str(self)

    def of(self, language: str) -> str:
        """The text in one of `LANGUAGES`."""
        return self.zh if language == "zh" else self.en

    @staticmethod
    def same(text: str) -> Text:
        """A text that is the same in both languages: code, names, numbers."""
        return Text(text, text)

    @staticmethod
    def lines(texts: Iterable[Text]) -> Text:
        """Texts below each other."""
        lines = list(texts)
        return Text("\n".join(each.en for each in lines), "\n".join(each.zh for each in lines))


def locale_language() -> str:
    """ "zh" if the environment is in Chinese, else "en"."""
    locale_name = next(
        (os.environ[name] for name in ("LC_ALL", "LC_MESSAGES", "LANG") if os.environ.get(name)), ""
    )
    return (
        "zh" if (locale_name or locale.getlocale()[0] or "").lower().startswith(("zh", "chinese")) else "en"
    )
