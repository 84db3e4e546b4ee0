"""MkDocs hooks for pages outside of `docs/`, and for generated pages.

Links from a page to a file of the repository lead to the page of the site if there is one, and to GitHub otherwise. A
link to a file that does not exist is unchanged, so that the strict build fails on it.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import mkdocs.plugins
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import reshard
from reshard.runs.doctor.entries.catalogue_entry import catalogue

REPOSITORY = Path(__file__).parents[2]
sys.path.insert(0, str(REPOSITORY))

from tools.site import commands  # noqa: E402

GITHUB = "https://github.com/reshard/reshard/blob/main/"
ROOT = {
    "README.md": "index.md",
    **{
        name: name
        for name in (
            "README.zh-CN.md",
            "CONTRIBUTING.md",
            "SECURITY.md",
            "CHANGELOG.md",
            "CODE_OF_CONDUCT.md",
        )
    },
}
"""Files outside `docs/`, and their place in the site."""
WRITTEN = {page: name for name, page in ROOT.items()}
"""The file of each of these pages."""

_LINK = re.compile(r'(\]\(|\b(?:src|srcset|href)=")([^)"\s]+)')
_CODE = re.compile(r"(?<!</span>)<code>([^<]*)</code>")  # in text: a block begins with an empty <span>
_FLAG = re.compile(r"(?<![\w-])--?[a-zA-Z][\w-]*")
_FENCED = re.compile(r"^```.*?^```$", re.M | re.S)
_FAILURE = re.compile(r"^### ([\w-]+)\n\n(\*\*.*)$", re.M)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Show the version on every page, and add pages that the navigation does not name to the guides."""
    config.site_name = f"reshard {reshard.__version__}"
    config.copyright = f"reshard {reshard.__version__}, Apache License 2.0"
    named = set(re.findall(r"[\w./-]+\.md", str(config.nav)))
    pages = (path.relative_to(config.docs_dir).as_posix() for path in Path(config.docs_dir).rglob("*.md"))
    for section in config.nav or []:
        if isinstance(section, dict) and "Guides" in section:
            section["Guides"] += sorted(page for page in pages if page not in named)
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add generated pages, and those in the root of the repository with their pictures."""
    made = {
        "reference/commands.md": commands.page(),
        "reference/python.md": _python(),
    }
    made |= {page: (REPOSITORY / name).read_text(encoding="utf-8") for page, name in WRITTEN.items()}
    for place, content in made.items():
        if files.get_file_from_path(place) is None:
            file = File.generated(config, place, content=content)
            file.edit_uri = f"../{WRITTEN[place]}" if place in WRITTEN else None
            files.append(file)
    return files


@mkdocs.plugins.event_priority(50)
def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Fix links out of `docs/`, and add the message of each failure for the search."""
    if page.file.src_uri == "failures.md":
        page.edit_url = None  # a tool writes it
        markdown = _FAILURE.sub(_with_message, markdown)
    start = 0
    parts = []
    for fence in (*_FENCED.finditer(markdown), None):
        end = fence.start() if fence else len(markdown)
        parts.append(
            _LINK.sub(lambda link: link[1] + _place(link[2], page.file.src_uri), markdown[start:end])
        )
        if fence:
            parts.append(fence[0])
            start = fence.end()
    return "".join(parts)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Mark flags in text, which browsers would break after a hyphen."""
    return _CODE.sub(lambda code: _FLAG.sub(r'<span class="flag">\g<0></span>', code[0]), html)


def _place(link: str, uri: str) -> str:
    """The target of a page's link in the site."""
    if "://" in link or link.startswith(("#", "mailto:")):
        return link
    path, mark, anchor = link.partition("#")
    written = WRITTEN.get(uri, f"docs/{uri}")
    target = Path(os.path.normpath(Path(written).parent / path))
    if not (REPOSITORY / target).exists():
        return link
    name = target.as_posix()
    if name in ROOT:
        inside = ROOT[name]
    elif name.startswith("docs/") and (REPOSITORY / target).is_file():
        inside = name.removeprefix("docs/")
    else:
        return GITHUB + name + mark + anchor
    return os.path.relpath(inside, Path(uri).parent) + mark + anchor


def _with_message(failure: re.Match[str]) -> str:
    excerpt = catalogue()[failure[1]].excerpt.strip()
    return f"{failure[0]}\n\n````text\n{excerpt}\n````"


def _python() -> str:
    """Every public name of the package, functions first."""
    public = [name for name in reshard.__all__ if not name.startswith("_")]
    lines = [
        "# Python",
        "",
        "The public names. [From Python](../python.md) shows how to use them.",
    ]
    for heading, names in (
        ("Functions", [name for name in public if name[0].islower()]),
        ("Types", [name for name in public if name[0].isupper()]),
    ):
        lines += [
            "",
            f"## {heading}",
            *(f"\n::: {getattr(reshard, name).__module__}.{name}" for name in names),
        ]
    return "\n".join(lines) + "\n"
