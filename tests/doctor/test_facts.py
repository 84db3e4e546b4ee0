"""The facts of `doctor --json`: what stands in the targets, each where it says; checked by hand against real logs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import reshard
from reshard.runs.doctor import diagnose_targets
from reshard.runs.doctor.diagnose_targets import examine
from reshard.runs.doctor.examination import Examination
from reshard.runs.doctor.facts import collect as module
from tests.commandline import follows_schema
from tests.commandline import reshard as command

TESTS = Path(__file__).parents[1]
HEAD, GUARD, HISTORY = TESTS / "doctor/head", TESTS / "data/guard", TESTS / "doctor/history"
REAL = sorted([*HEAD.rglob("*.log"), *GUARD.glob("*.log"), *HISTORY.glob("*.log")])


def facts_in(*targets: Path) -> dict[str, Any]:
    facts = examine(*targets).facts
    answer = {"answer": "no-failure", "findings": [], "unknown": []}
    follows_schema("doctor", json.dumps({**answer, "facts": facts}))
    return facts


def bare(facts: list[dict[str, Any]], *names: str) -> list[tuple[Any, ...]]:
    """Facts as tuples of these values."""
    return [tuple(each[name] for name in names) for each in facts]


def log_of(folder: Path, *lines: str) -> Path:
    (folder / "run.log").write_text("\n".join(lines), encoding="utf-8")
    return folder / "run.log"


def seen(facts: object) -> Iterator[dict[str, Any]]:
    """All facts with a line, also those inside others."""
    inside = facts.values() if isinstance(facts, dict) else facts if isinstance(facts, list) else ()
    for each in inside:
        yield from seen(each)
    if isinstance(facts, dict) and facts.get("line"):
        yield facts


@pytest.mark.parametrize("log", REAL, ids=lambda log: f"{log.parent.name}-{log.stem}")
def test_each_fact_stands_in_the_line_that_it_names(log: Path) -> None:
    lines = log.read_bytes().decode().split("\n")
    facts = facts_in(log)
    for fact in seen(facts):
        line = lines[fact["line"] - 1]
        names = ("version", "source", "source_line", "rank", "size")
        shown = [str(fact[name]) for name in names if fact.get(name) is not None]
        shown += [str(fact["text"]).split()[0]] if "text" in fact else []
        shown += [fact["exception"].rpartition(".")[2]] if fact.get("exception") else []
        assert fact["file"] == str(log) and all(each in line for each in shown), (fact, line)
        assert not fact.get("code") or lines[fact["line"]].endswith(fact["code"])


def test_the_first_failure_has_its_frames_rank_and_lines() -> None:
    log = GUARD / "torchrun-raise.log"
    facts = facts_in(log)
    place = {"file": str(log), "line": 9}
    code = 'if how == "raise": raise ValueError("bad shard")'
    frame = {
        "source": "/home/user/train/w.py",
        "source_line": 12,
        "function": "<module>",
        "code": code,
        **place,
    }
    said = {"process": "1", "exception": "ValueError", "message": "bad shard", "file": str(log), "line": 12}
    assert facts["root"] == {**said, "first": 8, "last": 12, "follows": False, "frames": [frame], "then": []}
    assert facts["ranks"]["failed"] == [said]
    known_by = "torchrun: Root Cause (first observed failure)"
    assert bare(facts["ranks"]["first_failed"], "rank", "known_by", "line") == [(1, known_by, 49)]
    last = bare(facts["ranks"]["last"], "process", "text", "line")
    assert last == [
        ("", "traceback : Signal 6 (SIGABRT) received by PID 10044", 52),
        ("1", "ValueError: bad shard", 12),
    ]


def test_a_chain_is_told_from_its_first_exception_on() -> None:
    root = facts_in(HISTORY / "transformers-model-type.log")["root"]
    assert (root["exception"], root["message"], root["line"]) == ("KeyError", "'qwen3'", 7)
    assert bare(root["frames"], "source_line", "line") == [(945, 2), (647, 5)]
    assert bare(root["then"], "exception", "line") == [("ValueError", 16)]


def test_a_failure_that_follows_from_another_says_so() -> None:
    lost, killed = (facts_in(GUARD / f"{name}.log") for name in ("deepspeed-kill", "torchrun-kill"))
    assert lost["root"]["follows"] and lost["root"]["line"] == 22 and lost["ranks"]["first_failed"] == []
    assert killed["root"]["exception"] is None and killed["root"]["line"] == 9
    assert killed["root"]["frames"] == []  # those below are the launcher's


def test_a_message_does_not_take_in_what_was_printed_next(tmp_path: Path) -> None:
    mismatch = "Error(s) in loading state_dict for M:", "\tsize mismatch for w."
    root = facts_in(log_of(tmp_path, f"RuntimeError: {mismatch[0]}", mismatch[1], "it worked last week"))[
        "root"
    ]
    assert root["message"] == "\n".join(mismatch)
    assert (root["first"], root["line"], root["last"]) == (1, 1, 2)


STATED = {
    "- `transformers` version: 4.53.0": ("transformers", "4.53.0"),
    "- PyTorch version (GPU?): 2.6.0+cu124 (True)": ("torch", "2.6.0+cu124"),
    "[pip3] numpy==1.26.4": ("numpy", "1.26.4"),
    "flash_attn 2.7.4.post1": ("flash-attn", "2.7.4.post1"),
    "torch version .................... 2.1.0": ("torch", "2.1.0"),
    "vllm 0.6 requires torch==2.4.0, but you have torch 2.6.0 which is incompatible.": ("torch", "2.6.0"),
    "INFO 01-02 api_server.py:1] vLLM API server version 0.6.3": ("vllm", "0.6.3"),
    "INFO Initializing a V1 LLM engine (v0.8.5) with config: a": ("vllm", "0.8.5"),
    "Successfully installed trl-0.14.0": ("trl", "0.14.0"),
    '  File "/e/lib/python3.10/site-packages/a/b.py", line 1, in f': ("python", "3.10"),
}


@pytest.mark.parametrize("line", STATED)
def test_versions_are_those_that_a_line_states(line: str, tmp_path: Path) -> None:
    facts = facts_in(log_of(tmp_path, "start", line))
    assert bare(facts["versions"], "package", "version", "line") == [(*STATED[line], 2)]


@pytest.mark.parametrize(
    "line",
    [
        "ipex flag is deprecated, will be removed in Accelerate v1.10. From 2.7.0, PyTorch has all of it.",
        '  File "/home/u/transformers-4.53/bin/accelerate", line 8, in <module>',
        "torch 2.1 or newer is required",
        "torch==2.1.0 is required by this script",
        '  "transformers_version": "4.41.0",',
        "vllm 0.6.3 depends on torch==2.4.0",
        "This needs trl 0.20",
    ],
)
def test_a_version_that_is_not_the_installed_one_is_left_out(line: str, tmp_path: Path) -> None:
    assert facts_in(log_of(tmp_path, line))["versions"] == []


def test_a_command_has_its_flags_with_the_words_behind_them(tmp_path: Path) -> None:
    typed = (
        "$ torchrun --standalone train.py --bf16 True --data a b --steps -1 -m a --out=b --verbose lr=1e-5 \\"
    )
    (ran,) = facts_in(log_of(tmp_path, "now", typed, "  --load /ckpt/3 --last 2>&1 | tee --append x"))[
        "commands"
    ]
    expected: dict[str, object] = {
        "standalone": None,
        "bf16": "True",
        "data": ["a", "b"],
        "steps": "-1",
        "m": "a",
    }
    expected |= {"out": "b", "verbose": None, "lr": "1e-5", "load": "/ckpt/3", "last": None}
    assert {each["name"]: each["value"] for each in ran["flags"]} == expected and ran["line"] == 2


def test_settings_are_read_from_configs_and_shell_scripts(tmp_path: Path) -> None:
    texts = {
        "ds.json": '{"fp16": {"enabled": "auto"},\n "steps": 3}',
        "a.yaml": "# one\nbf16: true\nlora:\n  targets: [q, v]\nmodel: null\nparts: [{a: 1}]\n",
        "run.sh": "export N=8 # GPUs\nM=$N\ntorchrun --nproc-per-node $N train.py\n",
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    facts = facts_in(*(tmp_path / name for name in texts))
    assert [
        (Path(each["file"]).name, each["line"], each["name"], each["value"]) for each in facts["settings"]
    ] == [
        ("ds.json", 1, "fp16.enabled", "auto"),
        ("ds.json", 2, "steps", 3),
        ("a.yaml", 2, "bf16", True),
        ("a.yaml", 4, "lora.targets", ["q", "v"]),
        ("a.yaml", 5, "model", None),
        ("run.sh", 1, "N", "8"),
    ]
    assert bare(facts["commands"], "text", "line") == [("torchrun --nproc-per-node $N train.py", 3)]


SAID = {
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 3 has a total capacity of 79.15 GiB "
    "of which 1.06 GiB is free.": {"requested": "2 GiB", "total": "79.15 GiB", "available": "1.06 GiB"},
    "AssertionError: num_attention_heads (30) must be a multiple of tensor_parallel_groups (4)": {
        "num_attention_heads": 30,
        "tensor_parallel_groups": 4,
    },
}


@pytest.mark.parametrize("said", SAID, ids=["memory", "divisor"])
def test_numbers_are_those_of_the_message(said: str, tmp_path: Path) -> None:
    assert dict(bare(facts_in(log_of(tmp_path, said))["numbers"], "what", "value")) == SAID[said]


def test_the_shapes_of_a_log_are_there_though_its_script_is_the_cause() -> None:
    targets = (HEAD / "internlm_tp/convert2hf.log", HEAD / "internlm_tp/convert2hf.py")
    assert reshard.doctor(*targets)[0].code == "script-first-rank-only"
    facts = facts_in(*targets)
    assert bare(facts["numbers"], "what", "value", "line") == [
        ("model.embed_tokens.weight in the checkpoint", [96, 16], 10),
        ("model.embed_tokens.weight in the model", [96, 32], 10),
    ]


def test_several_targets_are_one_set_of_facts() -> None:
    folder = HEAD / "cat_mixed"
    targets = [
        folder / "grpo.log",
        folder / "accelerate.yaml",
        folder / "train_grpo.py",
    ]
    facts = facts_in(*targets)
    assert (facts["root"]["file"], facts["root"]["line"]) == (str(targets[0]), 46)
    assert len(facts["root"]["frames"]) == 16
    assert ("num_processes", 2, str(targets[1]), 7) in bare(
        facts["settings"], "name", "value", "file", "line"
    )


def test_ranks_that_are_absent_are_those_that_the_log_names(tmp_path: Path) -> None:
    lines = ("world_size: 4", "[rank0]: RuntimeError: Ranks 2, 3 failed to pass monitoredBarrier in 1 ms")
    facts = facts_in(log_of(tmp_path, *lines))
    assert bare(facts["ranks"]["absent"], "ranks", "line") == [([2, 3], 2)]
    assert bare(facts["ranks"]["world"], "size", "line") == [(4, 1)]


def test_a_checkpoint_is_summarized_as_inspect_does(hf_model: Callable[..., Path], tmp_path: Path) -> None:
    model = hf_model("qwen3")
    (fact,) = facts_in(model)["checkpoints"]
    told = reshard.inspect(model).as_dict()
    same = ("format", "family", "layout", "tensors", "parameters", "bytes", "dtypes")
    assert {name: fact[name] for name in same} == {name: told[name] for name in same}
    assert fact["opened"] and fact["complete"] and fact["file"] == str(model)
    (tmp_path / "model.safetensors").write_bytes(b"PK\x03\x04")
    assert facts_in(tmp_path)["checkpoints"] == [{"opened": False, "file": str(tmp_path), "line": None}]


def test_without_a_log_there_is_no_failure(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("bf16: true\n")
    for facts in (facts_in(tmp_path / "a.yaml"), Examination([]).facts):
        assert facts["root"] is None
    assert "facts" not in command("doctor", "--json").json


def test_a_clean_log_has_facts_and_no_failure() -> None:
    facts = facts_in(GUARD / "torchrun-trainer.log")
    assert facts["root"] is None and facts["ranks"]["failed"] == []
    assert facts["commands"][0]["line"] == 1


def test_facts_are_bounded_and_the_others_counted(tmp_path: Path) -> None:
    facts = facts_in(log_of(tmp_path, *(f"[rank{at}]: started" for at in range(module.MAX_FACTS + 7))))
    assert len(facts["ranks"]["last"]) == module.MAX_FACTS and facts["left_out"] == {"last": 7}


def test_facts_are_computed_only_when_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    monkeypatch.setattr(module, "facts_of", lambda *given: asked.append(given) or {"left_out": {}})
    log = GUARD / "torchrun-raise.log"
    command("doctor", log)
    assert reshard.doctor(log) and not asked
    examination = examine(log)
    assert examination.facts is examination.facts and len(asked) == 1


def test_of_many_logs_those_with_findings_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnose_targets, "MAX_LOG_LINES", 8)
    for at in range(5):
        (tmp_path / f"{at}.log").write_text("started\n" * 2 + "ValueError: no frob\n" * (at == 4))
    facts = facts_in(*(tmp_path / f"{at}.log" for at in range(5)))
    assert facts["left_out"] == {"logs": 2} and facts["root"]["file"] == str(tmp_path / "4.log")
