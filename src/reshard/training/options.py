"""Options of a training run: the records from which command line, Python signature, docs and configs are made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from reshard.base.argument_checks import StrPath
from reshard.base.options import ADAPTERS, ADVANCED, DATA, PARALLEL, About, LocalPath, options_of
from reshard.base.shared_options import DtypeOption, MergeOption, OnBytesOption, TargetOptions
from reshard.training.data.records import SFT_SHAPES

ENGINE_NAMES = ("trl", "megatron")
"""Packages next to this module, by the names that users type."""
PARALLEL_PLANS = ("ddp", "fsdp2", "zero2", "zero3", "tp")
"""How TRL can shard a model."""
OptionalText = str | None
OptionalPath = str | Path | None
DataPaths = StrPath | Sequence[StrPath] | None


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options of a run. Each field is a flag, an argument of `train`, and a key of a config."""

    model: Annotated[StrPath | None, About("Hugging Face folder or Hub model (Org/Model) to start from.")] = (
        None
    )
    model_revision: Annotated[
        OptionalText, About("Branch, tag or commit of a Hub model.", "NAME", group=ADVANCED)
    ] = None
    data: Annotated[
        DataPaths,
        About(
            "JSONL or Parquet file, a folder of them, or a Hub dataset (Org/Set). Several are mixed by weight, for "
            "example a.jsonl:0.7.",
            "PATH[:WEIGHT]",
        ),
    ] = None
    output: Annotated[
        OptionalPath, About("Output folder. Its folder final has the trained model.", "DIR", also="-o")
    ] = None
    eval_data: Annotated[
        DataPaths, About("Data to evaluate on during training.", "PATH[:WEIGHT]", group=DATA)
    ] = None
    dataset_config: Annotated[OptionalText, About("Configuration of a Hub dataset.", "NAME", group=DATA)] = (
        None
    )
    dataset_train_split: Annotated[
        OptionalText, About("Split of a Hub dataset for --data.", "NAME", group=DATA)
    ] = "train"
    dataset_test_split: Annotated[
        OptionalText, About("Split of a Hub dataset for --eval-data.", "NAME", group=DATA)
    ] = "test"
    data_shape: Annotated[
        OptionalText, About("Shape of records that fit several.", choices=SFT_SHAPES, group=DATA)
    ] = None
    system: Annotated[OptionalText, About("System message for chats that have none.", "TEXT", group=DATA)] = (
        None
    )
    token_cache: Annotated[
        bool, About("Cache the tokens in ~/.cache/reshard for the next run.", group=DATA)
    ] = True
    engine: Annotated[
        str, About("trl, or megatron (experimental) for TP, PP and EP.", choices=ENGINE_NAMES)
    ] = "trl"
    lora: Annotated[bool, About("Train LoRA adapters, or all weights.", off="--full", group=ADAPTERS)] = False
    parallel: Annotated[
        OptionalText,
        About(
            "How TRL shards the model; by default tp if --tp is above 1, or ddp.",
            choices=PARALLEL_PLANS,
            group=PARALLEL,
        ),
    ] = None
    tp: Annotated[int, About("Tensor-parallel size.", "N", least=1, group=PARALLEL)] = 1
    pp: Annotated[int, About("Pipeline-parallel size (megatron).", "N", least=1, group=PARALLEL)] = 1
    vpp: Annotated[
        int, About("Virtual pipeline chunks per stage (megatron).", "N", least=1, group=PARALLEL)
    ] = 1
    ep: Annotated[int, About("Expert-parallel size.", "N", least=1, group=PARALLEL)] = 1
    cp: Annotated[int, About("Context-parallel size (megatron).", "N", least=1, group=PARALLEL)] = 1
    nproc: Annotated[
        int | str,
        About(
            "Processes on this node; auto is one per GPU.",
            "N|auto",
            least=1,
            choices=("auto",),
            group=PARALLEL,
        ),
    ] = "auto"
    nnodes: Annotated[
        int, About("Number of nodes; start a run on each.", "N", least=1, also="--nodes", group=PARALLEL)
    ] = 1
    node_rank: Annotated[int, About("Rank of this node, from 0.", "R", group=PARALLEL)] = 0
    rendezvous: Annotated[OptionalText, About("Address of the first node.", "HOST:PORT", group=PARALLEL)] = (
        None
    )
    max_restarts: Annotated[int, About("Restart failed ranks up to N times.", "N", group=PARALLEL)] = 0
    reward: Annotated[
        str | Sequence[str] | None,
        About("Reward function for GRPO and RLOO, also as MODULE:NAME.", "FILE.py:NAME[:WEIGHT]", group=DATA),
    ] = None
    nan_steps: Annotated[
        int, About("Stop after N consecutive NaN or Inf losses.", "N", least=1, group=ADVANCED)
    ] = 1
    save_on_signal: Annotated[
        int,
        About(
            "Seconds to save the current step after SIGTERM, SIGUSR1 or Ctrl-C; 0 saves nothing.",
            "SECONDS",
            group=ADVANCED,
        ),
    ] = 600
    merge: Annotated[bool, About("With --lora, also write the merged model.", group=ADAPTERS)] = True
    resume: Annotated[bool, About("Continue from the last checkpoint in --output.")] = False


@dataclass(frozen=True, kw_only=True)
class StartOptions(RunOptions):
    """Those, and how to start the run."""

    config: Annotated[
        OptionalPath,
        About(
            "YAML file with options of reshard and of the engine, which other options override.",
            "FILE",
            group=ADVANCED,
        ),
    ] = None
    dry_run: Annotated[bool, About("Check everything, print the plan, and stop.")] = False
    gpus: Annotated[
        OptionalText,
        About(
            "With --dry-run, plan for N GPUs per node of another machine, for example H100:8.",
            "N|NAME:N",
            group=PARALLEL,
        ),
    ] = None
    gpu_memory: Annotated[
        OptionalText, About("With --gpus N, memory of each GPU, for example 80GB.", "SIZE", group=PARALLEL)
    ] = None
    slurm: Annotated[
        OptionalText,
        About(
            "Submit the run to Slurm: partition=gpu,nodes=2,gpus_per_node=8,time=720 (minutes).",
            "NAME=VALUE,…",
            group=PARALLEL,
        ),
    ] = None
    overwrite: Annotated[bool, About("Replace the files of an earlier run in --output.")] = False


@dataclass(frozen=True, kw_only=True)
class ExportOptions(OnBytesOption, TargetOptions, MergeOption, DtypeOption):
    """Options of `export`."""

    HELP: ClassVar = {"merge": "Merge the LoRA adapter into its base model."}


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """Options of `report`."""

    output: Annotated[
        LocalPath | None,
        About("Page to write. [default: RUN/report.html, or runs.html for several runs]", "FILE", also="-o"),
    ] = None


RUN_OPTIONS = {each.name: each for each in options_of(RunOptions)}
"""The options of a run by their names; every other name is an option of the engine."""
