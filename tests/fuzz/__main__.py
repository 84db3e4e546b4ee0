"""Fuzz one target after another, and keep the inputs that fail.

    python -m tests.fuzz                           all targets, a minute each
    python -m tests.fuzz --seconds 600 pickle      one of them for ten minutes
    python -m tests.fuzz --list

Mutation is guided by coverage, with atheris, which tests/environments.py installs; with --blind it is not. Failing
inputs are written to --out, one file for each place of failure; an input becomes a test when it is put into
tests/fuzz/found/TARGET/.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from packaging.requirements import Requirement

from tests.environments import python_with
from tests.fuzz.targets import TARGETS


def main() -> int:
    """Fuzz each target in its own process; the exit status tells whether all passed."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__.split("\n")[0])
    parser.add_argument("targets", nargs="*", metavar="TARGET", help="all by default")
    parser.add_argument(
        "--seconds", type=float, default=60, help="of the processor, for each target; 60 by default"
    )
    parser.add_argument("--seed", type=int, default=1, help="of the mutations")
    parser.add_argument(
        "--out", type=Path, default=Path("fuzz-found"), help="where inputs are kept that fail"
    )
    parser.add_argument("--list", action="store_true", help="list the targets")
    parser.add_argument("--blind", action="store_true", help="without atheris")
    given = parser.parse_args()
    if given.list:
        print("\n".join(TARGETS))
        return 0
    if unknown := set(given.targets) - set(TARGETS):
        parser.error(f"no such target: {', '.join(sorted(unknown))}; --list names all")
    failed, python = 0, sys.executable if given.blind else python_with([Requirement("atheris")])
    print(f"{'target':<22}{'inputs':>10}{'seconds':>9}{'coverage':>10}{'failures':>10}", flush=True)
    for name in given.targets or TARGETS:
        with tempfile.NamedTemporaryFile("r", suffix=".json") as result:
            words = [name, str(given.seconds), str(given.seed), str(given.out), result.name]
            command = [python, "-m", "tests.fuzz.worker", *words]
            run = subprocess.run(command, check=False, stderr=subprocess.PIPE)
            text, printed = result.read(), run.stderr.decode(errors="replace")
        if not text:
            print(f"{name}: ended with {run.returncode}\n{printed[-3000:]}", flush=True)
            failed += 1
            continue
        found = json.loads(text)
        covered = re.findall(r"cov: (\d+)", printed)
        failed += len(found["failures"])
        print(
            f"{name:<22}{found['inputs']:>10,}{found['seconds']:>9.0f}{covered[-1] if covered else '-':>10}"
            f"{len(found['failures']):>10}",
            flush=True,
        )
        for failure in found["failures"]:
            print(f"    {failure}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
