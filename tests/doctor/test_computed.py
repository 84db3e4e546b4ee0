"""Findings computed from failures that no entry knows: of linkers, releases."""

from __future__ import annotations

import subprocess
import sys

from reshard.runs.doctor.log_diagnosis import diagnose_text


def test_a_launcher_that_failed_is_no_compiler() -> None:
    code = "import subprocess, sys; subprocess.check_call([sys.executable, '-c', 'raise SystemExit(3)'])"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert diagnose_text("log", ran.stderr)[0].code == "worker-traceback-missing"


# ----------------------------------------------------------------------------------- releases, and whose fault
