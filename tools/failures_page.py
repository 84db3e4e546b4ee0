"""The catalogue as a page of the documentation: `python -m tools.failures_page > docs/failures.md`."""

from __future__ import annotations

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


def page() -> str:
    """All entries in English, by kind and id."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    entries = catalogue().values()
    yield "# Failures"
    yield ""
    yield (
        f"The {len(entries)} failures that `reshard doctor` knows, made from its catalogue: one YAML file for each in "
        "`src/reshard/runs/doctor/entries/catalogue/`. [Add a failure](add-a-failure.md) shows how one is written."
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
    yield RunTools().spelled(entry.cause.en)
    yield ""
    yield RunTools().spelled(entry.cure.en)
    if entry.sources:
        yield ""
        yield f"Sources: {', '.join(entry.sources)}"


if __name__ == "__main__":
    print(page(), end="")
