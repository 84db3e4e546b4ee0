"""Findings computed from failures that no entry knows: of linkers, resolvers, releases."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

from reshard.runs.doctor.log_diagnosis import diagnose_text


def test_a_launcher_that_failed_is_no_compiler() -> None:
    code = "import subprocess, sys; subprocess.check_call([sys.executable, '-c', 'raise SystemExit(3)'])"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert diagnose_text("log", ran.stderr)[0].code == "worker-traceback-missing"


# --------------------------------------------------------------------------------------------------- resolvers


def test_pip_itself_says_so(tmp_path: Path) -> None:
    """Two wheels that need different releases of a third."""
    for name, version, needs in [
        ("nicate", 1, "frob>=2"),
        ("wibble", 1, "frob<2"),
        ("frob", 1, ""),
        ("frob", 2, ""),
    ]:
        with zipfile.ZipFile(tmp_path / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
            info = f"{name}-{version}.dist-info"
            requires = f"Requires-Dist: {needs}\n" if needs else ""
            wheel.writestr(
                f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{requires}"
            )
            wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{info}/RECORD", "")
    install = [sys.executable, "-m", "pip", "install", "--dry-run", "--no-index", "--find-links"]
    ran = subprocess.run(
        [*install, str(tmp_path), "nicate", "wibble"], capture_output=True, text=True, check=False
    )
    found = diagnose_text("log", ran.stdout + ran.stderr)[0]
    assert found.code == "requirements-conflict", ran.stdout + ran.stderr
    assert "frob>=2" in found.rule.en and "frob<2" in found.rule.en


# ----------------------------------------------------------------------------------- releases, and whose fault
