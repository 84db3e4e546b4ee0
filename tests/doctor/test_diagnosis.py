"""Diagnoses of noisy logs, clean logs, checkpoints, and several targets at once."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest

import reshard
from reshard.runs.checks.finding import UNKNOWN_FAILURE
from reshard.runs.checks.rules import RULES_COVERED, rules
from reshard.runs.doctor.entries.catalogue_entry import catalogue
from reshard.runs.doctor.log_diagnosis import diagnose_text
from tests.commandline import reshard as command

ENTRIES = catalogue()
SHOWN = [entry for entry in ENTRIES.values() if entry.patterns and entry.kind != "symptom"]
NOISE = [
    "INFO:root:Loading checkpoint shards: 100%|##########| 14/14 [00:07<00:00,  1.87it/s]",
    "{'loss': 1.2345, 'grad_norm': 0.71, 'learning_rate': 9.9e-06, 'epoch': 0.13}",
    "[2025-05-21 10:11:12,345] [INFO] [logging.py:107:log_dist] [Rank 0] step=10, skipped=0, lr=[1e-05]",
    "/usr/lib/python3/torch/utils/checkpoint.py:92: UserWarning: None of the inputs have requires_grad=True",
]
PREFIXES = (
    *("[rank{}]: ", "{}: ", "[default{}]:", "2025-03-01T09:11:12.123456789Z stderr F [rank{}]: ", ""),
    *("ML-0{}: ", "172.31.20.{}: ", "10.0.0.1: [rank{}]: ", "(worker{0}, rank={0}, pid=7, ip=10.0.0.1) "),
    *("(EngineCore_DP{} pid=7) ERROR 11-19 12:54:26 [core.py:710] ", "[2025-04-21 07:28:41 TP{}] ", "> "),
    *("pod/x-worker-{} container ", "[default{0}]:[rank{0}]: ", "[ERROR] 2025-01-02 03:04:05,678 - "),
)


def disturbed(excerpt: str, rng: random.Random) -> str:
    """An excerpt as in a large run: from several ranks at once, with prefixes and colours, amid other lines."""
    prefix = rng.choice(PREFIXES)
    ranks = rng.sample(range(8), 3) if "{}" in prefix else [0]
    queues = [[prefix.format(rank) + line for line in excerpt.splitlines()] for rank in ranks]
    lines: list[str] = [rng.choice(NOISE) for _ in range(5)]
    while any(queues):
        lines.append(rng.choice([queue for queue in queues if queue]).pop(0))
        if "{}" in prefix and rng.random() < 0.1:
            lines.append(prefix.format(9) + rng.choice(NOISE))
    return "\n".join(f"\x1b[31m{line}\x1b[0m" if rng.random() < 0.1 else line for line in [*lines, NOISE[-1]])


MISSED_IF_DISTURBED = {
    *("hf-remote-code-too-old", "loss-nan", "megatron-te-spec", "nccl-system-error"),
    *("nccl-wrong-interface", "peft-twice", "peft-unsharded", "weights-only-global", "zero-stage-changed"),
    "zero-to-fp32-not-zero",
}
"""Failures whose message is one line that a disturbance may hide, or that another one then comes before."""

MISSED_WITHOUT_THE_BEGINNING = {
    *(
        "bitsandbytes-cuda-setup",
        "checkpoint-recompute-differs",
        "dtensor-mixed-cat-ddp",
        "internlm-convert-tp",
    ),
    *("killed-by-signal", "nccl-cuda-failure", "zero3-experts-hang"),
}
"""Failures whose message is at the beginning of what is logged."""


@pytest.mark.thorough
def test_failures_are_recognised_however_their_logs_are_disturbed() -> None:
    missed: dict[str, list[str]] = {}
    for entry, time in product(SHOWN, "ab"):  # each with its own disturbances, whatever the others are
        found = diagnose_text("log", disturbed(entry.excerpt, random.Random(entry.id + time)))
        if entry.id not in [finding.code for finding in found[:1]]:
            missed[entry.id] = [finding.code for finding in found]
    assert missed.keys() == MISSED_IF_DISTURBED, missed


def test_the_last_lines_are_enough() -> None:
    """Logs may be cut off: most failures are still found from the second half of a traceback."""
    missed = set()
    for entry in SHOWN:
        lines = entry.excerpt.splitlines()
        found = diagnose_text("log", "\n".join(lines[len(lines) // 2 :]))
        if entry.id not in [finding.code for finding in found]:
            missed.add(entry.id)
    assert missed == MISSED_WITHOUT_THE_BEGINNING


@pytest.mark.parametrize("entry", SHOWN, ids=lambda entry: entry.id)
def test_one_cure_at_most_is_sure(entry) -> None:
    found = diagnose_text("log", entry.excerpt)
    by_line: dict[object, list[str]] = {}
    for finding in found:
        if finding.certainty == "sure":
            by_line.setdefault(finding.places[0].line, []).append(finding.code)
    assert all(len(sure) == 1 for sure in by_line.values()), by_line


@pytest.mark.parametrize(
    "log", sorted((Path(__file__).parent / "clean").glob("*.log")), ids=lambda path: path.stem
)
def test_clean_logs_give_no_finding(log: Path) -> None:
    assert [each.code for each in reshard.doctor(log)] == ["run-end-unknown"] * (log.stem in STOP_SILENTLY)


CLEAN = Path(__file__).parent / "clean"
STOP_SILENTLY = ("deepspeed-zero2",)
"""Logs of good runs whose last line is a warning: nothing in them says that they ended."""


@pytest.mark.parametrize("identifier", ["old-gc", "peft-unsharded"])
def test_a_trap_in_a_run_that_ended_well_is_told_as_a_warning(identifier: str) -> None:
    """Exit status 0 proves nothing: weights were initialized again, or an adapter was saved in pieces."""
    ran = (CLEAN / "sft-lora-ddp.log").read_text()
    found = diagnose_text("log", ENTRIES[identifier].excerpt + "\n" + ran)
    assert [finding.severity for finding in found] == ["warning"]
    assert identifier in (found[0].code, *found[0].also)


def test_a_rank_that_only_lost_its_peer_is_not_the_cause() -> None:
    entry = ENTRIES["fsdp1-requires-grad"]
    lost = ["Traceback (most recent call last):", '  File "/a/b.py", line 3, in f', "    g()"]
    lost += ["RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.1]:4242"]
    log = [f"[rank0]: {line}" for line in lost] + [f"[rank3]: {line}" for line in entry.excerpt.splitlines()]
    assert diagnose_text("log", "\n".join(log))[0].code == "fsdp1-requires-grad"


# ------------------------------------------------------------------------------------------------- checkpoints


def test_what_is_wrong_with_a_checkpoint(hf_model: Callable[..., Path], tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(hf_model("qwen3"), folder)
    told = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(
        json.dumps({**told, "tokenizer_class": "TokenizersBackend"})
    )
    old = "class M:\n    def _set_gradient_checkpointing(self, module, value=False):\n        pass\n"
    (folder / "modeling_old.py").write_text(old)
    found = {finding.code: finding for finding in reshard.doctor(folder)}
    expected = {"checkpoint-tokenizer-of-5", "checkpoint-old-gradient-checkpointing"}
    assert expected <= found.keys()
    assert found["checkpoint-old-gradient-checkpointing"].places[0].line == 2


def _cut(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


DAMAGES: dict[str, tuple[str, Callable[[Path], None]]] = {
    "cut off": ("model.safetensors", _cut),
    "weights gone": ("model", lambda folder: (folder / "model.safetensors").unlink()),
    "config broken": ("config.json", lambda folder: (folder / "config.json").write_text("{")),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_a_finding(
    hf_model: Callable[..., Path], tmp_path: Path, damage: str
) -> None:
    shutil.copytree(hf_model("qwen3"), tmp_path / "model")
    named, spoil = DAMAGES[damage]
    spoil(tmp_path / "model")
    found = reshard.doctor(tmp_path / "model")
    assert found[0].severity == "error" and found[0].certainty == "sure"
    assert Path(found[0].places[0].target).name == named
    assert command("doctor", tmp_path / "model").code == 1


def test_a_folder_that_is_no_checkpoint_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "todo.txt").write_text("nothing")
    shown = command("doctor", tmp_path / "notes")
    assert shown.code == 2 and "neither a checkpoint nor a log" in shown.err


def test_a_failure_is_told_before_a_warning_that_it_did_not_die_of() -> None:
    warning = ENTRIES["old-gc"].excerpt
    log = (
        warning
        + '\nTraceback (most recent call last):\n  File "/a/b.py", line 3, in f\n    g()\nFrobError: frob'
    )
    assert [finding.code for finding in diagnose_text("log", log)] == [UNKNOWN_FAILURE, "old-gc"]


# -------------------------------------------------------------------------------------------- several at once


def test_a_log_and_its_script_point_at_one_cause(tmp_path: Path) -> None:
    loaded = 'model = AutoModelForCausalLM.from_pretrained("m", device_map="auto")'
    (tmp_path / "train.py").write_text(f"{loaded}\ntrainer = GRPOTrainer(model=model)\n")
    (tmp_path / "train.log").write_text(ENTRIES["dtensor-mixed-cat-ddp"].excerpt)
    found = reshard.doctor(tmp_path / "train.log", tmp_path / "train.py")
    assert found[0].code == "script-device-map" and found[0].certainty == "sure"
    assert found[0].also == ("dtensor-mixed-cat-ddp",)
    assert {Path(place.target).name for place in found[0].places} == {"train.py", "train.log"}


def test_causes_and_their_effects_exist() -> None:
    known = rules().keys() | ENTRIES.keys()
    assert {*RULES_COVERED, *(effect for effects in RULES_COVERED.values() for effect in effects)} <= known


# ---------------------------------------------------------------------------------------------- command line


def test_exit_statuses_and_languages(tmp_path: Path) -> None:
    entry = ENTRIES["fsdp1-requires-grad"]
    (tmp_path / "bad.log").write_text(entry.excerpt)
    (tmp_path / "good.log").write_text("\n".join([*NOISE, "Training completed."]))
    assert command("doctor", tmp_path / "good.log").code == 0
    english, chinese = (command("doctor", tmp_path / "bad.log", "--lang", each) for each in ("en", "zh"))
    (tmp_path / "half.log").write_text("\n".join(NOISE))
    assert english.code == chinese.code == command("doctor", tmp_path / "half.log").code == 1
    assert entry.title.en in english.out and entry.title.zh in chinese.out
    machine = command("doctor", tmp_path / "bad.log", "--json")
    assert machine.json["findings"][0]["id"] == entry.id and machine.json["unknown"] == []
    answers = {name: command("doctor", tmp_path / f"{name}.log", "--json").json for name in ("half", "good")}
    assert answers["half"]["answer"] == "unknown" and answers["half"]["findings"] == []
    assert (
        answers["half"]["unknown"][0]["id"] == "run-end-unknown" and answers["good"]["answer"] == "no-failure"
    )
    assert command("doctor", tmp_path / "nothing.log").code == 2


def test_the_catalogue_is_listed_and_explained() -> None:
    listed = command("doctor", "--list").out
    assert [identifier for identifier in ENTRIES if identifier not in listed] == []
    shown = command("doctor", "--explain", "fsdp1-requires-grad", "--lang", "en")
    assert ENTRIES["fsdp1-requires-grad"].cure.en.splitlines()[0] in shown.out and shown.code == 0
    unknown = command("doctor", "--explain", "fsdp1-requires-gra")
    assert unknown.code == 2 and "fsdp1-requires-grad" in unknown.err
