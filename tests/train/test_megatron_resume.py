"""A killed Megatron run continues as if it had never stopped, in its own layout or another."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("megatron.core")

from reshard import convert, export
from reshard.algebra.layout import Layout
from reshard.base.plain_json import put
from reshard.engines.megatron.session import RankError
from reshard.formats import open_checkpoint
from reshard.guard.end.completeness import RUN_RECORD, SAVED_FILE
from reshard.training import megatron
from reshard.training.engine import Trained
from reshard.training.run import Run
from reshard.training.run_request import run_of as request_of
from tests.train.megatron import (
    STEPS,
    Seen,
    run_of,
    train,
    train_and_die,
    train_and_stop,
    write_chats,
    write_held_out,
)

Tiny = Callable[..., Path]
Whole = Callable[..., tuple[Run, Seen, Trained]]
OPTIONS = {"save_interval": 2, "global_batch_size": 4, "eval_interval": 2}
"""A step sees half of the data."""


class Case(NamedTuple):
    """A run on `ranks` that continues on `others`."""

    model: str
    ranks: int
    layout: Layout
    others: int
    then: Layout
    options: dict[str, Any] = {}  # noqa: RUF012


CASES = {"TP2, then PP2": Case("qwen3", 2, Layout(tp=2), 2, Layout(pp=2))}
MORE_CASES = {
    "the same layout": Case("qwen3", 2, Layout(tp=2), 2, Layout(tp=2)),
    "one rank, then TP2": Case("qwen2", 1, Layout(), 2, Layout(tp=2)),
    "two replicas, then PP2": Case("qwen3", 2, Layout(), 2, Layout(pp=2)),
    "EP2, then one rank": Case("qwen3_moe", 2, Layout(ep=2), 1, Layout()),
    "one rank, then EP2": Case("qwen3_moe", 1, Layout(), 2, Layout(ep=2)),
    "a plain optimizer": Case("qwen3", 2, Layout(tp=2), 1, Layout(), {"use_distributed_optimizer": False}),
    "adapters": Case("qwen3", 2, Layout(tp=2), 2, Layout(pp=2), {"lora": True, "lora_r": 4}),
    "adapters with dropout": Case(
        "qwen3", 2, Layout(tp=2), 2, Layout(tp=2), {"lora": True, "lora_r": 4, "lora_dropout": 0.2}
    ),
}


@pytest.fixture(scope="module")
def whole(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """A run that nothing interrupts, trained once: the run, the reports of rank 0, its result."""
    done: dict[str, tuple[Run, Seen, Trained]] = {}

    def get(
        model: str = "qwen3", ranks: int = 1, layout: Layout | None = None, **options: Any
    ) -> tuple[Run, Seen, Trained]:
        key = f"{model} {ranks} {layout} {options}"
        if key not in done:
            folder = tmp_path_factory.mktemp("whole")
            given = {**OPTIONS, "eval_data": write_held_out(folder), **options}
            run = run_of(tiny(model), write_chats(folder), folder / "out", layout, **given)
            run.output.mkdir()
            put(run.output / RUN_RECORD, run.as_dict())
            done[key] = (run, *train(run, ranks))
        return done[key]

    return get


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name", [*CASES, *(pytest.param(each, marks=pytest.mark.slow) for each in MORE_CASES)]
)
def test_a_killed_run_goes_on_with_the_same_losses(name: str, whole: Whole, tmp_path: Path) -> None:
    case = {**CASES, **MORE_CASES}[name]
    run, unbroken, _ = whole(case.model, case.ranks, case.layout, **case.options)
    killed = replace(run, output=tmp_path / "killed")
    train_and_die(killed, case.ranks, after=3)
    assert (killed.output / "latest_checkpointed_iteration.txt").read_text() == "2"
    again, trained = train(replace(killed, layout=case.then, resume=True), case.others)
    assert again.done == 2
    assert list(again.steps) == [3, 4]
    assert again.losses == pytest.approx(unbroken.losses[2:], abs=5e-5)
    assert len(set(unbroken.losses)) == STEPS
    assert (list(unbroken.evaluations), list(again.evaluations)) == ([2, 4], [4])
    assert again.evaluations[4] == pytest.approx(unbroken.evaluations[4], abs=5e-5)
    assert trained.checkpoint == killed.output / "iter_0000004"


@pytest.mark.slow
def test_a_run_that_a_signal_has_stopped_goes_on_to_the_same_bits(whole: Whole, tmp_path: Path) -> None:
    run, unbroken, finished = whole("qwen3", 2, Layout(tp=2))
    stopped = replace(run, output=tmp_path / "stopped")
    ends = train_and_stop(stopped, 2, after=2)
    checkpoint = stopped.output / "iter_0000003"
    assert [where for _, where in ends] == [(3, checkpoint)] * 2
    assert ends[0][0].checkpoints[-1] == checkpoint and checkpoint.is_dir()
    again, trained = train(replace(stopped, resume=True), 2)
    assert list(again.steps) == [4]
    assert [*ends[0][0].losses, *again.losses] == unbroken.losses
    assert trained.digests == finished.digests


@pytest.mark.slow
def test_a_run_killed_while_it_saves_leaves_the_checkpoint_before(tiny: Tiny, tmp_path: Path) -> None:
    run = run_of(tiny("qwen3"), write_chats(tmp_path), tmp_path / "out", train_iters=2, save_interval=1)
    unbroken, _ = train(run)
    partial = run.output / ".iter_0000003.partial"  # as a killed save leaves it
    shutil.copytree(run.output / "iter_0000002", partial)
    (partial / "common.pt").unlink()
    onward = replace(
        run, resume=True, options={**run.options, "train_iters": 3, "lr_decay_style": "constant"}
    )
    again, trained = train(onward)
    assert again.done == 2
    assert trained.step == 3
    assert again.losses[0] < unbroken.losses[0]
    assert not partial.exists()


@pytest.mark.slow
def test_a_checkpoint_of_another_optimizer_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    run = run_of(tiny("qwen3"), write_chats(tmp_path), tmp_path / "out", train_iters=2)
    train(run)
    other = replace(run, resume=True, options={**run.options, "use_distributed_optimizer": False})
    with pytest.raises(RankError, match="does not fit this run's"):
        train(other)


@pytest.mark.thorough
def test_a_megatron_checkpoint_that_has_lost_a_file_is_not_continued_from(
    whole: Whole, tmp_path: Path
) -> None:
    run, unbroken, _ = whole()
    run = replace(run, output=Path(shutil.copytree(run.output, tmp_path / "out")))
    last, kept = run.output / "iter_0000004", megatron.ENGINE.checkpoints
    assert kept.last(run.output) == last
    assert {"common.pt", ".metadata"} <= set(json.loads((last / SAVED_FILE).read_text()))
    next(last.glob("*.distcp")).unlink()
    assert kept.last(run.output) == run.output / "iter_0000002"
    again, trained = train(replace(run, resume=True))
    assert again.done == 2 and again.losses == unbroken.losses[2:] and trained.checkpoint == last
    shutil.rmtree(last)
    assert kept.damaged(run.output) == {last: ["the folder is missing"]}


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.slow
def test_a_copied_checkpoint_is_complete_without_the_run_it_came_from(
    lora: bool, whole: Whole, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run, unbroken, _ = whole(**({"lora": True, "lora_r": 4} if lora else {}))
    away, gone = tmp_path / "away", tmp_path / "gone"
    shutil.copytree(run.output / "iter_0000002", away / "iter_0000002")
    shutil.move(run.output, gone)
    convert(away / "iter_0000002", tmp_path / "model", base=run.model if lora else None)
    export(away / "iter_0000002", tmp_path / "exported")
    model = "exported" if lora else "model"
    base = AutoTokenizer.from_pretrained(run.model)
    assert AutoTokenizer.from_pretrained(tmp_path / model).get_vocab() == base.get_vocab()
    assert AutoTokenizer.from_pretrained(tmp_path / model).chat_template == base.chat_template
    if not lora:
        AutoModelForCausalLM.from_pretrained(tmp_path / model)
    again, _ = train(request_of("sft", {"output": away, "resume": True}))
    assert again.done == 2 and again.losses == unbroken.losses[2:]
    shutil.move(gone, run.output)


@pytest.mark.thorough
def test_the_config_of_a_checkpoint_comes_before_that_of_the_folder_above(
    whole: Whole, tiny: Tiny, tmp_path: Path
) -> None:
    output = Path(shutil.copytree(whole()[0].output, tmp_path / "out"))
    assert not (output / "config.json").exists()
    shutil.copytree(tiny("qwen2"), output, dirs_exist_ok=True)
    last = output / "iter_0000004"
    assert open_checkpoint(last).root == last
    (last / "config.json").unlink()  # as older versions wrote it
    assert open_checkpoint(last).root == output
