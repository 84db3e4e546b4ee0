"""Steps and losses are read from what trainers print."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from reshard.runs.guard.watch.trainer_progress import TrainerProgress, read
from reshard.runs.guard.watch.watcher import Notice, OutputLine
from tests.work import calls

LOGS = Path(__file__).parents[1] / "data/guard"


def told(
    *texts: str, rank: int | None = None, progress: TrainerProgress | None = None
) -> tuple[TrainerProgress, list[Notice]]:
    """Progress after lines that are printed once in a second."""
    progress = progress or TrainerProgress()
    start = progress.spoke
    lines = [OutputLine(start + n, text, rank) for n, text in enumerate(texts, start=1)]
    return progress, [notice for line in lines for notice in progress.line(line)]


@pytest.mark.parametrize(
    ("name", "first", "last"),
    [
        ("accelerate-fsdp2", "1/20 [", 5.602),
        ("deepspeed-zero3", "1/20 [", 5.602),
        ("grpo-fsdp2", "1/20 [", 0.0),
        ("llamafactory-sft", "1/20 [", 5.387),
        ("swift-sft", "1/20 [", 5.142),
        ("torchrun-loop", "step 1 loss", 5.9992),
        ("torchrun-trainer", "{'loss': '5.72'", 5.246),
    ],
)
def test_genuine_output(name: str, first: str, last: float) -> None:
    """The first step is seen when it is printed, not in settings, maps or downloads; and the last one with its loss."""
    progress = TrainerProgress()
    began = None
    for n, text in enumerate(re.split(r"[\r\n]+", (LOGS / f"{name}.log").read_text())):
        assert list(progress.line(OutputLine(float(n), text))) == []
        began = text if progress.started and began is None else began
    assert began is not None and (first in began or "'loss': " in began), began
    assert progress.at.startswith("step 20") and progress.loss == last


def test_genuine_output_of_a_run_that_fails_before_its_first_step() -> None:
    progress, notices = told(*re.split(r"[\r\n]+", (LOGS / "lora-device-map.log").read_text()))
    assert not progress.started and notices == []


# Formats of tools that are not run here, from the print and format calls of their sources.
@pytest.mark.parametrize(
    ("text", "n", "total", "loss", "norm"),
    [
        (
            " [2025-01-01 00:00:00] iteration       10/     100 | consumed samples:           80 | elapsed time per "
            "iteration (ms): 123.4 | learning rate: 1.000000E-05 | global batch size:     8 | lm loss: 1.076893E+01 | "
            "loss scale: 1.0 | grad norm: 2.345 | number of skipped iterations:   0 | number of nan iterations:   0 |",
            *("10", "100", 10.76893, 2.345),
        ),
        (
            "[rank0]:[titan] 2025-01-01 00:00:00,000 - root - INFO - \x1b[31mstep: 10  \x1b[32mloss:  7.1234  "
            "\x1b[38;2;180;60;0mgrad_norm:  1.2345  \x1b[36mmemory:  1.00GiB(1.27%)\x1b[39m",
            *("10", "", 7.1234, 1.2345),
        ),
        (
            "01/01/2025 00:00:00 [INFO|DP=0|PP=0|TP=0]: iteration: 1 / 15 | consumed_tokens: 1.02K | "
            "lm_loss: 10.9 | lr: 0.0001 | grad_norm: 2.1",
            *("1", "15", 10.9, 2.1),
        ),
        (
            "(TaskRunner pid=1) step:2 - global_seqlen/min:10 - actor/pg_loss:np.float64(-0.01) - actor/grad_norm:0.5",
            *("2", "", -0.01, 0.5),
        ),
        ("steps: 10 loss: 2.3456 iter time (s): 0.123 samples/sec: 8.0", "10", "", 2.3456, None),
        (
            "[2025-01-01 00:00:00,000] [INFO] [logging.py:96:log_dist] [Rank 0] step=10, skipped=0, lr=[1e-05]",
            *("10", "", None, None),
        ),
        (
            "Epoch 0:  10%|█         | 1/10 [00:01<00:09,  1.0it/s, v_num=0, train_loss=2.3]",
            "1",
            "10",
            2.3,
            None,
        ),
        ("step 10 loss 2.3", "10", "", 2.3, None),
        ("iter 100: loss 2.4125, time 12.3ms, mfu 1.2%", "100", "", 2.4125, None),
        ("[10/100] loss=2.3", "10", "100", 2.3, None),
        ("Epoch 1 | Step 3 | loss tensor(2.2)", "3", "", 2.2, None),
        ("Epoch 1/3, val loss: nan", "1", "3", None, None),
        ("step 4: val loss 2.2", "4", "", None, None),
        ("step 4: train loss 2.1, val loss nan", "4", "", 2.1, None),
        ("Validation: step 10, loss: nan", "10", "", None, None),
        ("step 4 | aux loss: nan | loss: 2.3", "4", "", 2.3, None),
        ("step    10/100 | loss 3.2 (+1.2z)| norm 1.2 (0.1z)", "10", "100", 3.2, None),
        ("loss: nan", "", "", None, None),
        (
            "model.safetensors:  12%|█▏        | 123M/1.02G [00:01<00:09, 100MB/s]",
            "123M",
            "1.02G",
            None,
            None,
        ),
    ],
)
def test_lines(text: str, n: str, total: str, loss: float | None, norm: float | None) -> None:
    seen = read(text)
    assert (seen.n, seen.counter[1] if seen.counter else "") == (n, total)
    assert (seen.loss, seen.norm) == (loss, norm)


@pytest.mark.parametrize("text", ["a" * 40_000, "step " * 8000, "12 " * 8000, " " * 40_000, "[1 " * 8000])
def test_a_long_line_is_no_more_work_than_a_shorter_one(text: str) -> None:
    assert calls(lambda: read(text * 10)) == calls(lambda: read(text))


def test_the_time_of_a_step_is_learned() -> None:
    """Its median is not that of an evaluation; a long first step and a save are remembered as the longest silence."""
    bar = "{}%|█  | {}/100 [00:01<00:09, 1it/s]".format
    progress, _ = told("Map:  10%|█  | 10/100 [00:01<00:09, 9 examples/s]", bar(0, 0))
    assert not progress.started
    progress.spoke += 50
    told(bar(1, 1), bar(2, 2), bar(3, 3), bar(4, 4), progress=progress)
    assert (progress.started, progress.interval, progress.longest) == (True, 1, 51)
    told(*(f"{n}%|█  | {n}/7 [00:01<00:09, 1it/s]" for n in range(8)), progress=progress)
    progress.spoke += 60
    told(bar(5, 5), bar(6, 6), bar(6, 6), progress=progress)
    assert (progress.at, progress.interval, progress.longest) == ("step 6 of 100", 1, 61)
    assert progress.alive == progress.spoke - 1


def test_an_evaluation_inside_of_training() -> None:
    """As transformers prints it; its bars have no names."""
    progress, _ = told(
        "  0%|          | 0/6 [00:00<?, ?it/s]", " 50%|█████     | 3/6 [00:01<00:01,  2.01it/s]"
    )
    told(
        "  0%|          | 0/5 [00:00<?, ?it/s]\x1b[A",
        " 40%|████      | 2/5 [00:00<00:00, 13.92it/s]\x1b[A",
        progress=progress,
    )
    assert (progress.at, progress.alive) == ("step 3 of 6", progress.spoke)
    told(
        " 67%|██████▋   | 4/6 [00:03<00:00,  1.48it/s]",
        "100%|██████████| 5/5 [00:03<00:00]",
        progress=progress,
    )
    assert progress.at == "step 4 of 6"


def test_an_evaluation_before_training() -> None:
    progress, _ = told("  0%|          | 0/5 [00:00<?, ?it/s]", "100%|██████████| 5/5 [00:00<00:00, 8.1it/s]")
    told(
        "  0%|          | 0/6 [00:00<?, ?it/s]",
        " 17%|█▋        | 1/6 [00:01<00:01,  2.01it/s]",
        progress=progress,
    )
    assert progress.at == "step 1 of 6"


LINES = yaml.safe_load((LOGS / "loss_lines.yaml").read_text(encoding="utf-8"))


def five_times(line: str) -> list[str]:
    return [line.replace("{n}", str(n)) for n in range(1, 6)]


@pytest.mark.parametrize("line", LINES["healthy"])
def test_a_healthy_line_with_nan_in_it_ends_nothing(line: str) -> None:
    notices = told(*five_times(line))[1]
    assert {each.problem.code for each in notices} <= {"evaluation-loss-not-finite"}
    assert not any(each.stop for each in notices)


@pytest.mark.parametrize("line", LINES["unhealthy"])
def test_three_steps_in_a_row_without_a_finite_loss_end_the_run(line: str) -> None:
    lines = five_times(line)
    assert told(*lines[:2])[1] == []
    _, (notice,) = told(*lines[:3])
    assert notice.stop and notice.problem.code == "loss-not-finite"
    assert "3 steps in a row" in str(notice.problem.found)


def test_a_finite_loss_in_between_is_a_new_beginning() -> None:
    assert (
        told("step 1 loss nan", "step 2 loss nan", "step 3 loss 2.0", "step 4 loss nan", "step 5 loss inf")[1]
        == []
    )


def test_steps_are_counted_by_rank_and_once() -> None:
    progress = TrainerProgress(nan_steps=2)
    assert told("step 1 loss nan", rank=0, progress=progress)[1] == []
    assert told("step 1 loss nan", "step 1 loss nan", rank=1, progress=progress)[1] == []
    assert told("step 2 loss 2.0", rank=0, progress=progress)[1] == []
    assert told("step 3 loss nan", rank=0, progress=progress)[1] == []
    (notice,) = told("step 2 loss nan", rank=1, progress=progress)[1]
    assert notice.problem.found == "step 1 on rank 1: loss nan, 2 steps in a row"


def test_zero_steps_only_warn() -> None:
    _, (notice,) = told(*(f"step {n} loss nan" for n in range(5)), progress=TrainerProgress(nan_steps=0))
    assert not notice.stop and notice.problem.severity == "warning"


def test_other_values_only_warn() -> None:
    """fp16 skips steps whose gradients are not finite."""
    skipped = [f"{{'loss': 2.3, 'grad_norm': {norm}, 'epoch': 0.1}}" for norm in ("inf", "nan", "nan", "nan")]
    assert told(*skipped)[1] == []
    _, (notice,) = told(*["{'eval_loss': 'nan', 'eval_runtime': '0.2', 'epoch': '0.1'}"] * 5)
    assert (notice.problem.code, notice.stop) == ("evaluation-loss-not-finite", False)
    assert told("{'train_runtime': '0.5', 'train_loss': 'nan', 'epoch': '0.6'}")[1] == []


OLMO = """[2024-04-17 09:42:{n}] INFO     [olmo.train:816, rank=0] [step={n}/739328,epoch=0]
    optim/total_grad_norm=231.7
    train/CrossEntropyLoss={loss}
    train/Perplexity=76,631"""
OLMO_CORE = """2026-08-08 12:01:00 INFO [olmo_core.train.callbacks:68] [step={n}/2000,epoch=0,eta=5h11m]
    train/CE loss={loss}
    train/PPL=511.9"""
COMPOSER = """[epoch=1][batch={n}/100]:
\t Train time/batch: 4
\t Train loss/train/total: {loss}
\t Train metrics/train/LanguageCrossEntropy: 10.9736"""


@pytest.mark.parametrize("printed", [OLMO, OLMO_CORE, COMPOSER])
def test_a_step_whose_loss_is_on_another_line(printed: str) -> None:
    def lines(*losses: str) -> list[str]:
        return [
            line for n, loss in enumerate(losses, 10) for line in printed.format(n=n, loss=loss).split("\n")
        ]

    assert told(*lines("2.0", "nan", "nan", "2.0", "1.9"))[1] == []
    _, (notice,) = told(*lines("2.0", "nan", "nan", "nan"))
    assert notice.stop and str(notice.problem.found).startswith("step 11 of ")


@pytest.mark.parametrize("name", ["torchrun-trainer-nan", "swift-sft-nan", "llamafactory-sft-nan"])
def test_a_loss_that_transformers_hides_ends_the_run(name: str) -> None:
    """It prints 0 in place of NaN, with a gradient norm that is NaN."""
    notices = told(*(LOGS / f"{name}.log").read_text(encoding="utf-8").replace("\r", "\n").splitlines())[1]
    assert [(each.problem.code, each.stop) for each in notices][:1] == [("loss-not-finite", True)]


def test_a_step_of_grpo_that_fp16_skips_is_none() -> None:
    """The loss of GRPO is 0 where the advantages of a group cancel out."""
    skipped = "{'loss': '0.0', 'grad_norm': 'nan', 'learning_rate': '1e-06', 'reward': '0.5', 'epoch': '0.1'}"
    assert told(skipped, skipped.replace("nan", "1.2"))[1] == []
