"""Real TRL runs on one and two CPU ranks: equal losses under every plan, and complete checkpoints."""

from __future__ import annotations

import json
import shutil
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import reshard as api
from reshard import export
from reshard.training import trl
from reshard.training.run_request import run_of as request_of
from reshard.training.show.metrics import history_of
from reshard.training.show.progress_display import words
from tests.train.trl_plans import BESIDE, EVALUATED, FOUR_DIGITS, PLANS, Trainer, resumed, run_of, same_as
from tests.train.trl_runs import train


@pytest.mark.thorough
@pytest.mark.parametrize("plan", ["ddp", "fsdp2", "tp"])
def test_every_plan_has_the_losses_of_one_process(plan: str, ran: Trainer) -> None:
    one = ran("one")
    assert one.losses[0] - one.losses[-1] > 1, one.losses
    same_as(ran(plan), one)
    assert [row["tokens"] for row in ran(plan).rows] == [row["tokens"] for row in one.rows]
    assert list(ran(plan).evaluations()) == [0, 2, 4]


@pytest.mark.slow
def test_ranks_take_digests_of_what_final_will_be(
    hf_model: Callable[..., Path], data: dict[str, Path], tmp_path: Path
) -> None:
    from reshard.training.finish import export

    base = hf_model("qwen3", dtype="bfloat16", num_hidden_layers=2)
    half = train(run_of("one", "dpo", base, data["dpo"], tmp_path / "out", False, 1, {}), 1)
    assert not half.failed, half.log
    export(half.trained.checkpoint, tmp_path / "final")
    assert {tensor.dtype.name for tensor in api.open(tmp_path / "final").tensors.values()} == {"bfloat16"}
    assert trl.ENGINE.check(half.run, half.trained, tmp_path / "final") == []


def test_one_rank_of_torchrun_trains_as_one_process_without_ddp(ran: Trainer, tmp_path: Path) -> None:
    one = ran("one")
    rank = train(replace(one.run, output=tmp_path), 1, before="tests.train.trl_runs:started_as_one_rank")
    assert not rank.failed, rank.log  # it refuses a wrapper that nobody asked for
    assert rank.losses == one.losses and rank.evaluations() == one.evaluations()
    assert rank.trained.digests == one.trained.digests


def test_an_evaluation_is_that_of_plain_trl(ran: Trainer, data: dict[str, Path], tmp_path: Path) -> None:
    from datasets import load_dataset
    from transformers import AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    one = ran("one")
    tokenizer = AutoTokenizer.from_pretrained(one.run.model)

    def by_hand(row: dict[str, Any]) -> dict[str, list[int]]:
        """The tokens of a chat, with those of the answer, the last turn, as labels."""
        render = tokenizer.apply_chat_template
        before = len(render(row["messages"][:-1], add_generation_prompt=True, return_dict=True)["input_ids"])
        ids = render(row["messages"], return_dict=True)["input_ids"]
        return {"input_ids": ids, "labels": [-100] * before + ids[before:]}

    rows = load_dataset("json", data_files=str(data["sft-eval"]), split="train", cache_dir=str(tmp_path))
    rows = rows.map(by_hand, remove_columns=rows.column_names)
    for step, found in one.evaluations().items():
        folder = one.run.output / f"checkpoint-{step}" if step else one.run.model
        settings = SFTConfig(
            str(tmp_path), use_cpu=True, bf16=False, report_to="none", per_device_eval_batch_size=2
        )
        plain = SFTTrainer(str(folder), args=settings, train_dataset=rows, eval_dataset=rows)
        assert plain.evaluate()["eval_loss"] == pytest.approx(found, abs=1e-5)


@pytest.mark.parametrize(
    ("method", "measure"), [("grpo", "reward"), ("rloo", "reward"), ("distillation", "loss")]
)
@pytest.mark.slow
def test_evaluations_leave_the_random_numbers_of_training_alone(
    method: str, measure: str, ran: Trainer, tiny: Callable[..., Path]
) -> None:
    more = {"teacher_model_name_or_path": str(tiny(seed=1))} if method == "distillation" else {}
    alone = ran("one", method, max_steps=2, **more)
    evaluated = ran("one", method, max_steps=2, **{**EVALUATED, "eval_steps": 1}, **more)
    assert [row[measure] for row in evaluated.rows] == [row[measure] for row in alone.rows]
    assert list(evaluated.evaluations(f"eval_{measure}")) == [0, 1, 2]


@pytest.mark.thorough
@pytest.mark.parametrize("plan", ["one", "fsdp2", "tp"])
def test_a_checkpoint_is_what_was_trained(plan: str, ran: Trainer) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run, trained = ran(plan).run, ran(plan).trained
    assert trained.checkpoint.name == "checkpoint-4"
    assert {file.name for file in trained.checkpoint.iterdir()} >= BESIDE
    config = json.loads((trained.checkpoint / "config.json").read_text())
    assert (config["use_cache"], config["dtype"]) == (True, "float32")
    assert trl.ENGINE.check(run, trained, trained.checkpoint) == []
    model, told = AutoModelForCausalLM.from_pretrained(trained.checkpoint, output_loading_info=True)
    assert not any(told[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert trained.digests.keys() == {name for name, _ in model.named_parameters()}
    assert len(AutoTokenizer.from_pretrained(trained.checkpoint)) > 1
    assert not api.verify(run.model, trained.checkpoint).equal


def test_a_byte_that_differs_is_found(ran: Trainer, tmp_path: Path) -> None:
    trained = ran("one").trained
    shutil.copytree(trained.checkpoint, tmp_path / "final")
    with (tmp_path / "final/model.safetensors").open("r+b") as file:
        file.seek(-5, 2)
        file.write(b"\x7f")
    problems = trl.ENGINE.check(ran("one").run, trained, tmp_path / "final")
    assert [problem.message for problem in problems] == ["a weight differs from the trained one"]


def test_a_run_goes_on_as_if_it_had_not_been_killed(ran: Trainer, tmp_path: Path) -> None:
    uninterrupted = ran("fsdp2")
    again = resumed(uninterrupted, tmp_path)
    assert not again.failed, again.log
    assert [row["step"] for row in again.rows] == [3, 4]
    assert again.losses == uninterrupted.losses[2:]
    assert again.trained.digests == uninterrupted.trained.digests


def test_a_copied_checkpoint_is_all_that_a_run_needs_to_go_on_and_its_steps_have_one_row(
    ran: Trainer, tmp_path: Path
) -> None:
    one, output = ran("one"), tmp_path / "copied"
    shutil.copytree(one.run.output / "checkpoint-2", output / "checkpoint-2")
    export(output / "checkpoint-2", tmp_path / "model")
    assert {file.name for file in (tmp_path / "model").iterdir()} >= BESIDE - {"trainer_state.json"}
    shutil.copyfile(one.run.output / "metrics.jsonl", output / "metrics.jsonl")
    again = train(request_of("sft", {"output": output, "resume": True}), 1)
    assert not again.failed, again.log
    assert [row["step"] for row in again.rows] == [1, 2, 3, 4] and again.losses == one.losses
    assert again.evaluations() == one.evaluations()
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if row["event"] == "eval"] == [0, 2, 4]
    assert history_of(output).series("loss") == [*enumerate(one.losses, 1)]


MORE = {"one": {}, "ddp": {}, "tp": {}, "grpo": {"max_steps": 4}}


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["fsdp2", *(pytest.param(each, marks=pytest.mark.slow) for each in MORE)])
def test_a_run_that_a_signal_has_stopped_goes_on_to_the_same_bits(
    kind: str, ran: Trainer, tmp_path: Path
) -> None:
    plan = kind if kind in PLANS else "ddp"
    uninterrupted = ran(plan, method="grpo" if kind == "grpo" else "sft", **MORE.get(kind, {}))
    run = replace(uninterrupted.run, output=tmp_path / "stopped")
    stopped = train(run, PLANS[plan], before="tests.train.trl_runs:sent_sigterm_after_step_2")
    assert stopped.failed and "interrupted by SIGTERM after step 3, which is saved" in stopped.log
    assert sorted(each.name for each in run.output.glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-3"]
    assert not (run.output / "trained.json").exists()
    again = train(replace(run, resume=True), PLANS[plan])
    assert not again.failed, again.log
    assert again.losses == uninterrupted.losses
    assert again.trained.digests == uninterrupted.trained.digests


@pytest.mark.slow
@pytest.mark.parametrize("sent", ["sigint", "sigterm"])
def test_workers_that_read_data_outlive_a_signal_to_all_processes(
    sent: str, ran: Trainer, tmp_path: Path
) -> None:
    uninterrupted = ran("one", dataloader_num_workers=2, eval_steps=3)
    run = replace(uninterrupted.run, output=tmp_path / "stopped")
    stopped = train(run, 1, before=f"tests.train.trl_runs:sent_{sent}_with_all_processes_after_step_2")
    assert f"interrupted by {sent.upper()} after step 3, which is saved" in stopped.log, stopped.log
    assert "the evaluation after step 3 was skipped" in (run.output / "metrics.jsonl").read_text()
    again = train(replace(run, resume=True), 1)
    assert not again.failed and again.trained.digests == uninterrupted.trained.digests, again.log


def test_a_run_that_was_killed_behind_its_last_step_trains_no_further(ran: Trainer, tmp_path: Path) -> None:
    uninterrupted = ran("one")
    output = tmp_path / "resumed"
    shutil.copytree(uninterrupted.trained.checkpoint, output / "checkpoint-4")
    again = train(replace(uninterrupted.run, output=output, resume=True), 1)
    assert not again.failed, again.log
    assert again.rows == [] and again.trained.step == 4
    assert again.trained.digests == uninterrupted.trained.digests
    assert [each.name for each in output.glob("checkpoint-*")] == ["checkpoint-4"]


@pytest.mark.thorough
def test_grpo_takes_a_path_on_two_processes(ran: Trainer) -> None:
    grpo = ran("ddp", "grpo", beta=0.1, max_steps=2)
    assert [row["step"] for row in grpo.rows] == [1, 2]
    assert all(row["reward"] > 0 and row["tokens"] > 0 and row["kl"] >= 0 for row in grpo.rows)
    assert grpo.rows[0]["kl"] == pytest.approx(0, abs=1e-6)
    history = history_of(grpo.run.output)
    assert words(history).startswith(f"step 2/2  reward {grpo.rows[1]['reward']:.4f}  KL divergence ")
    assert [*history.samples] == [1, 2] and len(history.samples[2]) == 4
    assert all({*each} == {"prompt", "completion", "variety"} for each in history.samples[2])
    assert grpo.rows[1]["reward"] == pytest.approx(
        statistics.mean(each["variety"] for each in history.samples[2])
    )


def test_a_plan_that_did_not_hold_stops_the_run(ran: Trainer, tmp_path: Path) -> None:
    asked = replace(ran("fsdp2").run, output=tmp_path)
    silent = train(asked, 2, before="tests.train.trl_runs:without_cpu_adaptation")
    assert silent.failed
    assert "the model is not wrapped as planned" in silent.log
    assert "found: DistributedDataParallel" in silent.log
    assert not (tmp_path / "checkpoint-2").exists()


@pytest.mark.slow
def test_weights_that_do_not_change_stop_the_run(ran: Trainer, tmp_path: Path) -> None:
    run = ran("ddp").run
    still = train(replace(run, output=tmp_path, options={**run.options, "learning_rate": 1e-30}), 2)
    assert still.failed
    assert "the weights did not change in the first step" in still.log


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["ddp", "fsdp2", "tp"])
def test_dpo_has_the_losses_of_one_process(plan: str, ran: Trainer) -> None:
    one = ran("one", "dpo")
    assert one.losses[0] == pytest.approx(
        0.6931, abs=FOUR_DIGITS
    )  # ln 2: the reference is the model as it was
    same_as(ran(plan, "dpo"), one)


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["ddp", "fsdp2", "tp"])
def test_preferences_are_evaluated_as_on_one_process(plan: str, ran: Trainer) -> None:
    settings = {**EVALUATED, "per_device_eval_batch_size": 3}
    one, spread = ran("one", "dpo", **settings), ran(plan, "dpo", **settings)
    same_as(spread, one)
    name = "eval_rewards/accuracies"
    assert spread.evaluations(name) == one.evaluations(name) == {0: 0.0, 2: 1.0, 4: 1.0}


@pytest.mark.slow
@pytest.mark.parametrize(("plan", "like"), [("fsdp2", "ddp"), ("tp", "one")])
def test_rewards_are_evaluated_on_every_plan(plan: str, like: str, ran: Trainer) -> None:
    found = [ran(each, "grpo", beta=0.1, **EVALUATED) for each in (plan, like)]
    same_as(*found)
    rewards = [each.evaluations("eval_reward") for each in found]
    assert rewards[0] == rewards[1] and all(rewards[0].values())


@pytest.mark.slow
def test_grpo_under_tensor_parallelism_draws_what_one_process_draws(ran: Trainer) -> None:
    same_as(ran("tp", "grpo", beta=0.1), ran("one", "grpo", beta=0.1))


@pytest.mark.slow
def test_grpo_under_fsdp2_draws_what_ddp_draws(ran: Trainer) -> None:
    same_as(ran("fsdp2", "grpo", beta=0.1), ran("ddp", "grpo", beta=0.1))


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["ddp", "fsdp2", "tp"])
@pytest.mark.parametrize("lora", [False, True])
def test_resuming_changes_nothing(plan: str, lora: bool, ran: Trainer, tmp_path: Path) -> None:
    uninterrupted = ran(plan, lora=lora)
    again = resumed(uninterrupted, tmp_path)
    assert not again.failed, again.log
    assert again.losses == uninterrupted.losses[2:]
    assert again.trained.digests == uninterrupted.trained.digests


@pytest.mark.slow
@pytest.mark.parametrize("method", ["dpo", "grpo"])
def test_the_reference_of_a_resumed_run_is_the_base(method: str, ran: Trainer, tmp_path: Path) -> None:
    options = {"beta": 0.1} if method == "grpo" else {}
    uninterrupted = ran("ddp", method, **options)
    again = resumed(uninterrupted, tmp_path)
    assert again.losses == uninterrupted.losses[2:]


@pytest.mark.slow
@pytest.mark.parametrize(("plan", "ep"), [("fsdp2", 1), ("tp", 1), ("tp", 2)])
def test_experts_are_saved_as_the_hub_has_them(plan: str, ep: int, ran: Trainer, tmp_path: Path) -> None:
    spread, one = ran(plan, model="qwen3_moe", ep=ep), ran("one", model="qwen3_moe")
    same_as(spread, one)
    names = set(api.open(spread.run.model).tensors)
    assert spread.trained.digests.keys() == names
    assert trl.ENGINE.check(spread.run, spread.trained, spread.trained.checkpoint) == []
    again = resumed(spread, tmp_path)
    assert again.losses == spread.losses[2:]


@pytest.mark.slow
def test_another_template_is_in_the_checkpoint(
    ran: Trainer, tiny: Callable[..., Path], tmp_path: Path
) -> None:
    template = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + eos_token }}{% endfor %}"
    (tmp_path / "other.jinja").write_text(template)
    path = str(tmp_path / "other.jinja")
    changed = ran("one", chat_template_path=path, warmup_steps=2, save_total_limit=1)
    assert (changed.trained.checkpoint / "chat_template.jinja").read_text() == template
    assert [each.name for each in changed.run.output.glob("checkpoint-*")] == ["checkpoint-4"]
    assert changed.rows[0]["learning_rate"] == 0  # the first step of a warm-up moves nothing, and may


@pytest.mark.slow
def test_16_bit_weights_of_fsdp2_go_on_in_the_precision_they_were_trained_in(
    ran: Trainer, tmp_path: Path
) -> None:
    uninterrupted = ran("fsdp2", bf16=True, dtype="bfloat16")
    again = resumed(uninterrupted, tmp_path)
    assert again.losses == uninterrupted.losses[2:]
    assert again.trained.digests == uninterrupted.trained.digests


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["zero2", "zero3"])
@pytest.mark.parametrize("lora", [False, True])
def test_zero_has_the_losses_of_ddp_and_goes_on(plan: str, lora: bool, ran: Trainer, tmp_path: Path) -> None:
    zero = ran(plan, lora=lora)
    same_as(zero, ran("ddp", lora=lora))
    assert trl.ENGINE.check(zero.run, zero.trained, zero.trained.checkpoint) == []
    assert zero.trained.digests.keys() == ran("ddp", lora=lora).trained.digests.keys()
    again = resumed(zero, tmp_path)
    assert again.losses == zero.losses[2:]
    assert again.trained.digests == zero.trained.digests


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["zero2", "zero3"])
@pytest.mark.parametrize("method", ["dpo", "grpo"])
def test_dpo_and_grpo_under_zero_have_the_losses_of_ddp(plan: str, method: str, ran: Trainer) -> None:
    options = {"beta": 0.1} if method == "grpo" else {}
    same_as(ran(plan, method, **options), ran("ddp", method, **options))


@pytest.mark.slow
def test_tied_heads_are_saved_once(ran: Trainer) -> None:
    for plan in ("ddp", "fsdp2"):
        run = ran(plan, model="qwen2_tied")
        assert "lm_head.weight" not in run.trained.digests
        assert trl.ENGINE.check(run.run, run.trained, run.trained.checkpoint) == []
    same_as(ran("fsdp2", model="qwen2_tied"), ran("ddp", model="qwen2_tied"))


@pytest.mark.slow
def test_bfloat16_keeps_float32_weights_and_a_16_bit_base(ran: Trainer) -> None:
    full = ran("fsdp2", bf16=True, gradient_checkpointing=True)
    same = ran("fsdp2", gradient_checkpointing=True)
    assert full.losses == pytest.approx(same.losses, abs=0.02)
    assert {str(t.dtype) for t in api.open(full.trained.checkpoint).tensors.values()} == {"float32"}
    lora = ran("fsdp2", lora=True, bf16=True, gradient_checkpointing=True)
    assert lora.losses == pytest.approx(ran("ddp", lora=True).losses, abs=0.02)
    # What is computed in 16 bits is summed in 32: FSDP2 has the losses of DDP, not their first three digits.
    whole = ran("ddp", lora=True, bf16=True, gradient_checkpointing=True)
    assert lora.losses[:2] == pytest.approx(whole.losses[:2], abs=FOUR_DIGITS)
    assert lora.evaluations()[0] == pytest.approx(whole.evaluations()[0], abs=FOUR_DIGITS)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe"])
def test_groups_of_tensor_parallel_ranks_share_a_model(name: str, ran: Trainer, tmp_path: Path) -> None:
    both, one = ran("tp+fsdp2", model=name), ran("one", model=name)
    assert both.losses == pytest.approx(one.losses, abs=FOUR_DIGITS)
    assert [row["tokens"] for row in both.rows] == [row["tokens"] for row in one.rows]
    assert trl.ENGINE.check(both.run, both.trained, both.trained.checkpoint) == []
    again = resumed(both, tmp_path, ranks=4)
    assert not again.failed, again.log
    assert again.losses == both.losses[2:]
    assert again.trained.digests == both.trained.digests


@pytest.mark.slow
def test_groups_of_tensor_parallel_ranks_accumulate_and_compare(ran: Trainer) -> None:
    halves = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2}
    assert ran("tp+fsdp2", **halves).losses == pytest.approx(ran("one").losses, abs=FOUR_DIGITS)
    same_as(ran("tp+fsdp2", "dpo"), ran("one", "dpo"))
