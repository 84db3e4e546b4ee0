"""`reshard.transfer_plan`: what the ranks of a trainer send to those of an engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from reshard.algebra.layout import Layout
from reshard.base.arguments import Arguments
from reshard.base.exceptions_to_problems import for_users
from reshard.base.values import StrPath
from reshard.exchange import megatron_trainer
from reshard.exchange import transfer_plan as planning
from reshard.exchange.engine_recording import EngineRecording, read_recordings
from reshard.exchange.trainer import Trainer
from reshard.exchange.transfer_plan import Nodes, TransferPlan


@for_users()
def described_trainer(
    model: StrPath, layout: Layout, *, dtype: str = "bfloat16", transformer_engine: bool = True
) -> Trainer:
    """The Megatron-Core trainer of a model in a layout, described without running it.

    Parameters
    ----------
    model : str or path-like
        Hugging Face folder, of which only the config is read.
    layout : Layout
        Its parallel sizes: ``reshard.Layout(tp=2, pp=2, ep=8, dp=4)``.
    dtype : str
        Dtype of its weights.
    transformer_engine : bool
        Whether its layers are Transformer Engine's, or those of the local spec.

    Returns
    -------
    Trainer
        The model's tensors under their Hugging Face names, each element at a place in the memory of its ranks.

    Raises
    ------
    ReshardError
        If Megatron-Core does not compute the model, or cannot have the layout.

    Examples
    --------
    >>> reshard.described_trainer("model", reshard.Layout(tp=2, pp=2, dp=2)).ranks
    8
    """
    return megatron_trainer.described_trainer(
        Path(model), layout, dtype=dtype, transformer_engine=transformer_engine
    )


@for_users()
def transfer_plan(
    trainer: Trainer,
    engine: StrPath | Sequence[EngineRecording],
    *,
    sender: int | None = None,
    nodes: tuple[Sequence[str], Sequence[str]] | None = None,
) -> TransferPlan:
    """Plan what each rank of a trainer sends to each rank of an engine: every element once, from one rank.

    Parameters
    ----------
    trainer : Trainer
        What `described_trainer` returned.
    engine : str or path-like or sequence of EngineRecording
        Folder with what vLLM recorded of the model, a file for each of its ranks.
    sender : int, optional
        Plan only what this rank of the trainer sends.
    nodes : pair of sequences of str, optional
        The machine of each rank of the trainer, and of each rank of the engine. What a receiver's machine has is sent
        from there, so that links between machines carry less.

    Returns
    -------
    TransferPlan
        The transfers, with `summary()`, `as_dict()`, and the least number of bytes that must cross.

    Raises
    ------
    ReshardError
        If the engine loads another model, or if the trainer would have to compute what it sends.

    Examples
    --------
    >>> plan = reshard.transfer_plan(reshard.described_trainer("moe", reshard.Layout(tp=2)), "recordings")
    >>> plan.engine_ranks, len(plan.sent())
    (2, 2)
    """
    given = engine if isinstance(engine, Sequence) and not isinstance(engine, str) else None
    recordings = read_recordings(Path(str(engine))) if given is None else given
    if nodes is not None and [*map(len, nodes)] != [trainer.ranks, len(recordings)]:
        arguments = Arguments("transfer_plan")
        arguments.reject(
            "nodes", [*map(len, nodes)], f"{trainer.ranks} and {len(recordings)} names of machines"
        )
        arguments.settle()
    return planning.plan_transfer(trainer, recordings, sender, Nodes(*nodes) if nodes else None)
