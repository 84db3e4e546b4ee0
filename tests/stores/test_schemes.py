"""What a new store needs outside its class: a row on the page of stores, an extra, and its secrets removed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import tomllib

from reshard.base.foreign_text import without_secrets
from reshard.stores.address import StoreKind
from reshard.stores.bucket import not_writable
from reshard.stores.file_info import FileInfo
from reshard.stores.object_stores import AlibabaOss, ObjectStore, entry_of
from reshard.stores.registry import STORES, is_writable
from reshard.stores.store import Store

ROOT = Path(__file__).parents[2]
TYPED = [kind for kind in STORES if kind.kind.package]
"""The kinds of stores whose URLs users type."""
WRITABLE = {kind.kind.schemes[0] for kind in TYPED if issubclass(kind, ObjectStore)}


def listed(text: str) -> set[str]:
    return set(re.findall(r"\b([a-z0-9]+)://", text))


def test_the_error_lists_the_stores_that_can_be_written() -> None:
    assert listed(str(not_writable("https://host/model").problems[0].expected)) == WRITABLE


@pytest.mark.parametrize("kind", STORES)
def test_a_path_is_writable_on_this_machine_or_in_a_bucket(kind: type[Store]) -> None:
    for scheme in kind.kind.schemes:
        assert is_writable(f"{scheme}://somewhere/model") == issubclass(kind, ObjectStore)
    assert is_writable("/somewhere/model")


def test_each_has_an_extra_that_installs_its_package() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    packages = {re.match(r"[\w-]+", each)[0] for name in extras if name != "dev" for each in extras[name]}  # type: ignore[index]
    assert {kind.kind.package for kind in TYPED} - packages == set()
    assert set(re.findall(r"\w+", extras["stores"][0])) >= WRITABLE


def test_times_may_be_those_of_http_headers() -> None:
    for time in ("2026-11-27T02:03:04Z", "Fri, 27 Nov 2026 02:03:04 GMT"):
        assert entry_of({"size": 5, "LastModified": time}) == FileInfo(5, 1795744984 * 10**9, "")


def test_a_package_that_fsspec_does_not_know_is_named_by_its_class(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = StoreKind(("strange",), "nobody", "", file_system="fsspec.implementations.memory.MemoryFileSystem")
    monkeypatch.setattr(AlibabaOss, "kind", kind)
    assert type(AlibabaOss("strange://bucket").fs).__name__ == "MemoryFileSystem"


def test_the_page_of_stores_has_them_all() -> None:
    page = (ROOT / "docs/stores.md").read_text()
    rows = {row[0]: row[3].strip() for row in re.findall(r"^\| `(\w+)://` \|(.*)\|(.*)\|(.*)\|$", page, re.M)}
    assert [kind for kind in TYPED if len(rows.keys() & set(kind.kind.schemes)) != 1] == []
    assert {scheme for scheme, written in rows.items() if written == "yes"} == WRITABLE


@pytest.mark.parametrize("scheme", [*(scheme for kind in TYPED for scheme in kind.kind.schemes), "new-store"])
def test_messages_hide_the_secrets_of_each(scheme: str) -> None:
    for secret in (
        f"{scheme}://key:geheim@host/model",
        f"{scheme}://key:geheim/model",
        f"{scheme}://host/m?sig=geheim",
    ):
        assert "geheim" not in without_secrets(f"cannot read {secret}: refused")
