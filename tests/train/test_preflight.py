"""Preflight: all problems are reported before anything starts, with their cures."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from reshard.algebra.layout import Layout
from reshard.base.errors import ReshardError
from reshard.guard.end.completeness import RUN_RECORD, note_files
from reshard.training.data.mix import mix_of, read_mix
from reshard.training.output_folder import clear
from reshard.training.preconditions import config_problems
from reshard.training.preflight import preflight
from reshard.training.run import Run, RunProcesses
from tests.train.conftest import chats, preferences, write_lines
from tests.train.preflights import NOWHERE, gpus, messages, the


def test_a_run_that_is_in_order_is_told_what_it_will_do(run: Run) -> None:
    found = preflight(run, environment=NOWHERE)
    assert (found.problems, found.warnings) == ([], [])
    assert not run.output.exists(), "nothing is written"
    assert found.batches is not None and found.lengths is not None and found.room is not None
    assert (found.records, found.batches.samples, found.batches.steps) == (64, 8, 24)
    assert found.lengths.longest < 64 and found.lengths.cut == 0
    assert found.room.fits and found.room.on_cpu
    rows = dict(found.rows())
    assert rows["plan"] == "SFT of all weights with TRL on 1 process" and "note" not in rows
    assert "64 records" in rows["data"] and "8 samples" in rows["step"] and "weights" in rows["memory"]
    longest = found.lengths.longest
    kept, again = found.room.by_length[longest]
    assert again == found.room.needed.step["activations"] < kept < found.room.by_length[2 * longest][0]
    assert f"{2 * longest} tokens" in rows["lengths"] and "recomputed" in rows["lengths"]
    assert {"run.json", "checkpoint-24/", "final/"} <= set(found.files)
    assert "reshard.training.worker" in found.command and found.command[-1] == str(run.output / RUN_RECORD)


def test_an_engine_that_has_not_run_on_a_gpu_says_so(run: Run) -> None:
    found = preflight(replace(run, engine="megatron"), environment=NOWHERE)
    assert "experimental: it has run on one GPU" in dict(found.rows())["note"]


@pytest.mark.parametrize(
    ("method", "given"),
    [
        ("dpo", {}),
        ("grpo", {"reward": ("tests.train.test_preflight:reward",)}),
        ("sft", {"lora": True, "parallel": "fsdp2", "ranks": RunProcesses(nproc=2)}),
        ("sft", {"engine": "megatron", "layout": Layout(tp=2, pp=2), "ranks": RunProcesses(nproc=4)}),
    ],
)
def test_every_method_and_engine_is_told_as_json(
    method: str, given: dict[str, Any], run: Run, data: dict[str, Path]
) -> None:
    found = preflight(replace(run, method=method, data=data[method], **given), environment=NOWHERE)
    assert found.problems == []
    content = json.loads(json.dumps(found.as_dict()))
    assert content["memory"]["fits"] and content["batches"]["steps"] > 0
    assert content["world_size"] == run.ranks.nproc or found.world_size


def test_a_base_in_bfloat16_is_trained_in_float32_and_stays_what_it_is(
    hf_model: Callable[..., Path], run: Run
) -> None:
    half = replace(run, model=hf_model("qwen3", dtype="bfloat16"))
    assert dict(preflight(half, environment=NOWHERE).rows())["model"].endswith(
        "; trained in float32, final in bfloat16"
    )
    asked = replace(half, options={"dtype": "float32"})
    for other in (run, asked, replace(half, lora=True)):
        assert preflight(other, environment=NOWHERE).final_dtype is None


def reward(completions: list[Any], **columns: Any) -> list[float]:
    return [0.0 for _ in completions]


def test_all_that_is_wrong_is_said_at_once(run: Run, tmp_path: Path) -> None:
    bad = write_lines(tmp_path / "bad.jsonl", [*chats(), {"messages": []}])
    run.output.mkdir()
    (run.output / "notes.txt").write_text("mine")
    wrong = replace(run, data=bad, options={"learning_rat": "1"}, ranks=RunProcesses(nproc=4))
    (wrong.model / "tokenizer.json").unlink()
    found = preflight(wrong, environment=gpus(2))
    text = "\n".join(map(str, found.problems))
    for part in (
        "learning_rate",
        f"{bad}:65",
        "the output is not empty",
        "4 processes",
        "the model has no tokenizer",
    ):
        assert part in text
    assert all(problem.remedy or problem.expected for problem in found.problems)


def test_the_records_of_a_mix_that_an_epoch_sees_are_counted(run: Run, tmp_path: Path) -> None:
    talks = [{"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}] * 4
    few = write_lines(tmp_path / "few.jsonl", talks)  # type: ignore[arg-type]
    (many,) = run.data.paths
    found = preflight(replace(run, data=read_mix("--data", [f"{many}:1", f"{few}:1"])), environment=NOWHERE)
    assert (found.problems, found.records) == ([], 128)
    assert found.lengths is not None and found.lengths.records == 128
    alone = preflight(replace(run, data=mix_of(few)), environment=NOWHERE)
    whole = preflight(run, environment=NOWHERE)
    assert alone.lengths is not None and whole.lengths is not None
    assert found.lengths.tokens == whole.lengths.tokens + 16 * alone.lengths.tokens
    told = [value for name, value in found.rows() if name in ("data", "epoch")]
    assert told[0] == f"{many}:1: 64 records (chat)"
    assert told[1] == f"{few}:1: 4 records (ShareGPT), 64 in an epoch, each 16 times"
    assert told[2].startswith("128 records, ")
    assert [source["seen"] for source in found.as_dict()["sources"]] == [64, 64]


def test_sources_of_different_shapes_are_refused(run: Run, tmp_path: Path) -> None:
    texts = write_lines(tmp_path / "texts.jsonl", [{"text": "a"}])
    mix = read_mix("--data", [str(run.data.paths[0]), str(texts)])
    assert preflight(replace(run, data=mix), environment=NOWHERE).problems == []
    pairs = [
        write_lines(tmp_path / "messages.jsonl", preferences()),
        write_lines(tmp_path / "strings.jsonl", [{"prompt": "a", "chosen": "b", "rejected": "c"}]),
    ]
    asked = replace(run, method="dpo", data=read_mix("--data", list(map(str, pairs))))
    assert messages(preflight(asked, environment=NOWHERE).problems) == [
        "the data has sources of different shapes"
    ]


def test_a_system_message_is_for_chats(run: Run, tmp_path: Path) -> None:
    texts = write_lines(tmp_path / "texts.jsonl", [{"text": "a"}] * 8)
    asked = replace(run, data=mix_of(texts), system="Be brief.")
    assert messages(preflight(asked, environment=NOWHERE).problems) == [
        "no record has a place for a system message"
    ]
    both = replace(asked, data=read_mix("--data", [str(texts), str(run.data.paths[0])]))
    assert preflight(both, environment=NOWHERE).problems == []


def test_without_data_everything_else_is_still_looked_at(run: Run, tmp_path: Path) -> None:
    wrong = replace(run, data=tmp_path / "nothing.jsonl", options={"learning_rat": "1"})
    assert messages(preflight(wrong, environment=NOWHERE).problems) == [
        "there is no data",
        "SFTConfig has no option learning_rat",
    ]


def with_options(**options: Any) -> Callable[[Run], Run]:
    return lambda run: replace(run, options=options)


def resumed(run: Run) -> Run:
    return replace(run, resume=True)


def resumed_in_a_checkpoint(run: Run) -> Run:
    run.output.mkdir()
    note_files(run.output)
    return replace(run, resume=True)


def resumed_from_another(run: Run) -> Run:
    checkpoint = run.output / "checkpoint-2"
    checkpoint.mkdir(parents=True)
    (checkpoint / "trainer_state.json").write_text("{}")
    (checkpoint / RUN_RECORD).write_text(json.dumps(replace(run, lora=True).as_dict()))
    return replace(run, resume=True)


def too_short(run: Run) -> Run:
    """A prompt that fills the sequence by itself."""
    pairs: list[dict[str, object]] = [{"prompt": "What is the answer to all?", "completion": " it"}] * 8
    data = write_lines(run.data.paths[0].parent / "pairs.jsonl", pairs)
    return replace(run, data=data, options={"max_length": 4})


@pytest.mark.parametrize(
    ("change", "message", "remedy"),
    [
        (with_options(device_map="auto"), "device_map", "device_map=None"),
        (too_short, "records without a token to train on", "raise --max_length"),
        (resumed, "no checkpoint to resume from", "leave out --resume"),
        (resumed_in_a_checkpoint, "no checkpoint to resume from", "pass the folder of the run, -o /"),
        (resumed_from_another, "the checkpoint belongs to another run", "start another"),
    ],
)
def test_what_would_fail_later_is_refused_with_its_cure(
    change: Callable[[Run], Run], message: str, remedy: str, run: Run
) -> None:
    problem = the(message, preflight(change(run), environment=NOWHERE).problems)
    assert remedy in str(problem.remedy)


def test_what_is_only_doubtful_is_a_warning(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    write_lines(folder / "train.jsonl", chats()[:4])
    write_lines(folder / "test.jsonl", chats()[4:6])
    found = preflight(
        replace(run, data=folder, options={"max_length": 40, "packing": "true"}), environment=NOWHERE
    )
    assert found.problems == []
    assert the("suggests evaluation data", found.warnings).file == str(folder / "test.jsonl")
    assert "6 of 6" in str(the("longer than the maximum length", found.warnings).found)
    wrapped = {"packing": "true", "packing_strategy": "wrapped"}
    refused = preflight(replace(run, options=wrapped), environment=NOWHERE).problems
    assert "bfd_split" in str(the("see each other", refused).remedy)


def test_an_output_of_before_may_be_overwritten(run: Run) -> None:
    run.output.mkdir()
    (run.output / "run.json").write_text("{}")
    assert messages(preflight(run, environment=NOWHERE).problems) == ["the output is not empty"]
    assert preflight(run, overwrite=True, environment=NOWHERE).problems == []


def test_resuming_goes_on_with_the_same_data(run: Run, tmp_path: Path) -> None:
    checkpoint = run.output / "checkpoint-2"
    checkpoint.mkdir(parents=True)
    (checkpoint / "trainer_state.json").write_text("{}")
    (checkpoint / RUN_RECORD).write_text(json.dumps({**run.as_dict(), "data_digest": "of other data"}))
    found = preflight(replace(run, resume=True), environment=NOWHERE)
    assert found.problems == []
    assert messages(found.warnings) == ["the data have changed since the run began"]
    wider = preflight(replace(run, resume=True, parallel="fsdp2"), environment=NOWHERE)
    assert the("to another run", wider.problems).expected == "parallel: ddp"


def test_long_text_goes_on_in_the_next_sequence_of_megatron(run: Run, tmp_path: Path) -> None:
    text = write_lines(tmp_path / "text.jsonl", [{"text": "What is the answer? " * 200}] * 16)
    found = preflight(replace(run, data=text, engine="megatron"), environment=NOWHERE)
    assert found.warnings == [] and found.lengths is not None
    assert found.lengths.tokens == 16 * found.lengths.longest


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("run.yaml", {"model": "m", "data": "d", "lora": True, "device_map": "auto"}),
        ("run.yaml", {"learning_rate": 1e-5, "device_map": "auto"}),
        ("run.json", {"model": "m", "model_init_kwargs": {"device_map": "balanced"}}),
        (
            "train.py",
            'import trl\nm = AutoModelForCausalLM.from_pretrained("m", device_map="auto")\ntrl.SFTTrainer(m)',
        ),
    ],
)
def test_a_config_or_script_with_a_device_map_is_refused_with_the_doctors_cure(
    name: str, content: Any, tmp_path: Path
) -> None:
    path = tmp_path / name
    dump = json.dumps if path.suffix == ".json" else yaml.safe_dump
    path.write_text(content if isinstance(content, str) else dump(content))
    problem = the("device_map='auto'", config_problems(path))
    assert "device_map=None" in str(problem.remedy)
    assert str(problem.file).startswith(str(path)) and "device_map" in str(problem.found)
    assert problem.severity == "error"


def test_a_config_that_is_in_order_is_let_through(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({"model": "m", "device_map": None, "learning_rate": 1e-5}))
    assert config_problems(path) == []


def test_a_method_that_the_engine_lacks_is_all_that_is_wrong(run: Run, data: dict[str, Path]) -> None:
    found = preflight(replace(run, method="dpo", engine="megatron", data=data["dpo"]), environment=NOWHERE)
    assert messages(found.problems) == ["the Megatron-Core engine trains with SFT only"]


def test_a_tracker_that_is_not_installed_is_said_before(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from reshard.training.show import trackers

    monkeypatch.setattr(trackers, "find_spec", lambda module: None)
    found = preflight(replace(run, options={"report_to": "wandb"}), environment=NOWHERE)
    assert messages(found.problems) == ["wandb is not installed, but report_to needs it"]


def test_an_output_that_cannot_be_made_or_must_not_be_removed_is_refused(run: Run) -> None:
    below = replace(run, output=run.data.paths[0] / "out")
    assert "a file has its name" in messages(preflight(below, environment=NOWHERE).problems)[0]
    foreign = preflight(replace(run, output=run.model), overwrite=True, environment=NOWHERE)
    assert messages(foreign.problems) == ["the output folder contains files that no run wrote"]
    before = run.output / "final"
    shutil.copytree(run.model, before)
    (run.output / RUN_RECORD).write_text(json.dumps(run.as_dict()))
    again = replace(run, model=before)
    assert messages(preflight(again, overwrite=True, environment=NOWHERE).problems) == [
        "--overwrite would remove the model of this run"
    ]
    with pytest.raises(ReshardError, match="would remove the model"):
        clear(again)
    assert (before / "config.json").is_file()


@pytest.mark.parametrize("layout", [Layout(pp=2), Layout(cp=2), Layout(tp=2, pp=2)])
def test_parallelism_that_trl_lacks_is_refused_once_on_any_number_of_ranks(layout: Layout, run: Run) -> None:
    for ranks in (RunProcesses(), RunProcesses(nproc=4)):
        plan = replace(run, layout=layout, parallel="tp" if layout.tp > 1 else "ddp", ranks=ranks)
        the("no pipeline or context parallelism", preflight(plan, environment=NOWHERE).problems)
