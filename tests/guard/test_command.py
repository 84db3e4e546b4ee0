"""What a command starts, judged by the launchers' own parsers, by bash, and by the processes that they start."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from accelerate.commands.launch import launch_command_parser
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.run import config_from_args, parse_args

from reshard.runs.checks.command.launchers import LAUNCHERS, options_of
from reshard.runs.checks.command.read_command import TrainingCommand, read_command
from reshard.runs.checks.command.wrapper_programs import WRAPPER_PROGRAMS
from reshard.runs.guard.options import GuardOptions
from tests.environments import python

BIN = Path(sys.executable).parent
HERE = {"PATH": f"{BIN}:/usr/bin:/bin", "CUDA_VISIBLE_DEVICES": ""}


def read(line: str, folder: Path = Path("/nowhere"), **variables: str) -> TrainingCommand:
    return read_command(shlex.split(line), {**HERE, **variables}, folder)


# --------------------------------------------------------------------------------------------------- launchers


@pytest.mark.parametrize(
    "line",
    [
        "train.py",
        "--nproc-per-node 2 train.py --nproc-per-node 9",
        "--nproc_per_node=3 --nnodes=2 --node-rank 1 --master-addr 10.0.0.1 --master_port 1234 train.py -x",
        "--nproc_per_node cpu --standalone train.py",
        "--nproc-per-node 2 --no-python bash -c true",
        "-m --nproc_per_node 2 some.module a b",
        "--rdzv-backend c10d --rdzv-endpoint 10.0.0.1:29400 --nnodes 1:4 --max-restarts 2 train.py",
        "-r 3 -t3 --log-dir /tmp/x --nproc_per_node=2 -- train.py --lr 1",
    ],
)
def test_torchrun_as_its_own_parser_reads_it(line: str) -> None:
    own = parse_args(shlex.split(line))
    config, _, _ = config_from_args(own)
    command = read(f"torchrun {line}")
    _, rest = options_of(LAUNCHERS[0], shlex.split(line), {})
    assert rest == [own.training_script, *[word for word in own.training_script_args if word != "--"]]
    assert command.processes == config.nproc_per_node and command.nodes == config.max_nodes
    assert command.node_rank == own.node_rank
    is_free = own.standalone or (not own.rdzv_endpoint and own.master_port is None and config.max_nodes == 1)
    expected = None if is_free else config.rdzv_endpoint  # as torch.distributed.run.run says
    assert (":".join(map(str, command.rendezvous)) if command.rendezvous else None) == expected


@pytest.mark.parametrize(
    "line",
    [
        "train.py --num_processes 5",
        "--multi-gpu --num-processes=4 --num_machines 2 --machine_rank 1 train.py --x",
        "--use_fsdp --fsdp_version 2 --num_processes 2 --quiet -m some.module --output_dir x",
        "--cpu --num_processes 2 --main_process_port 0 --debug train.py",
    ],
)
def test_accelerate_as_its_own_parser_reads_it(line: str) -> None:
    own = launch_command_parser().parse_args(shlex.split(line))
    command = read(f"accelerate launch {line}")
    assert (command.module or command.script.name) == own.training_script  # type: ignore[union-attr]
    assert list(command.arguments) == own.training_script_args
    assert command.node_rank == (own.machine_rank or 0)
    assert command.launcher == read(f"python -m accelerate.commands.launch {line}").launcher == "accelerate"


PARSER = """
import argparse, json, sys
P = argparse.ArgumentParser

def show(parser, *_, **__):
    known = [[name.lstrip("-").replace("-", "_"), each.nargs == 0] for each in parser._actions
             for name in each.option_strings]
    print(json.dumps(known))
    sys.exit()

kind = sys.argv.pop(1)
P.parse_args = P.parse_known_args = show
if kind == "torchrun":
    from torch.distributed.run import parse_args
    parse_args([])
elif kind == "accelerate":
    from accelerate.commands.launch import main
    main()
else:
    from deepspeed.launcher.runner import main
    main([])
"""


@pytest.mark.parametrize(
    ("launcher", "environment"),
    [
        ("torchrun", ""),
        ("accelerate", ""),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (
                ("torchrun", "torch-2.6"),
                ("accelerate", "transformers-4.35"),
                ("accelerate", "transformers-4.51"),
                ("accelerate", "transformers-4.53"),
                ("deepspeed", "deepspeed"),
            )
        ),
    ],
)
@pytest.mark.thorough
def test_options_without_a_value(launcher: str, environment: str) -> None:
    interpreter = python(environment) if environment else sys.executable
    ran = subprocess.run([interpreter, "-c", PARSER, launcher], capture_output=True, text=True, check=True)
    known = json.loads(ran.stdout.splitlines()[-1])
    ours = next(each for each in LAUNCHERS if each.name == launcher)
    assert {name for name, flag in known if flag} <= ours.flags
    assert not {name for name, flag in known if not flag} & ours.flags
    assert {ours.nodes, ours.node_rank} <= {name for name, _ in known}


SHOWS = "import json, os, sys; print(json.dumps([os.environ.get('WORLD_SIZE', '1'), sys.argv[1:]]))"


@pytest.mark.slow
@pytest.mark.parametrize(
    "line",
    [
        "accelerate launch --multi_gpu --num_processes 2 show.py a",
        "accelerate launch --num_processes 2 show.py --x 1",
        "accelerate launch --config_file two.yaml show.py",
        "accelerate launch --config_file two.yaml --num_processes 3 show.py",
        "env HF_HOME=. accelerate launch show.py",
        "env HF_HOME=. accelerate launch --cpu show.py",
        "python -m torch.distributed.run --nproc-per-node 2 show.py",
        "bash two.sh 3",
        "env A=1 python show.py b",
    ],
)
def test_processes_are_those_that_start(line: str, tmp_path: Path) -> None:
    (tmp_path / "show.py").write_text(SHOWS)
    (tmp_path / "two.yaml").write_text("distributed_type: MULTI_GPU\nnum_processes: 2\nnum_machines: 1\n")
    (tmp_path / "accelerate").mkdir()
    shutil.copy(tmp_path / "two.yaml", tmp_path / "accelerate/default_config.yaml")
    (tmp_path / "two.sh").write_text(
        "N=$1\ntorchrun --nproc_per_node $N --standalone \\\n  show.py $N | cat\n"
    )
    environment = {**os.environ, **HERE, "HF_HOME": str(tmp_path / "empty")}
    ran = subprocess.run(
        shlex.split(line), cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    shown = [json.loads(each) for each in re.findall(r"\[.+?\]\]", ran.stdout)]
    command = read_command(shlex.split(line), environment, tmp_path)
    assert len(shown) == command.processes
    assert {int(size) for size, _ in shown} == {command.processes}
    assert shown[0][1] == list(command.arguments) and command.script == tmp_path / "show.py"


def test_deepspeed() -> None:
    assert read("deepspeed --num_gpus 2 --num_nodes 1 t.py --deepspeed ds.json").processes == 2
    chosen = read("deepspeed --include=localhost:0,2,3 --master_port 1 --module some.module -x 1")
    assert (chosen.processes, chosen.module, chosen.arguments) == (3, "some.module", ("-x", "1"))
    assert chosen.rendezvous == ("127.0.0.1", 1)
    assert read("deepspeed t.py", CUDA_VISIBLE_DEVICES="0,1,2,3").processes == 4


# ------------------------------------------------------------------------------------------------------- tools


def test_tools_become_launchers(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("model_name_or_path: m\noutput_dir: there\nlearning_rate: 1.0e-4\n")
    trained = read("llamafactory-cli train a.yaml learning_rate=1e-5", tmp_path)
    assert (trained.launcher, trained.processes, trained.output) == ("llamafactory", 1, tmp_path / "there")
    assert trained.settings["learning_rate"][0] == "1e-5" and str(trained.settings["output_dir"][1]).endswith(
        "yaml:2"
    )
    forced = read(
        "lmf train a.yaml", tmp_path, FORCE_TORCHRUN="1", NPROC_PER_NODE="2", NNODES="2", NODE_RANK="1"
    )
    assert (forced.processes, forced.nodes, forced.node_rank, forced.rendezvous) == (2, 2, 1, None)
    axolotl = read("axolotl train a.yaml --launcher torchrun -- --nproc_per_node 2", tmp_path)
    assert (axolotl.launcher, axolotl.processes, axolotl.module) == ("axolotl", 2, "axolotl.cli.train")
    assert axolotl.interpreter is None  # not installed here
    assert read("axolotl train b.yaml --num-processes 2", tmp_path).output == tmp_path / "model-out"
    trl = read("trl sft --config a.yaml --output_dir=here --num_processes 2 --multi_gpu", tmp_path)
    assert (trl.launcher, trl.processes, trl.module, trl.output) == (
        "trl",
        2,
        "trl.scripts.sft",
        tmp_path / "here",
    )
    verl = read("python3 -m verl.trainer.main_ppo trainer.project_name=p +x.y=1", tmp_path)
    assert (verl.launcher, verl.output) == ("verl", tmp_path / "checkpoints/p/gsm8k")
    assert verl.settings["x.y"][0] == "1"


# ------------------------------------------------------------------------------------------------- interpreters


@pytest.mark.parametrize(
    "line", ["torchrun t.py", "accelerate launch t.py", f"{BIN}/python t.py", "python3 t.py"]
)
def test_the_interpreter_is_that_of_the_program(line: str) -> None:
    interpreter = read(line).interpreter
    assert interpreter is not None
    ran = subprocess.run(
        [*interpreter, "-c", "import sys; print(sys.prefix)"], capture_output=True, text=True
    )
    assert Path(ran.stdout.strip()).samefile(sys.prefix)


@pytest.mark.parametrize(
    ("line", "interpreter"),
    [
        ("uv run --with trl torchrun t.py", "uv run --no-sync --with trl python"),
        ("uv -q run -p 3.11 python3.11 t.py", "uv -q run --no-sync -p 3.11 python3.11"),
        ("uv run --no-sync t.py", "uv run --no-sync python"),
        ("uv run --isolated -- t.py", "uv run --isolated -- python"),
        ("conda run -n e --no-capture-output python t.py", "conda run -n e --no-capture-output python"),
        ("poetry -C there run python t.py", "poetry -C /nowhere/there run python"),
        ("pipenv --python 3.11 run python t.py", "pipenv --python 3.11 run python"),
        ("pdm run -p . t.py", "pdm run -p . python"),
    ],
)
def test_wrappers_bring_their_own_interpreter(line: str, interpreter: str) -> None:
    command = read(line)
    assert command.interpreter == tuple(interpreter.split())
    assert command.script == command.folder / "t.py"
    assert command.folder == Path("/nowhere", "there" if "there" in line else "")


def test_wrappers_of_the_same_interpreter() -> None:
    plain = read("nohup nice -n 5 timeout -k 3 2h python t.py a")
    assert plain.interpreter == read("python t.py").interpreter and plain.arguments == ("a",)


def test_a_guarded_command_is_read_through_the_guard() -> None:
    line = "reshard guard --log log --final final --merge -- python t.py a"
    assert read(line).script == Path("/nowhere/t.py") and read(line).arguments == ("a",)
    valued = {each.name for each in fields(GuardOptions) if not isinstance(each.default, bool)}
    assert WRAPPER_PROGRAMS["reshard"].valued == {f"--{name.replace('_', '-')}" for name in valued}


@pytest.mark.parametrize(
    "line",
    ["docker run image python t.py", "srun -n 2 python t.py", "ssh host python t.py", "swift infer", "ls"],
)
def test_what_cannot_be_told(line: str) -> None:
    command = read(line)
    assert (command.launcher, command.script, command.module, command.processes) == ("", None, "", 1)


def test_an_executable_script_with_a_shebang(tmp_path: Path) -> None:
    script = tmp_path / "train"
    script.write_text(f"#!{sys.executable}\nprint()\n")
    script.chmod(0o755)
    command = read("./train --x 1", tmp_path)
    assert (command.launcher, command.script, command.interpreter) == ("python", script, (sys.executable,))


def test_an_executable_script_without_a_shebang(tmp_path: Path) -> None:
    (tmp_path / "launch").write_text("torchrun --nproc-per-node 2 train.py\n")
    (tmp_path / "launch").chmod(0o755)
    command = read("./launch", tmp_path)
    assert (command.launcher, command.processes) == ("torchrun", 2)


def test_variables_of_the_command() -> None:
    command = read("env -u GONE A=1 B=2 C=3 torchrun t.py", GONE="x", A="0")
    assert "GONE" not in command.environment
    assert (command.environment["A"], command.environment["C"]) == ("1", "3")
    assert read("torchrun t.py", PET_NPROC_PER_NODE="2").processes == 2
    assert read("torchrun --nproc_per_node=gpu t.py", CUDA_VISIBLE_DEVICES="0,1").processes == 2


# ----------------------------------------------------------------------------------------------- shell scripts

STUB = f"#!{sys.executable}\nimport json, os, sys\nprint(json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ)]))\n"
SCRIPTS = {
    "megatron": """#!/bin/bash
# torchrun in a comment
export CUDA_DEVICE_MAX_CONNECTIONS=1   # why
GPUS=${1:-8}; MODEL="some model"
MASTER=${MASTER_ADDR:-localhost}
DISTRIBUTED_ARGS="
    --nproc_per_node $GPUS \\
    --master_addr $MASTER
"
TRAINING=(
    --lr 1e-5   # rate
    --save "./my checkpoints"
)
TRAINING+=(--bf16)
mkdir -p logs && echo "torchrun is next" > logs/x
torchrun $DISTRIBUTED_ARGS \\
    train.py "${TRAINING[@]}" \\
    --load "$MODEL" "$@" 2>&1 | tee log.txt
""",
    "here": """set -e
cat > ds.json <<'EOF'
{"torchrun": "no"}
torchrun not this
EOF
cd "$(dirname "$0")"
if [ -d . ]; then
  torchrun --nproc_per_node=2 \\
    train.py --deepspeed ds.json || exit 1
fi
""",
    "activated": """source env/bin/activate
export HF_HOME=./cache
exec torchrun train.py
""",
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_launch_script_as_bash_runs_it(name: str, tmp_path: Path) -> None:
    for folder in ("bin", "env/bin"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "torchrun").write_text(STUB)
        (tmp_path / folder / "torchrun").chmod(0o755)
    (tmp_path / "env/bin/activate").write_text(f'export PATH="{tmp_path}/env/bin:$PATH"')
    (tmp_path / "launch.sh").write_text(SCRIPTS[name])
    environment = {"PATH": f"{tmp_path}/bin:/usr/bin:/bin"}
    words = ["bash", "launch.sh", "4", "last one"]
    ran = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    given, folder, variables = json.loads(ran.stdout.splitlines()[-1])
    command = read_command(words, environment, tmp_path)
    direct = read_command(["torchrun", *given], variables, Path(folder))
    assert (command.script, command.arguments) == (direct.script, direct.arguments)
    assert (command.processes, command.output) == (direct.processes, direct.output)
    assert command.environment["PATH"].split(":")[0] == variables["PATH"].split(":")[0]
    assert variables.items() - command.environment.items() <= {
        (name, variables.get(name)) for name in ("PWD", "OLDPWD", "SHLVL", "_", "PATH", "LC_CTYPE")
    }
    line = (
        SCRIPTS[name]
        .splitlines()
        .index(
            next(
                x
                for x in SCRIPTS[name].splitlines()
                if re.match(r" *(exec )?torchrun ", x) and "not" not in x
            )
        )
    )
    settings = [place for _, place in command.settings.values()]
    assert all((place.target, place.line) == (str(tmp_path / "launch.sh"), line + 1) for place in settings)


@pytest.mark.parametrize(
    "text",
    [
        "torchrun a.py\ntorchrun b.py\n",
        'cd "$SOMEWHERE"\ntorchrun a.py\n',
        "echo 'torchrun a.py\n",
        "sbatch job.sh\n",
    ],
)
def test_a_launch_script_that_is_not_plain(text: str, tmp_path: Path) -> None:
    (tmp_path / "launch.sh").write_text(text)
    assert read("sh launch.sh", tmp_path).launcher == ""


# ---------------------------------------------------------------------------------------------------- settings


def test_settings_and_their_places(tmp_path: Path) -> None:
    (tmp_path / "fsdp.yaml").write_text(
        "distributed_type: FSDP\nfsdp_config:\n  fsdp_version: 2\nnum_processes: 2\n"
    )
    (tmp_path / "run.yaml").write_text("output_dir: from-config\nbf16: true\nlearning_rate: 1e-5\n")
    (tmp_path / "ds.json").write_text("{}")
    line = "accelerate launch --config_file fsdp.yaml t.py --config run.yaml --output_dir=x --deepspeed ds.json --lr -1"
    command = read(line, tmp_path)
    values = {name: value for name, (value, _) in command.settings.items()}
    assert values["fsdp_config.fsdp_version"] == 2 and values["bf16"] is True and values["lr"] == "-1"
    assert command.output == tmp_path / "x"
    assert [path.name for path in command.configs] == ["fsdp.yaml", "run.yaml", "ds.json"]
    place = command.settings["fsdp_config.fsdp_version"][1]
    assert (place.target, place.line) == (str(tmp_path / "fsdp.yaml"), 3)
    assert command.settings["output_dir"][1].text == "--output_dir=x"


@pytest.mark.parametrize(
    ("text", "output"),
    [
        ("SFTConfig(output_dir='there')", "there"),
        ("OUT = 'const'\nTrainingArguments(output_dir=OUT)", "const"),
        ("p.add_argument('--output_dir', default='by-default')", "by-default"),
        ("@dataclass\nclass A:\n    output_dir: str = field(default='a-field')", "a-field"),
        ("A(output_dir='a')\nB(output_dir='b')", None),
        ("A(output_dir=f'{x}')", None),
        ("not python(", None),
    ],
)
def test_an_output_that_only_the_script_states(text: str, output: str | None, tmp_path: Path) -> None:
    (tmp_path / "t.py").write_text(text)
    assert read("python t.py", tmp_path).output == (tmp_path / output if output else None)


def test_nothing_is_executed(tmp_path: Path) -> None:
    for name in ("torchrun", "t.py", "launch.sh"):
        (tmp_path / name).write_text("#!/bin/sh\ntouch executed\ntorchrun t.py\n")
        (tmp_path / name).chmod(0o755)
    for line in (
        "torchrun t.py",
        "./launch.sh",
        "./torchrun t.py",
        "bash -c 'touch executed; torchrun t.py'",
    ):
        read(line, tmp_path, PATH=f"{tmp_path}:/usr/bin:/bin")
    assert not (tmp_path / "executed").exists()


WORDS = (
    *(
        "torchrun",
        "python",
        "-m",
        "--nproc_per_node",
        "2",
        "bash",
        "-c",
        "env",
        "A=1",
        "accelerate",
        "launch",
        "swift",
    ),
    *(
        "sft",
        "--",
        "-",
        "",
        "\0",
        "--config",
        "folder",
        "bad.yaml",
        "uv",
        "run",
        "nohup",
        "t.py",
        "l.sh",
        "--=x",
        "deepspeed",
    ),
    *(
        "llamafactory-cli",
        "train",
        "axolotl",
        "--launcher",
        "trl",
        "--config_file",
        "list.yaml",
        "conda",
        "-n",
        "timeout",
    ),
    *("--master_port=99999999", "--nnodes=x:y", "--include=@:", "a.b=c", "$(x)", "-um", "-Wx", "--save", "~"),
)


@settings(max_examples=200, deadline=None)
@given(words=st.lists(st.sampled_from(WORDS), max_size=9))
def test_any_words_are_read(words: list[str], tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.getbasetemp() / "any"
    (folder / "folder").mkdir(parents=True, exist_ok=True)
    for name, text in (
        ("bad.yaml", "a: [1"),
        ("list.yaml", "- 1"),
        ("l.sh", "'torchrun t.py\n"),
        ("t.py", "def ("),
    ):
        (folder / name).write_text(text)
    assert read_command(words, HERE, folder).words == tuple(words)
