"""The catalogue as a page of the documentation: `python -m tools.failures_page > docs/failures.md`."""

from __future__ import annotations

import re
from collections.abc import Iterator

from reshard.runs.doctor.entries.catalogue_entry import CatalogueEntry, catalogue
from reshard.runs.doctor.remedy_spelling import RunTools

KINDS = {
    "error": "Errors",
    "hang": "Hangs",
    "warning": "Warnings that matter",
    "silent": "Failures without an error",
    "symptom": "Symptoms of another rank's failure",
}
WORDS = 32
"""The length of a fix on the page, unless its first step is longer."""


def page() -> str:
    """All entries in English, by kind and id."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    entries = catalogue().values()
    yield "# Failures"
    yield ""
    yield (
        f"The {len(entries)} failures in the catalogue of `reshard doctor`, each with its fix. "
        "`reshard doctor --explain ID` prints one in full: the cause, the complete fix, and the sources. "
        "A fix that ends with … has more steps or other cases there. `reshard doctor --list` prints all IDs. "
        "[Add a failure](add-a-failure.md) shows how an entry is written."
    )
    for kind, heading in KINDS.items():
        yield ""
        yield f"## {heading}"
        for entry in entries:
            if entry.kind == kind:
                yield from _section(entry)


def _section(entry: CatalogueEntry) -> Iterator[str]:
    yield ""
    yield f"### {entry.id}"
    yield ""
    versions = ", ".join(f"{name} {specifier}" for name, specifier in entry.versions.items())
    yield f"**{entry.title.en}**" + (f" ({versions})" if versions else "")
    yield ""
    yield _short(RunTools().spelled(entry.cure.en))


def _short(text: str) -> str:
    """The first lines and blocks of code of a fix, about `WORDS` words; … stands for the rest."""
    parts = re.findall(r"^(?:.+\n)?```(?s:.*?)^```$|^.+:\n.+$|^.+$", text, re.M)
    shown = 1
    while len(" ".join(parts[: shown + 1]).split()) <= WORDS and shown < len(parts):
        shown += 1
    rest = ["…"] if len(parts) > shown else []
    return "\n".join([*parts[:shown], *rest])


if __name__ == "__main__":
    print(page(), end="")
