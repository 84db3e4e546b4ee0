"""Recipes for ms-swift: the command, what ms-swift's own parser and training make of it, and what is refused."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import reshard
from reshard.final.saved_checkpoints import FoundCheckpoint, SavedCheckpoints, saved_in
from reshard.runs.train import options, start
from tests.environments import python
from tests.train.conftest import write_lines
from tests.train.test_recipe import command_of, refused

ROOT = Path(__file__).parents[2]
PEERS = ROOT / "tests" / "data" / "peers" / "swift"
PARSE = """
import json, sys
from tests.genuine import fake_te
fake_te.install()
from swift.megatron.arguments import MegatronSftArguments
from transformers import HfArgumentParser
given, unknown = HfArgumentParser([MegatronSftArguments]).parse_known_args(sys.argv[1:])
names = json.loads(sys.stdin.read())
print(json.dumps([unknown, {name: getattr(given, name) for name in names}]))
"""
TINY = {
    "model_type": "qwen3",
    "template": "qwen3",
    "torch_dtype": "bfloat16",
    "train_iters": 4,
    "save_steps": 2,
    "global_batch_size": 4,
    "logging_steps": 1,
    "lr": 1e-3,
    "check_model": False,
    "attention_backend": "unfused",
    "ddp_backend": "gloo",
    "use_cpu_initialization": True,
    "use_distributed_optimizer": False,
}
"""For a model of two layers on two CPUs. megatron-core's distributed optimizer cannot continue without Apex or
TransformerEngine: it asserts that its empty state has a step (`DistributedOptimizer.state_dict`)."""


@pytest.fixture
def write(tiny: Callable[..., Path], data: dict[str, Path], tmp_path: Path) -> Callable[..., Path]:
    """Write a recipe, and return its folder."""

    def get(method: str = "sft", **given: Any) -> Path:
        usual = {"model": tiny(), "data": data[method], "output": tmp_path / "out", "write_only": True}
        return reshard.train(method, **{**usual, "engine": "ms-swift", **given}).folder

    return get


def values_of(words: list[str]) -> dict[str, str]:
    """Options that have one value."""
    return {word[2:]: value for word, value in pairwise(words) if word.startswith("--")}


def test_the_engines_are_those_of_the_option() -> None:
    assert tuple(start.ENGINES) == options.ENGINES


def test_the_command_is_megatron_sft(write: Callable[..., Path], data: dict[str, Path]) -> None:
    folder = write(tp=2, pp=2, ep=4, nproc=8, eval_data=data["sft"], options={"lr": 1e-5, "max_length": 4096})
    assert not (folder / "train.py").exists()
    words = command_of(folder)
    assert words[:2] == ["megatron", "sft"] and words.count("--lr") == 1
    values = values_of(words)
    sizes = ("tensor", "pipeline", "expert")
    assert [values[f"{name}_model_parallel_size"] for name in sizes] == ["2", "2", "4"]
    assert values["dataset"] == values["val_dataset"] == str(data["sft"])
    assert (values["output_dir"], values["add_version"], values["sequence_parallel"]) == (
        ".",
        "false",
        "true",
    )
    assert (values["num_train_epochs"], values["lr"], values["max_length"]) == ("3", "1e-05", "4096")
    text = (folder / "run.sh").read_text()
    assert "export NPROC_PER_NODE=8\n" in text and "NNODES" not in text
    assert "reshard guard --log log --final final --overwrite -- " in text


def test_an_option_of_the_engine_replaces_the_recipes_own(write: Callable[..., Path]) -> None:
    values = values_of(command_of(write(options={"train_iters": 10, "truncation_strategy": "delete"})))
    assert values["truncation_strategy"] == "delete" and "num_train_epochs" not in values


@pytest.mark.parametrize("merge", [True, False])
def test_guard_merges_the_last_adapter(merge: bool, write: Callable[..., Path]) -> None:
    folder = write(lora=True, merge=merge, options={"lora_rank": 16})
    values = values_of(command_of(folder))
    assert (values["tuner_type"], values["lora_rank"], values["merge_lora"]) == ("lora", "16", "false")
    assert ("--final final --overwrite --merge --" in (folder / "run.sh").read_text()) == merge


def test_several_nodes_are_variables_of_the_cluster(write: Callable[..., Path], tmp_path: Path) -> None:
    folder = write(tp=8, nnodes=2, nproc=8)
    shown = tmp_path / "bin"
    shown.mkdir()
    (shown / "reshard").write_text(
        '#!/bin/bash\necho "$NPROC_PER_NODE $NNODES $NODE_RANK $MASTER_ADDR $MASTER_PORT"\n'
    )
    (shown / "reshard").chmod(0o755)
    text = (folder / "run.sh").read_text()
    (folder / "run.sh").write_text(text.replace("export NPROC", f"PATH={shown}:$PATH\nexport NPROC", 1))

    def run(**variables: str) -> subprocess.CompletedProcess[str]:
        environment = {"PATH": os.environ["PATH"], **variables}
        return subprocess.run(["bash", folder / "run.sh"], env=environment, capture_output=True, text=True)

    assert run(SLURM_NODEID="1", MASTER_ADDR="first").stdout.split() == ["8", "2", "1", "first", "29500"]
    assert run(NODE_RANK="0", MASTER_ADDR="a", MASTER_PORT="1").stdout.split() == ["8", "2", "0", "a", "1"]
    assert "MASTER_ADDR: set it to the first node" in run().stderr


def test_without_gpus_there_are_as_many_processes_as_the_sizes_need(
    write: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("reshard.runs.train.swift_recipe.gpus_here", lambda needed: 0)
    assert "NPROC_PER_NODE=8\n" in (write(tp=2, pp=2, ep=4) / "run.sh").read_text()


def test_what_the_engine_cannot_do_is_refused(
    write: Callable[..., Path], data: dict[str, Path], tmp_path: Path
) -> None:
    assert refused(write, "dpo") == ["method-not-of-engine"]
    assert refused(write, parallel="zero3") == ["option-not-of-engine"]
    assert refused(write, reward=["rewards.py:score"]) == ["option-not-of-engine"]
    assert refused(write, engine="trl", tp=2, pp=2, ep=2) == ["option-not-of-engine"] * 3
    assert refused(write, nproc=6, tp=4) == ["parallel-sizes-unfit"]
    wrong = write_lines(tmp_path / "wrong.jsonl", [{"messages": []}])
    assert refused(write, data=wrong, nproc=3, tp=2) == ["chat-without-messages", "parallel-sizes-unfit"]
    assert refused(write, data=write_lines(tmp_path / "plain.jsonl", [{"text": "a"}])) == ["data-not-chats"]
    packed = tmp_path / "chats.jsonl.gz"
    packed.write_bytes(gzip.compress(data["sft"].read_bytes()))
    assert refused(write, data=packed) == ["data-compressed"]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("lora", [False, True])
def test_a_run_continues_by_ms_swifts_own_options(
    lora: bool, write: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write(lora=lora, tp=2)
    last = FoundCheckpoint(folder / "checkpoint-2", 2, "megatron", 0.0)
    monkeypatch.setattr(start, "saved_in", lambda _: SavedCheckpoints([last]))
    command = reshard.train("sft", output=folder, resume=True, write_only=True).command
    option = "--mcore_adapter" if lora else "--mcore_model"
    assert command[2:] == (option, str(last.path), "--finetune", "false")


def test_guard_finds_the_checkpoints(write: Callable[..., Path]) -> None:
    """Those of ms-swift's own saver (`tests/genuine/make_swift.py`)."""
    folder = write()
    shutil.copytree(PEERS / "qwen3" / "checkpoint-3", folder / "checkpoint-3")
    found = saved_in(folder).weights
    assert found and found.path == folder / "checkpoint-3" and found.step == 3


@pytest.mark.slow
@pytest.mark.parametrize("lora", [False, True])
def test_ms_swifts_parser_knows_the_words(
    lora: bool, write: Callable[..., Path], data: dict[str, Path]
) -> None:
    words = command_of(write(lora=lora, tp=2, pp=2, ep=4, nproc=8, eval_data=data["sft"], options=TINY))
    expected = {
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 2,
        "expert_model_parallel_size": 4,
        "sequence_parallel": True,
        "use_hf": True,
        "add_version": False,
        "strict": True,
        "output_dir": ".",
        "dataset": [str(data["sft"])],
        "val_dataset": [str(data["sft"])],
        "train_iters": 4,
        "lr": 1e-3,
        "truncation_strategy": "right",
        "tuner_type": "lora" if lora else "full",
        "merge_lora": False if lora else None,
    }
    done = subprocess.run(
        [python("ms-swift"), "-c", PARSE, *words[2:]],
        input=json.dumps(list(expected)),
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [[], expected]


@pytest.mark.slow
@pytest.mark.parametrize("lora", [False, True])
def test_ms_swift_trains_on_two_ranks_and_continues(
    lora: bool, write: Callable[..., Path], tiny: Callable[..., Path], tmp_path: Path
) -> None:
    """Its own command, parser, data, trainer and saver; TransformerEngine and the GPU are stand-ins."""
    from transformers import AutoModelForCausalLM

    folder = write(tp=2, nproc=2, lora=lora, options=TINY)
    run_on_cpus(["bash", str(folder / "run.sh")], tmp_path)
    assert (folder / "checkpoint-4" / "iter_0000004").is_dir()
    AutoModelForCausalLM.from_pretrained(folder / "final")
    if not lora:
        assert reshard.verify(folder / "checkpoint-4", folder / "final").equal
    assert not reshard.verify(tiny(), folder / "final").equal
    more = {"train_iters": 6}
    resumed = reshard.train("sft", output=folder, resume=True, write_only=True, options=more).command
    log = run_on_cpus(list(resumed), tmp_path)
    assert not (folder / "checkpoint-5").exists() and (folder / "checkpoint-6").is_dir(), log


def run_on_cpus(command: list[str], scratch: Path) -> str:
    """Run a recipe on the CPUs, and return what it prints."""
    port = 20000 + os.getpid() % 10000  # below those that the kernel gives to connections
    paths = (ROOT / "tests" / "genuine" / "swift_on_cpu", ROOT, ROOT / "src")
    environment = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "HF_HUB_OFFLINE": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "MASTER_PORT": str(port),
        "MODELSCOPE_CACHE": str(scratch / "modelscope"),
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "PATH": f"{Path(python('ms-swift')).parent}{os.pathsep}{os.environ['PATH']}",
    }
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
