"""The functions behind the commands, under the same names and with the same arguments."""

from __future__ import annotations

from collections.abc import Callable
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from reshard import conversion, planning
from reshard.algebra.layout import Layout
from reshard.arguments import Arguments
from reshard.conversion import Conversion
from reshard.errors import ReshardError
from reshard.families.family import ENGINES
from reshard.formats import writable
from reshard.formats.checkpoint import Iteration
from reshard.formats.record import Integrity, check_record
from reshard.model.quantizer import STORAGES
from reshard.notebooks import Bar
from reshard.stores import source_path, typed_path
from reshard.transfer.memory import Meter, Need, plainly, shared
from reshard.transfer.plan import Plan
from reshard.transfer.sources import OnStep
from reshard.transfer.staging import OnResume

if TYPE_CHECKING:
    from reshard.coverage import Proof
    from reshard.hub.push import OnUpload
    from reshard.inspection import Inspection
    from reshard.verification import Comparison
    from reshard.weights import Weights

StrPath = str | PathLike[str]
OnBytes = Callable[[int], None]
IMPLEMENTATIONS = ("transformer_engine", "local")
TRUSTED = ("checkpoint", "config")


def open(
    path: StrPath,
    iteration: Iteration | None = None,
    *,
    base: StrPath | None = None,
    family: str | None = None,
    dtype: str | None = None,
    strip: tuple[str, ...] = (),
    merge: bool = False,
    adapter: str | None = None,
    lora_alpha: float | None = None,
) -> Weights:
    """Open a checkpoint of any format and layout as a mapping of its tensors, by their names on the hub.

    Headers and metadata are read; a tensor is read when `numpy`, `raw` or `torch` of it is called, and a slice of it
    reads the bytes of that slice alone. Names, dtypes and values are those that `convert` would write to a Hugging Face
    folder: shards of tensor, pipeline and expert parallelism are put together, fused weights taken apart.

    Quantized weights are mapped as they are stored, values and scales under their own names; with `dtype` they are
    dequantized. An adapter is mapped under PEFT's names; with `merge`, as the model that it makes of `base`. CRC32s
    that files record are not checked: `verify` does that.

    Parameters
    ----------
    path : str or path-like
        A folder or a file, a URL (``s3://``, ``hf://``, ``https://`` …) or ``Org/Model`` on the hub.
    iteration : int or "release", optional
        Which step of a training run; by default the one that its tracker names.
    base : str or path-like, optional
        Hugging Face folder with the config, where the checkpoint has none; with `merge`, the model that was adapted.
    family : str, optional
        Read the checkpoint as this family, whatever its config says.
    dtype : str, optional
        Cast weights to "float32", "bfloat16" or "float16" as they are read.
    strip : tuple of str
        Remove these marks from tensor names, for example ("_orig_mod.",).
    merge : bool
        Merge the LoRA adapter into the model at `base`.
    adapter : str, optional
        Which adapter, if there are several.
    lora_alpha : float, optional
        The adapter's alpha, where no file tells it.

    Returns
    -------
    Weights
        A mapping of names to `LazyTensor`, with the format, layout, dtypes and native tensors of the checkpoint.

    Raises
    ------
    ReshardError
        If no checkpoint is found there, or its metadata is damaged. If its tensors cannot be put together, the first
        look at them raises what `convert` would. A name that is not there is a KeyError too.

    Examples
    --------
    >>> weights = reshard.open("run")
    >>> print(weights.format, weights.layout, len(weights))
    megatron TP2 · PP2 47
    >>> weight = weights["model.layers.0.mlp.up_proj.weight"]
    >>> weight.shape, weight.dtype, weight[0:2].numpy().shape
    ((96, 64), 'float32', (2, 64))
    """
    given = Arguments("open")
    given.path("path", path)
    if base is not None:
        given.path("base", base)
    given.step("iteration", iteration)
    given.texts("strip", strip)
    given.settle()
    from reshard.weights import Weights

    options = planning.Options(
        base=source_path(base) if base is not None else None,
        iteration=iteration,
        family=family,
        dtype=dtype,
        strip=tuple(strip),
        merge=merge,
        adapter=adapter,
        lora_alpha=lora_alpha,
    )
    return Weights.opened(source_path(path), options)


def inspect(
    path: StrPath,
    iteration: Iteration | None = None,
    *,
    html: StrPath | None = None,
    on_step: OnStep = lambda step: None,
) -> Inspection:
    """Say what a checkpoint is, whether it is complete, and what to type next.

    Parameters
    ----------
    path : str or path-like
        A folder or a file, a URL (``s3://``, ``hf://``, ``https://`` …) or ``Org/Model`` on the hub.
    iteration : int or "release", optional
        Which step of a training run; by default the one that its tracker names.
    html : str or path-like, optional
        File to write a page to: a treemap of the weights by module, and the contents of each rank or file.
    on_step : callable
        Called with a line of text whenever another step of the work begins.

    Returns
    -------
    Inspection
        Its family, layout, sizes and problems. It prints as `reshard inspect` does.

    Raises
    ------
    ReshardError
        If nothing can be opened there. What is wrong with a checkpoint that opens is in `problems`.

    Examples
    --------
    >>> found = reshard.inspect("run")
    >>> found.family, found.whole
    ('qwen3', True)
    """
    _check_source("inspect", path, iteration)
    _check_page(html)
    from reshard.inspection import inspect_checkpoint

    found = inspect_checkpoint(source_path(path), iteration, on_step)
    if html is not None:
        from reshard.pages import inspection_page
        from reshard.pages.writing import write_page

        write_page(Path(html), inspection_page(found), "--html")
    return found


def _check_page(html: StrPath | None) -> None:
    if html is not None:
        from reshard.pages.writing import in_the_way

        if problems := [*in_the_way(Path(html), "--html")]:
            raise ReshardError(problems)


def _check_source(function: str, path: StrPath, iteration: Iteration | None) -> None:
    given = Arguments(function)
    given.path("path", path)
    given.step("iteration", iteration)
    given.settle()


def convert(
    src: StrPath,
    dst: StrPath,
    *,
    to: str | None = None,
    base: StrPath | None = None,
    tp: int = 1,
    pp: int = 1,
    vpp: int = 1,
    ep: int = 1,
    etp: int | None = None,
    stages: tuple[int, ...] = (),
    iteration: Iteration | None = None,
    family: str | None = None,
    engine: str | None = None,
    trust: str = "checkpoint",
    dtype: str | None = None,
    quantize: str | None = None,
    max_shard_size: int | str = "5GB",
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

    Sources are only read. `dst` appears complete, or stays as it was. The same call continues a run that was
    interrupted.

    Parameters
    ----------
    src : str or path-like
        The checkpoint: a folder or a file, a URL, or ``Org/Model`` on the hub.
    dst : str or path-like
        The output: a folder, or a URL of a store that can be written (``s3://``, ``gs://``, ``oss://``, ``az://``).
    to : str, optional
        Format of the output, one of those that `support` lists as written. By default "huggingface", or "peft" for an
        adapter.
    base : str or path-like, optional
        Hugging Face folder with the config and the tokenizer; with `merge`, also the model that was adapted.
    tp, pp, vpp, ep : int
        Tensor-parallel, pipeline-parallel, virtual-pipeline and expert-parallel size of the output.
    etp : int, optional
        Expert-tensor-parallel size; by default `tp`.
    stages : tuple of int
        Layers of each pipeline stage, if they are uneven.
    iteration : int or "release", optional
        Which step of the run `src`; by default the one that its tracker names.
    family : str, optional
        Read the source as this family, whatever its config says.
    engine : str, optional
        Who will load the Megatron checkpoint: "mcore", "mcore-bridge" or "megatron-bridge". By default, who saved the
        source.
    trust : {"checkpoint", "config"}
        Which one to use where config.json and a Megatron checkpoint's arguments disagree.
    dtype : str, optional
        Convert weights to "float32", "bfloat16" or "float16". Quantized weights are dequantized.
    quantize : str, optional
        Quantize the linear layers of a Hugging Face folder, for example to "fp8".
    max_shard_size : int or str
        Largest file of weights, in bytes or with a unit ("5GB", "512MiB").
    vocab_divisible_by : int, optional
        Pad the vocabulary to a multiple of this times `tp`; by default that of the source, else 128.
    transformer_impl : {"transformer_engine", "local"}, optional
        Layer spec whose tensor names to write; by default Transformer Engine's, as Megatron-LM.
    memory : int or str
        Bound on the memory beside Python itself (about 60 MiB), in bytes or with a unit.
    workers : int, optional
        Threads; by default two a core. With `on`, those of each part.
    on : str, optional
        Let other machines do the work, for example "dask://scheduler:8786", "ray" or "mpi".
    dry_run : bool
        Plan and check, and write nothing.
    overwrite : bool
        Replace the one checkpoint at `dst`.
    no_tokenizer : bool
        Continue without a tokenizer.
    strip : tuple of str
        Remove these marks from tensor names, for example ("_orig_mod.",).
    merge : bool
        Merge the LoRA adapter `src` into the model at `base`.
    adapter : str, optional
        Which adapter of `src`, if it has several.
    lora_alpha : float, optional
        The adapter's alpha, where no file tells it.
    with_optimizer : bool
        Convert the optimizer states too, if both formats can.
    strict : bool
        NaN or Inf in the weights is an error.
    no_checksum : bool
        Neither check nor record CRC32s of what is read.
    verify : bool
        Read the output back from the disk before it is published, and compare it with what was written.
    no_resume : bool
        Start anew, and keep nothing of a run that is interrupted.
    no_sync : bool
        Do not wait for the disk: if the machine fails within a minute, the output may be lost or damaged.
    push_to_hub : str, optional
        Then upload the output to this Hugging Face repository, "Org/Name".
    private : bool
        Make that repository private if it is new.
    command : str
        What `inspect` names as the way to continue this run, should it be interrupted.
    on_step : callable
        Called with a line of text whenever another step of the planning begins.
    on_plan : callable, optional
        Called with the `Plan` before a byte is read. In a notebook, these three draw a progress bar by default.
    on_bytes : callable, optional
        Called with the number of bytes of each window that was written.
    on_resume : callable, optional
        Called with a note and the bytes that are there already, when an interrupted run is continued.
    on_upload : callable
        Called with the address of the repository and the bytes to upload.

    Returns
    -------
    Conversion
        The plan with its notes and warnings, and a report of what was written (None after a dry run).

    Raises
    ------
    ReshardError
        With every reason that was found, and `dst` as it was before.

    Examples
    --------
    >>> result = reshard.convert("model", "megatron", to="megatron", tp=2, pp=2)
    >>> result.plan.target, result.report.nonfinite
    ('megatron', [])
    """
    given = Arguments("convert")
    for name, path in (("src", src), ("dst", dst), *([("base", base)] if base is not None else ())):
        given.path(name, path)
    given.known("to", to, writable)
    given.choice("engine", engine, ENGINES)
    given.choice("trust", trust, TRUSTED)
    given.choice("quantize", quantize, STORAGES)
    given.choice("transformer_impl", transformer_impl, IMPLEMENTATIONS)
    sizes = {"tp": tp, "pp": pp, "vpp": vpp, "ep": ep, "etp": etp, "workers": workers}
    for name, number in {**sizes, "vocab_divisible_by": vocab_divisible_by}.items():
        given.count(name, number)
    given.counts("stages", stages)
    given.texts("strip", strip)
    given.step("iteration", iteration)
    largest, allowed = given.size("--max-shard-size", max_shard_size), given.size("--memory", memory)
    given.settle()
    if private and not push_to_hub:
        raise ReshardError(
            "private-without-push",
            "--private is for --push-to-hub",
            remedy="add --push-to-hub Org/Name, or leave out --private",
        )
    push = None
    if push_to_hub:
        from reshard.hub.push import Push

        push = Push(push_to_hub, private, overwrite)
    layout = Layout(tp, pp, vpp, ep, tp if etp is None else etp, tuple(stages))
    options = planning.Options(
        to=writable(to).name if to else None,
        base=source_path(base) if base else None,
        layout=layout,
        iteration=iteration,
        family=family,
        engine=engine,
        trust=trust,
        dtype=dtype,
        quantize=quantize,
        max_shard_size=largest,
        vocab_divisible_by=vocab_divisible_by,
        transformer_impl=transformer_impl,
        tokenizer=not no_tokenizer,
        strip=tuple(strip),
        merge=merge,
        adapter=adapter,
        lora_alpha=lora_alpha,
        with_optimizer=with_optimizer,
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
        on_resume=on_resume or (lambda note, nbytes: bar.advance(nbytes)),
        on_upload=on_upload,
    )
    return conversion.convert(source_path(src), typed_path(dst), options, how)


@overload
def verify(
    a: StrPath,
    b: None = None,
    *,
    memory: int | str = ...,
    on_total: OnBytes | None = ...,
    on_bytes: OnBytes | None = ...,
    on_step: OnStep = ...,
) -> Integrity: ...


@overload
def verify(
    a: StrPath,
    b: StrPath,
    *,
    base: StrPath | None = None,
    logits: bool = False,
    memory: int | str = ...,
    proof: Literal[False] = False,
    html: StrPath | None = ...,
    on_step: OnStep = ...,
    on_total: OnBytes | None = ...,
    on_bytes: OnBytes | None = ...,
) -> Comparison: ...


@overload
def verify(
    a: StrPath, b: StrPath, *, base: StrPath | None = None, proof: Literal[True], on_step: OnStep = ...
) -> Proof: ...


@plainly()
def verify(
    a: StrPath,
    b: StrPath | None = None,
    *,
    base: StrPath | None = None,
    logits: bool = False,
    memory: int | str = "1GiB",
    proof: bool = False,
    html: StrPath | None = None,
    on_step: OnStep = lambda step: None,
    on_total: OnBytes | None = None,
    on_bytes: OnBytes | None = None,
) -> Comparison | Integrity | Proof:
    """Compare the weights of two checkpoints bit for bit, whatever their formats and layouts.

    Without `b`, all files of `a`, which `convert` wrote, are checked against the digests in its `reshard.json`. With
    `proof`, elements are counted instead of compared: the plan by which `convert` made `b` of `a` is made again; it
    uses each element of `a` once or drops it by a rule, and writes each of `b` once.

    Parameters
    ----------
    a, b : str or path-like
        The checkpoints: folders or files, URLs, or ``Org/Model`` on the hub.
    base : str or path-like, optional
        Hugging Face folder with the config, for a side that has none; with `proof`, instead of the recorded one.
    logits : bool
        Also run the same tokens through both, with transformers or megatron-core.
    memory : int or str
        Bound on the memory beside Python itself (about 60 MiB), in bytes or with a unit ("1GiB").
    proof : bool
        Count elements instead of comparing values.
    html : str or path-like, optional
        File to write a page to: a heat map of the relative change by layer and module, and a table of differences.
        The result then has the `changes` of every tensor that was compared.
    on_step : callable
        Called with a line of text whenever another step of the work begins.
    on_total : callable, optional
        Called once with the number of bytes that will be compared. In a notebook, a progress bar by default.
    on_bytes : callable, optional
        Called with the number of bytes of each tensor that was compared.

    Returns
    -------
    Comparison, Integrity or Proof
        True if the weights are equal (`Comparison`), the files unchanged (`Integrity`, without `b`), or the counts
        balanced (`Proof`, with `proof`).

    Raises
    ------
    ReshardError
        If one of them cannot be read.

    Examples
    --------
    >>> bool(reshard.verify("run", "model"))
    True
    >>> for row in reshard.verify("model", "tuned").rows[:1]:
    ...     print(row.tensor, row.kind)
    model.layers.1.mlp.up_proj.weight values
    """
    given = Arguments("verify")
    for name, path in (
        ("a", a),
        *((name, path) for name, path in (("b", b), ("base", base)) if path is not None),
    ):
        given.path(name, path)
    meter = Meter(given.size("--memory", memory))
    given.settle()
    bar = Bar()
    on_total, on_bytes = on_total or bar.begin, on_bytes or bar.advance
    if html is not None and (b is None or proof):
        raise ReshardError(
            "page-needs-two-checkpoints",
            "a page shows where the values of two checkpoints differ",
            remedy="pass both, without --proof: reshard verify A B --html FILE",
        )
    _check_page(html)
    if proof:
        from reshard.coverage import prove_output

        if b is None or logits:
            raise ReshardError(
                "proof-arguments-wrong",
                "a proof needs the source and the output, and counts elements alone",
                remedy="pass both: reshard verify SRC DST --proof",
            )
        return prove_output(source_path(a), source_path(b), source_path(base) if base else None, on_step)
    if b is None:
        if base is not None or logits:
            raise ReshardError(
                "second-checkpoint-missing",
                "base and logits are for two checkpoints, but only one is given",
                remedy="pass the other one too: verify(a, b)",
            )
        return check_record(source_path(a), shared(None, meter.left(Need())).threads, on_total, on_bytes)
    from reshard.verification import compare_weights, need_of, open_sides

    with meter.bounding():
        first, second = open_sides(
            source_path(a), source_path(b), source_path(base) if base else None, on_step
        )
    need = need_of(first, second)
    share = shared(None, meter.left(need), need, (first.sources | second.sources).paths)
    result = compare_weights(
        first, second, share, measured=html is not None, on_total=on_total, on_bytes=on_bytes
    )
    if logits:
        from reshard.oracle.agreement import compare_logits

        result.logits = compare_logits(first, second)
    if html is not None:
        from reshard.pages import comparison_page
        from reshard.pages.writing import write_page

        write_page(Path(html), comparison_page(result, str(a), str(b)), "--html")
    return result


def support() -> dict[str, list[dict[str, Any]]]:
    """List the formats and families that reshard knows.

    Returns
    -------
    dict
        "formats", "families" and "undeclared" (known models that are not converted to Megatron-Core), each a list of
        rows, as `reshard support --json` prints them.

    Examples
    --------
    >>> [row["name"] for row in reshard.support()["formats"] if row["written"]][:3]
    ['megatron', 'megatron-legacy', 'dcp']
    """
    from reshard.families import FAMILIES
    from reshard.families.family import JUDGES
    from reshard.families.undeclared import BEYOND_MEGATRON, BUILT_ALIKE
    from reshard.formats import FORMATS

    formats = [
        {
            "name": each.name,
            "what": each.what,
            "read": True,
            "written": each.target is not None,
            "aliases": [*each.aliases],
        }
        for each in FORMATS.values()
    ]
    families = [
        {
            "name": name,
            "architecture": family.architecture,
            "engine": ENGINES[family.computed_by],
            "judged": [JUDGES[judge] for judge in family.judged],
            "carried": [part.hub for part in family.within.carried] if family.within else [],
            "aliases": [*family.aliases],
        }
        for name, family in FAMILIES.items()
    ]
    undeclared = sorted((BEYOND_MEGATRON | BUILT_ALIKE).items())
    return {
        "formats": formats,
        "families": families,
        "undeclared": [{"name": name, "why": why} for name, why in undeclared],
    }
