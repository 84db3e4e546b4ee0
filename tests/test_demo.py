"""The demo, the first thing that a newcomer runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from demo.__main__ import Station, run, stations

REPOSITORY = Path(__file__).parents[1]


def demo(output: Path, steps: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "demo", "--output", str(output), "--steps", str(steps)]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=280)


@pytest.mark.slow  # `make demo` runs it, as continuous integration does
def test_demo_runs_every_station(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "stale").write_text("left by an earlier run")
    (tmp_path / "notes.txt").write_text("not the demo's")
    done = demo(tmp_path, steps=4)
    assert done.returncode == 0, done.stdout + done.stderr
    headings = [line for line in done.stdout.splitlines() if line[:2].rstrip(".").isdigit()]
    titles = [station.title for station in stations(tmp_path, 4)]
    assert headings == [f"{number}. {title}" for number, title in enumerate(titles, 1)]
    assert "equal: 135 tensors" in done.stdout
    assert "logits agree" in done.stdout
    assert (tmp_path / "run" / "iter_0000004" / ".metadata").is_file()
    assert not (tmp_path / "run" / "stale").exists()
    assert (tmp_path / "notes.txt").exists()


@pytest.mark.slow
def test_demo_ends_at_the_station_that_fails(tmp_path: Path) -> None:
    (tmp_path / "model").write_text("where the first station wants to make a folder")
    done = demo(tmp_path, steps=4)
    assert done.returncode == 1
    assert "this step ended with exit status 1; expected 0" in done.stderr
    assert "1. " in done.stdout
    assert "2. " not in done.stdout


def test_a_station_that_should_fail_and_does_not_is_a_failure() -> None:
    with pytest.raises(SystemExit, match="exit status 0; expected 1"):
        run(Station("support", ("reshard", "support", "--json"), status=1))
