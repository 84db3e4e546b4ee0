"""`reshard.train`, `export` and `report`: the functions behind the commands of the same name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from reshard.base.arguments import Arguments, OnBytes, StrPath
from reshard.base.boundary import for_users
from reshard.planning.naming import Types
from reshard.training.data.records import DATA_SHAPES
from reshard.training.engines import MODULES
from reshard.training.methods import METHODS, elsewhere
from reshard.training.planning.gpus import machine_asked
from reshard.training.request import run_of
from reshard.training.run import PARALLEL
from reshard.training.start import Outcome, start, submit

if TYPE_CHECKING:
    from reshard.commands.conversion import Conversion
    from reshard.training.outlook import Preflight


@for_users()
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
    """Fine-tune a model on many processes, and write a Hugging Face folder at the end.

    Package versions, data, tokenizer, batches and memory are checked before anything starts. The ranks run in their
    own processes, under torchrun.

    Parameters
    ----------
    method : {"sft", "dpo", "kto", "reward", "distillation", "grpo", "rloo"}
        Training method, as in ``reshard train sft``.
    model : str or path-like
        Hugging Face folder or Hub model ("Org/Model") to start from. `model` and `data` can be omitted with `resume`,
        or if `config` sets them.
    model_revision : str, optional
        Branch, tag or commit of a Hub model.
    data : str, path-like, or a sequence of those
        JSONL or Parquet file, a folder of them, or a Hub dataset ("Org/Set"). Several are mixed by weight, for example
        "a.jsonl:0.7".
    output : str or path-like
        Folder for checkpoints, logs and the report. The trained model is in `output/final`.
    eval_data : str, path-like, or a sequence of those, optional
        Data to evaluate the model on during training, in the same forms as `data`.
    dataset_config : str, optional
        Configuration of a Hub dataset.
    dataset_train_split, dataset_test_split : str, optional
        Splits of a Hub dataset: for `data`, by default "train"; for `eval_data`, by default "test".
    data_shape : {"chat", "sharegpt", "alpaca", "prompt-and-completion", "plain-text"}, optional
        How to read records that fit several shapes.
    system : str, optional
        System message for chats that have none.
    token_cache : bool, optional
        Cache the tokenized data in ``~/.cache/reshard`` for the next run; by default true.
    engine : {"trl", "megatron"}, optional
        "megatron", which is experimental, adds pipeline and expert parallelism; by default "trl".
    lora : bool, optional
        Train LoRA adapters instead of all weights.
    parallel : {"ddp", "fsdp2", "zero2", "zero3", "tp"}, optional
        How TRL shards the model; by default "ddp".
    tp, pp, vpp, ep, cp : int, optional
        Tensor-parallel, pipeline-parallel, virtual-pipeline, expert-parallel and context-parallel size; by default 1.
    nproc : int or "auto", optional
        Processes on this node; by default one per GPU.
    nnodes, node_rank : int, optional
        Number of nodes, and the number of this one, from 0. Make the same call on each node.
    rendezvous : str, optional
        "HOST:PORT" of the first node.
    reward : str or sequence of str, optional
        Reward functions for GRPO and RLOO, as "module:function" or "file.py:function:weight".
    merge : bool, optional
        With `lora`, also write the merged model; by default true.
    nan_steps : int, optional
        Stop after this many consecutive steps with a NaN or infinite loss; by default 1.
    save_on_signal : int, optional
        Seconds to finish and save the current step after SIGTERM, SIGUSR1 or Ctrl-C; by default 600. With 0, nothing
        is saved.
    max_restarts : int, optional
        Restart failed ranks at most this many times; by default 0.
    resume : bool, optional
        Continue from the last checkpoint in `output`.
    config : str or path-like, optional
        YAML file with any of these arguments and the engine's options. Arguments of the call take precedence.
    options : mapping, optional
        Options of the engine under its own names, for example ``{"learning_rate": 1e-5}``.
    dry_run : bool
        Check everything, but do not train.
    gpus, gpu_memory : str, optional
        With `dry_run`, plan for GPUs of another machine, for example "H100:8", or "8" with "80GB". The result has the
        plans that fit in `preflight.plans`.
    slurm : str, optional
        Submit the run to Slurm with these settings, for example "partition=gpu,nodes=2,gpus_per_node=8,time=720"
        (minutes), and return. The result has the job in `submitted`.
    overwrite : bool
        Replace the files of an earlier run in `output`.
    quiet : bool
        Print warnings and errors only.
    on_preflight : callable
        Called with the plan and its warnings before anything starts.

    Returns
    -------
    Outcome
        True if the run and all checks of its output succeeded. `status` is the exit status that the command would have.

    Raises
    ------
    ReshardError
        With every problem that prevents the run. Nothing was started.

    Examples
    --------
    >>> try:
    ...     reshard.train("sft", data="chats.jsonl", output="out", options={"learning_rate": 1e-5})
    ... except reshard.ReshardError as error:
    ...     print(error.problems[0].message)
    --model is missing
    """
    given = Arguments("train")
    if problem := elsewhere(str(method)):
        given.problems.append(problem)
    else:
        given.choice("method", str(method), METHODS)
    given.choice("engine", engine, MODULES)
    given.choice("data_shape", data_shape, DATA_SHAPES)
    given.choice("parallel", parallel, PARALLEL)
    processes = None if nproc == "auto" else nproc
    counts = {"tp": tp, "pp": pp, "vpp": vpp, "ep": ep, "cp": cp, "nnodes": nnodes, "nproc": processes}
    for name, number in {**counts, "nan_steps": nan_steps}.items():
        given.counted(name, number)
    for name, number in {
        "node_rank": node_rank,
        "save_on_signal": save_on_signal,
        "max_restarts": max_restarts,
    }.items():
        given.counted(name, number, least=0)
    for name, path in (("model", model), ("output", output), ("config", config)):
        if path is not None:
            given.path(name, path)
    given.switches(dry_run=dry_run, overwrite=overwrite, quiet=quiet)
    given.callbacks(on_preflight=on_preflight)
    given.text("gpus", gpus, "H100:8")
    given.text("gpu_memory", gpu_memory, "80GB")
    given.text("slurm", slurm, "partition=gpu,nodes=2,time=720")
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


@for_users()
def export(
    checkpoint: StrPath,
    dst: StrPath,
    *,
    merge: bool = False,
    dtype: str | None = None,
    overwrite: bool = False,
    no_resume: bool = False,
    on_bytes: OnBytes = lambda count: None,
) -> Conversion:
    """Convert a checkpoint of a training run to a Hugging Face folder.

    Works like `convert`, and takes all other settings from the record of the run in the checkpoint.

    Parameters
    ----------
    checkpoint : str or path-like
        A checkpoint written by `train`, for example "out/checkpoint-200" or "out/iter_0000200".
    dst : str or path-like
        The output folder.
    merge : bool
        Merge the adapter of a LoRA run into its base.
    dtype : str, optional
        Convert weights to "float32", "bfloat16" or "float16".
    overwrite : bool
        Replace the one checkpoint at `dst`.
    no_resume : bool
        Start over, and keep nothing if the export is interrupted.
    on_bytes : callable
        Called with the number of bytes of each window that was written.

    Returns
    -------
    Conversion
        The plan with its notes and warnings, and a report of what was written.

    Raises
    ------
    ReshardError
        If the checkpoint has no record of a run, or cannot be converted. `dst` is as it was before.

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
    given.known("dtype", dtype, Types)
    given.switches(merge=merge, overwrite=overwrite, no_resume=no_resume)
    given.callbacks(on_bytes=on_bytes)
    given.settle()
    from reshard.training.final import finish

    return finish.export(
        Path(checkpoint),
        Path(dst),
        merge=merge,
        dtype=dtype,
        overwrite=overwrite,
        resume=not no_resume,
        on_bytes=on_bytes,
    )


def report(*runs: StrPath, output: StrPath | None = None) -> Path:
    """Draw one or several training runs on one HTML page, which needs no network.

    Parameters
    ----------
    *runs : str or path-like
        Output folders of `train`; the runs may still be going on.
    output : str or path-like, optional
        Page to write. By default `report.html` in the folder of the run, or `runs.html` for several runs.

    Returns
    -------
    Path
        The page.

    Raises
    ------
    ReshardError
        If a folder is not that of a run, or something else is in the place of the page.

    Examples
    --------
    >>> try:
    ...     reshard.report("model")
    ... except reshard.ReshardError as error:
    ...     print(error.problems[0].code)
    report-no-run
    """
    given = Arguments("report")
    for name, path in (*(("run", each) for each in runs), *([] if output is None else [("output", output)])):
        given.path(name, path)
    if not runs:
        given.path("run", None)
    given.settle()
    from reshard.training.show.report import draw

    return draw([Path(run) for run in runs], None if output is None else Path(output))[0]
