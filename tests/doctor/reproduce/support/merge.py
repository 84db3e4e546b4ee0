"""verl's merger of the shards of an actor."""

import shutil
import subprocess
import sys
from pathlib import Path

from small import DATA


def actor():
    """A copy of what verl has saved, to be spoiled."""
    step = shutil.copytree(DATA / "verl" / "fsdp1" / "global_step_3", Path.cwd() / "out" / "global_step_3")
    return Path(step) / "actor"


def merge(folder, *options):
    """Run the merger. Returns its exit status."""
    where = ["--backend", "fsdp", "--local_dir", folder, "--target_dir", "out/hf"]
    return subprocess.call([sys.executable, "-m", "verl.model_merger", "merge", *where, *options])
