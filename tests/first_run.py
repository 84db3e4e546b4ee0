"""`python tests/first_run.py ARCHIVE...`: the first page's commands, with a wheel or sdist, outside of the clone.

Each archive is installed into a fresh environment in a new folder, to which only `examples/` is copied: no torch, no
extra and no file of the clone. With `--extras`, pip must also find a solution for each extra of a wheel (minutes).
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

CLONE = Path(__file__).parents[1]
PASSED = ("PIP_", "SSL_", "REQUESTS_")
SERVERS = {"vllm", "sglang"}
"""Extras that take gigabytes to solve: their own releases bring torch and CUDA."""


def first_run() -> list[list[str]]:
    """The commands of the README's first run, as words."""
    section = (CLONE / "README.md").read_text(encoding="utf-8").partition("\n## First run\n")[2]
    block = re.search(r"^```bash\n(.*?)^```$", section, re.M | re.S)
    assert block
    return [shlex.split(line) for line in block[1].splitlines()]


class Fresh:
    """A new folder with an environment in which nothing but an archive and its requirements is installed."""

    def __init__(self, folder: Path, archive: Path) -> None:
        self.folder = folder
        subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
        self._environment = {key: value for key, value in os.environ.items() if key.startswith(PASSED)}
        self._environment |= {"PATH": f"{folder / 'venv' / 'bin'}:{os.environ['PATH']}", "HOME": str(folder)}
        self.run("pip", "install", "--quiet", str(archive))

    def run(self, *words: str, status: int = 0) -> str:
        """What a command prints. Raises SystemExit, with all of its output, if it ends with another status."""
        done = subprocess.run(words, cwd=self.folder, env=self._environment, capture_output=True, text=True)
        if done.returncode != status:
            raise SystemExit(
                f"{shlex.join(words)}: exit status {done.returncode}\n{done.stdout}{done.stderr}"
            )
        return done.stdout


def extras_of(wheel: Path) -> list[str]:
    """The extras that a wheel declares."""
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return re.findall(r"^Provides-Extra: (\S+)$", archive.read(metadata).decode(), re.M)


def solve_extras(fresh: Fresh, wheel: Path) -> None:
    """Have pip find releases for each extra of a wheel, without installing them."""
    for extra in sorted({*extras_of(wheel)} - SERVERS):
        fresh.run("pip", "install", "--quiet", "--dry-run", f"reshard[{extra}] @ {wheel.as_uri()}")


def main(archives: list[Path], *, extras: bool) -> None:
    """Try all archives; the first command that fails ends the run."""
    for archive in archives:
        with tempfile.TemporaryDirectory() as folder:
            fresh = Fresh(Path(folder).resolve(), archive.resolve())
            shutil.copytree(CLONE / "examples", fresh.folder / "examples")
            place = fresh.run("python", "-c", "import reshard; print(reshard.__file__)")
            assert place.startswith(str(fresh.folder)), place
            for words in first_run():
                print(f"$ {shlex.join(words)}\n{fresh.run(*words)}", end="")
            fresh.run("python", "-c", "import torch", status=1)
            fresh.run("pip", "check")
            if extras:
                solve_extras(fresh, archive.resolve())
            print(f"{archive.name}: works with Python {sys.version.split()[0]}\n")


if __name__ == "__main__":
    main([Path(word) for word in sys.argv[1:] if word != "--extras"], extras="--extras" in sys.argv)
