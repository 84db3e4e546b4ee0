"""The documentation site: it builds without a warning, and loads nothing from elsewhere."""

from __future__ import annotations

import json
import os
import re
import subprocess
from html import unescape
from pathlib import Path
from urllib.parse import unquote

import pytest

import reshard
from reshard.runs.doctor.entries.catalogue_entry import catalogue
from tests import browser, environments

REPOSITORY = Path(__file__).parents[1]

pytestmark = pytest.mark.slow


def build(config: Path, site: Path) -> subprocess.CompletedProcess[str]:
    """Build as `make docs` does: in strict mode, where a warning is an error."""
    source = f"{REPOSITORY / 'src'}"
    return subprocess.run(
        [environments.python("docs"), "-m", "mkdocs", "build", "-f", config, "-d", site],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": source, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site") / "site"
    done = build(REPOSITORY / "mkdocs.yml", folder)
    assert done.returncode == 0, done.stderr
    return folder


def test_every_link_leads_to_a_page_and_a_place_in_it(site: Path) -> None:
    """Including pictures and links in HTML, which MkDocs does not check."""
    places = {
        page: set(re.findall(r'\bid="([^"]+)"', page.read_text(encoding="utf-8")))
        for page in site.rglob("*.html")
    }
    wrong = []
    for page in places:
        if page.name == "404.html":  # its links begin at the root of a server
            continue
        for link in re.findall(r'\b(?:src|srcset|href)="?([^"\s>]+)', page.read_text(encoding="utf-8")):
            path, _, anchor = unescape(link).partition("#")
            if "://" in path or path.startswith(("mailto:", "data:")):
                continue
            target = (page.parent / unquote(path)).resolve() if path else page
            if target.is_dir():
                target /= "index.html"
            if not target.exists() or (anchor and target in places and unquote(anchor) not in places[target]):
                wrong.append(f"{page.relative_to(site)}: {link}")
    assert wrong == []


def test_a_link_to_nothing_stops_the_build(tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "page.md").write_text("# Page\n\n[nothing](../src/reshard/nothing.py) [nowhere](#nowhere)\n")
    tools = REPOSITORY / "tools" / "site"
    (tmp_path / "mkdocs.yml").write_text(
        f"INHERIT: {REPOSITORY / 'mkdocs.yml'}\ndocs_dir: {docs}\nnav: [page.md]\n"
        f"hooks: [{tools / 'hooks.py'}]\ntheme: {{custom_dir: {tools / 'theme'}}}\n"
        "validation: {nav: {omitted_files: ignore}, links: {anchors: warn}}\n"
    )
    done = build(tmp_path / "mkdocs.yml", tmp_path / "site")
    assert done.returncode == 1
    assert "nothing.py" in done.stderr and "#nowhere" in done.stderr


def test_a_page_loads_nothing_from_elsewhere(site: Path) -> None:
    loads = r"<(?:script|img|iframe|source)\b[^>]*\bsrc(?:set)?=\"?https?://[^\s>]+|<link\b[^>]*rel=\"?stylesheet[^>]*https?://"
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        assert not re.findall(loads, text), page.name
        assert 'data-md-component="source"' not in text  # the theme would ask GitHub for stars
        assert 'class="mermaid"' not in text  # the theme would fetch what draws it
    for sheet in site.rglob("*.css"):
        assert not re.search(r"url\(\"?https?:|@import", sheet.read_text(encoding="utf-8")), sheet.name


@browser.needed
@pytest.mark.parametrize("name", ["index.html", "tutorials/lora.html"])
def test_search_works_in_a_page_opened_from_the_disk(site: Path, name: str) -> None:
    page = browser.drawn(f"{(site / name).as_uri()}?q=device-map-zero3")
    assert re.search(r'href="[^"]*failures\.html[^"]*#device-map-zero3"', page)


def test_every_page_links_to_the_repository_and_to_its_source(site: Path) -> None:
    address = "https://github.com/reshard/reshard"
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        assert f'href="{address}"' in text, page.name
        for source in re.findall(r'href="([^"]*)"[^>]* rel="edit"', text):
            assert (REPOSITORY / source.removeprefix(f"{address}/edit/main/")).is_file(), source
    start, formats, failures = (
        (site / name).read_text(encoding="utf-8") for name in ("index.html", "formats.html", "failures.html")
    )
    assert f"{address}/edit/main/README.md" in start and f"{address}/edit/main/docs/formats.md" in formats
    assert "/edit/main/" not in failures  # a tool writes it


def test_every_table_has_a_header(site: Path) -> None:
    for page in site.rglob("*.html"):
        for head in re.findall(r"(?s)<thead>(.*?)</thead>", page.read_text(encoding="utf-8")):
            assert re.sub(r"<[^>]+>|\s", "", head), page.name


def test_patterns_with_asterisks_are_plain_text(site: Path) -> None:
    for page in site.rglob("*.html"):
        found = re.findall(r"\w<em>[^<]*</em>[\w.]", page.read_text(encoding="utf-8"))
        assert found == [], page.name  # model_tp*_pp*.pt


def test_every_page_shows_the_version(site: Path) -> None:
    for page in site.rglob("*.html"):
        assert f"reshard {reshard.__version__}" in page.read_text(encoding="utf-8"), page.name


def test_failures_have_anchors_that_stay_and_are_found_by_their_message(site: Path) -> None:
    index = {
        each["location"]: each["text"]
        for each in json.loads((site / "search/search_index.json").read_text())["docs"]
    }
    for name, entry in catalogue().items():
        found = unescape(re.sub(r"<[^>]+>", "", index[f"failures.html#{name}"]))
        assert " ".join(entry.excerpt.split())[:60] in " ".join(found.split()), name


def test_the_reference_has_every_command_and_every_public_name(site: Path) -> None:
    from reshard.cli import COMMANDS

    commands = (site / "reference/commands.html").read_text(encoding="utf-8")
    assert [name for name in COMMANDS if f'id="reshard-{name}"' not in commands] == []
    assert "Sentinel" not in commands and r"\|" not in commands
    code = re.sub(r"<[^>]+>", "", "".join(re.findall(r"(?s)<pre.*?</pre>", commands)))
    examples = [line.strip() for line in unescape(code).splitlines() if line.startswith("reshard ")]
    assert "reshard convert model ckpt --to megatron --tp 4     Hugging Face to Megatron" in examples
    assert [
        line for line in re.findall(r"reshard \w+ +[A-Z]+  [^<]*", unescape(commands)) if line not in code
    ] == []
    python = (site / "reference/python.html").read_text(encoding="utf-8")
    public = [name for name in reshard.__all__ if not name.startswith("_")]
    assert [name for name in public if not re.search(rf'id="reshard\.[\w.]+\.{name}"', python)] == []
