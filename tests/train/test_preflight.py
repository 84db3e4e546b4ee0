"""Preflight: what is wrong is said before anything starts, all at once, with the cure."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from bench.models import make
from reshard import api
from reshard.algebra.layout import Layout
from reshard.doctor.environment import Environment, Gpu
from reshard.errors import Problem, ReshardError
from reshard.train import preconditions
from reshard.train.data.mix import mix_of, read_mix
from reshard.train.engines import engine_of
from reshard.train.megatron import looks
from reshard.train.memory import GIB
from reshard.train.outlook import Preflight
from reshard.train.preconditions import config_problems
from reshard.train.preflight import preflight
from reshard.train.run import RECORD, Ranks, Run
from reshard.train.start import clear
from tests.train.conftest import chats, preferences, write_lines
from tests.train.test_memory import QWEN3_8B

NOWHERE = Environment({}, [], None, {})
"""A machine without GPUs."""
TEXTS: list[dict[str, object]] = [{"text": f"The answer is {number}."} for number in range(64)]


def gpus(count: int, gib: int = 80, capability: float = 9.0, **variables: str) -> Environment:
    """A machine with GPUs that are not here."""
    return Environment({}, [Gpu("H100", capability, gib * GIB)] * count, "570", variables)


@pytest.fixture
def folder(tiny: Callable[..., Path], tmp_path: Path) -> Path:
    """A model of one's own, to be broken."""
    return Path(shutil.copytree(tiny("qwen3"), tmp_path / "model"))


@pytest.fixture
def run(folder: Path, data: dict[str, Path], tmp_path: Path) -> Run:
    return Run("sft", folder, data["sft"], tmp_path / "out")


def messages(problems: list[Problem]) -> list[str]:
    return [problem.message for problem in problems]


def the(message: str, problems: list[Problem]) -> Problem:
    found = [problem for problem in problems if message in problem.message]
    assert len(found) == 1, messages(problems)
    return found[0]


def test_a_run_that_is_in_order_is_told_what_it_will_do(run: Run) -> None:
    found = preflight(run, environment=NOWHERE)
    assert (found.problems, found.warnings) == ([], [])
    assert not run.output.exists(), "nothing is written"
    assert found.batches is not None and found.lengths is not None and found.room is not None
    assert (found.records, found.batches.samples, found.batches.steps) == (64, 8, 24)
    assert found.lengths.longest < 64 and found.lengths.cut == 0
    assert found.room.fits and found.room.on_cpu
    rows = dict(found.rows())
    assert rows["plan"] == "SFT of all weights with TRL on 1 process"
    assert "64 records" in rows["data"] and "8 samples" in rows["step"] and "weights" in rows["memory"]
    longest = found.lengths.longest
    kept, again = found.room.by_length[longest]
    assert again == found.room.needed.step["activations"] < kept < found.room.by_length[2 * longest][0]
    assert f"{2 * longest} tokens" in rows["lengths"] and "recomputed" in rows["lengths"]
    assert {"run.json", "checkpoint-24/", "final/"} <= set(found.files)
    assert "torch.distributed.run" in found.command and found.command[-1] == str(run.output / RECORD)


@pytest.mark.parametrize(
    ("method", "given"),
    [
        ("dpo", {}),
        ("grpo", {"reward": ("tests.train.test_preflight:reward",)}),
        ("sft", {"lora": True, "parallel": "fsdp2", "ranks": Ranks(nproc=2)}),
        ("sft", {"engine": "megatron", "layout": Layout(tp=2, pp=2), "ranks": Ranks(nproc=4)}),
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
    wrong = replace(run, data=bad, options={"learning_rat": "1"}, ranks=Ranks(nproc=4))
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


def break_tokenizer(run: Run) -> Run:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (run.model / name).unlink()
    return run


def break_tokenizer_file(run: Run) -> Run:
    (run.model / "tokenizer.json").write_text("{}")
    return run


def break_weights(run: Run) -> Run:
    weights = next(run.model.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-64])
    return run


def drop_end(run: Run) -> Run:
    file = run.model / "tokenizer_config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({name: value for name, value in config.items() if name != "eos_token"}))
    return run


def drop_template(run: Run) -> Run:
    (run.model / "chat_template.jinja").unlink(missing_ok=True)
    config = json.loads((run.model / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (run.model / "tokenizer_config.json").write_text(json.dumps(config))
    return run


def strict_template(run: Run) -> Run:
    drop_template(run)
    template = (
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('no') }}{% endif %}{{ m.content }}{% endfor %}"
    )
    (run.model / "chat_template.jinja").write_text(template)
    turn = {"role": "user", "content": "a"}
    rows = [{"messages": [turn, turn, {"role": "assistant", "content": "b"}]}]
    return replace(run, data=write_lines(run.data.paths[0].parent / "turns.jsonl", rows))  # type: ignore[arg-type]


def not_a_model(run: Run) -> Run:
    (run.model / "config.json").unlink()
    return run


def with_options(**options: Any) -> Callable[[Run], Run]:
    return lambda run: replace(run, options=options)


def resumed(run: Run) -> Run:
    return replace(run, resume=True)


def resumed_from_another(run: Run) -> Run:
    checkpoint = run.output / "checkpoint-2"
    checkpoint.mkdir(parents=True)
    (checkpoint / "trainer_state.json").write_text("{}")
    (checkpoint / RECORD).write_text(json.dumps(replace(run, lora=True).as_dict()))
    return replace(run, resume=True)


def many_ranks(run: Run) -> Run:
    return replace(run, engine="megatron", layout=Layout(tp=3), ranks=Ranks(nproc=3))


@pytest.mark.parametrize(
    ("change", "environment", "message", "remedy"),
    [
        (break_tokenizer, NOWHERE, "the model has no tokenizer", "copy the tokenizer"),
        (drop_end, NOWHERE, "the tokenizer has no end token", "set eos_token in tokenizer_config.json"),
        (break_tokenizer_file, NOWHERE, "the tokenizer cannot be opened", "copy the tokenizer"),
        (drop_template, NOWHERE, "chat template", "chat_template.jinja"),
        (strict_template, NOWHERE, "take turns", "join neighbouring turns"),
        (not_a_model, NOWHERE, "not a Hugging Face model folder", "reshard inspect"),
        (with_options(device_map="auto"), NOWHERE, "device_map", "device_map=None"),
        (with_options(max_length=4), NOWHERE, "records without a token to learn from", None),
        (
            with_options(bf16=True, use_cpu=False),
            gpus(2, capability=7.0),
            "does not support bfloat16",
            "--fp16 true",
        ),
        (
            with_options(bf16=True, use_cpu=False),
            gpus(1, gib=1),
            "does not fit into memory",
            "no plan that was tried",
        ),
        (resumed, NOWHERE, "no checkpoint to resume from", "leave out --resume"),
        (resumed_from_another, NOWHERE, "the checkpoint is of another run", "start another"),
        (many_ranks, NOWHERE, "do not divide over --tp 3", "choose --tp from"),
    ],
)
def test_what_would_fail_later_is_refused_with_its_cure(
    change: Callable[[Run], Run], environment: Environment, message: str, remedy: str | None, run: Run
) -> None:
    if message == "records without a token to learn from":
        pairs = [{"prompt": "What is the answer to all?", "completion": " it"}]
        run = replace(run, data=write_lines(run.data.paths[0].parent / "pairs.jsonl", pairs * 8))  # type: ignore[arg-type]
    changed = change(run)
    problem = next(
        (p for p in preflight(changed, environment=environment).problems if message in str(p)), None
    )
    assert problem, messages(preflight(changed, environment=environment).problems)
    assert remedy is None or remedy in str(problem.remedy)


def test_weights_that_are_not_whole_are_refused(run: Run) -> None:
    found = preflight(break_weights(run), environment=NOWHERE)
    assert any(".safetensors" in str(problem) for problem in found.problems)


def test_text_needs_no_chat_template(run: Run, tmp_path: Path) -> None:
    texts = write_lines(tmp_path / "text.jsonl", TEXTS)
    assert preflight(replace(drop_template(run), data=texts), environment=NOWHERE).problems == []


@pytest.mark.parametrize("column", [{"cases": [1, 2]}, {"completion": 7}, {"text": None, "messages": "none"}])
def test_what_only_the_reward_reads_is_not_taken_for_text(
    run: Run, tmp_path: Path, column: dict[str, object]
) -> None:
    rows = write_lines(tmp_path / "rows.jsonl", [{"prompt": f"{at} plus 1 is", **column} for at in range(64)])
    given = {"method": "grpo", "reward": ("tests.train.test_preflight:reward",), "data": rows}
    assert preflight(replace(drop_template(run), **given), environment=NOWHERE).problems == []


def test_a_template_may_come_from_elsewhere(run: Run, tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}")
    options = {"chat_template_path": str(template)}
    assert preflight(replace(drop_template(run), options=options), environment=NOWHERE).problems == []


def test_a_model_that_transformers_does_not_know_is_refused(run: Run) -> None:
    path = run.model / "config.json"
    config = json.loads(path.read_text()) | {"model_type": "unheard_of", "architectures": ["UnheardOf"]}
    path.write_text(json.dumps(config))
    problem = the("transformers cannot build the model", preflight(run, environment=NOWHERE).problems)
    assert "unheard_of" in str(problem.found)


def test_a_disk_that_is_too_small_is_told_from_the_checkpoints_that_are_kept(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preconditions.shutil, "disk_usage", lambda _: SimpleNamespace(free=4 << 20))
    every_step = replace(run, options={"save_strategy": "steps", "save_steps": 1})
    problem = the("the disk is too small", preflight(every_step, environment=NOWHERE).problems)
    assert "--save_total_limit" in str(problem.remedy)
    few = replace(every_step, options={**every_step.options, "save_total_limit": 1})
    assert preflight(few, environment=NOWHERE).problems == []


def test_what_is_only_doubtful_is_a_warning(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    write_lines(folder / "train.jsonl", chats()[:4])
    write_lines(folder / "test.jsonl", chats()[4:6])
    found = preflight(
        replace(run, data=folder, options={"max_length": 40, "packing": "true"}), environment=NOWHERE
    )
    assert found.problems == []
    assert the("kept for evaluation", found.warnings).file == str(folder / "test.jsonl")
    assert "6 of 6" in str(the("longer than the greatest length", found.warnings).found)
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
    (checkpoint / RECORD).write_text(json.dumps({**run.as_dict(), "data_digest": "of other data"}))
    found = preflight(replace(run, resume=True), environment=NOWHERE)
    assert found.problems == []
    assert messages(found.warnings) == ["the data are not those that the run began with"]
    wider = preflight(replace(run, resume=True, parallel="fsdp2"), environment=NOWHERE)
    assert the("of another run", wider.problems).expected == "parallel: ddp"


def test_processes_are_those_of_the_launcher_that_is_there(run: Run) -> None:
    started = {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
    }
    found = preflight(run, environment=Environment({}, [], None, started))
    assert (found.world_size, found.command, found.problems) == (2, [], [])


def test_gpus_are_those_that_are_visible(run: Run) -> None:
    both = gpus(4, CUDA_VISIBLE_DEVICES="1,3")
    assert len(preconditions.visible(both)) == 2
    assert preconditions.visible(gpus(2, CUDA_VISIBLE_DEVICES="")) == []
    assert preconditions.visible(gpus(2, CUDA_VISIBLE_DEVICES="-1")) == []
    assert len(preconditions.visible(gpus(2, CUDA_VISIBLE_DEVICES="GPU-8f1c"))) == 1


def test_a_torch_without_cuda_beside_gpus_is_a_warning(run: Run) -> None:
    there = replace(gpus(2), versions={"torch": "2.13.0+cpu"})
    assert "--use_cpu" in str(the("built without CUDA", preflight(run, environment=there).warnings).remedy)
    told = preflight(replace(run, options={"use_cpu": "true"}), environment=there)
    assert told.warnings == []


@pytest.mark.parametrize("engine", ["trl", "megatron"])
def test_the_words_of_the_assistant_need_no_marks(run: Run, engine: str) -> None:
    for only in ("true", "false"):
        asked = replace(run, engine=engine, options={"assistant_only_loss": only})
        assert preflight(asked, environment=NOWHERE).problems == []


def test_long_text_goes_on_in_the_next_sequence_of_megatron(run: Run, tmp_path: Path) -> None:
    text = write_lines(tmp_path / "text.jsonl", [{"text": "What is the answer? " * 200}] * 16)
    found = preflight(replace(run, data=text, engine="megatron"), environment=NOWHERE)
    assert found.warnings == [] and found.lengths is not None
    assert found.lengths.tokens == 16 * found.lengths.longest


def test_packages_that_are_missing_or_old_come_with_the_command(run: Run) -> None:
    there = dict.fromkeys(engine_of(run).requires(run), "99") | {"peft": "0.20"}
    del there["trl"]
    missing, old = sorted(
        preconditions.packages(run, there), key=lambda problem: str(problem.found), reverse=True
    )
    assert (missing.message, missing.remedy) == ("trl is not installed", "pip install 'trl>=1.16'")
    assert (old.message, old.found) == ("this peft is too old", "0.20")
    zero = replace(run, parallel="zero3")
    assert [p.message for p in preconditions.packages(zero, there | {"trl": "1.16", "peft": "0.21"})] == [
        "deepspeed is not installed"
    ]


def test_an_old_megatron_core_cannot_share_query_groups(tiny: Callable[..., Path], run: Run) -> None:
    groups = replace(run, model=tiny("qwen3", num_key_value_heads=2), engine="megatron")
    shared = replace(groups, layout=Layout(tp=4))
    old = {"megatron-core": "0.15.3"}
    (problem,) = looks.model(shared, old)
    assert (problem.message, problem.found) == ("this megatron-core is too old", "0.15.3")
    assert problem.rule == "--tp 4 is larger than the 2 query groups"
    assert problem.remedy == "pip install --no-deps 'megatron-core>=0.16'"
    assert list(looks.model(shared)) == list(looks.model(replace(groups, layout=Layout(tp=2)), old)) == []


@pytest.fixture(scope="module")
def qwen3_8b(tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen3-8B, with a tokenizer and without a byte of weights on the disk."""
    model = make(tmp_path_factory.mktemp("sparse") / "qwen3-8b", QWEN3_8B, sparse=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (tiny("qwen3") / name).is_file():
            shutil.copyfile(tiny("qwen3") / name, model / name)
    return model


def looked_at(run: Run, environment: Environment) -> tuple[Preflight, float]:
    before = time.process_time()
    return preflight(run, environment=environment), time.process_time() - before


def test_a_model_that_does_not_fit_is_refused_with_the_plan_that_does(
    qwen3_8b: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preconditions.shutil, "disk_usage", lambda _: SimpleNamespace(free=1 << 50))
    options = {"bf16": "true", "use_cpu": "false", "max_length": 1024}
    ddp = replace(run, model=qwen3_8b, options=options, ranks=Ranks(nproc=8))
    found, seconds = looked_at(ddp, gpus(8))
    problem = the("does not fit into memory", found.problems)
    assert messages(found.problems) == [problem.message]
    assert "--parallel fsdp2" in str(problem.remedy) and "--lora" in str(problem.remedy)
    assert "optimizer 61.0 GiB" in str(problem.found) and "76.0 GiB" in str(problem.expected)
    assert seconds < 10
    fsdp2, _ = looked_at(replace(ddp, parallel="fsdp2"), gpus(8))
    assert fsdp2.problems == [] and fsdp2.room is not None and fsdp2.room.fits
    assert fsdp2.devices == "8 × H100 with 80 GiB"


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


def test_a_model_in_another_format_is_refused_with_the_command_that_converts_it(
    run: Run, tmp_path: Path
) -> None:
    api.convert(run.model, tmp_path / "megatron", to="megatron", tp=2)
    found = preflight(replace(run, model=tmp_path / "megatron"), environment=NOWHERE)
    problem = the("a format that training does not start from", found.problems)
    assert problem.found == "megatron" and f"reshard convert {tmp_path / 'megatron'}" in str(problem.remedy)


def test_a_name_of_the_hub_is_no_folder_and_how_to_get_it_is_said(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (problem,) = preflight(replace(run, model=tmp_path / "Qwen/Qwen3-8B"), environment=NOWHERE).problems
    assert "hf download Qwen/Qwen3-8B --local-dir Qwen3-8B" in str(problem.remedy)


def test_what_transformers_would_not_load_is_refused(run: Run) -> None:
    weights = run.model / "model.safetensors"
    weights.rename(run.model / "weights.safetensors")
    config = json.loads((run.model / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (run.model / "config.json").write_text(json.dumps(config))
    found = messages(preflight(run, environment=NOWHERE).problems)
    assert found == [
        "transformers does not find the weights: they have other names, and no index names them",
        "the model is quantized",
    ]


@pytest.mark.parametrize("engine", ["trl", "megatron"])
@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("num_hidden_layers", 3, "disagree on layers"),
        ("num_hidden_layers", "2", "does not describe a model"),
        ("model_type", "nobodys", "nobodys"),
    ],
)
def test_a_config_that_is_wrong_is_told_once(
    engine: str, key: str, value: Any, message: str, run: Run
) -> None:
    file = run.model / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), key: value}))
    (problem,) = map(str, preflight(replace(run, engine=engine), environment=NOWHERE).problems)
    assert message in problem and "--base" not in problem


def test_a_method_that_the_engine_lacks_is_all_that_is_wrong(run: Run, data: dict[str, Path]) -> None:
    found = preflight(replace(run, method="dpo", engine="megatron", data=data["dpo"]), environment=NOWHERE)
    assert messages(found.problems) == ["the Megatron-Core engine trains with SFT only"]


def test_layers_that_do_not_divide_are_told_in_flags_that_there_are(run: Run) -> None:
    wrong = replace(run, engine="megatron", layout=Layout(pp=3), ranks=Ranks(nproc=3))
    problem = the("do not divide over the pipeline", preflight(wrong, environment=NOWHERE).problems)
    assert "--stages" not in str(problem) and "add up" not in str(problem)


def test_adapters_of_layers_that_there_are_not_are_refused(run: Run) -> None:
    wrong = replace(run, lora=True, options={"lora_target_modules": "q_porj"})
    problem = the("PEFT cannot adapt", preflight(wrong, environment=NOWHERE).problems)
    assert "q_proj" in str(problem.expected)


def test_a_tracker_that_is_not_installed_is_said_before(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from reshard.train.show import trackers

    monkeypatch.setattr(trackers, "_is_here", lambda module: False)
    found = preflight(replace(run, options={"report_to": "wandb"}), environment=NOWHERE)
    assert messages(found.problems) == ["wandb is not installed, and report_to asks for it"]


def test_an_output_that_cannot_be_made_or_must_not_be_removed_is_refused(run: Run) -> None:
    below = replace(run, output=run.data.paths[0] / "out")
    assert "a file has its name" in messages(preflight(below, environment=NOWHERE).problems)[0]
    foreign = preflight(replace(run, output=run.model), overwrite=True, environment=NOWHERE)
    assert messages(foreign.problems) == ["the output folder contains files that no run left there"]
    before = run.output / "final"
    shutil.copytree(run.model, before)
    (run.output / RECORD).write_text(json.dumps(run.as_dict()))
    again = replace(run, model=before)
    assert messages(preflight(again, overwrite=True, environment=NOWHERE).problems) == [
        "--overwrite would remove the model that the run begins with"
    ]
    with pytest.raises(ReshardError, match="would remove the model"):
        clear(again)
    assert (before / "config.json").is_file()
