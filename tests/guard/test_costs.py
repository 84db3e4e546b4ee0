"""What a guard costs beside the command."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

GUARD = (sys.executable, "-X", "importtime", "-m", "reshard", "guard")


def test_a_good_run_imports_neither_formats_nor_the_report_of_failures(tmp_path: Path) -> None:
    done = subprocess.run(
        [*GUARD, "--", "true"], cwd=tmp_path, capture_output=True, text=True, check=True, timeout=300
    )
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "reshard.runs.guard.supervise.supervision" in imported
    assert not imported & {
        "numpy",
        "reshard.formats",
        "reshard.runs.guard.end.failure",
        "reshard.final.saved_checkpoints",
    }
