"""What Python calls of training: the functions behind `reshard train` and `reshard export`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from reshard.arguments import Arguments
from reshard.train.data.records import DATA_SHAPES
from reshard.train.engines import MODULES
from reshard.train.methods import METHODS
from reshard.train.planning.gpus import machine_asked
from reshard.train.request import run_of
from reshard.train.run import PARALLEL
from reshard.train.start import Outcome, start, submit

if TYPE_CHECKING:
    from reshard.conversion import Conversion
    from reshard.train.outlook import Preflight

StrPath = str | PathLike[str]


def train(
    method: str,
    *,
    model: StrPath | None = None,
    model_revision: str | None = None,
    data: StrPath | Sequence[StrPath] | None = None,
    output: StrPath | None = None,
    eval_data: StrPath | Sequence[StrPath] | None = None,
    dataset_config: str | None = None,
    dataset_train_split: str | None = None,
    dataset_test_split: str | None = None,
    data_shape: str | None = None,
    system: str | None = None,
    token_cache: bool | None = None,
    engine: str | None = None,
    lora: bool | None = None,
    parallel: str | None = None,
    tp: int | None = None,
    pp: int | None = None,
    vpp: int | None = None,
    ep: int | None = None,
    cp: int | None = None,
    nproc: int | Literal["auto"] | None = None,
    nnodes: int | None = None,
    node_rank: int | None = None,
    rendezvous: str | None = None,
    reward: str | Sequence[str] | None = None,
    merge: bool | None = None,
    nan_steps: int | None = None,
    save_on_signal: int | None = None,
    max_restarts: int | None = None,
    resume: bool | None = None,
    config: StrPath | None = None,
    options: Mapping[str, Any] | None = None,
    dry_run: bool = False,
    gpus: str | None = None,
    gpu_memory: str | None = None,
    slurm: str | None = None,
    overwrite: bool = False,
    quiet: bool = False,
    on_preflight: Callable[[Preflight], None] = lambda found: None,
) -> Outcome:
    """Fine-tune a model on many processes, and end with a Hugging Face folder.

    Versions, data, tokenizer, batches and memory are checked before anything starts. The ranks run in processes of
    their own, under torchrun.

    Parameters
    ----------
    method : {"sft", "dpo", "kto", "orpo", "cpo", "reward", "gkd", "grpo"}
        As the commands below ``reshard train``.
    model : str or path-like
        Hugging Face folder to start from, or a model of the hub, "Org/Model". May be left out with `resume`, or if
        `config` has it; so may `data`.
    model_revision : str, optional
        Branch, tag or commit of a model of the hub.
    data : str, path-like, or a sequence of those
        JSONL or Parquet file, a folder of them, or a dataset of the hub, "Org/Set"; several are mixed, each with its
        weight as in "a.jsonl:0.7".
    output : str or path-like
        Folder for everything; `output/final` is the model.
    eval_data : str, path-like, or a sequence of those, optional
        The same as `data`, to evaluate the model on while it is trained.
    dataset_config : str, optional
        Configuration of a dataset of the hub.
    dataset_train_split, dataset_test_split : str, optional
        Its split for `data`, by default "train", and for `eval_data`, by default "test".
    data_shape : {"chat", "sharegpt", "alpaca", "prompt-and-completion", "plain-text"}, optional
        What records are taken for that fit several shapes.
    system : str, optional
        System message of chats that have none.
    token_cache : bool, optional
        Keep the tokens of the data in ``~/.cache/reshard`` for the next run; by default true.
    engine : {"trl", "megatron"}, optional
        By default "trl"; "megatron" for tensor, pipeline and expert parallelism.
    lora : bool, optional
        Train LoRA adapters instead of all weights.
    parallel : {"ddp", "fsdp2", "zero2", "zero3", "tp"}, optional
        How TRL shards the model; by default "ddp".
    tp, pp, vpp, ep, cp : int, optional
        Tensor-parallel, pipeline-parallel, virtual-pipeline, expert-parallel and context-parallel size; by default 1.
    nproc : int or "auto", optional
        Processes of this node; by default one on each GPU.
    nnodes, node_rank : int, optional
        Number of nodes, and which one this is, from 0. Make the same call on each.
    rendezvous : str, optional
        "HOST:PORT" of the first node.
    reward : str or sequence of str, optional
        Rewards of GRPO, as "module:function" or "file.py:function:weight".
    merge : bool, optional
        With `lora`, write the merged model too; by default true.
    nan_steps : int, optional
        Stop after so many steps in a row whose loss is NaN or Inf; by default 1.
    save_on_signal : int, optional
        Seconds to finish and save a step after SIGTERM, SIGUSR1 or Ctrl-C; by default 600, and 0 saves nothing.
    max_restarts : int, optional
        Restart failed ranks up to so many times; by default 0.
    resume : bool, optional
        Continue from the last checkpoint in `output`.
    config : str or path-like, optional
        YAML file with any of these and of the engine's options. Arguments count before it.
    options : mapping, optional
        Options of the engine under its own names, for example ``{"learning_rate": 1e-5}``.
    dry_run : bool
        Check everything, and stop before the training.
    gpus, gpu_memory : str, optional
        With `dry_run`: plan for GPUs that are not here, as "H100:8", or "8" with "80GB". The plans that fit are
        `preflight.plans` of the result.
    slurm : str, optional
        Submit the run to Slurm with these settings, for example "partition=gpu,nodes=2,gpus_per_node=8,time=720"
        (minutes), and return. `submitted` of the result is the job.
    overwrite : bool
        Replace what an earlier run left in `output`.
    quiet : bool
        Print warnings and errors only.
    on_preflight : callable
        Called with the plan and its warnings before anything starts.

    Returns
    -------
    Outcome
        True if the run and all checks of its output succeeded. `status` is the exit status of the command.

    Raises
    ------
    ReshardError
        With all that forbids the run, and nothing started.

    Examples
    --------
    >>> try:
    ...     reshard.train("sft", data="chats.jsonl", output="out", options={"learning_rate": 1e-5})
    ... except reshard.ReshardError as error:
    ...     print(error.problems[0].message)
    --model is missing
    """
    given = Arguments("train")
    given.choice("method", str(method), METHODS)
    given.choice("engine", engine, MODULES)
    given.choice("data_shape", data_shape, DATA_SHAPES)
    given.choice("parallel", parallel, PARALLEL)
    for name, number in {"tp": tp, "pp": pp, "vpp": vpp, "ep": ep, "cp": cp, "nnodes": nnodes}.items():
        given.count(name, number)
    given.settle()
    flags = {
        "model": model,
        "model_revision": model_revision,
        "data": data,
        "output": output,
        "eval_data": eval_data,
        "dataset_config": dataset_config,
        "dataset_train_split": dataset_train_split,
        "dataset_test_split": dataset_test_split,
        "data_shape": data_shape,
        "system": system,
        "token_cache": token_cache,
        "engine": engine,
        "lora": lora,
        "parallel": parallel,
        "tp": tp,
        "pp": pp,
        "vpp": vpp,
        "ep": ep,
        "cp": cp,
        "nproc": nproc,
        "nnodes": nnodes,
        "node_rank": node_rank,
        "rendezvous": rendezvous,
        "reward": reward,
        "merge": merge,
        "nan_steps": nan_steps,
        "save_on_signal": save_on_signal,
        "max_restarts": max_restarts,
        "resume": resume,
    }
    file = Path(config) if config is not None else None
    run = run_of(method, flags, (), file)
    run = replace(run, options={**run.options, **(options or {})})
    machine = machine_asked(gpus, gpu_memory, run.ranks.nnodes, dry_run=dry_run and slurm is None)
    if slurm is not None:
        return submit(run, slurm, file, dry_run=dry_run, overwrite=overwrite, on_preflight=on_preflight)
    return start(
        run,
        file,
        dry_run=dry_run,
        machine=machine,
        overwrite=overwrite,
        quiet=quiet,
        on_preflight=on_preflight,
    )


def export(
    checkpoint: StrPath,
    dst: StrPath,
    *,
    merge: bool = False,
    dtype: str | None = None,
    overwrite: bool = False,
    no_resume: bool = False,
    on_bytes: Callable[[int], None] = lambda count: None,
) -> Conversion:
    """Make a Hugging Face folder of a checkpoint that `train` left.

    The same as `convert`, with everything else taken from the record of the run in the checkpoint.

    Parameters
    ----------
    checkpoint : str or path-like
        A checkpoint of a run, for example "out/checkpoint-200" or "out/iter_0000200".
    dst : str or path-like
        The output folder.
    merge : bool
        Merge the adapter of a LoRA run into its base.
    dtype : str, optional
        Convert weights to "float32", "bfloat16" or "float16".
    overwrite : bool
        Replace the one checkpoint at `dst`.
    no_resume : bool
        Start anew, and keep nothing of an export that is interrupted.
    on_bytes : callable
        Called with the number of bytes of each window that was written.

    Returns
    -------
    Conversion
        The plan with its notes and warnings, and a report of what was written.

    Raises
    ------
    ReshardError
        If the checkpoint has no record of a run, or cannot be converted; `dst` is as it was before.

    Examples
    --------
    >>> try:
    ...     reshard.export("run", "exported")
    ... except reshard.ReshardError as error:
    ...     print(error.problems[0].code)
    run-record-missing
    """
    given = Arguments("export")
    given.path("checkpoint", checkpoint)
    given.path("dst", dst)
    given.settle()
    from reshard.train.final import finish

    return finish.export(
        Path(checkpoint),
        Path(dst),
        merge=merge,
        dtype=dtype,
        overwrite=overwrite,
        resume=not no_resume,
        on_bytes=on_bytes,
    )
