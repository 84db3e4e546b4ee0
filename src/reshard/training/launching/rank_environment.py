"""Launchers that may have started this process as one of several ranks: torchrun, Slurm, MPI, `accelerate launch`.

reshard then uses this rank instead of starting ranks itself. What each launcher sets:

- torchrun, `accelerate launch` and DeepSpeed: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT
- srun: SLURM_STEP_ID, SLURM_PROCID, SLURM_STEP_NUM_TASKS, SLURM_LOCALID, SLURM_STEP_NODELIST (man srun, "OUTPUT
  ENVIRONMENT VARIABLES"); in a batch script SLURM_PROCID and SLURM_NTASKS are set as well, but no step
- mpirun: OMPI_COMM_WORLD_RANK … of Open MPI; PMI_RANK, PMI_SIZE, MPI_LOCALRANKID of MPICH and Intel MPI
- `accelerate launch` with one process: ACCELERATE_MIXED_PRECISION and nothing else
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass

from reshard.base.errors import Problem, ReshardError
from reshard.training.run import Run

EnvironmentVariables = Mapping[str, str]

TORCHRUN_RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
STALE_VARIABLES = (
    *(*TORCHRUN_RANK_VARIABLES, "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    *("ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE"),
)
"""Variables that an earlier launch may have left in the environment, and that torch would use."""
FOREIGN_PREFIXES = ("TORCHELASTIC_", "ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_", "MEGATRON_LM_")
"""Prefixes of settings by which another launcher would change the plan that was checked."""
FIRST_SPECIAL_STEP = 4294967290
"""SLURM_STEP_ID from here on means no step of tasks, but interactive shells and batch scripts (slurm.h)."""
PORT_RANGE = (20000, 10000)
"""First port of those derived from a job's number, and their count; they are below the ephemeral ports."""


@dataclass(frozen=True)
class LaunchedRank:
    """One rank that a launcher started, and the address of rank 0."""

    launcher: str
    rank: int
    world_size: int
    local_rank: int
    address: str
    port: int
    local_world_size: int | None = None

    def environment(self) -> dict[str, str]:
        """The variables from which torch reads this rank."""
        told = {
            "RANK": self.rank,
            "WORLD_SIZE": self.world_size,
            "LOCAL_RANK": self.local_rank,
            "LOCAL_WORLD_SIZE": self.local_world_size,
            "MASTER_ADDR": self.address,
            "MASTER_PORT": self.port,
        }
        return {name: str(value) for name, value in told.items() if value is not None}


def launched_rank(run: Run, environment: EnvironmentVariables | None = None) -> LaunchedRank | None:
    """The rank that a launcher has given this process, or None if reshard has to start the ranks itself.

    Raises ReshardError if the launcher started another number of processes than requested, or if variables are missing.
    """
    given = os.environ if environment is None else environment
    found = _torchrun(given) or _slurm(run, given) or _mpi(given) or _accelerate(given)
    problem = _disagreement(run, found) if found else _half_launched(run, given)
    if problem:
        raise ReshardError(problem)
    return found


def forget(environment: MutableMapping[str, str]) -> None:
    """Remove variables of other launches, so that ranks use only those of this one."""
    for name in list(environment):
        if name in STALE_VARIABLES or name.startswith(FOREIGN_PREFIXES):
            del environment[name]


def _torchrun(given: EnvironmentVariables) -> LaunchedRank | None:
    """A single rank that torchrun did not start is ignored: a script has left the variables behind."""
    started = "TORCHELASTIC_RUN_ID" in given
    if not all(given.get(name) for name in TORCHRUN_RANK_VARIABLES) or (
        given["WORLD_SIZE"] == "1" and not started
    ):
        return None
    rank, world_size, local_rank = (int(given[name]) for name in TORCHRUN_RANK_VARIABLES[:3])
    address, port = given["MASTER_ADDR"], int(given["MASTER_PORT"])
    here = _number(given, "LOCAL_WORLD_SIZE")
    return LaunchedRank(
        "torchrun" if started else "the launcher", rank, world_size, local_rank, address, port, here
    )


def _slurm(run: Run, given: EnvironmentVariables) -> LaunchedRank | None:
    """A task of `srun`. A single task, or one on each node with --nnodes, starts its ranks by torchrun instead."""
    step, rank = _step(given), _number(given, "SLURM_PROCID")
    tasks = _number(given, "SLURM_STEP_NUM_TASKS") or _number(given, "SLURM_NTASKS") or 1
    if step is None or rank is None or tasks == 1 or run.ranks.nnodes > 1:
        return None
    nodes = given.get("SLURM_STEP_NODELIST") or given.get("SLURM_NODELIST", "")
    address = given.get("MASTER_ADDR") or first_host(nodes)
    port = _number(given, "MASTER_PORT") or port_of((_number(given, "SLURM_JOB_ID") or 0) * 31 + step)
    sizes = _repeated(given.get("SLURM_STEP_TASKS_PER_NODE") or given.get("SLURM_TASKS_PER_NODE", ""))
    here = dict(enumerate(sizes)).get(_number(given, "SLURM_NODEID") or 0)
    return LaunchedRank("srun", rank, tasks, _number(given, "SLURM_LOCALID") or 0, address, port, here)


def _step(given: EnvironmentVariables) -> int | None:
    """The number of the step that `srun` has started."""
    step = _number(given, "SLURM_STEP_ID")
    return None if step is None or step >= FIRST_SPECIAL_STEP else step


_OPENMPI = tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
_MPICH = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")


def _mpi(given: EnvironmentVariables) -> LaunchedRank | None:
    """A process of `mpirun`. On one node, the ranks meet at a port derived from their parent process."""
    names = next((names for names in (_OPENMPI, _MPICH) if names[0] in given), _OPENMPI)
    rank, world_size, local_rank, here = (_number(given, name) for name in names)
    if rank is None or world_size is None or world_size == 1:
        return None
    address, port = given.get("MASTER_ADDR"), _number(given, "MASTER_PORT")
    if here not in (None, world_size) and not (address and port):
        raise ReshardError(
            "rendezvous-missing",
            "the address of the first node is unknown to the other nodes",
            rule="MPI does not pass the address of the first node to its processes",
            found=f"{names[0]}={rank}, {world_size} processes, {here} of them here",
            remedy="mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=29500 …, with the host of rank 0",
        )
    local_rank = rank if local_rank is None else local_rank
    address, port = address or "127.0.0.1", port or port_of(os.getppid())
    return LaunchedRank("mpirun", rank, world_size, local_rank, address, port, here or world_size)


def _accelerate(given: EnvironmentVariables) -> LaunchedRank | None:
    """`accelerate launch` with one process, for which it sets no ranks."""
    port = port_of(os.getpid())
    is_one = "ACCELERATE_MIXED_PRECISION" in given
    return LaunchedRank("accelerate launch", 0, 1, 0, "127.0.0.1", port, 1) if is_one else None


def _disagreement(run: Run, place: LaunchedRank) -> Problem | None:
    asked, started = run.ranks.nproc, place.local_world_size
    if asked and started and asked != started:
        return Problem(
            "launcher-processes-differ",
            f"{place.launcher} started a different number of processes than requested",
            expected=f"--nproc {asked}",
            found=f"{started} on this node",
            remedy=f"leave out {place.launcher} (reshard starts the processes itself), or leave out --nproc",
        )
    return None


def _half_launched(run: Run, given: EnvironmentVariables) -> Problem | None:
    """A problem if nodes were allocated of which this process would use only one."""
    if run.ranks.nnodes > 1:
        return None
    world_size = _number(given, "WORLD_SIZE") or 1
    if world_size > 1 and "RANK" in given and "MASTER_ADDR" in given and "LOCAL_RANK" not in given:
        return Problem(
            "local-rank-not-set",
            "RANK and WORLD_SIZE are set, and LOCAL_RANK is not",
            rule="torchrun sets all three; a pod of Kubernetes gets its number as RANK",
            found=f"RANK={given['RANK']}, WORLD_SIZE={world_size}",
            remedy="on several pods or nodes: --nnodes $WORLD_SIZE --node-rank $RANK --rendezvous "
            "$MASTER_ADDR:$MASTER_PORT; else unset RANK WORLD_SIZE",
        )
    nodes = _number(given, "SLURM_JOB_NUM_NODES") or 1
    if nodes > 1 and _step(given) is None:
        return Problem(
            "slurm-nodes-unused",
            "Slurm allocated several nodes, but this command would use only one",
            found=f"SLURM_JOB_NUM_NODES={nodes}, outside of srun",
            remedy="srun --ntasks-per-node=GPUS reshard train …: one task for each GPU",
        )
    return None


def first_host(nodes: str) -> str:
    """The first host of a Slurm node list: `gpu07` of "gpu[07-09,12],cpu1"."""
    match = re.match(r"([^,\[]+)(?:\[([^\],-]+)[^\]]*\]([^,]*))?", nodes)
    if not match:
        return "127.0.0.1"
    return match[1] + (match[2] or "") + (match[3] or "")


def _repeated(counts: str) -> Iterator[int]:
    """Tasks of each node, from "4(x2),2"."""
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", counts):
        yield from [int(count)] * int(times or 1)


def port_of(number: int) -> int:
    """A port derived from the number of a job or a process, so that all ranks use the same one."""
    return PORT_RANGE[0] + number % PORT_RANGE[1]


def _number(given: EnvironmentVariables, name: str) -> int | None:
    value = given.get(name, "")
    return int(value) if value.isdecimal() else None
