"""Pages as Chromium draws them."""

from __future__ import annotations

import re
import shutil
import subprocess
from html import unescape

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needed = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")


def drawn(address: str, *flags: str) -> str:
    """The page at an address after its scripts ran, as HTML."""
    words = [str(CHROMIUM), "--headless=new", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=3000"]
    done = subprocess.run([*words, *flags, "--dump-dom", address], capture_output=True, text=True, check=True)
    return done.stdout


def labels(svg: str) -> list[tuple[float, float, str]]:
    """The texts of a chart with their places: from the left, from the top."""
    found = re.findall(r'<text[^>]* transform="translate\(([\d.]+) ([\d.]+)\)"[^>]*>([^<]*)</text>', svg)
    return [(float(x), float(y), unescape(text)) for x, y, text in found]
