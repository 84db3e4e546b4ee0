"""Runs of the Megatron engine on forked ranks, and the plain loop of transformers to compare them with."""

from __future__ import annotations

import gc
import math
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from reshard.algebra.layout import Layout
from reshard.engines.megatron.session import RankError, run_ranks
from reshard.training import megatron, signals
from reshard.training.engine import Trained
from reshard.training.run import Run
from tests.train import warm_megatron  # noqa: F401
from tests.train.conftest import chats, write_lines

CHATS, HELD_OUT = chats()[:16], chats()[40:45]
LENGTH, ROWS = 128, 8
"""Two chats fit into a row; a step of 8 rows sees all 16, in any packing. Three rows are held out."""
STEPS, LR, DECAY = 4, 1e-3, 0.1
OPTIONS: dict[str, Any] = {
    "seq_length": LENGTH,
    "global_batch_size": ROWS,
    "train_iters": STEPS,
    "lr": LR,
    "weight_decay": DECAY,
    "lr_warmup_iters": 1,
}
EPSILON = 1e-4


@dataclass
class Seen:
    """A monitor that keeps everything reported; after a step it can kill the process, or send it SIGUSR1."""

    dies_after: int = 0
    signal_after: int = 0
    steps: dict[int, dict[str, float]] = field(default_factory=dict)
    evaluations: dict[int, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    checkpoints: list[Path] = field(default_factory=list)
    done: int = -1

    def begin(self, steps: int, done: int = 0) -> None:
        self.done = done

    def step(self, step: int, **metrics: float) -> None:
        self.steps[step] = metrics
        if step == self.dies_after:
            os._exit(9)
        if step == self.signal_after and torch.distributed.get_rank():
            signal.raise_signal(signal.SIGUSR1)

    def unlogged(self, step: int) -> None:
        pass

    def evaluated(self, step: int, **metrics: float) -> None:
        self.evaluations[step] = metrics["eval_loss"]

    def samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        pass

    def saved(self, checkpoint: Path) -> None:
        self.checkpoints.append(checkpoint)

    def note(self, text: str) -> None:
        self.notes.append(text)

    @property
    def losses(self) -> list[float]:
        return [metrics["loss"] for metrics in self.steps.values()]


def write_chats(folder: Path) -> Path:
    """The data of these runs."""
    return write_lines(folder / "chats.jsonl", CHATS)


def write_held_out(folder: Path) -> Path:
    """The data that these runs are evaluated on."""
    return write_lines(folder / "held-out.jsonl", HELD_OUT)


def run_of(model: Path, data: Path, output: Path, layout: Layout | None = None, **given: Any) -> Run:
    """A run with `OPTIONS`; `lora` and `resume` are those of `Run`, all others are options."""
    ours = {name: given.pop(name) for name in ("lora", "resume", "eval_data") if name in given}
    options = {**OPTIONS, **given}
    return Run("sft", model, data, output, "megatron", layout=layout or Layout(), options=options, **ours)


def _rank(run: Run, dies_after: int) -> tuple[Seen, Trained]:
    seen = Seen(dies_after)
    return seen, _trained(run, seen)


def _trained(run: Run, seen: Seen) -> Trained:
    gc.unfreeze = lambda: None  # reading the model would unfreeze what was imported, for each save to look at
    return megatron.ENGINE.train(run, seen)


def train(run: Run, world_size: int = 1) -> tuple[Seen, Trained]:
    """The reports and the result of rank 0."""
    return run_ranks(world_size, _rank, run, 0)[0]


def _stopped(run: Run, after: int) -> tuple[Seen, tuple[int | None, Path | None]]:
    seen = Seen(signal_after=after)
    with signals.listening(None):
        try:
            _trained(run, seen)
        except signals.StoppedRun as stop:
            return seen, (stop.step, stop.checkpoint)
    raise AssertionError("the run was not stopped")


def train_and_stop(
    run: Run, world_size: int, after: int
) -> list[tuple[Seen, tuple[int | None, Path | None]]]:
    """The results of all ranks, all but rank 0 of which receive a signal after a step, and where they stopped."""
    return run_ranks(world_size, _stopped, run, after)


def train_and_die(run: Run, world_size: int, after: int) -> None:
    """The same, killed right after a step."""
    try:
        run_ranks(world_size, _rank, run, after)
    except RankError:
        return
    raise AssertionError("the run was not killed")


class Reference(NamedTuple):
    """The measurements of a plain loop, per step."""

    losses: list[float]
    norms: list[float]
    """Norm of the gradient."""
    held_out: list[float]
    """The loss after each step on held-out chats."""


def reference(model: Path) -> Reference:
    """A plain loop: one chat at a time, loss on the answer's tokens, AdamW."""
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    matrices = [each for each in network.parameters() if each.ndim > 1]
    vectors = [each for each in network.parameters() if each.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": DECAY}, {"params": vectors, "weight_decay": 0.0}], eps=1e-8
    )
    samples, others, shown = _tokens(model), _tokens(model, HELD_OUT), Reference([], [], [])
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = cosine(step)
        loss = mean_loss(network, samples)
        loss.backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        shown.losses.append(loss.item())
        shown.norms.append(float(norm))
        with torch.no_grad():
            shown.held_out.append(mean_loss(network, others).item())
    return shown


def cosine(step: int) -> float:
    """One step of warm-up, then linear decay to zero."""
    return 0.5 * LR * (1 + math.cos(math.pi * (step - 1) / (STEPS - 1))) if step else 0.0


def _tokens(model: Path, chats: list[dict[str, object]] = CHATS) -> list[tuple[list[int], int]]:
    """Each chat in tokens, and the start of the answer."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    render: Callable[..., list[int]] = lambda messages, **options: tokenizer(  # noqa: E731
        tokenizer.apply_chat_template(messages, tokenize=False, **options)
    )["input_ids"]
    return [
        (render(chat["messages"]), len(render(chat["messages"][:1], add_generation_prompt=True)))  # type: ignore[index]
        for chat in chats
    ]


def mean_loss(
    network: Any, samples: list[tuple[list[int], int]] | None = None, model: Path | None = None
) -> Any:
    """The mean over all tokens of all answers."""
    total, count = torch.zeros(()), 0
    for tokens, answer in samples or _tokens(model or Path()):
        logits = network(torch.tensor([tokens])).logits[0, answer - 1 : -1]
        total = total + torch.nn.functional.cross_entropy(
            logits.float(), torch.tensor(tokens[answer:]), reduction="sum"
        )
        count += len(tokens) - answer
    return total / count


def assert_close(ours: Seen, reference: Reference) -> None:
    """Assert the same losses and norms, and falling losses."""
    assert reference.losses[-1] < reference.losses[0] - 0.1
    assert ours.losses == pytest.approx(reference.losses, abs=EPSILON)
    assert [step["grad_norm"] for step in ours.steps.values()] == pytest.approx(reference.norms, rel=EPSILON)
