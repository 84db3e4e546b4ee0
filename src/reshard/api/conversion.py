"""`reshard.convert`: a checkpoint in another format or layout."""

from __future__ import annotations

from collections.abc import Callable

from reshard import planning
from reshard.adapters.engines import ENGINES as ADAPTERS_FOR
from reshard.algebra.layout import Layout
from reshard.base.arguments import Arguments, OnBytes, StrPath
from reshard.base.boundary import for_users
from reshard.base.errors import ReshardError
from reshard.base.notebooks import Bar
from reshard.commands import conversion
from reshard.commands.conversion import Conversion
from reshard.families.family import ENGINES
from reshard.folders.iterations import Iteration
from reshard.formats import named_by, quantized_as, writable, written
from reshard.formats.target import Average
from reshard.hub.push import OnUpload, Push
from reshard.model.recognition import named
from reshard.planning.naming import Types
from reshard.stores import source_path, typed_path
from reshard.transfer.plan import Plan
from reshard.transfer.sources import OnStep
from reshard.transfer.staging import OnResume

IMPLEMENTATIONS = ("transformer_engine", "local")
TRUSTED = ("checkpoint", "config")


@for_users()
def convert(
    src: StrPath | Average,
    dst: StrPath,
    *,
    to: str | None = None,
    base: StrPath | None = None,
    tp: int = 1,
    pp: int = 1,
    vpp: int = 1,
    ep: int = 1,
    etp: int | None = None,
    dp: int | None = None,
    stages: tuple[int, ...] = (),
    iteration: Iteration | None = None,
    family: str | None = None,
    engine: str | None = None,
    trust: str = "checkpoint",
    dtype: str | None = None,
    quantize: str | None = None,
    max_shard_size: int | str | None = None,
    vocab_divisible_by: int | None = None,
    transformer_impl: str | None = None,
    memory: int | str = "1GiB",
    workers: int | None = None,
    on: str | None = None,
    dry_run: bool = False,
    overwrite: bool = False,
    no_tokenizer: bool = False,
    strip: tuple[str, ...] = (),
    merge: bool = False,
    adapter: str | None = None,
    lora_alpha: float | None = None,
    adapter_for: str | None = None,
    with_optimizer: bool = False,
    strict: bool = False,
    no_checksum: bool = False,
    verify: bool = False,
    no_resume: bool = False,
    no_sync: bool = False,
    push_to_hub: str | None = None,
    private: bool = False,
    command: str = "",
    on_step: OnStep = lambda step: None,
    on_plan: Callable[[Plan], None] | None = None,
    on_bytes: OnBytes | None = None,
    on_resume: OnResume | None = None,
    on_upload: OnUpload = lambda address, nbytes: None,
) -> Conversion:
    """Convert the checkpoint at `src` to `dst`, to any format and parallel layout.

    Sources are only read. `dst` appears when it is complete; until then it stays as it was. If a run is interrupted,
    the same call continues it.

    Parameters
    ----------
    src : str or path-like
        Checkpoint to read: a folder, a file, a URL, or ``Org/Model`` on the Hub. (`average` passes several.)
    dst : str or path-like
        Output: a folder, or the URL of a store that can be written (``s3://``, ``gs://``, ``oss://``, ``az://``).
    to : str, optional
        Format to write; `support` lists them. By default "huggingface", or "peft" for an adapter.
    base : str or path-like, optional
        Hugging Face folder with the config and tokenizer. With `merge`, the model to merge into.
    tp, pp, vpp, ep : int
        Tensor-parallel, pipeline-parallel, virtual-pipeline and expert-parallel size of the output.
    etp : int, optional
        Expert-tensor-parallel size of the output; by default `tp`.
    dp : int, optional
        Data-parallel size of the output: the number of ranks that will load it. For "fsdp-ranks" only, which needs it.
    stages : tuple of int
        Layers of each pipeline stage, if they are uneven.
    iteration : int or "release", optional
        Step of the run `src` to convert. By default, the one that its tracker names.
    family : str, optional
        Read `src` as this family, whatever its config says.
    engine : str, optional
        Engine that will load the Megatron output: "mcore", "mcore-bridge" or "megatron-bridge". By default, the one
        that saved `src`.
    trust : {"checkpoint", "config"}
        Which one to use if config.json and a Megatron checkpoint's arguments disagree.
    dtype : str, optional
        Cast weights to "float32", "bfloat16" or "float16". Quantized weights are dequantized.
    quantize : str, optional
        Quantize the linear layers of a Hugging Face output, for example to "fp8", or store a GGUF output in a type of
        its own, such as "q8_0", or an MLX output in groups, such as "affine-4".
    max_shard_size : int or str, optional
        Largest weight file, in bytes or with a unit ("5GB", "512MiB"). By default 5 GB; a GGUF output is one file.
    vocab_divisible_by : int, optional
        Pad the vocabulary to a multiple of this times `tp`. By default that of `src`, else 128.
    transformer_impl : {"transformer_engine", "local"}, optional
        Layer spec whose tensor names to write. By default that of `src`, else Transformer Engine's.
    memory : int or str
        Memory limit, in bytes or with a unit. Python itself (about 60 MiB) is not counted.
    workers : int, optional
        Threads, by default two per core; with `on`, threads per part.
    on : str, optional
        Run on other machines, for example "dask://scheduler:8786", "ray" or "mpi".
    dry_run : bool
        Plan and check, but write nothing.
    overwrite : bool
        Replace the checkpoint at `dst`.
    no_tokenizer : bool
        Continue without a tokenizer.
    strip : tuple of str
        Remove these marks from tensor names, for example ("_orig_mod.",).
    merge : bool
        Merge `src`, a LoRA adapter, into the model at `base`.
    adapter : str, optional
        Adapter to read, if `src` contains several.
    lora_alpha : float, optional
        Alpha of the adapter, if no file records it.
    adapter_for : {"vllm", "sglang", "peft"}, optional
        Write the adapter `src` in the layout that this library loads and applies completely, for the model at `base`.
        By default it keeps the layout of `src`.
    with_optimizer : bool
        Convert optimizer states too, if both formats can store them.
    strict : bool
        Fail if weights contain NaN or Inf.
    no_checksum : bool
        Do not check or record CRC32s of the source.
    verify : bool
        Read the output back from disk before it is published, and compare checksums.
    no_resume : bool
        Start over, and keep nothing if the run is interrupted.
    no_sync : bool
        Do not wait for the disk. If the machine crashes within a minute, the output may be lost or damaged.
    push_to_hub : str, optional
        Upload the output to this Hugging Face repository, "Org/Name", afterwards.
    private : bool
        Create that repository as private.
    command : str
        Command that `inspect` shows to continue this run if it is interrupted.
    on_step : callable
        Called with a line of text when a new step of the planning begins.
    on_plan : callable, optional
        Called with the `Plan` before any weight is read. In a notebook, `on_plan`, `on_bytes` and `on_resume` draw a
        progress bar by default.
    on_bytes : callable, optional
        Called with the number of bytes of each window that was written.
    on_resume : callable, optional
        Called with a note and the number of bytes already written when an interrupted run is continued.
    on_upload : callable
        Called with the address of the repository and the number of bytes to upload.

    Returns
    -------
    Conversion
        The plan with its notes and warnings, and a report of what was written (None after a dry run).

    Raises
    ------
    ReshardError
        With every reason that was found. `dst` is as it was before.

    Examples
    --------
    >>> result = reshard.convert("model", "megatron", to="megatron", tp=2, pp=2)
    >>> result.plan.target, result.report.nonfinite
    ('megatron', [])
    """
    given = Arguments("convert")
    source, average = (src.paths[-1], src) if isinstance(src, Average) else (src, None)
    given.path("src", source)
    given.path("dst", dst)
    if base is not None:
        given.path("base", base)
    given.known("to", to, writable)
    given.known("family", family, named)
    given.known("dtype", dtype, Types)
    given.choice("engine", engine, ENGINES)
    given.choice("trust", trust, TRUSTED)
    given.choice("adapter_for", adapter_for, ADAPTERS_FOR)
    given.known("quantize", quantize, quantized_as)
    given.choice("transformer_impl", transformer_impl, IMPLEMENTATIONS)
    for name, number in {"tp": tp, "pp": pp, "vpp": vpp, "ep": ep}.items():
        given.count(name, number)
    rows = vocab_divisible_by
    for name, optional in {"etp": etp, "dp": dp, "workers": workers, "vocab_divisible_by": rows}.items():
        given.counted(name, optional)
    given.number("lora_alpha", lora_alpha)
    for name, text, example in (
        ("adapter", adapter, "default"),
        ("on", on, "dask://scheduler:8786"),
        ("push_to_hub", push_to_hub, "Org/Name"),
    ):
        given.text(name, text, example)
    given.counts("stages", stages)
    given.texts("strip", strip)
    given.step("iteration", iteration)
    given.switches(
        dry_run=dry_run,
        overwrite=overwrite,
        no_tokenizer=no_tokenizer,
        merge=merge,
        with_optimizer=with_optimizer,
        strict=strict,
        no_checksum=no_checksum,
        verify=verify,
        no_resume=no_resume,
        no_sync=no_sync,
        private=private,
    )
    given.callbacks(
        on_step=on_step, on_plan=on_plan, on_bytes=on_bytes, on_resume=on_resume, on_upload=on_upload
    )
    asked = None if max_shard_size is None else given.size("--max-shard-size", max_shard_size)
    allowed = given.size("--memory", memory)
    given.settle()
    if private and not push_to_hub:
        raise ReshardError(
            "private-without-push",
            "--private is for --push-to-hub",
            remedy="add --push-to-hub Org/Name, or leave out --private",
        )
    push = Push(push_to_hub, private, overwrite) if push_to_hub else None
    layout = Layout(tp, pp, vpp, ep, tp if etp is None else etp, tuple(stages), dp=dp or 1)
    format = writable(to).name if to else named_by(typed_path(dst))
    if dp is None and format is not None and written()[format].ranks:
        raise ReshardError(
            "ranks-not-passed",
            f"the number of ranks that will load the output is missing, and {format} has a file for each of them",
            rule="the files are loaded by as many ranks as they were written for",
            expected="--dp N",
            remedy="pass --dp with the number of ranks (GPUs) of the run that will load the output",
        )
    undivided = format is not None and bool(written()[format].suffix)
    options = planning.Options(
        to=format,
        base=source_path(base) if base else None,
        layout=layout,
        iteration=iteration,
        family=family,
        engine=engine,
        trust=trust,
        dtype=dtype,
        quantize=quantize,
        max_shard_size=asked or (None if undivided else planning.Options().max_shard_size),
        vocab_divisible_by=vocab_divisible_by,
        transformer_impl=transformer_impl,
        tokenizer=not no_tokenizer,
        strip=tuple(strip),
        merge=merge,
        adapter=adapter,
        lora_alpha=lora_alpha,
        adapter_for=adapter_for,
        with_optimizer=with_optimizer,
        average=average,
    )
    bar = Bar()
    how = conversion.How(
        dry_run=dry_run,
        overwrite=overwrite,
        memory=allowed,
        workers=workers,
        on=on,
        strict=strict,
        checksum=not no_checksum,
        verify=verify,
        resume=not no_resume,
        sync=not no_sync,
        command=command,
        push=push,
        on_step=on_step,
        on_plan=on_plan or (lambda plan: None if dry_run else bar.begin(plan.nbytes)),
        on_bytes=on_bytes or bar.advance,
        on_resume=on_resume or (lambda note, nbytes: bar.begin_at(nbytes)),
        on_upload=on_upload,
    )
    return conversion.convert(source_path(source), typed_path(dst), options, how)
