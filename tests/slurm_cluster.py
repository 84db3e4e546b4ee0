"""A real Slurm on this machine, without accounting: one node, and job arrays of at most `LONGEST` jobs.

It needs slurmctld, slurmd and munged (Debian: `apt-get install slurm-wlm`), and root.
"""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LONGEST = 6

SETTINGS = """
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={first}
SlurmdPort={second}
AuthInfo=socket={folder}/munge.socket
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SlurmdParameters=config_overrides
MaxArraySize={longest}
KillWait=2
MinJobAge=2
NodeName={host} NodeAddr=127.0.0.1 CPUs=4 RealMemory=2000 State=UNKNOWN
PartitionName=all Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""


def is_installed() -> bool:
    """Whether a cluster can be started."""
    return all(map(shutil.which, ("slurmctld", "slurmd", "munged", "sbatch"))) and os.getuid() == 0


@contextmanager
def cluster(folder: Path) -> Iterator[dict[str, str]]:
    """The variables with which Slurm's commands use a cluster that runs until the block ends."""
    ports = [_free() for _ in range(2)]
    settings = folder / "slurm.conf"
    settings.write_text(
        SETTINGS.format(
            host=socket.gethostname(), folder=folder, first=ports[0], second=ports[1], longest=LONGEST
        )
    )
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(1024))
    key.chmod(0o400)
    for name in ("state", "spool"):
        (folder / name).mkdir()
    names = {"key-file": key, "socket": "munge.socket", "pid-file": "munged.pid", "log-file": "munged.log"}
    flags = [f"--{name}={folder / value}" for name, value in names.items()]
    environment = {"SLURM_CONF": str(settings)}
    commands = (
        ["munged", "--force", "--foreground", f"--seed-file={folder / 'munged.seed'}", *flags],
        ["slurmctld", "-D"],
        ["slurmd", "-D"],
    )
    started: list[subprocess.Popen[bytes]] = []
    try:
        with (folder / "output").open("w") as log:
            for command in commands:
                run = {**os.environ, **environment}
                started.append(subprocess.Popen(command, stdout=log, stderr=log, env=run))
                time.sleep(1)
        _wait_for_node(environment)
        yield environment
    finally:
        for process in reversed(started):
            process.terminate()
            process.wait()


def _wait_for_node(environment: dict[str, str]) -> None:
    for _ in range(100):
        asked = subprocess.run(
            ["sinfo", "-h", "-o", "%T"], capture_output=True, text=True, env={**os.environ, **environment}
        )
        if asked.stdout.strip() == "idle":
            return
        time.sleep(0.2)
    raise TimeoutError(f"no node is idle: {asked.stdout}{asked.stderr}")


def _free() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port
