"""The callback in real Trainers: signals end a run with a checkpoint, and nothing that is NaN is saved."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from reshard import guard
from reshard.base.errors import ReshardError

ROW = {"input_ids": torch.tensor([5, 9, 2, 7]), "labels": torch.tensor([5, 9, 2, 7])}


class AtStep(TrainerCallback):
    """Does something before a step."""

    def __init__(self, step: int, action: Callable[[Any], object]) -> None:
        self.step, self.action = step, action

    def on_step_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if state.global_step == self.step - 1:
            self.action(given["model"])


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """The handlers of signals are afterwards as before."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
    before = [signal.getsignal(each) for each in numbers]
    yield
    assert [signal.getsignal(each) for each in numbers] == before


def train(output: Path, *callbacks: TrainerCallback, nan_steps: int = 3, **options: Any) -> Trainer:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    settings = {"max_steps": 4, "save_steps": 2, "logging_steps": 1, **options}
    trainer = Trainer(
        LlamaForCausalLM(LlamaConfig(vocab_size=32, **sizes)),
        TrainingArguments(str(output), use_cpu=True, report_to="none", disable_tqdm=True, **settings),
        train_dataset=[ROW] * 64,
        callbacks=[*callbacks, guard.callback(nan_steps)],
    )
    trainer.train()
    return trainer


def saved(output: Path) -> list[str]:
    return sorted(each.name for each in output.glob("checkpoint-*"))


def spoil(model: Any) -> None:
    with torch.no_grad():
        next(model.parameters()).fill_(float("nan"))


def test_a_run_without_trouble_is_as_without_it(tmp_path: Path) -> None:
    assert train(tmp_path).state.global_step == 4
    assert saved(tmp_path) == ["checkpoint-2", "checkpoint-4"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP])
def test_a_signal_ends_the_run_after_a_saved_step(number: int, tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as caught:
        train(tmp_path, AtStep(1, lambda model: os.kill(os.getpid(), number)), eval_on_start=False)
    assert caught.value.code == 128 + number
    assert saved(tmp_path) == ["checkpoint-1"]


def test_an_ignored_signal_stays_ignored(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        train(tmp_path, AtStep(1, lambda model: os.kill(os.getpid(), signal.SIGHUP)))
    finally:
        signal.signal(signal.SIGHUP, before)
    assert saved(tmp_path) == ["checkpoint-2", "checkpoint-4"]


def test_a_loss_that_is_nan_ends_the_run_and_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(ReshardError, match="the loss is NaN") as caught:
        train(tmp_path, AtStep(2, spoil), nan_steps=1, save_steps=4)
    assert "step 2: loss nan" in str(caught.value.problems[0].found)
    assert saved(tmp_path) == []


def test_weights_that_are_nan_are_not_saved_though_no_loss_was_logged(tmp_path: Path) -> None:
    with pytest.raises(ReshardError, match="weights are NaN or infinite") as caught:
        train(tmp_path, AtStep(2, spoil), logging_steps=100)
    assert "step 2: model.embed_tokens.weight" in str(caught.value.problems[0].found)
    assert saved(tmp_path) == []


def test_weights_are_checked_at_the_end_of_an_epoch_too(tmp_path: Path) -> None:
    with pytest.raises(ReshardError, match="weights are NaN or infinite"):
        train(tmp_path, AtStep(8, spoil), max_steps=-1, save_strategy="epoch", logging_steps=100)


@pytest.mark.parametrize("plan", ["FSDP", "DEEPSPEED"])
def test_a_plan_that_accelerate_left_out_is_said(
    plan: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Requested(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            monkeypatch.setenv(f"ACCELERATE_USE_{plan}", "true")

    with pytest.raises(ReshardError, match=f"not sharded, though accelerate's config requests {plan}"):
        train(tmp_path, Requested())


def test_as_many_nan_losses_as_allowed_end_the_run(tmp_path: Path) -> None:
    with pytest.raises(ReshardError, match="the loss is NaN") as caught:
        train(tmp_path, AtStep(1, spoil), save_steps=100)
    assert "3 steps in a row" in str(caught.value.problems[0].found)
