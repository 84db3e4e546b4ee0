"""Preflight: a model folder that cannot be trained is refused before anything starts, with the cure."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import reshard as api
from reshard.training.preflight import preflight
from reshard.training.run import Run
from tests.train.conftest import write_lines
from tests.train.preflights import NOWHERE, messages, the

TEXTS: list[dict[str, object]] = [{"text": f"The answer is {number}."} for number in range(64)]


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


@pytest.mark.parametrize(
    ("change", "message", "remedy"),
    [
        (break_tokenizer, "the model has no tokenizer", "copy the tokenizer"),
        (drop_end, "the tokenizer has no end token", "set eos_token in tokenizer_config.json"),
        (break_tokenizer_file, "the tokenizer cannot be opened", "copy the tokenizer"),
        (drop_template, "chat template", "chat_template.jinja"),
        (strict_template, "alternating user and assistant turns", "join consecutive turns"),
        (not_a_model, "not a Hugging Face model folder", "reshard inspect"),
    ],
)
def test_a_model_that_is_not_whole_is_refused_with_its_cure(
    change: Callable[[Run], Run], message: str, remedy: str, run: Run
) -> None:
    problem = the(message, preflight(change(run), environment=NOWHERE).problems)
    assert remedy in str(problem.remedy)


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


@pytest.mark.parametrize("engine", ["trl", "megatron"])
def test_the_words_of_the_assistant_need_no_marks(run: Run, engine: str) -> None:
    for only in ("true", "false"):
        asked = replace(run, engine=engine, options={"assistant_only_loss": only})
        assert preflight(asked, environment=NOWHERE).problems == []


def test_a_model_in_another_format_is_refused_with_the_command_that_converts_it(
    run: Run, tmp_path: Path
) -> None:
    api.convert(run.model, tmp_path / "megatron", to="megatron", tp=2)
    found = preflight(replace(run, model=tmp_path / "megatron"), environment=NOWHERE)
    problem = the("training cannot start from this format", found.problems)
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


@pytest.mark.parametrize(
    ("option", "given", "remedy"),
    [
        ("lora_target_modules", ["q_porj"], "did you mean q_proj?"),
        ("lora_target_modules", ["q_proj", "v_porj"], "did you mean v_proj?"),
        ("lora_target_modules", ["q_proj", "self_atn.v_proj"], "did you mean self_attn.v_proj?"),
        ("lora_modules_to_save", ["lm_haed"], "did you mean lm_head?"),
        ("lora_target_parameters", ["q_proj.wieght"], "did you mean q_proj.weight?"),
        ("lora_target_parameters", ["xyz"], "correct the name"),
    ],
)
def test_names_that_peft_would_ignore_are_refused(
    option: str, given: list[str], remedy: str, run: Run
) -> None:
    wrong = replace(run, lora=True, options={option: given})
    problem = the(f"--{option} names a part", preflight(wrong, environment=NOWHERE).problems)
    assert (problem.found, problem.remedy) == (given[-1], remedy)


def test_a_pattern_that_matches_no_layer_is_refused(run: Run) -> None:
    wrong = replace(run, lora=True, options={"lora_target_modules": [r".*\.q_porj"]})
    problem = the("PEFT cannot adapt", preflight(wrong, environment=NOWHERE).problems)
    assert "q_proj" in str(problem.expected)


@pytest.mark.parametrize(
    "options",
    [
        {"lora_target_modules": ["q_proj", "gate_proj", "up_proj", "down_proj"]},
        {"lora_target_modules": ["q_proj"], "lora_target_parameters": ["experts.down_proj"]},
        {"lora_target_modules": ["q_proj"], "lora_modules_to_save": ["norm"]},
    ],
)
def test_names_of_experts_that_peft_translates_are_taken(
    options: dict[str, Any], run: Run, tiny: Callable[..., Path]
) -> None:
    experts = replace(run, model=tiny("qwen3_moe"), lora=True, options=options)
    assert messages(preflight(experts, environment=NOWHERE).problems) == []


@pytest.mark.parametrize("targets", [["q_proj"], ["self_attn.q_proj"], [r".*\.q_proj"], ["all-linear"]])
def test_a_single_name_or_pattern_of_layers_to_adapt_is_taken(targets: list[str], run: Run) -> None:
    wanted = replace(run, lora=True, options={"lora_target_modules": targets})
    assert messages(preflight(wanted, environment=NOWHERE).problems) == []


def test_an_adapter_of_the_head_that_trl_would_ignore_is_refused(run: Run) -> None:
    wrong = replace(run, lora=True, options={"lora_target_modules": ["q_proj", "lm_head"]})
    problem = the("adapter of the head", preflight(wrong, environment=NOWHERE).problems)
    assert "q_proj" in str(problem.expected) and "lm_head" not in str(problem.expected)


@pytest.mark.parametrize("whole", ["lm_head", "embed_tokens"])
def test_a_copy_of_one_of_two_tied_weights_is_refused(
    whole: str, run: Run, tiny: Callable[..., Path]
) -> None:
    copied = replace(run, lora=True, options={"lora_modules_to_save": [whole]})
    the(
        "one of two tied weights",
        preflight(replace(copied, model=tiny("qwen3_tied")), environment=NOWHERE).problems,
    )
    assert messages(preflight(copied, environment=NOWHERE).problems) == []


def test_flash_attention_that_is_not_installed_is_refused_without_a_gpu(run: Run) -> None:
    from transformers.utils import is_kernels_available

    if is_kernels_available():
        pytest.skip("transformers takes flash attention from the Hub")
    wrong = replace(run, options={"attn_implementation": "flash_attention_2"})
    problem = the("flash_attention_2 needs a package", preflight(wrong, environment=NOWHERE).problems)
    assert "pip install flash-attn, which needs a GPU, or leave out" in str(problem.remedy)


def test_variables_that_contradict_the_plan_are_said_before_the_start(run: Run) -> None:
    shell = replace(NOWHERE, variables={"ACCELERATE_USE_DEEPSPEED": "true"})
    assert (
        the("contradicts the plan", preflight(run, environment=shell).problems).expected == "--parallel ddp"
    )


@pytest.mark.parametrize("trusted", [False, True])
def test_qwen_1_is_sent_to_versions_that_can_train_it(trusted: bool, run: Run) -> None:
    """The config of Qwen-1, and the method of its code that transformers 5 does not know; not its other code."""
    file = run.model / "config.json"
    auto = {"AutoModelForCausalLM": "modeling_qwen.QWenLMHeadModel"}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_type": "qwen", "auto_map": auto}))
    old = "def _set_gradient_checkpointing(self, module, value=False):\n    pass\n"
    (run.model / "modeling_qwen.py").write_text(old)
    found = preflight(replace(run, options={"trust_remote_code": trusted}), environment=NOWHERE)
    (problem,) = found.problems
    assert problem.code == "model-needs-transformers-4"
    assert "'transformers==4.53.3'" in str(problem.remedy)
    assert "reshard guard -- old/bin/torchrun" in str(problem.remedy)
