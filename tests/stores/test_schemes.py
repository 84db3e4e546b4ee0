"""What a new store needs outside its own file: its scheme in the texts that list them, and its secrets removed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import reshard as package
from reshard.base.foreign_text import without_secrets
from reshard.stores.bucket import read_only
from reshard.stores.object_stores import ObjectStore
from reshard.stores.orbax import OrbaxStore
from reshard.stores.registry import STORES
from tests.commandline import reshard

ROOT = Path(__file__).parents[2]
TYPED = [kind for kind in STORES if kind.kind.package and kind is not OrbaxStore]
"""The kinds of stores whose URLs users type."""
WRITABLE = {kind.kind.schemes[0] for kind in TYPED if issubclass(kind, ObjectStore)}


def listed(text: str) -> set[str]:
    return set(re.findall(r"\b([a-z0-9]+)://", text))


def test_the_texts_list_the_stores_that_can_be_written() -> None:
    texts = {
        "convert --help": reshard("convert", "--help").out,
        "convert's docstring": str(package.convert.__doc__),
        "the error of a store that cannot be written": str(
            read_only("https://host/model").problems[0].expected
        ),
    }
    assert [
        (where, WRITABLE - listed(text)) for where, text in texts.items() if WRITABLE - listed(text)
    ] == []


def test_the_page_of_stores_has_them_all() -> None:
    page = (ROOT / "docs/stores.md").read_text()
    rows = {row[0]: row[3].strip() for row in re.findall(r"^\| `(\w+)://` \|(.*)\|(.*)\|(.*)\|$", page, re.M)}
    assert [kind for kind in TYPED if len(rows.keys() & set(kind.kind.schemes)) != 1] == []
    assert {scheme for scheme, written in rows.items() if written == "yes"} == WRITABLE


@pytest.mark.parametrize("scheme", [scheme for kind in TYPED for scheme in kind.kind.schemes])
def test_messages_hide_the_secrets_of_each(scheme: str) -> None:
    for secret in (
        f"{scheme}://key:geheim@host/model",
        f"{scheme}://key:geheim/model",
        f"{scheme}://host/m?sig=geheim",
    ):
        assert "geheim" not in without_secrets(f"cannot read {secret}: refused")
