"""What a tool of training starts, as the tool itself starts it: ms-swift, LLaMA-Factory, axolotl, verl."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from reshard.runs.checks.command.read_command import read_command
from tests.environments import python
from tests.guard.test_command import HERE


@pytest.mark.slow
@pytest.mark.parametrize("variables", [{}, {"NPROC_PER_NODE": "2", "MASTER_PORT": "29511"}])
@pytest.mark.parametrize("line", ["swift sft c.yaml --output_dir o", "megatron sft --save o"])
def test_swift_starts_what_it_says(line: str, variables: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("model: nowhere\nlearning_rate: 1e-5\n")
    folder = Path(python("ms-swift")).parent
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", **variables}
    words = shlex.split(line)
    ran = subprocess.run(
        [folder / words[0], *words[1:]],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    said = re.search(r"run sh: `(.+)`", ran.stdout)
    assert said, ran.stderr
    own = read_command(shlex.split(said[1]), environment, tmp_path)
    command = read_command(words, environment, tmp_path)
    assert command.launcher == words[0] and command.interpreter == own.interpreter == (
        str(folder / "python"),
    )
    assert command.processes == own.processes and command.rendezvous == own.rendezvous
    assert command.module.replace(".", "/") in str(own.script)
    assert command.output == own.output == tmp_path / "o"
    assert {name: value for name, (value, _) in own.settings.items()}.items() >= {
        name: str(value)
        for name, (value, _) in command.settings.items()
        if name not in ("m", "nproc_per_node")
    }.items() - {("learning_rate", "1e-05")}


@pytest.mark.slow
@pytest.mark.parametrize(
    "variables",
    [{}, {"NPROC_PER_NODE": "2"}, {"FORCE_TORCHRUN": "1", "NPROC_PER_NODE": "2", "MASTER_PORT": "29513"}],
)
def test_llamafactory_starts_what_it_says(variables: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("model_name_or_path: nowhere\nstage: sft\noutput_dir: o\n")
    folder = Path(python("llamafactory")).parent
    environment = {
        **HERE,
        "HOME": str(tmp_path),
        "HF_HUB_OFFLINE": "1",
        "PATH": f"{folder}:{HERE['PATH']}",
        **variables,
    }
    words = ["llamafactory-cli", "train", "c.yaml"]
    ran = subprocess.run(
        [folder / words[0], *words[1:]],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    said = re.search(r"Initializing (\d+) distributed tasks at: (\S+):(\d+)", ran.stdout + ran.stderr)
    command = read_command(words, environment, tmp_path)
    assert (command.launcher, command.interpreter) == ("llamafactory", (str(folder / "python"),))
    assert command.processes == (int(said[1]) if said else 1) and command.output == tmp_path / "o"
    assert command.rendezvous == ((said[2], int(said[3])) if said and "MASTER_PORT" in variables else None)
    assert (said is not None) == ("FORCE_TORCHRUN" in variables), ran.stderr


AXOLOTL = """
import json, os, sys
from axolotl.cli.utils import train

def show(program, words, environment):
    print("launches", json.dumps(words))
    os._exit(0)

os.execvpe = show
train._launch_python_training = lambda config, values: show("", ["python", "-m", "axolotl.cli.train", config], {})
from axolotl.cli.main import main
main()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "line",
    [
        "a.yaml",
        "a.yaml --num-processes 2 --main-process-port 1234 --learning-rate 1e-5",
        "--launcher=torchrun a.yaml -- --nproc_per_node 2 --rdzv_endpoint=h:29400 --nnodes 2",
        "a.yaml --nproc_per_node=2 --launcher torchrun --output-dir here",
        "a.yaml --launcher python",
        "a.yaml --use-ray",
    ],
)
def test_axolotl_as_it_launches_itself(line: str, tmp_path: Path) -> None:
    """As far as the words that a launcher reads."""
    (tmp_path / "a.yaml").write_text("base_model: m\noutput_dir: there\n")
    words = [python("axolotl"), "-c", AXOLOTL, "train", *line.split()]
    environment = {**os.environ, "PATH": f"{Path(words[0]).parent}:{HERE['PATH']}"}
    ran = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)
    launched = re.search(r"^launches (.*)", ran.stdout, re.MULTILINE)
    assert launched, ran.stderr
    own = read_command(json.loads(launched[1]), environment, tmp_path)
    command = read_command(["axolotl", "train", *line.split()], environment, tmp_path)
    for name in ("module", "processes", "nodes", "rendezvous"):
        assert getattr(command, name) == getattr(own, name), name
    assert command.output == tmp_path / ("here" if "here" in line else "there")
    assert command.interpreter == (words[0],) and command.arguments[0] == own.arguments[0]


HYDRA = """
import sys, verl.trainer.config
from pathlib import Path
from hydra import compose, initialize_config_dir
folder = str(Path(verl.trainer.config.__file__).parent)
with initialize_config_dir(folder, version_base=None):
    print(compose(sys.argv[1], overrides=sys.argv[2:]).trainer.default_local_dir)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "config", "line"),
    [
        ("main_ppo", "ppo_trainer", "data.train_batch_size=8"),
        (
            "main_ppo",
            "ppo_trainer",
            "trainer.experiment_name=e1 ++trainer.project_name='\"a b\"' +trainer.x=1",
        ),
        ("main_ppo", "ppo_megatron_trainer", "trainer.default_local_dir=there"),
        ("sft_trainer", "sft_trainer_engine", "trainer.experiment_name=e1"),
        ("sft_trainer", "sft_trainer_engine", ""),
    ],
)
def test_the_output_of_verl_as_hydra_composes_it(module: str, config: str, line: str, tmp_path: Path) -> None:
    words = shlex.split(line)
    ran = subprocess.run([python("verl"), "-c", HYDRA, config, *words], capture_output=True, text=True)
    command = read_command(["python", "-m", f"verl.trainer.{module}", *words], HERE, tmp_path)
    assert command.launcher == "verl"
    assert command.output == tmp_path / ran.stdout.splitlines()[-1], ran.stderr
